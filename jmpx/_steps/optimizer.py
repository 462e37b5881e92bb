"""Optimizer steps, which are skipped and counted if gradients are not finite."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jmpx._base.axes import varying_axes
from jmpx._base.messages import describe
from jmpx._base.stateful import Object, holds_objects, is_object, nnx, parameters_of
from jmpx._base.trees import (
    Flag,
    PyTree,
    all_finite,
    as_flag,
    is_array,
    is_none,
    is_traceable,
    select_tree,
    serialized,
)
from jmpx._steps.checks import (
    LEFT_OUT,
    check_optimizer,
    check_optimizer_arguments,
    check_skip_by,
    refuse_state,
    trained_part,
    warn_of_inner_counts,
    warn_of_later_steps,
    warn_of_views,
)
from jmpx._storage.low_precision_params import LowPrecisionParams, apply_update, with_extra_args

T = TypeVar("T")
SkipBy: TypeAlias = Literal["cond", "where"]


# A step is taken or skipped: by a selection, or by a `lax.cond`.


class _TypesDiffer(Exception):
    """A `lax.cond` cannot take or skip this step: its branches would have different types."""


def take_or_keep(
    grads_finite: Flag, take: Callable[[], T], keep: Callable[[PyTree], T], skip_by: SkipBy | None
) -> T:
    """Returns `take()` if the gradients are finite, and `keep(take())` if the step is skipped.

    `keep` reads only shapes and dtypes of its argument. A `lax.cond` needs branches of one type. If
    types differ, "where" is used: the state holds a Python number, or the flag varies over the
    devices of a `jax.shard_map`. An optimizer may widen its state at the first step, also a skipped
    one.

    With `skip_by=None`, the branch of a `lax.cond` that takes the step also selects, and the
    platform makes one of the two flags constant: the flag of the selection on a CPU, that of the
    `lax.cond` elsewhere, where compilers then remove the `lax.cond`.
    """
    if grads_finite is True:
        return take()
    finite = as_flag(grads_finite, "grads_finite")

    def by_where(flag: jax.Array = finite) -> T:
        new = take()
        return select_tree(flag, new, _kept(keep, new))

    if skip_by == "where" or not isinstance(finite, jax.core.Tracer):
        return by_where()
    try:
        if skip_by == "cond":
            return _by_cond(finite, take, keep)
        enters = lax.platform_dependent(finite, cpu=_as_it_is, default=_always)
        return _by_cond(
            enters,
            lambda: by_where(lax.platform_dependent(finite, cpu=_always, default=_as_it_is)),
            keep,
        )
    except _TypesDiffer:
        return by_where()


def _as_it_is(flag: jax.Array) -> jax.Array:
    return flag


def _always(flag: jax.Array) -> jax.Array:
    """Returns True, of the type that the flag has in a `jax.shard_map`; compilers fold it."""
    return flag | True


def _by_cond(finite: jax.Array, take: Callable[[], T], keep: Callable[[PyTree], T]) -> T:
    """Takes or skips a step by a `lax.cond`, whose branches compare their types as JAX traces them.

    To trace the step before, for its types alone, would take as long again.
    """
    news: list[tuple[PyTree, list[jax.core.ShapedArray | None]]] = []

    def taken() -> T:
        new = take()
        if not all(map(is_traceable, jax.tree.leaves(new))):
            raise _TypesDiffer
        types = list(map(_type_of, jax.tree.leaves(new)))
        axes = varying_axes(finite)
        if axes and not all(axes <= varying_axes(each) for each in types):
            raise _TypesDiffer
        news.append((jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), new), types))
        return new

    def skipped() -> T:
        if not news:  # JAX traces the branch of True first; otherwise the types are not known
            raise _TypesDiffer
        old = _kept(keep, news[0][0])
        if list(map(_type_of, jax.tree.leaves(old))) != news[0][1]:
            raise _TypesDiffer
        return old

    return lax.cond(finite, taken, skipped)


def _kept(keep: Callable[[PyTree], T], new: PyTree) -> T:
    """Returns what a skipped step keeps, in the dtypes of the new arrays."""
    return jax.tree.map(_in_dtype_of, keep(new), new)


def _in_dtype_of(old: PyTree, new: PyTree) -> PyTree:
    has_dtype = is_array(new) or isinstance(new, jax.ShapeDtypeStruct)
    differ = is_array(old) and has_dtype and old.dtype != new.dtype
    return jnp.asarray(old, new.dtype) if differ else old


def _type_of(leaf: PyTree) -> jax.core.ShapedArray | None:
    """Returns JAX's type of an array, with strong types for weak ones, as `lax.cond` makes them."""
    aval = jax.typeof(leaf) if is_array(leaf) else None
    return aval.update(weak_type=False) if aval is not None and aval.weak_type else aval


