"""What is measured of an array on its device: extremes, and how many numbers are in which bin.

All of it reads the bits of float32 numbers as integers, because a processor may take subnormal
numbers for zero.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._inspect.ranges.formats import BINS, CUTS, LOWEST, MANTISSA_BITS, PARTS
from jmpx._jaxprs.types import Array

ZERO, INFINITE, NAN, MASKED = range(BINS, BINS + 4)  # the bins after those of numbers
SIZE = BINS + 4

_INFINITY = 0x7F800000
_NONE = np.uint32(2**32 - 1)  # the smallest magnitude of an array without any
_NEAR = 1 << 14  # a masked number is a mask plus a score that is smaller by 2**9 or more


def magnitudes(array: Array) -> Array:
    """Returns the bits of the magnitudes of numbers in float32, which are ordered as these are."""
    bits = lax.bitcast_convert_type(lax.convert_element_type(array, jnp.float32), jnp.uint32)
    return bits & np.uint32(0x7FFFFFFF)


def is_mask(bits: Array, masks: Sequence[float]) -> Array:
    """Whether magnitudes are those of masks, such as 1e9, up to the scores added."""
    found = jnp.zeros(bits.shape, bool)
    for mask in masks:
        low = max(int(np.float32(abs(mask)).view(np.uint32)) - _NEAR, 0)
        found |= bits - np.uint32(low) <= np.uint32(2 * _NEAR)  # below `low`, it wraps around
    return found & (bits < np.uint32(_INFINITY))


def extremes(bits: Array, masks: Sequence[float] = ()) -> Array:
    """Returns the bits of the largest magnitude and of the smallest one that is not zero.

    They are 0 and 2**32 - 1 if all numbers are zero, infinite, NaN or masked.
    """
    large, small = _compared(bits, masks)
    # One reduction of two operands reads the array once.
    return jnp.stack(
        lax.reduce(
            (large, small),
            (np.uint32(0), _NONE),
            lambda a, b: (jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1])),
            tuple(range(bits.ndim)),
        )
    )


def extremes_of_parts(bits: Array, masks: Sequence[float], parts: Array, size: int) -> Array:
    """Returns the extremes of each of some parts, of shape (size, 2), given that of each number."""
    large, small = _compared(bits, masks)
    found = no_extremes((size,))
    largest = found[:, 0].at[parts].max(large, mode="promise_in_bounds")
    return jnp.stack([largest, found[:, 1].at[parts].min(small, mode="promise_in_bounds")], -1)


def _compared(bits: Array, masks: Sequence[float]) -> tuple[Array, Array]:
    """Returns the magnitudes whose maximum counts, and those whose minimum does."""
    counts = (bits > 0) & (bits < np.uint32(_INFINITY))
    if masks:
        counts &= ~is_mask(bits, masks)
    return jnp.where(counts, bits, np.uint32(0)), jnp.where(counts, bits, _NONE)


def no_extremes(shape: tuple[int, ...] = ()) -> Array:
    """Returns the extremes of no numbers."""
    return jnp.broadcast_to(jnp.asarray([np.uint32(0), _NONE]), (*shape, 2))


def bins_of(bits: Array, masks: Sequence[float] = ()) -> Array:
    """Returns the bin of each magnitude, in 16 bits; that of a mask is `MASKED`."""
    exponent, mantissa = bits >> MANTISSA_BITS, bits & np.uint32((1 << MANTISSA_BITS) - 1)
    is_subnormal = exponent == 0
    zeros = lax.clz(mantissa)  # the leading zeros of a subnormal number say its exponent
    normalized = (mantissa << (zeros - np.uint32(31 - MANTISSA_BITS))) & np.uint32(
        (1 << MANTISSA_BITS) - 1
    )
    mantissa = jnp.where(is_subnormal, normalized, mantissa)
    above = jnp.where(is_subnormal, np.uint32(31) - zeros, exponent + np.uint32(-127 - LOWEST))
    part = sum((mantissa >= np.uint32(cut)).astype(jnp.uint32) for cut in CUTS)
    bins = above * np.uint32(PARTS) + part
    bins = jnp.where(is_mask(bits, masks), np.uint32(MASKED), bins) if masks else bins
    bins = jnp.where(bits == 0, np.uint32(ZERO), bins)
    bins = jnp.where(bits == _INFINITY, np.uint32(INFINITE), bins)
    bins = jnp.where(bits > _INFINITY, np.uint32(NAN), bins)
    return bins.astype(jnp.uint16)


def count(bins: Array, rows: Array, size: int) -> Array:
    """Returns how many numbers are in each bin of each row, given the bin and row of each."""
    counts = jnp.zeros((size, SIZE), jnp.uint32)
    return counts.at[rows, bins].add(np.uint32(1), mode="promise_in_bounds")


def add_counts(total: Array, counts: Array) -> Array:
    """Adds counts to a sum of shape (..., 2), the low and the high 32 bits, as JAX lacks 64."""
    low = total[..., 0] + counts
    high = total[..., 1] + (low < counts).astype(jnp.uint32)
    return jnp.stack([low, high], -1)


def as_integers(total: Array) -> np.ndarray:
    """Returns the sums of `add_counts` as integers of 64 bits."""
    pairs = np.asarray(total).astype(np.int64)
    return pairs[..., 0] + (pairs[..., 1] << 32)


def as_number(bits: int) -> float:
    """Returns the number whose float32 has these bits."""
    return float(np.uint32(bits).view(np.float32))
