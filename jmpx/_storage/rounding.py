"""Stochastic rounding of pytrees: up or down by chance, and right on average."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.casts import at_least_float32
from jmpx._base.dtypes import DTypeLike, ScalarType, as_dtype, dtype_name
from jmpx._base.leaves import PyTree, is_floating, spell

T = TypeVar("T")

# The other formats of eight bits have no zero, no sign, or one zero and no infinity.
_ROUNDED_TO = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def stochastic_round(tree: T, dtype: DTypeLike, key: jax.Array) -> T:
    """Rounds the floating leaves of a pytree up or down by chance, so that the mean is right.

    A number between two neighbors of `dtype` becomes the upper one with a probability of its
    distance from the lower one. The rounding works on bits, so that XLA cannot undo it.

    Numbers that `dtype` has stay as they are. NaN, and numbers beyond the largest of `dtype`,
    become what a cast makes of them. Probabilities are multiples of 2**-32, which is exact except
    for numbers far below the smallest normal one of float16 and of eight bits.

    Args:
        tree: any pytree. JAX and NumPy arrays and scalars and tracers of floating dtype are
            rounded; other leaves pass untouched, and so do leaves that are in `dtype`.
        dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
        key: a key of `jax.random.key` or `jax.random.PRNGKey`. Pass another one at each step. Each
            leaf folds its place in the tree into it, and so every device rounds a replicated leaf
            alike. Under `jax.shard_map`, fold the index of the device into the key of shards.

    Returns:
        The same tree, its floating leaves as JAX arrays in `dtype`.

    Raises:
        TypeError: if `dtype` is not a dtype.
        ValueError: if `dtype` is none of the four, or a leaf is narrower than `dtype` or wider than
            float32.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> params = {"w": jnp.full(10_000, 1 + 2**-10), "step": 3}
        >>> rounded = jmpx.optim.stochastic_round(params, jnp.bfloat16, jax.random.key(0))
        >>> rounded["w"].dtype.name, rounded["step"]
        ('bfloat16', 3)
        >>> sorted({float(x) for x in rounded["w"]})  # the neighbors of 1 + 2**-10 in bfloat16
        [1.0, 1.0078125]
        >>> bool(abs(rounded["w"].astype("float32").mean() - (1 + 2**-10)) < 1e-4)
        True
    """
    dtype = as_dtype(dtype)
    if dtype_name(dtype) not in _ROUNDED_TO:
        raise ValueError(
            f"Cannot round stochastically to {dtype_name(dtype)}: expected "
            f"{', '.join(_ROUNDED_TO[:-1])} or {_ROUNDED_TO[-1]}; jmpx.cast_tree casts to others."
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return structure.unflatten(
        _round(path, leaf, dtype, key, place) for place, (path, leaf) in enumerate(leaves)
    )


def _round(
    path: jax.tree_util.KeyPath, leaf: PyTree, dtype: ScalarType, key: jax.Array, place: int
) -> PyTree:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if not np.dtype(dtype).itemsize <= leaf.dtype.itemsize <= 4:
        raise ValueError(
            f"Cannot round {spell(leaf)} at tree{jax.tree_util.keystr(path)} to "
            f"{dtype_name(dtype)}: cast it by jmpx.cast_tree, which is exact to a wider dtype, or "
            "to float32 before."
        )
    return _round_array(leaf, jax.random.fold_in(key, place), dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _round_array(array: jax.Array, key: jax.Array, dtype: ScalarType) -> jax.Array:
    wide = at_least_float32(jnp.asarray(array))
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 31
    narrow = jnp.finfo(dtype)
    lower, distance = _lower_neighbor(magnitude, narrow)
    is_up = jax.random.bits(key, bits.shape, jnp.uint32) < distance
    rounded = (lower + is_up.astype(jnp.uint32)) | (sign << (narrow.bits - 1))
    is_larger = magnitude > np.float32(narrow.max).view(np.uint32)  # NaN, too
    cast = jax.lax.bitcast_convert_type(wide.astype(dtype), jnp.dtype(f"uint{narrow.bits}"))
    chosen = jnp.where(is_larger, cast, rounded.astype(cast.dtype))
    return jax.lax.bitcast_convert_type(chosen, dtype)


def _lower_neighbor(magnitude: jax.Array, narrow: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of the next number of a narrow format at or below one of float32.

    `magnitude` has the bits of numbers without their sign. The second result is the distance to
    them, of which 2**32 is that to the next number.
    """
    wide = jnp.finfo(jnp.float32)
    stored = (magnitude >> wide.nmant).astype(jnp.int32)  # the exponent, as float32 has it
    leading = (stored > 0).astype(jnp.uint32) << wide.nmant
    significand = magnitude & (2**wide.nmant - 1) | leading
    exponent = jnp.maximum(stored, 1)  # a subnormal number has that of the smallest normal one
    smallest = narrow.minexp - wide.minexp + 1
    kept = jnp.maximum(exponent, smallest)
    dropped = kept - exponent + (wide.nmant - narrow.nmant)  # so many bits of the significand

    def shift(count: jax.Array) -> jax.Array:
        return jnp.clip(count, 0, 31).astype(jnp.uint32)

    lower = (kept - smallest).astype(jnp.uint32) << narrow.nmant
    lower += significand >> shift(dropped)
    # The bits that are not dropped are lost at the left.
    return lower, significand << shift(32 - dropped) >> shift(dropped - 32)
