"""`jmpx.remat`, and the pass over a jaxpr that puts checkpoints around its pieces."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.core
from jax.ad_checkpoint import checkpoint_name

from jmpx._base.messages import check_runs_at_once, describe, user_stacklevel
from jmpx._base.stateful import Arguments, Changes, Keywords, Leaf, PureFunction, call
from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.equations import Place, place_of
from jmpx._jaxprs.inner import (
    Piece,
    any_holds,
    inner_of,
    is_backward,
    kind_of,
    once_per_jaxpr,
    scopes_around,
    split,
)
from jmpx._jaxprs.marks import before_policy
from jmpx._jaxprs.rewriting import holding, new_variable, renamed, replaced, with_jaxprs
from jmpx._remat.cuts import Role, find_activations, find_groups, inside_of, sunk
from jmpx._remat.saving import SAVED, Saving, get_saving, is_named, keeps_residuals, with_residuals

Left = frozenset[Place | None]  # the places of equations with products that are left as they are


def with_checkpoints(jaxpr: Jaxpr, saving: Saving) -> tuple[Jaxpr, Left]:
    """Returns a jaxpr that computes the same, with a checkpoint around each piece with products."""
    changed, left = _checkpointed(jaxpr, saving)
    return (jaxpr if changed is None else changed), left


@once_per_jaxpr
def _checkpointed(given: Jaxpr, saving: Saving) -> tuple[Jaxpr | None, Left]:
    """Returns the same; None for a jaxpr that does not change, which the cache would keep alive."""
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
    # `with_residuals` traces, for which it has to know the axes of the shard_map.
    return core.in_shard_map(equation, changed) if is_mapped else changed()


class _Checkpoints:
    """Makes the checkpoints of one jaxpr."""

    def __init__(self, jaxpr: Jaxpr, saving: Saving) -> None:
        self.saving = saving
        self.active = find_activations(jaxpr, saving)[0]
        self.bodies: dict[Hashable, Jaxpr] = {}  # equal pieces share one
        # The two passes over a scan's body are in two loops: nothing can merge their equations.
        prevent_cse = not saving.trips
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
        """Returns the jaxpr of a piece, or of an equal piece."""
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
    """Yields the equations of a piece, and after each saved result the equation that names it.

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
    """Returns a jaxpr that names its saved results; None for one that does not change."""
    names: dict[Atom, Atom] = {}
    active = find_activations(jaxpr, saving)[0]
    new = holding(jaxpr, list(_named(jaxpr.eqns, saving, active, names)))
    return None if new is jaxpr else replaced(new, outvars=renamed(jaxpr.outvars, names))


