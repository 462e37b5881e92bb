"""Leaves of pytrees: which of them are arrays, which are floating, which JAX can hold."""

import functools
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any  # JAX has no public type of pytrees.
Array: TypeAlias = jax.Array | np.ndarray | np.generic

ARRAYS = (jax.Array, np.ndarray, np.generic)
NUMBERS = (bool, int, float, complex)


def is_none(node: object) -> bool:
    """Whether `node` is None; as an `is_leaf` it keeps None in the leaves of a pytree."""
    return node is None


def is_array(leaf: object) -> TypeGuard[Array]:
    """Whether `leaf` is a JAX array, a tracer, a NumPy array or a NumPy scalar."""
    return isinstance(leaf, ARRAYS)


def is_floating(leaf: object) -> bool:
    """Whether `leaf` is an array or a `jax.ShapeDtypeStruct` of a real floating dtype.

    Casts change these leaves and no others: a NumPy scalar such as `np.float32(1)`, but not a
    Python number, which has no dtype: JAX lets it take that of the other operand.
    """
    return isinstance(leaf, (*ARRAYS, jax.ShapeDtypeStruct)) and is_floating_dtype(leaf.dtype)


@functools.cache
def is_floating_dtype(dtype: np.dtype) -> bool:
    """Whether `dtype` is a real floating dtype: bfloat16 and float8 are, complex64 is not."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_inexact_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.number]:
    """Whether `leaf` is an array that JAX can differentiate: floating or complex."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_traceable(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.number | np.bool_]:
    """Whether `leaf` is an array that JAX can hold.

    JAX cannot hold NumPy's text, dates, objects and long doubles, nor float0, the dtype of the
    gradients of integers.
    """
    return isinstance(leaf, jax.Array) or (
        is_array(leaf)
        and leaf.dtype.type not in (np.longdouble, np.clongdouble, np.timedelta64)
        and any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_))
    )


def can_replace(new: PyTree, old: PyTree) -> bool:
    """Whether a loop that carries the leaf `old` can carry `new` next.

    An array may have other values, in its shape and dtype; any other leaf must be the same.
    """
    if is_traceable(new) and is_traceable(old):
        return (new.shape, new.dtype) == (old.shape, old.dtype)
    return new is old or (type(new) is type(old) and np.array_equal(new, old))


def is_view(node: object) -> bool:
    """Whether `node` is a view of a module; adapters mark the classes of views."""
    return hasattr(type(node), "__jmpx_view__")


def spell(leaf: object) -> str:
    """Returns a leaf as error messages name it: an array as `float32[2, 3]`."""
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else repr(leaf)


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number of Python or NumPy, other than a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
