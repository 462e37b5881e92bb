"""Casts of pytrees: floating leaves change their dtype, all other leaves pass untouched."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.dtypes import DTypeLike, as_dtype, check_enabled, half_dtype
from jmpx._base.leaves import Array, PyTree, is_floating

T = TypeVar("T")
FloatingT = TypeVar("FloatingT", bound=Array | jax.ShapeDtypeStruct)


def at_least_float32(leaf: FloatingT) -> FloatingT:
    """Returns a floating leaf of 8 or 16 bits in float32, and a wider one as it is."""
    return _cast_leaf(leaf, np.dtype(np.float32)) if leaf.dtype.itemsize < 4 else leaf


def _cast_leaf(leaf: PyTree, dtype: np.dtype) -> PyTree:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    if isinstance(leaf, jax.core.Tracer):
        return leaf.astype(dtype)
    if isinstance(leaf, jax.Array):
        # While tracing, cast closed-over arrays at once instead of staging a cast.
        with jax.ensure_compile_time_eval():
            return leaf.astype(dtype)
    with np.errstate(all="ignore"):  # As in JAX, 1e6 silently becomes inf in float16.
        return leaf.astype(dtype)


def cast_tree(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of a pytree.

    Follows JMP and MPX (arXiv 2507.03312, section 3.1). JAX arrays, NumPy arrays and scalars,
    tracers and `jax.ShapeDtypeStruct` of floating dtype are cast. Integers, bools, complex
    numbers, PRNG keys, Python scalars, strings, functions and None pass untouched.

    Args:
        tree: any pytree.
        dtype: the dtype to cast to: a name, a `np.dtype` or a scalar type.

    Returns:
        The same tree, its floating leaves of the same shapes in `dtype`. A leaf that already is in
        `dtype` is returned as the same object.

    Raises:
        TypeError: if `dtype` is not a dtype.
        ValueError: if `dtype` is not a floating dtype, or is float64 while JAX's 64-bit types are
            disabled.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> tree = jmpx.cast_tree({"w": jnp.ones(2), "step": jnp.arange(2)}, jnp.bfloat16)
        >>> tree["w"].dtype.name, tree["step"].dtype.name
        ('bfloat16', 'int32')
    """
    dtype = as_dtype(dtype)
    check_enabled(dtype)
    numpy_dtype = np.dtype(dtype)
    return jax.tree.map(lambda leaf: _cast_leaf(leaf, numpy_dtype), tree)


def cast_like(new: T, old: PyTree) -> T:
    """Returns `new` in the dtype of the leaf `old` that it replaces, if both are floating."""
    return cast_tree(new, old.dtype) if is_floating(old) else new


def holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Whether every number of a floating dtype is one of another; other dtypes hold their own."""
    if wide == narrow or not all(jnp.issubdtype(each, jnp.floating) for each in (wide, narrow)):
        return wide == narrow
    new, old = jnp.finfo(wide), jnp.finfo(narrow)
    return (
        new.nmant >= old.nmant
        and float(new.max) >= float(old.max)
        and float(new.smallest_subnormal) <= float(old.smallest_subnormal)
    )


def cast_except(cast: Callable[[PyTree], PyTree], tree: T, passes: Callable[[object], bool]) -> T:
    """Casts a pytree except for the nodes that pass as they are."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=passes)
    if not any(map(passes, nodes)):
        return cast(tree)
    others = treedef.unflatten([None if passes(node) else node for node in nodes])
    pairs = zip(nodes, treedef.flatten_up_to(cast(others)), strict=True)
    return treedef.unflatten([node if passes(node) else new for node, new in pairs])


def cast_to_full(tree: T) -> T:
    """Casts the floating leaves of a pytree to float32; see `cast_tree`. JMP's name.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in float32.

    Example:
        >>> import numpy as np, jmpx
        >>> jmpx.cast_to_full(np.ones(2, np.float16)).dtype.name
        'float32'
    """
    return cast_tree(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of a pytree to `half_dtype()`; see `cast_tree`. JMP's name.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in bfloat16 on TPU, in float16 elsewhere.

    Example:
        >>> import numpy as np, jmpx
        >>> jmpx.cast_to_half(np.ones(2, np.float32)).dtype == jmpx.half_dtype()
        True
    """
    return cast_tree(tree, half_dtype())
