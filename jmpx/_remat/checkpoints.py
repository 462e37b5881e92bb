"""The pass: `jax.checkpoint` around the pieces of a jaxpr, whose equations do not run for it."""

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import any_holds, once_per_jaxpr
from jmpx._jaxprs.marks import before_policy
from jmpx._jaxprs.pieces import Piece, scopes_around, split
from jmpx._jaxprs.places import Place, place_of
from jmpx._jaxprs.rewriting import holding, new_variable, renamed, replaced, with_jaxprs
from jmpx._jaxprs.structure import kind_of
from jmpx._remat.cuts import Role, find_activations
from jmpx._remat.pieces import find_groups, inside_of
from jmpx._remat.residuals import SAVED, keeps_residuals, with_residuals
from jmpx._remat.saving import Saving, is_named
from jmpx._remat.sinking import sunk

Left = frozenset[Place | None]  # where a jaxpr is as it was, although it holds products


def with_checkpoints(jaxpr: Jaxpr, saving: Saving) -> tuple[Jaxpr, Left]:
    """Returns a jaxpr that computes the same, with a checkpoint around each piece with products."""
    changed, left = _checkpointed(jaxpr, saving)
    return (jaxpr if changed is None else changed), left


@once_per_jaxpr
def _checkpointed(given: Jaxpr, saving: Saving) -> tuple[Jaxpr | None, Left]:
    """Returns None for a jaxpr that stays as it is."""
    jaxpr = given if saving.is_cast_later else sunk(given)
    groups = find_groups(jaxpr, saving)
    checkpoints = _Checkpoints(jaxpr, saving)
    left = set[Place | None]()

    def cut(jaxpr: Jaxpr, inside: Saving) -> Jaxpr:
        changed, places = with_checkpoints(jaxpr, inside)
        left.update(places)
        return changed

    eqns: list[Equation] = []
    for group, piece in zip(groups, split(jaxpr, [g.indices for g in groups]), strict=True):
        first = piece.equations[0]
        if group.role is Role.PRODUCT:
            eqns.append(checkpoints.equation(piece))
        elif group.role is Role.INSIDE:
            eqns.append(_with_inner(first, lambda inner, inside=group.inside: cut(inner, inside)))
        else:
            eqns += piece.equations
        if group.role is Role.LEFT:
            left.add(place_of(first))
    new = holding(given, eqns)
    return None if new is given else new, frozenset(left)


def _with_inner(equation: Equation, change: Callable[[Jaxpr], Jaxpr]) -> Equation:
    """Returns an equation with changed jaxprs; the same object if none did."""

    def changed() -> Equation:
        params = with_jaxprs(equation.params, change)
        return equation if params is equation.params else equation.replace(params=params)

    is_mapped = equation.primitive.name == "shard_map"
    is_mapped &= any(any_holds(j, keeps_residuals) for j in core.inner_jaxprs(equation.params))
    # What is traced for the jaxpr of a shard_map has to know its axes.
    return core.in_shard_map(equation, changed) if is_mapped else changed()


class _Checkpoints:
    """Makes the checkpoints of one jaxpr."""

    def __init__(self, jaxpr: Jaxpr, saving: Saving) -> None:
        self.saving = saving
        self.active = find_activations(jaxpr, saving)[0]
        self.bodies: dict[Hashable, Jaxpr] = {}  # pieces that are alike share one
        # The two passes over a scan's body are in two loops: nothing can merge their equations.
        prevent_cse = not saving.turns
        run = jax.checkpoint(lambda x: x, policy=saving.policy, prevent_cse=prevent_cse)
        (self.template,) = jax.make_jaxpr(run)(0.0).eqns

    def equation(self, piece: Piece) -> Equation:
        """Returns the equation that runs a piece under `jax.checkpoint`."""
        around = before_policy(scopes_around(piece, core.marked_stack_of))
        body = self._body(piece, len(around))
        made = self.template.replace(
            invars=piece.inputs,
            outvars=piece.outputs,
            params={**self.template.params, "jaxpr": body},
            effects=body.effects,
            source_info=piece.equations[0].source_info,
        )
        return core.with_stack(made, around)

    def _body(self, piece: Piece, depth: int) -> Jaxpr:
        """Returns the jaxpr of a piece, or that of one that is alike."""
        given = piece.equations, piece.inputs, piece.outputs
        activations = tuple(var in self.active for var in piece.inputs)
        # Autocast, which runs later, reads the marks of modules.
        stacks = (core.marked_stack_of(eqn)[depth:] for eqn in piece.equations)
        marks = tuple(stacks) if self.saving.is_cast_later else ()
        key = kind_of(*given, depth), activations, marks
        if key not in self.bodies:
            names: dict[Atom, Atom] = {}
            eqns = [
                core.with_stack(eqn, core.marked_stack_of(eqn)[depth:])
                for eqn in _named(piece.equations, self.saving, self.active, names)
            ]
            self.bodies[key] = replaced(
                self.template.params["jaxpr"],
                invars=piece.inputs,
                outvars=renamed(piece.outputs, names),
                eqns=eqns,
                effects=frozenset().union(*(eqn.effects for eqn in eqns)),
            )
        return self.bodies[key]


def _named(
    equations: Sequence[Equation],
    saving: Saving,
    active: Collection[Atom],
    names: dict[Atom, Atom],
) -> Iterator[Equation]:
    """Yields the equations of a piece, and what names the results that are saved.

    `names` gets the named variables.
    """
    for given in equations:
        equation, inside = given, inside_of(given, saving, active)
        if keeps_residuals(given):
            equation = with_residuals(given)
        elif inside is not None:
            equation = _with_inner(
                given, lambda jaxpr, to=inside: _named_within(jaxpr, to) or jaxpr
            )
        if any(not core.is_literal(atom) and atom in names for atom in given.invars):
            equation = equation.replace(invars=renamed(equation.invars, names))
        yield equation
        if is_named(given, saving, active):
            (var,) = given.outvars
            names[var] = new_variable(var.aval)
            place = {"source_info": given.source_info, "ctx": given.ctx}
            yield _name().replace(invars=[var], outvars=[names[var]], **place)


@once_per_jaxpr
def _named_within(jaxpr: Jaxpr, saving: Saving) -> Jaxpr | None:
    """Returns a jaxpr that names what is saved; None for one that stays as it is."""
    names: dict[Atom, Atom] = {}
    active = find_activations(jaxpr, saving)[0]
    new = holding(jaxpr, list(_named(jaxpr.eqns, saving, active, names)))
    return None if new is jaxpr else replaced(new, outvars=renamed(jaxpr.outvars, names))


@functools.cache
def _name() -> Equation:
    """Returns an equation that gives a name."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, SAVED))(0.0).eqns[0]
