"""Arrays on their way through autocast: in which dtype they are, and to which they yield."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOAT32 = np.dtype(np.float32)


class Value:
    """An array during the second run, in the dtype that was traced or a narrower one.

    Args:
        array: the array.
        weak: whether no operation of low precision is upstream: inputs, constants and what was
            computed of them alone. A weak value yields to the dtype of a strong one, so that a
            float32 bias leaves a bfloat16 activation bfloat16.
    """

    __slots__ = ("_casts", "array", "weak")

    def __init__(self, array: Any, weak: bool) -> None:
        self.array = array
        self.weak = weak
        self._casts: dict[Any, Any] = {}

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def to(self, dtype: Any, saturate: bool = False) -> Any:
        """Returns the array in `dtype`, cast once for all who ask."""
        if self.dtype == dtype:
            return self.array
        key = dtype, saturate
        if key not in self._casts:
            self._casts[key] = _cast(self.array, dtype, saturate)
        return self._casts[key]


def join(values: Sequence[tuple[Any, bool]]) -> tuple[Any, bool]:
    """Returns the dtype and weakness of several that meet; the weak ones yield."""
    strong = {dtype for dtype, weak in values if not weak}
    dtypes = strong or {dtype for dtype, _ in values}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32, not strong


def _cast(array: Any, dtype: np.dtype, saturate: bool) -> Any:
    if isinstance(array, jax.Array):
        return (
            _saturating_cast(dtype)(array) if saturate else lax.convert_element_type(array, dtype)
        )
    with np.errstate(over="ignore"):  # a constant of the jaxpr: cast here and now
        y = np.asarray(array, dtype)
    return _saturated(np, np.asarray(array), y) if saturate else y


def _saturated(xp: Any, x: Any, y: Any) -> Any:
    """Returns `y`, the cast of `x`, but what is finite in `x` stays finite.

    A mask of -1e9 becomes half of the least number, so that a logit can be added to it; in float16
    it would be -inf, and a row that is masked as a whole NaN.
    """
    bound = np.asarray(float(jnp.finfo(y.dtype).max) / 2, y.dtype)
    lost = xp.isfinite(x) & ~xp.isfinite(y)
    return xp.where(lost, xp.where(x > 0, bound, -bound), y)


@functools.cache
def _saturating_cast(dtype: np.dtype) -> Callable[[Any], Any]:
    """Returns a cast that saturates, whose derivative is that of a cast."""

    @jax.custom_jvp
    def cast(x: Any) -> Any:
        return _saturated(jnp, x, lax.convert_element_type(x, dtype))

    @cast.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        return cast(*primals), lax.convert_element_type(tangents[0], dtype)

    return jax.jit(cast)
