"""What a logger plots of a mixed-precision run: its loss scale, and the steps that it skipped."""

import functools

import jax
import jax.numpy as jnp

from jmpx._base.leaves import Array, PyTree
from jmpx._scales.kinds import LossScale
from jmpx._steps.checks import check_loss_scale
from jmpx._steps.progress import counts_of
from jmpx._storage.transformations import is_optimizer


def metrics(opt_state: PyTree = None, loss_scale: LossScale | None = None) -> dict[str, jax.Array]:
    """Returns the scalars of a mixed-precision step that a logger plots.

    Call it at the end of the step, under `jax.jit`, and return the dict with the loss: nothing
    waits for the device until the logger reads them, by `jax.device_get(metrics)`.

    Args:
        opt_state: the state of an optimizer of `skip_nonfinite`, or any pytree that holds one or
            several, as `check_progress` takes it.
        loss_scale: the loss scale of the next step; `jmpx.NoOpLossScale()` is the constant 1.

    Returns:
        A dict of arrays of shape (): `"loss_scale"` in float32, `"total_skipped"`, the steps that
        were skipped so far, and `"consecutive_skipped"`, those in a row up to this one, in int32;
        without those that the arguments do not tell. Inside `jax.shard_map` and `jax.pmap` they are
        the device's own. Of several states, or of a stack of them, they are the largest counts and
        the smallest scale.

    Raises:
        TypeError: if the arguments are swapped or of other types, or there is neither a loss scale
            nor a state of `skip_nonfinite`.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> state = jmpx.skip_nonfinite(optax.sgd(0.1)).init(jnp.ones(2))
        >>> found = jmpx.metrics(state, jmpx.DynamicLossScale(1024.0))
        >>> {name: float(value) for name, value in found.items()}
        {'loss_scale': 1024.0, 'total_skipped': 0.0, 'consecutive_skipped': 0.0}
    """
    remedy = "jmpx.metrics takes (opt_state, loss_scale), those that the step returns"
    if loss_scale is not None:
        check_loss_scale(loss_scale, remedy)
    found = {} if loss_scale is None else {"loss_scale": _factor_of(loss_scale)}
    for name in ("total_skipped", "consecutive_skipped"):
        if counts := counts_of(opt_state, name):
            found[name] = functools.reduce(jnp.maximum, map(_largest, counts))
    if not found or is_optimizer(opt_state):
        raise TypeError(
            "Expected a loss scale, or the state of an optimizer of jmpx.skip_nonfinite, got a "
            f"{type(opt_state).__name__} without one: {remedy}, and "
            "jmpx.skip_nonfinite(optax.adam(1e-3)) counts skipped steps."
        )
    return found


def _factor_of(loss_scale: LossScale) -> jax.Array:
    """Returns the factor of any loss scale, by what it makes of 1; of a stack the smallest."""
    one_scale = jax.tree.map(lambda x: x.min() if jnp.ndim(x) else x, loss_scale)
    return jnp.asarray(one_scale.scale(jnp.ones((), jnp.float32)), jnp.float32)


def _largest(count: Array | int) -> jax.Array:
    count = jnp.asarray(count, jnp.int32)
    return count.max() if count.ndim else count
