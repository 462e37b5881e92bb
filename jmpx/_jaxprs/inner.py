"""How equations run the jaxprs that they hold; walks, searches, pieces and keys of jaxprs."""

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from jmpx._jaxprs.core import (
    Params,
    Scopes,
    consts_of,
    inner_jaxprs,
    is_literal,
    last_uses,
    operation_name,
    scan_counts,
    stack_of,
)
from jmpx._jaxprs.marks import Atom, Equation, Jaxpr, is_jaxpr

V = TypeVar("V")
CHECKPOINT = "remat2"
CALLS = frozenset({"call", "closed_call", "jit", CHECKPOINT})  # they run one jaxpr on all operands
# Their jaxprs can be changed, because no other parameter depends on what these compute.
CHANGEABLE = CALLS | {"cond", "scan", "shard_map"}


class Inner(NamedTuple):
    """The jaxprs that an equation runs.

    Each takes the equation's operands from `first` on, and returns its results. In a loop, these
    operands are `consts` constants, `carry` arrays that each trip hands to the next, as its first
    results, and arrays of which each trip reads a slice; the results after the carry are stacked.
    """

    kind: str  # `call`, `scan`, `while`, `cond` or `shard_map`
    jaxprs: tuple[Jaxpr, ...]  # one of them runs: a cond has several
    first: int = 0  # how many operands come first: a cond's index, the constants of `condition`
    consts: int = 0
    carry: int = 0
    trips: int | None = 1  # how many trips a loop makes; None if it depends on the data
    condition: Jaxpr | None = None  # of a while loop; it takes the first operands and the carry

    def split(self, operands: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
        """Returns the constants, the carry and the sliced arrays among a loop's operands."""
        given = list(operands[self.first :])
        end = self.consts + self.carry
        return given[: self.consts], given[self.consts : end], given[end:]


def inner_of(eqn: Equation, platform: str | None = None) -> Inner | None:
    """Returns the jaxprs that an equation runs on a platform such as "tpu", and how.

    None if the equation holds no jaxpr, or is more than a call of one, such as a Pallas kernel or a
    linear solve.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "scan":
        consts, carry = scan_counts(eqn)
        return Inner(name, (params["jaxpr"],), 0, consts, carry, params["length"])
    if name == "while":
        first, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = len(eqn.invars) - first - consts
        bodies = (params["body_jaxpr"],)
        return Inner(name, bodies, first, consts, carry, None, params["cond_jaxpr"])
    if name == "cond":
        return Inner(name, tuple(_branches(eqn, platform)), first=1)
    jaxprs = tuple(inner_jaxprs(params))
    if name == "shard_map":
        return Inner(name, jaxprs)
    return Inner("call", jaxprs) if len(jaxprs) == 1 and _is_call(jaxprs[0], eqn) else None


def _branches(eqn: Equation, platform: str | None) -> Sequence[Jaxpr]:
    """Returns the branches of a cond; for `lax.platform_dependent`, the one that JAX lowers."""
    branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms")
    platform = platform or jax.default_backend()
    names = ("cuda", "rocm") if platform == "gpu" else (platform,)  # as JAX lowers for them
    for branch, known in zip(branches, platforms or (), strict=platforms is not None):
        if known is None or any(name in known for name in names):
            return [branch]
    return branches


def _is_call(jaxpr: Jaxpr, eqn: Equation) -> bool:
    """Whether a jaxpr and its equation have operands and results of the same shapes."""
    is_same = _shapes(jaxpr.invars) == _shapes(eqn.invars)
    return is_same and _shapes(jaxpr.outvars) == _shapes(eqn.outvars)


def _shapes(atoms: Sequence[Atom]) -> list[tuple[int, ...] | None]:
    return [getattr(atom.aval, "shape", None) for atom in atoms]  # a token has none


def walk(
    jaxpr: Jaxpr,
    operands: Sequence[V],
    step: Callable[[Equation, list[V]], Sequence[V]],
    constant: Callable[[Atom, object], V],
    join: Callable[[Sequence[V]], V] | None = None,
) -> list[V]:
    """Interprets a jaxpr on values of any kind, equation by equation, and returns its results.

    `constant` returns the value of a constant or a literal. `join`, if given, merges values: a
    mutable array that an equation may have written to gets the join of all operands and results.
    """
    env = dict(zip(jaxpr.invars, operands, strict=True))
    for var, const in zip(jaxpr.constvars, consts_of(jaxpr), strict=False):
        env[var] = constant(var, const)

    def read(atom: Atom) -> V:
        return constant(atom, atom.val) if is_literal(atom) else env[atom]

    for eqn, last in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
        inputs = list(map(read, eqn.invars))
        results = step(eqn, inputs)
        env.update(zip(eqn.outvars, results, strict=True))
        if join is not None:
            joined = [atom for atom in eqn.invars if hasattr(atom.aval, "inner_aval")]
            env.update((atom, join([*inputs, *results])) for atom in joined)
        for var in last:
            del env[var]
    return list(map(read, jaxpr.outvars))


def depends(jaxpr: Jaxpr, operands: Sequence[bool]) -> list[bool]:
    """Returns which results depend on the numbers of these operands, as a shape does not.

    The results of a loop, a branch or another function depend on everything that it reads.
    """

    def step(eqn: Equation, inputs: Sequence[bool]) -> Sequence[bool]:
        inner = inner_of(eqn)
        if inner is not None and inner.kind == "call":
            return depends(inner.jaxprs[0], inputs)
        return [any(inputs)] * len(eqn.outvars)

    return walk(jaxpr, operands, step, lambda var, const: False)


def all_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the equations of a jaxpr, each followed by those of all jaxprs that it holds."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from itertools.chain.from_iterable(map(all_equations, inner_jaxprs(eqn.params)))


def is_backward(eqn: Equation) -> bool:
    """Whether an equation belongs to a backward pass, by the names of its scopes."""
    return "transpose(" in str(eqn.source_info.name_stack)


def once_per_jaxpr(fn: Callable[..., V]) -> Callable[..., V]:
    """Caches a function of a jaxpr and other arguments as long as the jaxpr lives.

    The result must not refer to the jaxpr, because it would keep the jaxpr alive.
    """
    found = weakref.WeakKeyDictionary[Jaxpr, dict[Hashable, V]]()

    @functools.wraps(fn)
    def kept(jaxpr: Jaxpr, *args: Hashable) -> V:
        known = found.setdefault(jaxpr, {})
        if args not in known:
            known[args] = fn(jaxpr, *args)
        return known[args]

    return kept


def holds(eqn: Equation, test: Callable[[Equation], bool]) -> bool:
    """Whether an equation passes a test, or one in the jaxprs that it holds does."""
    return test(eqn) or any(any_holds(jaxpr, test) for jaxpr in inner_jaxprs(eqn.params))


@once_per_jaxpr
def any_holds(jaxpr: Jaxpr, test: Callable[[Equation], bool]) -> bool:
    """Whether `holds` is true of an equation of a jaxpr."""
    return any(holds(eqn, test) for eqn in jaxpr.eqns)


# Searches from results backwards: which variables of a jaxpr reach something, such as a product.
#
# A path goes through the jaxprs that equations hold, operand by operand, and a loop's carry through
# all of its trips.


CONVOLUTION = "conv_general_dilated"
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", CONVOLUTION})

Flags: TypeAlias = tuple[bool, ...]  # of the operands or the results of an equation or a jaxpr
# Tells which operands of an equation reach the goal, given all variables found so far.
Step: TypeAlias = Callable[[Equation, Collection[Atom]], Flags]
# Returns the step for the equations of a jaxpr.
Search: TypeAlias = Callable[[Jaxpr], Step]


@once_per_jaxpr
def find(jaxpr: Jaxpr, search: Search, results: Flags) -> frozenset[Atom]:
    """Returns the variables of a jaxpr that reach the goal of a search.

    The flags say which of its first results reach it outside; other results do not.
    """
    step, found = search(jaxpr), set[Atom]()

    def add(atoms: Sequence[Atom], flags: Flags) -> None:
        pairs = zip(atoms, flags, strict=False)
        found.update(atom for atom, flag in pairs if flag and not is_literal(atom))

    add(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        inner = inner_of(equation)
        if inner is None:
            add(equation.invars, step(equation, found))
        else:
            add(equation.invars, _through(search, equation, inner, found))
    return frozenset(found)


def variables(equation: Equation) -> list[Atom]:
    """Returns the operands of an equation, without literals."""
    return [atom for atom in equation.invars if not is_literal(atom)]


def _through(search: Search, equation: Equation, inner: Inner, found: Collection[Atom]) -> Flags:
    """Returns which operands of an equation with inner jaxprs reach the goal."""
    results = within(search, equation, found)
    # Any branch of a `lax.platform_dependent` may run: the program may be for another platform.
    jaxprs = equation.params.get("branches", inner.jaxprs)
    columns = zip(*(_inputs(search, jaxpr, results) for jaxpr in jaxprs), strict=True)
    flags = tuple(map(any, columns))
    if inner.condition is None:
        return (False,) * inner.first + flags
    cond = _inputs(search, inner.condition, ())
    carry = zip(cond[inner.first :], flags[inner.consts :], strict=True)
    return *cond[: inner.first], *flags[: inner.consts], *map(any, carry)


def within(search: Search, equation: Equation, found: Collection[Atom]) -> Flags:
    """Returns which results of the jaxpr that an equation holds reach the goal.

    A loop reads its carry in the next trip.
    """
    results, inner = tuple(var in found for var in equation.outvars), inner_of(equation)
    while inner is not None:
        read = _inputs(search, inner.jaxprs[0], results)[inner.consts : inner.consts + inner.carry]
        carry = tuple(a or b for a, b in zip(read, results, strict=False))
        if carry == results[: inner.carry]:
            break
        results = carry + results[inner.carry :]
    return results


def _inputs(search: Search, jaxpr: Jaxpr, results: Flags) -> Flags:
    found = find(jaxpr, search, results)
    return tuple(var in found for var in jaxpr.invars)


def is_outer(equation: Equation) -> bool:
    """Whether a matrix product sums nothing, as an outer product does."""
    return equation.primitive.name == "dot_general" and not sums(equation.params, equation.invars)


def sums(params: Params, operands: Sequence[Atom]) -> bool:
    """Whether a matrix product of some operands, or of their abstract values, sums anything."""
    (contracted, _), _ = params["dimension_numbers"]
    shape = getattr(operands[0], "aval", operands[0]).shape
    return any(shape[axis] != 1 for axis in contracted)


def multiplied(jaxpr: Jaxpr) -> Step:
    """A search for the variables that reach a product."""
    del jaxpr
    return _multiplied


def _multiplied(equation: Equation, found: Collection[Atom]) -> Flags:
    is_read = any(var in found for var in equation.outvars)
    if operation_name(equation.primitive.name) in PRODUCTS:
        is_read |= not is_outer(equation)
    else:
        is_read |= any(find(j, multiplied, ()) for j in inner_jaxprs(equation.params))
    return (is_read,) * len(equation.invars)


# Pieces of a jaxpr: equations that run together, with their inputs and outputs.


class Piece(NamedTuple):
    """Equations that run together."""

    equations: list[Equation]  # in their order
    inputs: list[Atom]  # variables from outside that they read
    outputs: list[Atom]  # variables that they define and something outside reads
    last: list[Atom]  # variables that nothing reads after them


def split(jaxpr: Jaxpr, groups: Sequence[Sequence[int]]) -> list[Piece]:
    """Splits the equations of a jaxpr into pieces, given their indices by groups, in order."""
    read = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    pieces = []
    for indices in reversed(groups):
        equations = [jaxpr.eqns[i] for i in indices]
        defined = {var: None for equation in equations for var in equation.outvars}
        used = {var: None for equation in equations for var in variables(equation)}
        inputs = [var for var in used if var not in defined]
        last = [var for var in (*inputs, *defined) if var not in read]
        outputs = [var for var in defined if var in read]
        pieces.append(Piece(equations, inputs, outputs, last))
        read.update(inputs)
    return pieces[::-1]


def scopes_around(piece: Piece, stack_of: Callable[[Equation], Scopes] = stack_of) -> Scopes:
    """Returns the scopes, as JAX keeps them, that are around all equations of a piece."""
    first, *stacks = map(stack_of, piece.equations)
    for stack in stacks:
        if stack[: len(first)] != first:
            pairs = zip(first, stack, strict=False)
            first = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return first


# Keys of programs: two programs that were traced apart have equal keys if they do the same.


def structure(jaxpr: Jaxpr) -> Hashable:
    """Returns a key of a jaxpr: equal ones compute the same, given equal operands and constants.

    The key holds the primitives, their parameters and contexts, inner jaxprs, abstract values, the
    numbers of literals and how variables connect. It holds no scopes and no lines, and only the
    abstract values of constants. A shared inner jaxpr is stored once, and then by number.

    Functions with derivative rules differ only by the jaxpr that they run: JAX makes the rules anew
    in each trace.

    Raises:
        TypeError: by `hash` of the key, if a parameter has no hash.
    """
    return _Keys(derivatives=False).jaxpr(jaxpr)


def structure_of(
    equations: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom]
) -> Hashable:
    """Returns the key of equations that read and return these variables, with derivative rules."""
    return _Keys(derivatives=True).equations(equations, inputs, outputs)


@once_per_jaxpr
def kind(jaxpr: Jaxpr) -> Hashable:
    """Returns `kind_of` the equations of a jaxpr."""
    return kind_of(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)


def kind_of(
    equations: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom], depth: int = 0
) -> Hashable:
    """Returns a key of equations: equal ones compute the same, at the same lines.

    They also have the same constants, derivative rules, and scopes, apart from marks and from the
    first `depth` scopes. If a parameter has no hash, the key equals no other.
    """
    key = structure_of(equations, inputs, outputs), tuple(_places(equations, depth))
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _places(equations: Sequence[Equation], depth: int = 0) -> Iterator[Hashable]:
    """Yields the scopes and lines of equations and of the equations in the jaxprs that they hold.

    Also yields the identities of the constants of these jaxprs.
    """
    for eqn in equations:
        yield stack_of(eqn)[depth:], eqn.source_info.traceback
        for jaxpr in inner_jaxprs(eqn.params):
            yield tuple(map(id, consts_of(jaxpr)))
            yield from _places(jaxpr.eqns)


class _Keys:
    """Makes keys, and numbers the inner jaxprs that it has met."""

    def __init__(self, derivatives: bool) -> None:
        self.derivatives = derivatives
        self.met: dict[int, int] = {}

    def jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        if id(jaxpr) in self.met:
            return "again", self.met[id(jaxpr)]
        self.met[id(jaxpr)] = len(self.met)
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        return len(consts_of(jaxpr)), self.equations(jaxpr.eqns, inputs, jaxpr.outvars)

    def equations(
        self, equations: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom]
    ) -> Hashable:
        numbers: dict[Atom, int] = {}

        def atom(atom: Atom) -> Hashable:
            if is_literal(atom):  # its bytes, as NaN does not equal itself, and 0.0 equals -0.0
                return atom.aval, np.asarray(atom.val).dtype, np.asarray(atom.val).tobytes()
            known = atom in numbers
            number = numbers.setdefault(atom, len(numbers))
            return number if known else (number, atom.aval)

        first = tuple(map(atom, inputs))
        rows = tuple(
            (eqn.primitive, eqn.ctx, *map(atom, (*eqn.invars, *eqn.outvars)), self.params(eqn))
            for eqn in equations
        )
        return first, rows, tuple(map(atom, outputs))

    def params(self, eqn: Equation) -> Hashable:
        inner = None if self.derivatives else inner_of(eqn)
        if inner is not None and inner.kind == "call":
            return self.jaxpr(inner.jaxprs[0])
        return tuple((name, self.value(value)) for name, value in eqn.params.items())

    def value(self, value: object) -> Hashable:
        if type(value) is tuple:
            return tuple(map(self.value, value))
        if isinstance(value, np.generic):
            return value.dtype, value.tobytes()
        return self.jaxpr(value) if is_jaxpr(value) else value