# The step of an `nnx.Optimizer`, which holds its own state: it and the model change in place.


# Takes a step: of parameters, an optax optimizer, its state and gradients, without variables.
Step = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def updated_in_place(
    model: Object, optimizer: Object, grads: PyTree, grads_finite: Flag, step: Step
) -> None:
    """Takes a step of an `nnx.Optimizer` by its optax optimizer, and counts one that is taken."""
    from jmpx._adapters.nnx.objects import array_in, set_value  # here, because it imports Flax

    if not is_object(model):
        raise TypeError(
            f"Expected the nnx.Module that an nnx.Optimizer updates as the model, got "
            f"{describe(model)}: pass the module itself, or optimizer.tx and a state of its own."
        )
    arrays_in = functools.partial(
        jax.tree.map, lambda x: array_in(x) if is_object(x) else x, is_leaf=is_object
    )
    graph = getattr(optimizer, "graph", None)  # Flax 0.12.0 has no such mode
    mode = {} if graph is None else {"graph": graph}
    params = nnx().state(model, optimizer.wrt, **mode)
    own_grads = arrays_in(nnx().state(grads, optimizer.wrt, **mode))
    state = optimizer.opt_state
    stepped, new_state = step(arrays_in(params), optimizer.tx, arrays_in(state), own_grads)
    nnx().update(model, jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(stepped)))
    variables, treedef = jax.tree.flatten(state, is_leaf=is_object)
    for variable, new in zip(variables, treedef.flatten_up_to(new_state), strict=True):
        set_value(variable, new)
    count = array_in(optimizer.step)
    set_value(optimizer.step, count + as_flag(grads_finite, "grads_finite").astype(count.dtype))


# `jmpx.skip_nonfinite` and `jmpx.optimizer_update`.


if TYPE_CHECKING:
    import optax
    from flax.nnx import Optimizer

    OptimizerT = TypeVar("OptimizerT", bound=Optimizer[Any])

ModelT = TypeVar("ModelT")
StateT = TypeVar("StateT")