@functools.cache
def _name() -> Equation:
    """Returns an equation that names its operand."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, SAVED))(0.0).eqns[0]


# `jmpx.remat`, and the same for a function that a policy runs.


F = TypeVar("F", bound=Callable[..., Any])
Words = Literal["products", "products+mixed", "products+attention"]


@overload
def remat(fn: F, save: Words = ...) -> F: ...


@overload
def remat(fn: None = None, save: Words = ...) -> Callable[[F], F]: ...


def remat(fn: Callable[..., Any] | None = None, save: Words = "products") -> Callable[..., Any]:
    """Makes the backward pass of a function keep the results of products, and little else.

    This is `jax.checkpoint`, for which jmpx chooses the policy and the blocks: it cuts the function
    where little has to be kept, so that layers need no marks, and computes the rest again. No dtype
    and no result changes, and gradients change by the order of sums alone. A policy does the same
    by `save=`; this is for a function that has no policy.

    Nothing is traced where nothing is differentiated, as in an eager call.

    Args:
        fn: any function of pytrees, such as a loss or a model; None to decorate with arguments.
        save: "products" keeps the results of matmuls with weights, of convolutions and of experts.
            "products+mixed" also keeps results of matmuls of two activations if they are no larger
            than the larger activation, as the weighted values of an attention are.
            "products+attention" keeps the results of all matmuls: more memory, less time.

    Returns:
        A function with the arguments and results of `fn`.

    Raises:
        TypeError: if `fn` is no function.
        ValueError: if `save` has no such value.

    Warns:
        UserWarning: when called, if a part of the function stays as it is, because it is under
            `jax.checkpoint` already, has effects, or takes a gradient itself.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def loss_fn(w, x):
        ...     for _ in range(12):
        ...         x = x + jnp.tanh(x @ w) @ w.T
        ...     return jnp.square(x).mean()
        >>> w, x = jnp.eye(32) / 2, jnp.ones((64, 32))
        >>> def kept(fn):  # bytes that the backward pass reads
        ...     return sum(array.nbytes for array in jax.tree.leaves(jax.vjp(fn, w, x)[1]))
        >>> kept(jmpx.remat(loss_fn)) < 0.7 * kept(loss_fn)
        True
    """
    if fn is None:
        return functools.partial(remat, save=save)
    if not callable(fn):
        raise TypeError(
            f"Expected a function whose backward pass keeps less, got {describe(fn)}: write "
            "jmpx.remat(f) or decorate the function with @jmpx.remat."
        )
    check_runs_at_once(fn)
    saving = get_saving(save)
    if saving is None:
        raise ValueError(
            "Expected 'products', 'products+mixed' or 'products+attention' as save= of jmpx.remat, "
            "got None: leave jmpx.remat out to keep what JAX keeps."
        )

    def transform(
        pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords
    ) -> tuple[PyTree, Changes]:
        return run_saved(pure, saving, fn, (state, *args), kwargs)

    @functools.wraps(fn, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(transform, fn, args, kwargs)

    return wrapper


def run_saved(
    fn: Callable[..., PyTree],
    saving: Saving,
    user: Callable[..., Any],
    args: PyTree,
    kwargs: Keywords,
) -> PyTree:
    """Runs a function that keeps less for its backward pass; JAX calls it by the user's name."""
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
    if not is_traced and not core.enclosing_bodies():  # nothing differentiates an eager call
        return fn(*args, **kwargs)
    with _tracing_explained():
        traced = core.trace(fn, args, kwargs, name=getattr(user, "__name__", type(user).__name__))
    jaxpr, left = keeping_less(traced.jaxpr, saving)
    for message in messages_of(left):
        warnings.warn(message, stacklevel=user_stacklevel("jax", "flax", "haiku", "equinox"))
    return traced.rebuild(core.evaluate(jaxpr, traced.arrays))


@contextlib.contextmanager
def _tracing_explained() -> Iterator[None]:
    """Adds a note to errors of tracing a function that would run eagerly without `save=`."""
    bodies = {*core.enclosing_bodies()}
    try:
        yield
    except core.UNREAD as error:
        if bodies <= {"derivative"}:
            error.add_note(
                "save= traces the function that it is given to, so that Python reads no number of "
                "an array in it: leave save= or jmpx.remat out, or give it a part of the function "
                "that reads none."
            )
        raise


def keeping_less(jaxpr: Jaxpr, saving: Saving) -> tuple[Jaxpr, Left]:
    """Returns a jaxpr that computes the same, and keeps less for its backward pass.

    Also returns where it is left as it was; None stands for a whole function that takes a gradient.
    """
    if _takes_a_gradient(jaxpr):
        return jaxpr, frozenset({None})
    return with_checkpoints(jaxpr, saving)


@once_per_jaxpr
def _takes_a_gradient(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr contains a backward pass; the transposed jaxpr of a linear solve is none."""
    if any(map(is_backward, jaxpr.eqns)):
        return True
    held = (inner.jaxprs for inner in map(inner_of, jaxpr.eqns) if inner is not None)
    return any(map(_takes_a_gradient, itertools.chain.from_iterable(held)))


def messages_of(left: Left) -> Iterator[str]:
    """Yields the warning about the places that `save=` left as they were, if there are any."""
    if left:
        places = ", ".join(sorted(str(place) for place in left if place is not None))
        yield (
            f"save= leaves a part of the function as it is{places and f' ({places})'}, because it "
            "is under jax.checkpoint or jmpx.remat, has effects such as a callback, or takes a "
            "gradient itself: leave the checkpoint out, move the effects out of it, or "
            "differentiate what save= is given to, as in jax.grad(jmpx.remat(f))."
        )
