"""The pieces of a jaxpr that run under one `jax.checkpoint` each."""

import enum
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from jmpx._autocast.backward import variables
from jmpx._autocast.cuts import (
    Role,
    find_activations,
    find_cuts,
    find_head,
    find_lives,
    holds_product,
    length,
)
from jmpx._autocast.saving import Saving
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name
from jmpx._jaxprs.inner import all_equations

# Their jaxprs are cut as the one around them is.
_CUT_INSIDE = frozenset({"jit", "call", "closed_call", "cond", "shard_map", "scan"})
_CHECKPOINT = "remat2"
_NOT_DIFFERENTIATED = "while"
# It does not matter if an equation with such an effect runs twice or later.
_HARMLESS = frozenset({"NamedAxisEffect"})


class Kind(enum.Enum):
    """What becomes of a piece."""

    SAVED = "it is checkpointed"
    INSIDE = "it is one equation, whose jaxprs have pieces"
    LEFT = "it is one equation, which the user checkpointed, or which has effects"
    PLAIN = "it is as without pieces"


class Piece(NamedTuple):
    """Equations that run together."""

    kind: Kind
    equations: list[Equation]  # in their order
    inputs: list[Atom]  # the variables that they read, and others define
    outputs: list[Atom]  # the variables that they define, and others read
    last: list[Atom]  # the variables that nothing reads after them
    inside: Saving  # what is saved in the jaxprs of an equation that is `INSIDE`
    named: set[Atom]  # results that are saved by the name `SAVED`


# Indices of equations, what is saved inside, and indices of those with named results.
_Group = tuple[Kind, list[int], Saving, set[int]]
# Indices, as values that refer to their key would keep it alive.
_found: weakref.WeakKeyDictionary[Jaxpr, dict[Saving, list[_Group]]] = weakref.WeakKeyDictionary()


def find_pieces(jaxpr: Jaxpr, saving: Saving) -> list[Piece]:
    """Returns the pieces of a jaxpr, cut where little lives, in their order."""
    read = {atom for atom in jaxpr.outvars if not core.is_literal(atom)}
    pieces = []
    for kind, indices, inside, products in reversed(_found_groups(jaxpr, saving)):
        equations = [jaxpr.eqns[i] for i in indices]
        defined = {var: None for equation in equations for var in equation.outvars}
        used = {var: None for equation in equations for var in variables(equation)}
        inputs = [var for var in used if var not in defined]
        last = [var for var in (*inputs, *defined) if var not in read]
        outputs = [var for var in defined if var in read]
        named = {jaxpr.eqns[i].outvars[0] for i in products}
        pieces.append(Piece(kind, equations, inputs, outputs, last, inside, named))
        read.update(inputs)
    return pieces[::-1]


def takes_gradient(jaxpr: Jaxpr) -> bool:
    """Whether a backward pass is part of a jaxpr."""
    stacks = (equation.source_info.name_stack for equation in all_equations(jaxpr))
    return any("transpose(" in str(stack) for stack in stacks)


def _found_groups(jaxpr: Jaxpr, saving: Saving) -> list[_Group]:
    known = _found.setdefault(jaxpr, {})
    if saving not in known:
        active, batched = find_activations(jaxpr, saving)
        within = [_inside(equation, saving, active) for equation in jaxpr.eqns]
        roles = [_role(*pair) for pair in zip(jaxpr.eqns, within, strict=True)]
        named = {i for i, e in enumerate(jaxpr.eqns) if batched.intersection(e.outvars)}
        roles = [Role.PRODUCT if i in named else role for i, role in enumerate(roles)]
        lives = find_lives(jaxpr.eqns, roles, active)
        head = find_head(jaxpr, roles, lives[0])
        cuts = set()
        if head is not None:  # it is in no piece, and what it reads ends the last one
            roles[head] = Role.ORDINARY
            cuts.add(head)
        cuts |= find_cuts(jaxpr.eqns, roles, lives, saving.turns)
        groups = _grouped(jaxpr.eqns, roles, cuts)
        known[saving] = [
            (kind, indices, within[indices[0]], named.intersection(indices))
            for kind, indices in groups
        ]
    return known[saving]


def _inside(equation: Equation, saving: Saving, active: Collection[Atom]) -> Saving:
    """Returns what is saved in the jaxprs of an equation, which they get with its operands."""
    if equation.primitive.name not in _CUT_INSIDE:
        return saving
    flags = [not core.is_literal(atom) and atom in active for atom in equation.invars]
    if equation.primitive.name != "scan":
        return saving._replace(activations=tuple(flags))
    consts, carry = core.scan_counts(equation)
    flags[consts : consts + carry] = [True] * carry
    return Saving(max(saving.turns, 1) * length(equation.params["length"]), tuple(flags))


def _has_pieces(jaxpr: Jaxpr, saving: Saving) -> bool:
    """Whether a jaxpr has more than one piece, or one that cannot join the equations around it."""
    kinds = [kind for kind, *_ in _found_groups(jaxpr, saving) if kind is not Kind.PLAIN]
    return kinds not in ([], [Kind.SAVED])


def _role(equation: Equation, inside: Saving) -> Role:
    name = operation_name(equation.primitive.name)
    if any(type(effect).__name__ not in _HARMLESS for effect in equation.effects):
        if not equation.outvars:
            return Role.LATER
        return Role.INSIDE if name in _CUT_INSIDE else Role.ALONE
    if not holds_product(equation):
        return Role.ORDINARY
    if name in _CUT_INSIDE:
        jaxprs = core.inner_jaxprs(equation.params)
        is_cut = name == "scan" or any(_has_pieces(jaxpr, inside) for jaxpr in jaxprs)
        return Role.INSIDE if is_cut else Role.PRODUCT
    return Role.ALONE if name in (_NOT_DIFFERENTIATED, _CHECKPOINT) else Role.PRODUCT


def _kind_alone(equation: Equation, role: Role) -> Kind:
    if role is Role.INSIDE:
        return Kind.INSIDE
    is_lost = equation.primitive.name != _NOT_DIFFERENTIATED and holds_product(equation)
    return Kind.LEFT if is_lost else Kind.PLAIN


def _grouped(
    equations: Sequence[Equation], roles: Sequence[Role], cuts: Collection[int]
) -> Iterator[tuple[Kind, list[int]]]:
    """Yields groups of the equations between cuts, and those that are alone."""
    indices: list[int] = []
    for i, role in enumerate(roles):
        is_alone = role in (Role.INSIDE, Role.ALONE)
        if is_alone or i in cuts:
            yield from _together(indices, roles)
            indices = []
        if is_alone:
            yield _kind_alone(equations[i], role), [i]
        else:
            indices.append(i)
    yield from _together(indices, roles)


def _together(indices: Sequence[int], roles: Sequence[Role]) -> Iterator[tuple[Kind, list[int]]]:
    """Yields the groups that equations make: one, and what has effects in it after it."""
    now = [i for i in indices if roles[i] is not Role.LATER]
    later = [i for i in indices if roles[i] is Role.LATER]
    if now:
        yield Kind.SAVED if any(roles[i] is Role.PRODUCT for i in now) else Kind.PLAIN, now
    if later:
        yield Kind.PLAIN, later
