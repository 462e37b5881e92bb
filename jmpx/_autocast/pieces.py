"""The pieces of a jaxpr that run under one `jax.checkpoint` or `jax.jit` each, and their keys.

Pieces with equal keys are one function, which JAX traces and derives once.
"""

import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax

from jmpx._autocast.backward import variables
from jmpx._autocast.cuts import (
    SINGLE,
    Role,
    find_activations,
    find_cuts,
    find_head,
    find_lives,
    holds_product,
    length,
)
from jmpx._autocast.layers import layers
from jmpx._autocast.neighbours import Neighbours
from jmpx._autocast.regions import Regions
from jmpx._autocast.saving import Saving, is_batched_product
from jmpx._autocast.value import Value
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, Scopes
from jmpx._jaxprs.inner import CHECKPOINT, holds, once_per_jaxpr
from jmpx._jaxprs.structure import structure_of

# Their jaxprs are cut as the one around them is.
_CUT_INSIDE = frozenset({"jit", "call", "closed_call", "cond", "shard_map", "scan"})
_NOT_DIFFERENTIATED = "while"
# It does not matter if an equation with such an effect runs twice or later.
_HARMLESS = frozenset({"NamedAxisEffect"})


class Piece(NamedTuple):
    """Equations that run together."""

    role: Role  # of all its equations; `PRODUCT` has it checkpointed, `ALIKE` jitted
    equations: list[Equation]  # in their order
    inputs: list[Atom]  # the variables that they read, and others define
    outputs: list[Atom]  # the variables that they define, and others read
    last: list[Atom]  # the variables that nothing reads after them
    inside: Saving  # what is saved in the jaxprs of an equation that is `INSIDE`
    named: set[Atom]  # results that are saved by the name `SAVED`


# The role, the indices, what is saved inside, and those of the results with a name.
_Group: TypeAlias = tuple[Role, Sequence[int], Saving, set[int]]
_NOTHING = Saving()  # is saved inside of what is evaluated without pieces


def find_pieces(jaxpr: Jaxpr, saving: Saving) -> list[Piece]:
    """Returns the pieces of a jaxpr, cut where little lives, in their order."""
    return _pieces(jaxpr, _found_groups(jaxpr, saving))


def find_layers(jaxpr: Jaxpr) -> list[Piece]:
    """Returns the layers of a jaxpr and what is between them, in order; nothing without layers."""
    roles = (Role.ORDINARY, Role.ALIKE)
    return _pieces(jaxpr, [(roles[i], group, _NOTHING, set()) for i, group in layers(jaxpr)])


def _pieces(jaxpr: Jaxpr, groups: Sequence[_Group]) -> list[Piece]:
    read = {atom for atom in jaxpr.outvars if not core.is_literal(atom)}
    pieces = []
    for role, indices, inside, products in reversed(groups):
        equations = [jaxpr.eqns[i] for i in indices]
        defined = {var: None for equation in equations for var in equation.outvars}
        used = {var: None for equation in equations for var in variables(equation)}
        inputs = [var for var in used if var not in defined]
        last = [var for var in (*inputs, *defined) if var not in read]
        outputs = [var for var in defined if var in read]
        named = {jaxpr.eqns[i].outvars[0] for i in products}
        pieces.append(Piece(role, equations, inputs, outputs, last, inside, named))
        read.update(inputs)
    return pieces[::-1]


@once_per_jaxpr
def _found_groups(jaxpr: Jaxpr, saving: Saving) -> list[_Group]:
    active, named = find_activations(jaxpr, saving)
    within = [_inside(equation, saving, active) for equation in jaxpr.eqns]
    pairs = enumerate(zip(jaxpr.eqns, within, strict=True))
    roles = [Role.PRODUCT if i in named else _role(*pair) for i, pair in pairs]
    lives = find_lives(jaxpr.eqns, roles, active)
    head = find_head(jaxpr, roles, lives[0])
    cuts = set()
    if head is not None:  # it is in no piece, and what it reads ends the last one
        roles[head] = Role.ORDINARY
        cuts.add(head)
    cuts |= find_cuts(jaxpr.eqns, roles, lives, saving.turns)
    groups = _grouped(roles, cuts)
    return [(role, group, within[group[0]], named.intersection(group)) for role, group in groups]


def _inside(equation: Equation, saving: Saving, active: Collection[Atom]) -> Saving:
    """Returns what is saved in the jaxprs of an equation, which they get with its operands."""
    if equation.primitive.name not in _CUT_INSIDE:
        return saving
    flags = [not core.is_literal(atom) and atom in active for atom in equation.invars]
    if equation.primitive.name != "scan":
        return saving._replace(activations=tuple(flags))
    consts, carry = core.scan_counts(equation)
    flags[consts : consts + carry] = [True] * carry
    turns = max(saving.turns, 1) * length(equation.params["length"])
    return saving._replace(turns=turns, activations=tuple(flags))


