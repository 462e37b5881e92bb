"""What arrays hold: infinities, NaNs, and the range of the rest."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NAN, INF = 1, 2  # bits: an array may hold both


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


def is_inexact(x: Any) -> bool:
    """Whether an array, or an abstract one, has a floating or complex dtype."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a floating one of 8 or 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4


def numbers_of(array: Any) -> Numbers:
    """Returns what an array holds."""
    x = np.asarray(array)
    dtype, shape = x.dtype.name, x.shape
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    nans = int(np.isnan(wide).sum())
    infs = wide.size - finite.size - nans
    if not finite.size:
        return Numbers(dtype, shape, None, None, nans, infs)
    return Numbers(dtype, shape, float(finite.min()), float(finite.max()), nans, infs)


def bits_of(array: Any) -> int:
    """Returns whether an array holds NaNs, infinities, or both."""
    if not is_inexact(array):
        return 0
    if not isinstance(array, jax.Array):
        x = np.asarray(array)
        return NAN * bool(np.isnan(x).any()) | INF * bool(np.isinf(x).any())
    nan, inf = flags_of([array])
    return NAN * bool(nan) | INF * bool(inf)


def flags_of(arrays: list[Any]) -> tuple[jax.Array, jax.Array]:
    """Returns two bool arrays of shape (): whether any array holds NaNs, and any infinities."""
    lax = jax.lax
    nan = inf = jnp.zeros((), bool)
    for x in filter(is_inexact, arrays):
        for part in (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,):
            is_nan = lax.ne(part, part)
            is_inf = lax.bitwise_not(lax.bitwise_or(lax.is_finite(part), is_nan))
            axes = tuple(range(np.ndim(part)))
            nan = lax.bitwise_or(nan, lax.reduce_or(is_nan, axes))
            inf = lax.bitwise_or(inf, lax.reduce_or(is_inf, axes))
    return nan, inf
