"""The pieces of a jaxpr between which few arrays live: what `save="products"` checkpoints."""

import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jmpx import _jaxpr
from jmpx._jaxpr import Atom, Equation, Jaxpr, operation_name
from jmpx._autocast.saving import is_weight_product

# Functions that are called, whose jaxprs are cut as the one around them is.
CALLS = frozenset({"jit", "pjit", "call", "closed_call", "cond", "shard_map"})
LOOPS = frozenset({"while"})
CHECKPOINTS = frozenset({"remat2", "checkpoint"})


class Kind(enum.Enum):
    """What becomes of a piece."""

    SAVED = "it is checkpointed"
    INSIDE = "it is one equation, whose jaxprs are cut"
    PLAIN = "it is as without cuts"


class Piece(NamedTuple):
    """Equations that run together.

    Args:
        kind: what becomes of them.
        equations: the equations, in their order.
        inputs: the variables that they read, and others define.
        outputs: the variables that they define, and others read.
    """

    kind: Kind
    equations: list[Equation]
    inputs: list[Atom]
    outputs: list[Atom]


_found: weakref.WeakKeyDictionary[Jaxpr, list[tuple[Kind, list[int]]]]
_found = weakref.WeakKeyDictionary()
_holding: weakref.WeakKeyDictionary[Jaxpr, bool] = weakref.WeakKeyDictionary()


def find_pieces(jaxpr: Jaxpr) -> list[Piece]:
    """Returns the pieces of a jaxpr, in their order."""
    if jaxpr not in _found:
        _found[jaxpr] = list(_grouped(jaxpr.eqns))
    groups = [(kind, [jaxpr.eqns[i] for i in indices]) for kind, indices in _found[jaxpr]]
    read = {atom for atom in jaxpr.outvars if not _jaxpr.is_literal(atom)}
    pieces = []
    for kind, equations in reversed(groups):
        inputs, defined = _inputs(equations)
        pieces.append(Piece(kind, equations, inputs, [v for v in defined if v in read]))
        read.update(inputs)
    return pieces[::-1]


def _inputs(equations: Sequence[Equation]) -> tuple[list[Atom], list[Atom]]:
    """Returns the variables that equations read and do not define, and those they define."""
    defined: dict[Atom, None] = {}
    inputs: dict[Atom, None] = {}
    for equation in equations:
        inputs.update((v, None) for v in _variables(equation) if v not in defined)
        defined.update((v, None) for v in equation.outvars)
    return list(inputs), list(defined)


def _variables(equation: Equation) -> list[Atom]:
    return [atom for atom in equation.invars if not _jaxpr.is_literal(atom)]


def holds_product(equation: Equation) -> bool:
    """Whether an equation is a weight product, or a jaxpr that it holds has one."""
    return is_weight_product(equation.primitive, equation.params, equation.invars) or any(
        map(_jaxpr_holds_product, _jaxpr.inner_jaxprs(equation.params))
    )


def _jaxpr_holds_product(jaxpr: Jaxpr) -> bool:
    if jaxpr not in _holding:
        _holding[jaxpr] = any(map(holds_product, jaxpr.eqns))
    return _holding[jaxpr]


class _Role(enum.Enum):
    """What an equation is to the cuts."""

    ORDINARY = 0
    PRODUCT = 1  # stays in a piece, which it makes worth a checkpoint
    INSIDE = 2  # is cut itself
    ALONE = 3  # has to stay outside of pieces
    LATER = 4  # has an effect and no results: runs after its piece


def _role(equation: Equation) -> _Role:
    name = operation_name(equation.primitive.name)
    if _has_effects(equation):
        if not equation.outvars:
            return _Role.LATER
        return _Role.INSIDE if name in CALLS or name == "scan" else _Role.ALONE
    if not holds_product(equation):
        return _Role.ORDINARY
    if name in CALLS:
        jaxprs = _jaxpr.inner_jaxprs(equation.params)
        return _Role.INSIDE if any(len(find_pieces(j)) > 1 for j in jaxprs) else _Role.PRODUCT
    if name == "scan":
        return _Role.INSIDE
    return _Role.ALONE if name in LOOPS or name in CHECKPOINTS else _Role.PRODUCT


def _has_effects(equation: Equation) -> bool:
    """Whether it matters how often an equation runs, or when: not where it names a mapped axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def _grouped(equations: Sequence[Equation]) -> Iterator[tuple[Kind, list[int]]]:
    """Yields the kinds of pieces, and the indices of their equations."""
    roles = list(map(_role, equations))
    cuts = set(_cuts(equations, roles))
    indices: list[int] = []

    def flush() -> Iterator[tuple[Kind, list[int]]]:
        later = [i for i in indices if roles[i] is _Role.LATER]
        now = [i for i in indices if roles[i] is not _Role.LATER]
        if now:
            has_product = any(roles[i] is _Role.PRODUCT for i in now)
            yield Kind.SAVED if has_product else Kind.PLAIN, now
        if later:
            yield Kind.PLAIN, later
        indices.clear()

    for i, role in enumerate(roles):
        if i in cuts:
            yield from flush()
        if role in (_Role.INSIDE, _Role.ALONE):
            yield from flush()
            yield Kind.INSIDE if role is _Role.INSIDE else Kind.PLAIN, [i]
        else:
            indices.append(i)
    yield from flush()


def _cuts(equations: Sequence[Equation], roles: Sequence[_Role]) -> Iterator[int]:
    """Yields the indices of equations before which few arrays live that depend on products.

    There is one at most between two equations that hold products.
    """
    holders = [i for i, role in enumerate(roles) if role not in (_Role.ORDINARY, _Role.LATER)]
    live = _live(equations, roles)
    for before, after in zip(holders, holders[1:], strict=False):
        costs = [
            (sum(size for size, is_saved in live[i].values() if not is_saved), i)
            for i in range(before + 1, after + 1)
            if len(live[i]) <= 1
        ]
        if costs:
            yield min(costs)[1]


def _live(
    equations: Sequence[Equation], roles: Sequence[_Role]
) -> list[dict[Atom, tuple[int, bool]]]:
    """Returns, for each equation, the arrays that it or a later one reads and earlier ones made.

    Only floating arrays that depend on a product count, and of these not the small ones.

    Returns:
        For each equation, the arrays with their bytes, and whether a product made them.
    """
    made: dict[Atom, tuple[int, int, bool]] = {}
    last: dict[Atom, int] = {}
    for i, (equation, role) in enumerate(zip(equations, roles, strict=True)):
        if role is _Role.LATER:
            continue
        variables = _variables(equation)
        last.update((v, i) for v in variables if v in made)
        if role is not _Role.ORDINARY or any(v in made for v in variables):
            is_product = role is _Role.PRODUCT and not _jaxpr.holds_jaxpr(equation.params)
            for var in equation.outvars:
                made[var] = i, _bytes(var), is_product
    bound = max((size for _, size, _ in made.values()), default=0) / 100
    live: list[dict[Atom, tuple[int, bool]]] = [{} for _ in equations]
    for var, end in last.items():
        start, size, is_product = made[var]
        if size > bound:
            for i in range(start + 1, end + 1):
                live[i][var] = size, is_product
    return live


def _bytes(atom: Atom) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return 0
    return atom.aval.size * dtype.itemsize
