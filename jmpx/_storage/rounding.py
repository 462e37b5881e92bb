"""Stochastic rounding; float32 masters split into bfloat16 parameters and their low bits."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.dtypes import DTypeLike, ScalarType, as_dtype, dtype_name
from jmpx._base.trees import PyTree, at_least_float32, is_array, is_floating, spell

T = TypeVar("T")

# The other formats of eight bits have no zero, no sign, or one zero and no infinity.
_ROUNDED_TO = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def stochastic_round(tree: T, dtype: DTypeLike, key: jax.Array) -> T:
    """Rounds the floating leaves of a pytree up or down by chance, so that the mean is right.

    A number between two neighbors of `dtype` becomes the upper one with a probability of its
    distance from the lower one. The rounding works on bits, so that XLA cannot undo it.

    Numbers that `dtype` has stay as they are. NaN, and numbers beyond the largest of `dtype`, are
    cast. Probabilities are multiples of 2**-32, which is exact except for numbers far below the
    smallest normal one of float16 and of eight bits.

    Args:
        tree: any pytree. JAX and NumPy arrays and scalars and tracers of floating dtype are
            rounded; other leaves pass untouched, and so do leaves that are in `dtype`.
        dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
        key: a key of `jax.random.key` or `jax.random.PRNGKey`. Pass another one at each step. The
            place of a leaf in the tree is folded into it, so every device rounds a replicated leaf
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
    """Returns the bits of the nearest numbers of a narrow format at or below float32 numbers.

    `magnitude` has the bits of the float32 numbers without their sign. The second result is their
    distance from the lower neighbor, in 2**-32 of the gap to the next number.
    """
    wide = jnp.finfo(jnp.float32)
    stored = (magnitude >> wide.nmant).astype(jnp.int32)  # the exponent, as float32 has it
    leading = (stored > 0).astype(jnp.uint32) << wide.nmant
    significand = magnitude & (2**wide.nmant - 1) | leading
    exponent = jnp.maximum(stored, 1)  # subnormal numbers have the smallest normal exponent
    smallest = narrow.minexp - wide.minexp + 1
    kept = jnp.maximum(exponent, smallest)
    dropped = kept - exponent + (wide.nmant - narrow.nmant)  # how many bits of the significand

    def shift(count: jax.Array) -> jax.Array:
        return jnp.clip(count, 0, 31).astype(jnp.uint32)

    lower = (kept - smallest).astype(jnp.uint32) << narrow.nmant
    lower += significand >> shift(dropped)
    # The shift to the left loses the bits that are kept.
    return lower, significand << shift(32 - dropped) >> shift(dropped - 32)


# Float32 masters as two halves: bfloat16 parameters for the model, and their low 16 bits.


_HALF = 0x8000  # half a unit in the last place of bfloat16, in units of float32's
_LARGEST = 0x7F7F  # the bits of the largest bfloat16
_INF = 0x7F80  # the bits of its infinity; NaN comes after it
_QUIET = 0x0040  # the bit that tells a quiet NaN from a signaling one


