"""Casts of whole pytrees: floating leaves change their dtype, every other leaf passes untouched."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._dtypes import DTypeLike, as_dtype, check_enabled, half_dtype
from jmpx._leaves import is_floating, is_floating_dtype

T = TypeVar("T")

# Outside of a trace, this many leaves of one shape and up to this size are cast 16 in a call. The
# larger ones take longer to cast than to call, and the fewer ones than to compile for 16.
_MANY, _SMALL, _CHUNK = 64, 2**18, 16


def widen(leaf: Any) -> Any:
    """Returns a floating leaf in at least float32: 8 and 16-bit ones become float32."""
    return _cast_leaf(leaf, np.dtype(np.float32)) if leaf.dtype.itemsize < 4 else leaf


def _cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    if isinstance(leaf, jax.Array):
        return leaf.astype(dtype)
    with np.errstate(all="ignore"):  # float16 turns 1e6 into inf, in NumPy as in JAX.
        return leaf.astype(dtype)


@functools.partial(jax.jit, static_argnums=1, inline=True)  # under tracing, casts and no calls
def _cast_together(leaves: list[jax.Array], dtype: np.dtype) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf in leaves]


def _cast_leaves(leaves: list[Any], dtype: np.dtype) -> list[Any]:
    """Casts the floating leaves; JAX arrays that are no tracers in few calls, if they are many."""
    casts, groups = list(leaves), {}
    for place, leaf in enumerate(leaves):
        if getattr(leaf, "dtype", None) == dtype:
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            casts[place] = _cast_leaf(leaf, dtype)
        elif is_floating_dtype(leaf.dtype):
            # Of one shape, so that few functions are compiled. Of one sharding and commitment, so
            # that these stay: one committed argument commits all results to its devices.
            alike = leaf.shape, leaf.dtype, leaf.sharding, leaf.committed
            groups.setdefault(alike, []).append(place)
    # Here and now, once, also for constants of a function that is being traced.
    with jax.ensure_compile_time_eval() if groups else contextlib.nullcontext():
        for places in groups.values():
            for chunk in _chunks(places, leaves[places[0]].size):
                results = _cast_together([leaves[place] for place in chunk], dtype)
                for place, result in zip(chunk, results, strict=True):
                    casts[place] = result
    return casts


def _chunks(places: list[int], size: int) -> Iterator[list[int]]:
    """Parts of one length, the last of which overlaps: each length is compiled by itself."""
    length = _CHUNK if len(places) >= _MANY and size <= _SMALL else 1
    for start in range(0, len(places), length):
        start = min(start, len(places) - length)
        yield places[start : start + length]


def cast_tree(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of a pytree.

    Follows JMP and MPX (arXiv 2507.03312, section 3.1). JAX arrays, NumPy arrays and scalars,
    tracers and `jax.ShapeDtypeStruct` of floating dtype are cast. Integers, bools, complex
    numbers, PRNG keys, Python scalars, strings, functions and None pass untouched.

    Args:
        tree: any pytree.
        dtype: the dtype to cast to: a name, a `np.dtype` or a scalar type.

    Returns:
        The same tree, its floating leaves of the same shapes in `dtype`. A leaf that is in
        `dtype` already is returned as the same object.

    Raises:
        TypeError: if `dtype` is not a dtype.
        ValueError: if `dtype` is not a floating dtype, or is float64 while JAX's 64-bit types are
            disabled.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> tree = jmpx.cast_tree({"w": jnp.ones(2), "step": jnp.arange(2)}, jnp.bfloat16)
        >>> tree["w"].dtype.name, tree["step"].dtype.name
        ('bfloat16', 'int32')
    """
    dtype = as_dtype(dtype)
    check_enabled(dtype)
    dtype = np.dtype(dtype)
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_cast_leaves(leaves, dtype))


def cast_like(new: T, old: Any) -> T:
    """Returns a leaf in the dtype of the one that it replaces, if both are floating."""
    return cast_tree(new, old.dtype) if is_floating(old) else new


def cast_to_float32(tree: T) -> T:
    """Casts the floating leaves of a pytree to float32; see `cast_tree`.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in float32.

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_float32(np.ones(2, np.float16)).dtype.name
        'float32'
    """
    return cast_tree(tree, jnp.float32)


def cast_to_float16(tree: T) -> T:
    """Casts the floating leaves of a pytree to float16; see `cast_tree`.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in float16 (values above 65504 become inf).

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_float16(np.ones(2, np.float32)).dtype.name
        'float16'
    """
    return cast_tree(tree, jnp.float16)


def cast_to_bfloat16(tree: T) -> T:
    """Casts the floating leaves of a pytree to bfloat16; see `cast_tree`.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in bfloat16.

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_bfloat16(np.ones(2, np.float32)).dtype.name
        'bfloat16'
    """
    return cast_tree(tree, jnp.bfloat16)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of a pytree to `half_dtype()`; see `cast_tree`.

    JMP's name; MPX calls it `cast_to_half_precision`. Both are here.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in bfloat16 on TPU, in float16 elsewhere.

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_half(np.ones(2, np.float32)).dtype == jmpx.half_dtype()
        True
    """
    return cast_tree(tree, half_dtype())


cast_to_full = cast_to_float32  # JMP's name.
cast_to_full_precision = cast_to_float32  # MPX's name.
cast_to_half_precision = cast_to_half  # MPX's name.
