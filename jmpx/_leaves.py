"""Which leaves of a pytree are what: `is_floating` is the one place that says what casts act on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ARRAYS = (jax.Array, np.ndarray, np.generic)
NUMBERS = (bool, int, float, complex)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is a JAX array, a tracer, a NumPy array or a NumPy scalar."""
    return isinstance(leaf, ARRAYS)


def is_floating(leaf: Any) -> bool:
    """Whether `leaf` is an array (or a `jax.ShapeDtypeStruct`) of real floating dtype.

    Python scalars are not: they have no dtype, and JAX lets them follow that of their
    surroundings. NumPy scalars such as `np.float32(1)` do have one, and are.
    """
    return isinstance(leaf, (*ARRAYS, jax.ShapeDtypeStruct)) and is_floating_dtype(leaf.dtype)


@functools.cache
def is_floating_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_inexact_array(leaf: Any) -> bool:
    """Whether `leaf` is an array that can be differentiated: floating or complex."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_traceable(leaf: Any) -> bool:
    """Whether `leaf` is an array that JAX can hold.

    It cannot hold NumPy's text, dates, objects, long doubles and float0, the cotangent of integers.
    """
    return isinstance(leaf, jax.Array) or (
        is_array(leaf)
        and leaf.dtype.type not in (np.longdouble, np.clongdouble, np.timedelta64)
        and any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_))
    )


def is_view(node: Any) -> bool:
    """Whether an adapter made this node as a view of a module; adapters mark the classes."""
    return hasattr(type(node), "__jmpx_view__")