def split_master(tree: T) -> tuple[T, PyTree]:
    """Splits float32 parameters into bfloat16 ones and the 16 bits that these lack.

    Together they take as much memory as float32 masters alone, and the model reads the bfloat16
    ones without a cast. `jmpx.optim.merge_master` puts them together again.

    The high half is the nearest bfloat16. Ties round away from zero, where a cast rounds to even:
    with ties to even, 65,537 numbers would share one bfloat16, and 16 bits tell only 65,536 apart.
    Finite numbers stay finite in it, and NaN stays NaN.

    Args:
        tree: any pytree whose floating leaves are float32: JAX and NumPy arrays and scalars.

    Returns:
        Two trees of the same structure, the high halves, in bfloat16, and the low ones, in uint16.
        A leaf that is not floating passes untouched into the first, and is None in the second.

    Raises:
        ValueError: if a floating leaf is not float32.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> high, low = jmpx.optim.split_master({"w": jnp.array([1 + 2**-20]), "step": 3})
        >>> high
        {'step': 3, 'w': Array([1], dtype=bfloat16)}
        >>> low
        {'step': None, 'w': Array([8], dtype=uint16)}
        >>> float(jmpx.optim.merge_master(high, low)["w"][0]) == 1 + 2**-20
        True
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    halves = [_split(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return (
        structure.unflatten(high for high, _ in halves),
        structure.unflatten(low for _, low in halves),
    )


def merge_master(high: T, low: PyTree) -> T:
    """Returns the float32 parameters that `jmpx.optim.split_master` split, bit for bit.

    Exceptions: numbers beyond the largest of bfloat16, 3.39e38, lose their last bit (float32's
    largest keeps it), and a signaling NaN whose payload is all in its low half becomes a quiet one.
    If a parameter was replaced and its low half was not, the result is within half a unit in the
    last place of the new one, in bfloat16.

    Args:
        high: the tree of bfloat16 parameters.
        low: the tree of their low halves.

    Returns:
        The tree of float32 parameters. Where `low` has None, the leaf of `high` passes untouched.

    Raises:
        ValueError: if the trees are not the two of one split.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> jmpx.optim.merge_master(*jmpx.optim.split_master(jnp.array([0.1, jnp.inf])))
        Array([0.1, inf], dtype=float32)
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(high)
    lows = structure.flatten_up_to(low)
    return structure.unflatten(
        _merge(jax.tree_util.keystr(path), leaf, low_leaf)
        for (path, leaf), low_leaf in zip(leaves, lows, strict=True)
    )


def _split(path: str, leaf: PyTree) -> tuple[PyTree, PyTree]:
    if not is_floating(leaf):
        return leaf, None
    if leaf.dtype != np.float32:
        raise ValueError(
            f"Cannot split {leaf.dtype}{list(leaf.shape)} at tree{path}: pass float32 parameters."
        )
    return _split_array(leaf)


def _merge(path: str, high: PyTree, low: PyTree) -> PyTree:
    if low is None:
        return high
    halves = is_array(high) and is_array(low) and high.shape == low.shape
    if not halves or (high.dtype, low.dtype) != (jnp.bfloat16, jnp.uint16):
        raise ValueError(
            f"Cannot merge {spell(high)} with {spell(low)} at tree{path}: pass both trees of one "
            "jmpx.optim.split_master, bfloat16 and uint16, of the same shapes."
        )
    return _merge_arrays(high, low)


@jax.jit
def _split_array(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = jax.lax.bitcast_convert_type(array, jnp.uint32)
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    cut, low = magnitude >> 16, magnitude & 0xFFFF
    is_finite = cut < _INF
    # There are as many finite float32 numbers as pairs of finite high halves and low ones. Rounding
    # leaves half of the low halves of zero unused, so `_LARGEST` lacks as many: from there on, two
    # numbers share one pair, and float32's largest comes back rather than its neighbor.
    low = jnp.where(is_finite & (cut == _LARGEST), low >> 1, low)
    rounded = jnp.minimum((magnitude + _HALF) >> 16, _LARGEST)
    quiet = jnp.where((cut == _INF) & (low > 0), cut | _QUIET, cut)
    high = jnp.where(is_finite, rounded, quiet) | sign
    high = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return high, low.astype(jnp.uint16)


@jax.jit
def _merge_arrays(high: jax.Array, low: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.int32)
    sign, cut = (bits >> 15).astype(jnp.uint32) << 31, bits & 0x7FFF
    low = low.astype(jnp.int32)
    was_rounded_up = low >= _HALF
    # Never below zero, even if somebody replaced a high half by zero.
    near = jnp.maximum((cut << 16) + low - jnp.where(was_rounded_up, 0x10000, 0), 0)
    doubled = (cut << 16) | jnp.where(low == _HALF - 1, 0xFFFF, low << 1)
    finite = jnp.where((cut == _LARGEST) & ~was_rounded_up, doubled, near)
    magnitude = jnp.where(cut < _INF, finite, (cut << 16) | low)
    return jax.lax.bitcast_convert_type(magnitude.astype(jnp.uint32) | sign, jnp.float32)