def _has_pieces(jaxpr: Jaxpr, saving: Saving) -> bool:
    """Whether a jaxpr has more than one piece, or one that cannot join the equations around it."""
    roles = [role for role, *_ in _found_groups(jaxpr, saving)]
    return Role.INSIDE in roles or Role.LEFT in roles or roles.count(Role.PRODUCT) > 1


def _role(equation: Equation, inside: Saving) -> Role:
    name, is_holder = equation.primitive.name, holds_product(equation)
    is_holder |= inside.attention and holds(equation, is_batched_product)
    has_effect = any(type(effect).__name__ not in _HARMLESS for effect in equation.effects)
    if has_effect and not equation.outvars:
        return Role.LATER
    if not (has_effect or is_holder):
        return Role.ORDINARY
    if name in _CUT_INSIDE:
        jaxprs = core.inner_jaxprs(equation.params)
        is_cut = has_effect or name == "scan" or any(_has_pieces(each, inside) for each in jaxprs)
        return Role.INSIDE if is_cut else Role.PRODUCT
    if name == _NOT_DIFFERENTIATED or not is_holder:
        return Role.ALONE
    return Role.LEFT if has_effect or name == CHECKPOINT else Role.PRODUCT


def _grouped(roles: Sequence[Role], cuts: Collection[int]) -> Iterator[tuple[Role, list[int]]]:
    """Yields groups of the equations between cuts, and those that are alone."""
    alone = [i for i, role in enumerate(roles) if role in SINGLE]
    ends = sorted({0, *cuts, *alone, *(i + 1 for i in alone), len(roles)})
    for start, end in itertools.pairwise(ends):
        if roles[start] in SINGLE:
            yield roles[start], [start]
        else:
            yield from _together(range(start, end), roles)


def _together(indices: Sequence[int], roles: Sequence[Role]) -> Iterator[tuple[Role, list[int]]]:
    """Yields the groups that equations make: one, and what has effects in it after it."""
    now = [i for i in indices if roles[i] is not Role.LATER]
    later = [i for i in indices if roles[i] is Role.LATER]
    if now:
        yield Role.PRODUCT if any(roles[i] is Role.PRODUCT for i in now) else Role.ORDINARY, now
    if later:
        yield Role.LATER, later


def key_of(
    piece: Piece,
    values: Sequence[Value],
    scope: str,
    depth: int,
    neighbours: Neighbours,
    regions: Regions,
) -> Hashable:
    """Returns a key of a piece: equal ones compute the same, in the same dtypes, at the same lines.

    The first scopes of each equation, as many as `depth` says, are around the whole piece, as a
    layer's name is: they count only for what the policy map says of them. The key has no hash where
    a parameter of an equation has none. What it names by `id` lives as long as the piece.
    """
    results = [var for equation in piece.equations for var in equation.outvars]
    places = (_of_place(equation, scope, regions, depth) for equation in piece.equations)
    return (
        structure_of(piece.equations, piece.inputs, piece.outputs),
        tuple(map(_of_value, values)),
        tuple(itertools.chain.from_iterable(places)),
        neighbours.said_of(results),
        tuple(var in piece.named for var in results),
    )


def scopes_around(piece: Piece) -> Scopes:
    """Returns the scopes, as JAX keeps them, that are around all equations of a piece."""
    first, *stacks = (core.stack_of(equation) for equation in piece.equations)
    for stack in stacks:
        if stack[: len(first)] != first:
            pairs = zip(first, stack, strict=False)
            first = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return first


def _of_value(value: Value) -> Hashable:
    constant = None if isinstance(value.array, jax.Array) else id(value.array)
    avals = tuple(map(jax.typeof, (value.array, *value.casts.values())))
    return value.traits, constant, avals, tuple(value.casts)


def _of_place(equation: Equation, scope: str, regions: Regions, depth: int) -> Iterator[Hashable]:
    """Yields what the scopes and the lines of an equation, and of those that it holds, say."""
    within = core.scope_within(scope, equation)
    region = regions.region(within)
    yield core.stack_of(equation)[depth:], equation.source_info.traceback
    yield region, regions.override(core.operation_name(equation.primitive.name), region)
    for jaxpr in core.inner_jaxprs(equation.params):
        yield tuple(map(id, core.consts_of(jaxpr)))
        for inner in jaxpr.eqns:
            yield from _of_place(inner, within, regions, 0)
