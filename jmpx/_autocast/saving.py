"""Which results of autocast the backward pass keeps: a policy of `jax.checkpoint`."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmpx._jaxpr import Primitive

COMPARISONS = frozenset("eq ne lt le gt ge is_finite eq_to lt_to le_to".split())
# Primitives that cost next to nothing to run again on what is saved.
CHEAP = frozenset(
    """
    mul div sub neg abs sign max min clamp select_n integer_pow square convert_element_type
    broadcast_in_dim reshape transpose squeeze rev slice pad concatenate split
    """.split()
)


def save_low_precision(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """Keeps no float32 intermediates for the backward pass: a policy of `jax.checkpoint`.

    Results in 16 bits are saved, and so are masks and indices. Results in float32, such as a
    softmax or the statistics of a norm, are computed again, and so are multiplications, casts and
    changes of shape. The policy says what JAX asks the compiler to keep; peak memory is the
    compiler's choice, and may even grow, so measure it.

    Args:
        primitive: the operation, a primitive of JAX.
        *avals: the shapes and dtypes of its operands.
        **params: its parameters.

    Returns:
        Whether to save the results.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> import jmpx
        >>> @functools.partial(jax.checkpoint, policy=jmpx.save_low_precision)
        ... @jmpx.autocast
        ... def loss_fn(w, x):
        ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> jax.grad(loss_fn)(jnp.ones((3, 2)), jnp.ones((4, 3))).shape
        (3, 2)
    """
    if primitive.name in COMPARISONS:
        return True
    if primitive.name in CHEAP:
        return False
    said = [params.get(key) for key in ("new_dtype", "preferred_element_type", "dtype")]
    dtypes = [dtype for dtype in said if dtype is not None]
    dtypes = dtypes or [aval.dtype for aval in avals if hasattr(aval, "dtype")]
    inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return all(np.dtype(dtype).itemsize <= 2 for dtype in inexact)
