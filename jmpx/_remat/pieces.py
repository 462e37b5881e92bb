"""The pieces of a jaxpr that run under one `jax.checkpoint` each."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import CHANGEABLE, CHECKPOINT, once_per_jaxpr
from jmpx._remat.cuts import SINGLE, Role, find_activations, find_cuts, find_head, find_lives
from jmpx._remat.saving import Saving, holds_saved, length

# Their jaxprs are cut as the one around them is.
CUT_INSIDE = CHANGEABLE - {CHECKPOINT}
_NOT_DIFFERENTIATED = "while"
# It does not matter if an equation with such an effect runs twice or later.
_HARMLESS = frozenset({"NamedAxisEffect"})


class Group(NamedTuple):
    """Equations of a piece, by their indices."""

    role: Role  # of all its equations; `PRODUCT` has it checkpointed
    indices: Sequence[int]
    inside: Saving  # what is saved in the jaxprs of an equation that is `INSIDE`


def inside_of(equation: Equation, saving: Saving, active: Collection[Atom]) -> Saving | None:
    """Returns what is saved in the jaxprs of an equation, which get its last operands.

    None for an equation whose jaxprs are not to be changed.
    """
    if equation.primitive.name not in CUT_INSIDE:
        return None
    flags = [not core.is_literal(atom) and atom in active for atom in equation.invars]
    if equation.primitive.name != "scan":
        return saving._replace(activations=tuple(flags))
    consts, carry = core.scan_counts(equation)
    flags[consts : consts + carry] = [True] * carry
    turns = max(saving.turns, 1) * length(equation.params["length"])
    return saving._replace(turns=turns, activations=tuple(flags))


@once_per_jaxpr
def find_groups(jaxpr: Jaxpr, saving: Saving) -> list[Group]:
    """Returns the groups of the equations of a jaxpr, cut where little lives, in their order."""
    active, named = find_activations(jaxpr, saving)
    inside = [inside_of(equation, saving, active) for equation in jaxpr.eqns]
    pairs = enumerate(zip(jaxpr.eqns, inside, strict=True))
    roles = [Role.PRODUCT if i in named else _role(eqn, saving, to) for i, (eqn, to) in pairs]
    lives = find_lives(jaxpr.eqns, roles, active)
    head = find_head(jaxpr, roles, lives[0], active)
    cuts = set()
    if head is not None:  # it is in no piece, and what it reads ends the last one
        roles[head] = Role.ORDINARY
        cuts.add(head)
    cuts |= find_cuts(jaxpr.eqns, roles, lives, saving)
    groups = _grouped(roles, cuts)
    return [Group(role, group, inside[group[0]] or saving) for role, group in groups]


def _has_pieces(jaxpr: Jaxpr, saving: Saving) -> bool:
    """Whether a jaxpr has more than one piece, or one that cannot join the equations around it."""
    roles = [group.role for group in find_groups(jaxpr, saving)]
    return Role.INSIDE in roles or Role.LEFT in roles or roles.count(Role.PRODUCT) > 1


def _role(equation: Equation, saving: Saving, inside: Saving | None) -> Role:
    name, is_holder = equation.primitive.name, holds_saved(equation, saving)
    has_effect = any(type(effect).__name__ not in _HARMLESS for effect in equation.effects)
    if has_effect and not equation.outvars:
        return Role.LATER
    if not (has_effect or is_holder):
        return Role.ORDINARY
    if inside is not None:
        jaxprs = core.inner_jaxprs(equation.params)
        is_cut = has_effect or name == "scan" or any(_has_pieces(each, inside) for each in jaxprs)
        return Role.INSIDE if is_cut else Role.PRODUCT
    if name == _NOT_DIFFERENTIATED or not is_holder:
        return Role.ALONE
    return Role.LEFT if has_effect or name == CHECKPOINT else Role.PRODUCT


def _grouped(roles: Sequence[Role], cuts: Collection[int]) -> Iterator[tuple[Role, Sequence[int]]]:
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
