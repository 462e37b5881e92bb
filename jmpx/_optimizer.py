"""Optimizer steps that are left out when gradients overflowed."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jmpx._tree import all_finite, as_flag, select_tree

if TYPE_CHECKING:
    import optax


class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite`.

    Attributes:
        inner_state: the state of the wrapped optimizer.
        grads_finite: whether the last step was taken: a bool array of shape (). Select other state
            that the step made, such as moving averages, by it.
        total_skipped: how many steps were skipped so far: an int32 array of shape ().
        consecutive_skipped: how many in a row, up to the last step: an int32 array of shape ().

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import jmpx
        >>> state = jmpx.skip_nonfinite(optax.sgd(0.1)).init({"w": jnp.ones(2)})
        >>> isinstance(state, jmpx.SkipNonfiniteState), int(state.total_skipped)
        (True, 0)
    """

    inner_state: Any
    grads_finite: Any
    total_skipped: Any
    consecutive_skipped: Any


def skip_nonfinite(
    optimizer: "optax.GradientTransformation",
) -> "optax.GradientTransformationExtraArgs":
    """Wraps an optax optimizer so that it skips steps with non-finite gradients, and counts them.

    A skipped step leaves the wrapped optimizer's state, its step counts and schedules included, as
    it was, and returns updates of -0.0, which leave parameters as they were to the bit. It is to
    be the outermost transformation: what stands outside of it sees the skipped step. Unlike
    `optax.apply_if_finite` it never gives in and applies a non-finite update.

    Args:
        optimizer: an optax gradient transformation.

    Returns:
        An optax gradient transformation whose `update` takes an optional `grads_finite=`, a scalar
        bool that says whether to take the step; without it, the gradients are checked. Other extra
        arguments are handed on. Its state is a `SkipNonfiniteState`.

    Raises:
        TypeError: if `optimizer` is not an optax gradient transformation.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import jmpx
        >>> optimizer = jmpx.skip_nonfinite(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update({"w": jnp.array([1.0, jnp.inf])}, state, params)
        >>> optax.apply_updates(params, updates)["w"], int(state.total_skipped)
        (Array([1., 1.], dtype=float32), 1)
    """
    import optax

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"Expected an optax gradient transformation, got {optimizer!r}: pass for example "
            "optax.adam(1e-3)."
        )
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> SkipNonfiniteState:
        none = jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(inner.init(params), jnp.array(True), none, none)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        grads_finite: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, SkipNonfiniteState]:
        finite = (
            all_finite(updates) if grads_finite is None else as_flag(grads_finite, "grads_finite")
        )
        new_updates, new_inner = inner.update(updates, state.inner_state, params, **extra_args)
        skipped = (~finite).astype(jnp.int32)
        return (
            jax.tree.map(lambda u: jnp.where(finite, u, jnp.full_like(u, -0.0)), new_updates),
            SkipNonfiniteState(
                inner_state=select_tree(finite, new_inner, state.inner_state),
                grads_finite=finite,
                total_skipped=state.total_skipped + skipped,
                consecutive_skipped=(state.consecutive_skipped + 1) * skipped,
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def optimizer_update(
    model: Any,
    optimizer: "optax.GradientTransformation",
    optimizer_state: Any,
    grads: Any,
    grads_finite: Any,
    **extra_args: Any,
) -> tuple[Any, Any]:
    """Takes an optimizer step, unless the gradients were not finite.

    Follows MPX's `optimizer_update` (arXiv 2507.03312, section 3.5), for any pytree. A skipped step
    leaves model and optimizer state, step counts and schedules included, as they were to the bit.
    An optimizer made by `skip_nonfinite` is told, and counts.

    Args:
        model: any pytree; the leaves for which `grads` holds None are handed on untouched.
        optimizer: an optax gradient transformation.
        optimizer_state: its state.
        grads: gradients of the structure of `model`, as `filter_grad` returns them.
        grads_finite: whether to take the step: a scalar bool, traced or not.
        **extra_args: what `optimizer.update` takes besides, such as `value=`.

    Returns:
        The new `(model, optimizer_state)`, leaves of the dtypes that they had.

    Raises:
        TypeError: if `grads_finite` is not a scalar bool.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import jmpx
        >>> model, optimizer = {"w": jnp.ones(2), "activation": jnp.tanh}, optax.sgd(0.5)
        >>> grads = {"w": jnp.ones(2), "activation": None}
        >>> state = optimizer.init({"w": model["w"], "activation": None})
        >>> model, state = jmpx.optimizer_update(model, optimizer, state, grads, jnp.array(True))
        >>> model["w"]
        Array([0.5, 0.5], dtype=float32)
    """
    finite = as_flag(grads_finite, "grads_finite")
    params = jax.tree.map(lambda g, p: None if g is None else p, grads, model, is_leaf=_is_none)
    if isinstance(optimizer_state, SkipNonfiniteState):
        extra_args = {**extra_args, "grads_finite": finite}
    updates, new_state = optimizer.update(grads, optimizer_state, params, **extra_args)
    if not isinstance(optimizer_state, SkipNonfiniteState):
        new_state = select_tree(finite, new_state, optimizer_state)

    def apply(update: Any, leaf: Any) -> Any:
        if update is None:
            return leaf
        leaf = jnp.asarray(leaf)
        with jax.numpy_dtype_promotion("standard"):  # a float32 update of a bfloat16 leaf
            stepped = jnp.asarray(leaf + update, leaf.dtype)
        return jnp.where(finite, stepped, leaf)

    return jax.tree.map(apply, updates, model, is_leaf=_is_none), new_state


def _is_none(x: Any) -> bool:
    return x is None