@serialized
class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite`, whose own arrays have the shape ()."""

    __module__ = "jmpx.types"

    inner_state: PyTree  # of the wrapped optimizer
    grads_finite: jax.Array  # whether the last step was taken
    total_skipped: jax.Array  # in int32
    consecutive_skipped: jax.Array  # those in a row, up to the last step


def skip_nonfinite(
    optimizer: "optax.GradientTransformation | optax.MultiSteps", *, skip_by: SkipBy = "where"
) -> "optax.GradientTransformationExtraArgs":
    """Wraps an optax optimizer so that it skips steps with non-finite gradients, and counts them.

    A skipped step leaves the wrapped optimizer's state unchanged, step counts and schedules
    included, and returns updates of -0.0, which leave parameters unchanged to the bit. Unlike
    `optax.apply_if_finite`, it never applies a non-finite update, however many it has skipped. Make
    it the outermost transformation: in an `optax.MultiSteps` around it, the sum stays non-finite
    after one overflow, while `skip_nonfinite(optax.MultiSteps(optimizer, n))` skips one micro-step.
    `optimizer_update` warns of that, and otherwise `jmpx.inspect.check_progress` does, once it is
    so.

    Args:
        optimizer: an optax gradient transformation, or an `optax.MultiSteps`.
        skip_by: "where" or "cond", as in `optimizer_update`, which uses its own setting instead. A
            `lax.cond` writes the updates to memory and reads them again: 8 bytes per parameter.

    Returns:
        An optax gradient transformation with a `SkipNonfiniteState`, whose `update` takes an
        optional `grads_finite=`, a scalar bool that says whether to take the step; without it, the
        gradients are checked. Other extra arguments go to the wrapped optimizer.

    Raises:
        TypeError: if `optimizer` is of another type.
        ValueError: if `skip_by` has no such value.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> optimizer = jmpx.skip_nonfinite(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update({"w": jnp.array([1.0, jnp.inf])}, state, params)
        >>> optax.apply_updates(params, updates)["w"], int(state.total_skipped)
        (Array([1., 1.], dtype=float32), 1)
    """
    import optax

    check_skip_by(skip_by)
    skipping = _SkipNonfinite(with_extra_args(optimizer), skip_by)
    return optax.GradientTransformationExtraArgs(skipping.init, skipping.update)


class _SkipNonfinite(NamedTuple):
    """The two functions of `skip_nonfinite`, and its arguments."""

    inner: "optax.GradientTransformationExtraArgs"
    skip_by: SkipBy

    def init(self, params: "optax.Params") -> SkipNonfiniteState:
        warn_of_views(params)
        # Two arrays: a jitted step that donates the state cannot donate one array twice.
        total, consecutive = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(self.inner.init(params), jnp.array(True), total, consecutive)

    def update(
        self,
        updates: "optax.Updates",
        state: "optax.OptState",
        params: "optax.Params | None" = None,
        *,
        grads_finite: Flag | None = None,
        **extra_args: Any,
    ) -> "tuple[optax.Updates, SkipNonfiniteState]":
        if not isinstance(state, SkipNonfiniteState):
            refuse_state(state)
        warn_of_views((updates, params))
        if grads_finite is None:
            grads_finite = all_finite(updates)

        def take() -> tuple[PyTree, PyTree]:
            return self.inner.update(updates, state.inner_state, params, **extra_args)

        def keep(new: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            return jax.tree.map(lambda u: jnp.full_like(u, -0.0), new[0]), state.inner_state

        new_updates, new_inner = take_or_keep(grads_finite, take, keep, self.skip_by)
        return new_updates, self.counted(state, new_inner, grads_finite)

    def counted(
        self, state: SkipNonfiniteState, inner_state: PyTree, grads_finite: Flag
    ) -> SkipNonfiniteState:
        """Returns the state after a step, which counts the step if it was skipped."""
        finite = as_flag(grads_finite, "grads_finite")
        skipped = (~finite).astype(jnp.int32)
        consecutive = (state.consecutive_skipped + 1) * skipped
        total = state.total_skipped + skipped
        return SkipNonfiniteState(inner_state, finite, total, consecutive)


@overload
def optimizer_update(
    model: ModelT,
    optimizer: "optax.GradientTransformation | optax.MultiSteps",
    optimizer_state: StateT,
    grads: PyTree,
    grads_finite: Flag,
    *,
    skip_by: SkipBy | None = None,
    **extra_args: Any,
) -> tuple[ModelT, StateT]: ...


@overload
def optimizer_update(
    model: ModelT,
    optimizer: "OptimizerT",
    *,
    grads: PyTree,
    grads_finite: Flag,
    skip_by: SkipBy | None = None,
    **extra_args: Any,
) -> "tuple[ModelT, OptimizerT]": ...


def optimizer_update(
    model: PyTree,
    optimizer: PyTree,
    optimizer_state: PyTree = LEFT_OUT,
    grads: PyTree = LEFT_OUT,
    grads_finite: PyTree = LEFT_OUT,
    *,
    skip_by: SkipBy | None = None,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Takes an optimizer step, unless the gradients were not finite.

    Follows MPX's `optimizer_update` (arXiv 2507.03312, section 3.5), for any pytree. A skipped step
    leaves the model and the optimizer state, step counts and schedules included, unchanged to the
    bit. An optimizer of `skip_nonfinite` counts the skipped steps. With `low_precision_params`, the
    new parameters are as that optimizer rounds them.

    Args:
        model: any pytree; leaves for which `grads` holds None stay as they are. An NNX
            module is updated in place and returned; make its optimizer state by
            `optimizer.init(nnx.state(model, nnx.Param))`.
        optimizer: an optax gradient transformation, or an `nnx.Optimizer`, which is updated in
            place. Its `step` counts the steps that were taken. Its own `update` is not called.
        optimizer_state: its state; for an `nnx.Optimizer`, leave it out, and give the arguments
            after it by name.
        grads: gradients of the structure of `model`, as `grad` returns them.
        grads_finite: whether to take the step: a scalar bool, traced or not.
        skip_by: "cond" runs the update in a `lax.cond`, which a skipped step does not enter.
            "where" computes the update and then selects; a flag that is not traced or varies over
            devices always selects. None means "cond" on CPUs and "where" elsewhere.
        **extra_args: other arguments of `optimizer.update`, such as `value=`.

    Returns:
        The new `(model, optimizer_state)`, or `(model, optimizer)` for an `nnx.Optimizer`. The
        model's leaves keep their dtypes; those of the state have the dtypes that optax gives them.

    Raises:
        TypeError: if `grads_finite` is not a scalar bool, the arguments are not in this order, one
            is missing, an `nnx.Optimizer` is given a state, or the state of an NNX module's
            optimizer was made of the module itself.
        ValueError: if `skip_by` has no such value.

    Warns:
        UserWarning: if `model` is a view, which holds rounded parameters, or if `skip_nonfinite` is
            inside other transformations, where it does not count what this function skips, and
            where sums of gradients keep an overflow that this function is not to skip, or if an
            `optax.chain` changes updates of parameters that `low_precision_params` has rounded.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> model, optimizer, grads = {"w": jnp.ones(2)}, optax.sgd(0.5), {"w": jnp.ones(2)}
        >>> state = optimizer.init(model)
        >>> model, state = jmpx.optimizer_update(model, optimizer, state, grads, jnp.array(True))
        >>> model["w"]
        Array([0.5, 0.5], dtype=float32)
    """
    if skip_by is not None:
        check_skip_by(skip_by)
    of_nnx = nnx() is not None and isinstance(optimizer, nnx().Optimizer)
    check_optimizer_arguments(of_nnx, optimizer_state, grads, grads_finite)
    warn_of_views(model)

    step = functools.partial(_stepped, grads_finite, skip_by, extra_args)
    if not of_nnx:
        return step(model, optimizer, optimizer_state, grads)
    updated_in_place(model, optimizer, grads, grads_finite, step)
    return model, optimizer


def _stepped(
    grads_finite: Flag,
    skip_by: SkipBy | None,
    extra_args: dict[str, Any],
    model: PyTree,
    optimizer: PyTree,
    optimizer_state: PyTree,
    grads: PyTree,
) -> tuple[PyTree, PyTree]:
    """Returns the new model and the new state of an optax optimizer."""
    check_optimizer(optimizer)
    before, put_back = _parameters_of(model, optimizer_state, grads)
    params = trained_part(before, grads)
    state: PyTree = optimizer_state
    warn_of_later_steps(state)
    skipping = _made_by(_SkipNonfinite, optimizer)
    inner, inner_state = optimizer, state
    counts = isinstance(state, SkipNonfiniteState)
    if skipping is not None:
        if not counts:
            refuse_state(state)
        inner, inner_state = skipping.inner, state.inner_state
    elif counts:  # a wrapper hides `skip_nonfinite`, which then skips by itself
        extra_args, grads_finite = {**extra_args, "grads_finite": grads_finite}, True
    else:
        warn_of_inner_counts(state, skips=grads_finite is not True)
    low_precision = _made_by(LowPrecisionParams, inner)

    def take() -> tuple[PyTree, PyTree]:
        if low_precision is not None:
            return low_precision.step(grads, inner_state, params, **extra_args)
        try:
            updates, new_state = inner.update(grads, inner_state, params, **extra_args)
        except (AttributeError, TypeError, ValueError) as error:
            made = jax.eval_shape(inner.init, params)
            if jax.tree.structure(made) != jax.tree.structure(inner_state):
                error.add_note("The state is of another optimizer or model: make it by its init.")
            raise
        return jax.tree.map(apply_update, updates, params, is_leaf=is_none), new_state

    kept = params, inner_state
    new_state: PyTree
    stepped, new_state = take_or_keep(grads_finite, take, lambda new: kept, skip_by)
    if skipping is not None:
        new_state: PyTree = skipping.counted(state, new_state, grads_finite)
    merge = lambda new, old: old if new is None else new  # noqa: E731
    return put_back(jax.tree.map(merge, stepped, before, is_leaf=is_none)), new_state


def _made_by(cls: type[T], optimizer: PyTree) -> T | None:
    """Returns the object of a class whose method is the `update` of an optimizer, if any."""
    owner = getattr(optimizer.update, "__self__", None)
    return owner if isinstance(owner, cls) else None


def _parameters_of(
    model: PyTree, optimizer_state: PyTree, grads: PyTree
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns the pytree that the optimizer updates, and a function from it to the new model."""
    # If the gradients are an NNX module, as `jax.grad` returns them, the model is a plain pytree.
    if not holds_objects(model) or holds_objects(grads):
        return model, lambda new: new
    if holds_objects(optimizer_state):
        raise TypeError(
            "Expected the optimizer state of an NNX module to be one of its parameters, got one of "
            "the module itself: make it by optimizer.init(nnx.state(model, nnx.Param))."
        )
    return parameters_of(model)
