"""The pieces of a jaxpr that run under one `jax.checkpoint` each."""

import enum
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jmpx._autocast.backward import variables
from jmpx._autocast.cuts import Role, find_cuts, find_head, holds_product
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
    CHECKPOINT = "it is one equation, which the user checkpointed"
    EFFECTS = "it is one equation, which has effects and holds products"
    PLAIN = "it is as without pieces"


class Piece(NamedTuple):
    """Equations that run together."""

    kind: Kind
    equations: list[Equation]  # in their order
    inputs: list[Atom]  # the variables that they read, and others define
    outputs: list[Atom]  # the variables that they define, and others read
    last: list[Atom]  # the variables that nothing reads after them


_Group = tuple[Kind, list[int]]  # indices of equations
# Indices, as values that refer to their key would keep it alive.
_found: weakref.WeakKeyDictionary[Jaxpr, list[_Group]] = weakref.WeakKeyDictionary()


def find_pieces(jaxpr: Jaxpr) -> list[Piece]:
    """Returns the pieces of a jaxpr, cut where little lives, in their order."""
    return _pieces(jaxpr, _found_groups(jaxpr))


def find_selected(jaxpr: Jaxpr, scope: str, is_selected: Callable[[str], bool]) -> list[Piece]:
    """Returns the pieces of a jaxpr in their order: the scopes that the user selected."""
    roles = [_role_of_selected(equation) for equation in jaxpr.eqns]
    keys = [_outermost(equation, scope, is_selected) for equation in jaxpr.eqns]
    return _pieces(jaxpr, _grouped(jaxpr.eqns, roles, keys, by_user=True))


def takes_gradient(jaxpr: Jaxpr) -> bool:
    """Whether a backward pass is part of a jaxpr."""
    stacks = (equation.source_info.name_stack for equation in all_equations(jaxpr))
    return any("transpose(" in str(stack) for stack in stacks)


def _pieces(jaxpr: Jaxpr, groups: Iterable[_Group]) -> list[Piece]:
    read = {atom for atom in jaxpr.outvars if not core.is_literal(atom)}
    pieces = []
    for kind, indices in reversed(list(groups)):
        equations = [jaxpr.eqns[i] for i in indices]
        defined = {var: None for equation in equations for var in equation.outvars}
        used = {var: None for equation in equations for var in variables(equation)}
        inputs = [var for var in used if var not in defined]
        last = [var for var in (*inputs, *defined) if var not in read]
        outputs = [var for var in defined if var in read]
        pieces.append(Piece(kind, equations, inputs, outputs, last))
        read.update(inputs)
    return pieces[::-1]


def _found_groups(jaxpr: Jaxpr) -> list[_Group]:
    if jaxpr not in _found:
        roles = [_role(equation, _has_pieces) for equation in jaxpr.eqns]
        head = find_head(jaxpr, roles)
        cuts = set()
        if head is not None:  # it is in no piece, and what it reads ends the last one
            roles[head] = Role.ORDINARY
            cuts.add(head)
        cuts |= find_cuts(jaxpr.eqns, roles)
        keys = list(itertools.accumulate(i in cuts for i in range(len(roles))))
        _found[jaxpr] = list(_grouped(jaxpr.eqns, roles, keys))
    return _found[jaxpr]


def _has_pieces(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has more than one piece, or one that cannot join the equations around it."""
    kinds = [kind for kind, _ in _found_groups(jaxpr) if kind is not Kind.PLAIN]
    return kinds not in ([], [Kind.SAVED])


def _role(equation: Equation, has_pieces: Callable[[Jaxpr], bool]) -> Role:
    name = operation_name(equation.primitive.name)
    if _has_effects(equation):
        if not equation.outvars:
            return Role.LATER
        return Role.INSIDE if name in _CUT_INSIDE else Role.ALONE
    if not holds_product(equation):
        return Role.ORDINARY
    if name in _CUT_INSIDE:
        is_cut = name == "scan" or any(map(has_pieces, core.inner_jaxprs(equation.params)))
        return Role.INSIDE if is_cut else Role.PRODUCT
    return Role.ALONE if name in (_NOT_DIFFERENTIATED, _CHECKPOINT) else Role.PRODUCT


def _role_of_selected(equation: Equation) -> Role:
    """Returns the role of an equation where the user selected the pieces: any call may hold one."""
    is_call = operation_name(equation.primitive.name) in _CUT_INSIDE
    return Role.INSIDE if is_call and equation.outvars else _role(equation, lambda _: True)


def _has_effects(equation: Equation) -> bool:
    return any(type(effect).__name__ not in _HARMLESS for effect in equation.effects)


def _kind_alone(equation: Equation, role: Role) -> Kind:
    name = operation_name(equation.primitive.name)
    if role is Role.INSIDE:
        return Kind.INSIDE
    if name == _NOT_DIFFERENTIATED or not holds_product(equation):
        return Kind.PLAIN
    return Kind.CHECKPOINT if name == _CHECKPOINT else Kind.EFFECTS


def _grouped(
    equations: Sequence[Equation],
    roles: Sequence[Role],
    keys: Sequence[Hashable],
    by_user: bool = False,
) -> Iterator[_Group]:
    """Yields groups of equations with equal keys, and those that are alone.

    If the user selected the pieces, equations without a key are in none, and a call with a key is
    part of its piece.
    """
    for key, group in itertools.groupby(range(len(equations)), lambda i: keys[i]):
        indices, is_selected = list[int](), by_user and key is not None
        for i in group:
            is_inside = roles[i] is Role.INSIDE and (not is_selected or _has_effects(equations[i]))
            if is_inside or roles[i] is Role.ALONE:
                yield from _together(indices, roles, is_selected, by_user)
                indices = []
                yield _kind_alone(equations[i], roles[i]), [i]
            else:
                indices.append(i)
        yield from _together(indices, roles, is_selected, by_user)


def _together(
    indices: Sequence[int], roles: Sequence[Role], is_selected: bool, by_user: bool
) -> Iterator[_Group]:
    """Yields the groups that equations make: one, and what has effects in it after it."""
    now = [i for i in indices if roles[i] is not Role.LATER]
    later = [i for i in indices if roles[i] is Role.LATER]
    if now:
        is_saved = is_selected if by_user else any(roles[i] is Role.PRODUCT for i in now)
        yield Kind.SAVED if is_saved else Kind.PLAIN, now
    if later:
        yield Kind.PLAIN, later


def _outermost(equation: Equation, scope: str, is_selected: Callable[[str], bool]) -> Hashable:
    """Returns what stands for the entering of the outermost selected scope; None if there is none.

    Equal scopes that are entered one after the other, as by a loop over layers, are told apart.
    """
    for prefix, entered in core.scopes_entered(scope, equation):
        if is_selected(prefix):
            return prefix, entered
    return None
