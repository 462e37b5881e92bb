"""Float32 masters as two halves: bfloat16 parameters for the model, and 16 bits for the rest."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.leaves import PyTree, is_array, is_floating, spell

T = TypeVar("T")

_HALF = 0x8000  # half a unit of the last place of bfloat16, in units of float32's
_LARGEST = 0x7F7F  # the bits of the largest bfloat16
_INF = 0x7F80  # those of its infinity; NaN comes after it
_QUIET = 0x0040  # the bit that tells a quiet NaN from a signaling one


def split_master(tree: T) -> tuple[T, PyTree]:
    """Splits float32 parameters into bfloat16 ones and the 16 bits that these lack.

    The two together take as much memory as float32 masters alone, and the model reads the first
    without a cast. `jmpx.optim.merge_master` puts them together again.

    The high half is the nearest bfloat16. Of two equally near it is the one away from zero, where a
    cast takes the even one: with both kinds of ties, 65,537 numbers would share one bfloat16, and
    16 bits tell only 65,536 apart. Finite numbers stay finite in it, and NaN stays NaN.

    Args:
        tree: any pytree whose floating leaves are float32: JAX and NumPy arrays and scalars.

    Returns:
        The same tree twice: with the high halves, in bfloat16, and with the low ones, in uint16. A
        leaf that is not floating passes untouched into the first, and is None in the second.

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

    But numbers beyond the largest of bfloat16, 3.39e38, lose their last bit (float32's largest
    keeps it), and a signaling NaN whose payload is all in its low half becomes a quiet one. Where a
    parameter was replaced and its low half was not, the result is within half a unit of bfloat16's
    last place of the new one.

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
    # Finite float32 numbers are as many as pairs of a finite high half and a low one. Rounding
    # leaves half of the low halves of zero unused, and so `_LARGEST` lacks as many: of the numbers
    # from it on, two share one, and float32's largest comes back rather than its neighbor.
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
    # Never below zero, even if a zero was put in place of a high half.
    near = jnp.maximum((cut << 16) + low - jnp.where(was_rounded_up, 0x10000, 0), 0)
    doubled = (cut << 16) | jnp.where(low == _HALF - 1, 0xFFFF, low << 1)
    finite = jnp.where((cut == _LARGEST) & ~was_rounded_up, doubled, near)
    magnitude = jnp.where(cut < _INF, finite, (cut << 16) | low)
    return jax.lax.bitcast_convert_type(magnitude.astype(jnp.uint32) | sign, jnp.float32)
