"""The numbers of arrays: infinities, NaNs, and the range of the rest."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._jaxprs.types import Array, Aval

INF, NAN = 1, 2  # the worst that an array holds; 0 is neither


class Numbers(NamedTuple):
    """The numbers of an array.

    Attributes:
        dtype: the name of its dtype.
        shape: its shape.
        smallest: the smallest magnitude of its finite numbers; None if it has none.
        largest: the largest magnitude of its finite numbers.
        nans: how many NaNs it holds.
        infs: how many infinities it holds.
    """

    dtype: str
    shape: tuple[int, ...]
    smallest: float | None
    largest: float | None
    nans: int
    infs: int

    @property
    def is_broken(self) -> bool:
        """Whether it holds a NaN or an infinity."""
        return self.nans + self.infs > 0

    def __str__(self) -> str:
        """Returns for example `float16[2,3], magnitudes 0.5 to 300, 1 inf`."""
        parts = [f"{self.dtype}[{','.join(map(str, self.shape))}]"]
        if self.smallest is not None and self.largest is not None:
            low, high = f"{self.smallest:.4g}", f"{self.largest:.4g}"
            magnitudes = f"magnitudes {low} to {high}"
            parts.append(magnitudes if low != high else f"magnitude {low}")
        parts += [f"{self.infs} inf"] if self.infs else []
        parts += [f"{self.nans} NaN"] if self.nans else []
        return ", ".join(parts)


def is_inexact(x: Array | Aval) -> bool:
    """Whether an array, or an abstract one, has a floating or complex dtype."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def numbers_of(array: Array) -> Numbers:
    """Returns the numbers of an array."""
    x = np.asarray(array)
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    ends = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    nans = int(np.isnan(wide).sum())
    return Numbers(x.dtype.name, x.shape, *ends, nans, wide.size - finite.size - nans)


def worst_of(array: Array) -> int:
    """Returns `NAN`, `INF` or 0: the worst number that an array holds."""
    if not is_inexact(array):
        return 0
    x = np.asarray(array)  # jax.numpy would compile a check for each shape
    return NAN if np.isnan(x).any() else INF if np.isinf(x).any() else 0


def worst_traced(arrays: Sequence[Array]) -> jax.Array:
    """Returns the worst number that any of the arrays holds, as an int32 of shape ()."""
    lax = jax.lax
    worst = jnp.zeros((), jnp.int32)
    for x in filter(is_inexact, arrays):
        for part in (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,):
            # One reduction for both, which XLA computes in one pass with what makes the array.
            infinite = lax.convert_element_type(lax.bitwise_not(lax.is_finite(part)), jnp.int32)
            nan = lax.convert_element_type(lax.ne(part, part), jnp.int32)
            each = lax.reduce_max(lax.add(infinite, nan), tuple(range(np.ndim(part))))
            worst = lax.max(worst, each)
    return worst
