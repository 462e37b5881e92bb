"""The four formats that a run is compared with, and the bins in which numbers are counted."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.messages import describe

MANTISSA_BITS = 23  # of float32
LOWEST = -149  # the exponent of float32's smallest subnormal number
HIGHEST = 127


class Format(NamedTuple):
    """Where a dtype loses, denormalizes and overflows float32 numbers that are rounded to it.

    A number `2**e * (1 + m / 2**23)` has the key `e * 2**23 + m`, in which keys are ordered as the
    numbers are, and a factor of `2**k` adds `k * 2**23`.
    """

    kept: int  # the lowest key that is not rounded to zero
    normal: int  # the lowest key that is rounded to a normal number
    overflows: int  # the lowest key that is rounded to infinity, or to NaN in `float8_e4m3fn`


def _format(name: str) -> Format:
    info = jnp.finfo(name)
    lowest, bits, largest = int(info.minexp), int(info.nmant), float(info.max)
    # Rounding is to nearest. A tie goes to the even number, whose last bit is 0.
    exponent = math.frexp(largest)[1] - 1
    last = round(largest * 2.0 ** (bits - exponent)) % 2
    return Format(
        kept=_key(2.0 ** (lowest - bits - 1)) + 1,  # half of the smallest number is a tie with 0
        normal=_key(2.0**lowest) - (1 << MANTISSA_BITS - bits),  # a tie with the smallest normal
        overflows=_key(largest + 2.0 ** (exponent - bits - 1)) + (1 - last),
    )


def _key(number: float) -> int:
    mantissa, exponent = math.frexp(number)
    return ((exponent - 1) << MANTISSA_BITS) + round((2 * mantissa - 1) * 2**MANTISSA_BITS)


FORMATS = {name: _format(name) for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")}


def as_format(dtype: DTypeLike) -> Format:
    """Returns the format of a dtype or of its name; raises a ValueError if it is another one."""
    known = FORMATS.get(dtype_name(as_dtype(dtype)))
    if known is None:
        raise ValueError(
            f"Expected one of the formats {', '.join(FORMATS)}, got {describe(dtype)}."
        )
    return known


# Numbers are counted by exponent, and within an exponent by parts of the mantissa, at whose edges a
# format treats a number otherwise. So shares are exact, at any scale that is a power of two.
CUTS = sorted(
    {
        key % (1 << MANTISSA_BITS)
        for known in FORMATS.values()
        for key in (known.kept, known.normal, known.overflows)
    }
    - {0}
)
PARTS = len(CUTS) + 1
BINS = (HIGHEST - LOWEST + 1) * PARTS


def bin_of(key: int) -> int:
    """Returns the first bin whose numbers have at least this key; the key is an edge of a bin."""
    exponent, mantissa = key >> MANTISSA_BITS, key % (1 << MANTISSA_BITS)
    return (exponent - LOWEST) * PARTS + sum(mantissa >= cut for cut in CUTS)
