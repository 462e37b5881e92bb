"""The jaxprs that equations run, and the one walk through a jaxpr on values of any kind.

A call, a branch, a loop and a map over shards hand their operands to the jaxprs that they hold, and
hand out what these return, each in its own way. `inner_of` says how, for all versions of JAX.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax

from jmpx._jaxprs.core import consts_of, inner_jaxprs, is_literal, last_uses, scan_counts
from jmpx._jaxprs.types import Atom, Equation, Jaxpr

V = TypeVar("V")
CHECKPOINT = "remat2"
CALLS = frozenset({"call", "closed_call", "jit", CHECKPOINT})  # their jaxpr gets the operands
# Their jaxprs can be changed: nothing else in the equation says what they compute.
CHANGEABLE = CALLS | {"cond", "scan", "shard_map"}


class Inner(NamedTuple):
    """The jaxprs that an equation runs.

    Each takes the equation's operands from `first` on, and returns its results. In a loop, these
    operands are `consts` constants, `carry` arrays that each trip hands to the next, as its first
    results, and arrays of which each trip reads a slice; the results after the carry are stacked.
    """

    kind: str  # `call`, `scan`, `while`, `cond` or `shard_map`
    jaxprs: tuple[Jaxpr, ...]  # of which one runs: a cond has several
    first: int = 0  # how many operands come before: a cond's index, the constants of `condition`
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

    None if the equation stands for itself: if it holds no jaxpr, or is more than a call of one,
    such as a Pallas kernel or a linear solve.
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
    """Returns the branches of a cond: of a `lax.platform_dependent`, the one that JAX lowers."""
    branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms")
    platform = platform or jax.default_backend()
    names = ("cuda", "rocm") if platform == "gpu" else (platform,)  # as JAX lowers for them
    for branch, known in zip(branches, platforms or (), strict=platforms is not None):
        if known is None or any(name in known for name in names):
            return [branch]
    return branches


def _is_call(jaxpr: Jaxpr, eqn: Equation) -> bool:
    """Whether operands and results of a jaxpr and of its equation have the same shapes."""
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
    """Goes through the equations of a jaxpr, in order, and returns its results.

    `constant` returns what stands for a constant or a literal. If `join` is given, it makes one
    value of several: a mutable array that an equation may have written to joins all its operands
    and results.
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

    What a loop, a branch or another function computes depends on all that it reads.
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
    """Whether an equation is of the backward pass of a gradient, by the names of its scopes."""
    return "transpose(" in str(eqn.source_info.name_stack)


def once_per_jaxpr(fn: Callable[..., V]) -> Callable[..., V]:
    """Keeps what a function finds of a jaxpr, by its other arguments, as long as the jaxpr lives.

    The result must not refer to the jaxpr, which it would keep alive.
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
