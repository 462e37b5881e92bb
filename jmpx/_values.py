"""Arrays on their way through autocast: in which dtype they are, and to which they yield."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOAT32 = np.dtype(np.float32)


class Traits(NamedTuple):
    """What is known of an array before it is there, and so part of the keys of caches.

    Args:
        dtype: its dtype.
        weak: True until an operation of low precision contributes: inputs, constants and what was
            computed of them alone. A weak array yields to the dtype of a strong one, so that a
            float32 bias leaves a bfloat16 activation bfloat16.
        tangent: whether it is a tangent or made of one. It is cast linearly, so that it can be
            transposed and an overflow shows.
        uniform: whether all its elements are the same number.
        power: whether it is float32 only because a power in float16 could overflow.
    """

    dtype: Any
    weak: bool
    tangent: bool = False
    uniform: bool = False
    power: bool = False


class Value:
    """An array during the second run, in the dtype that was traced or a narrower one.

    Args:
        array: the array.
        weak: see `Traits`.
        tangent: see `Traits`.
    """

    __slots__ = ("_casts", "array", "constant", "power", "tangent", "uniform", "weak")

    def __init__(self, array: Any, weak: bool, tangent: bool = False) -> None:
        self.array = array
        self.weak = weak
        self.tangent = tangent
        self.uniform = array.size == 1
        self.power = False
        self.constant: Any = None  # an array of the same numbers in any shape, where it is known
        self._casts: dict[Any, Any] = {}

    @classmethod
    def of(cls, array: Any, traits: Traits) -> "Value":
        """Returns the value of an array of which the traits are known."""
        value = cls(array, traits.weak, traits.tangent)
        value.uniform |= traits.uniform
        value.power = traits.power
        return value

    @classmethod
    def of_constant(cls, array: Any) -> "Value":
        """Returns the value of a constant of a jaxpr, which holds the same numbers in each run."""
        value = cls(array, weak=True)
        is_here = not isinstance(array, jax.core.Tracer)
        if is_here and getattr(array, "is_fully_addressable", True):
            value.constant = array
        return value

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def traits(self) -> Traits:
        return Traits(self.dtype, self.weak, self.tangent, self.uniform, self.power)

    def to(self, dtype: Any) -> Any:
        """Returns the array in `dtype`, cast once for all who ask."""
        return self._cast(dtype, saturate=False)

    def placed(self, dtype: Any) -> Any:
        """Returns the array in `dtype`, to be added to others or put among them.

        What is finite in a weak array stays finite. Strong ones were computed, so that an overflow
        is theirs to show.
        """
        return self._cast(dtype, saturate=self.weak and not self.tangent)

    def _cast(self, dtype: Any, saturate: bool) -> Any:
        if self.dtype == dtype:
            return self.array
        key = dtype, saturate
        if key not in self._casts:
            self._casts[key] = _cast(self.array, dtype, saturate)
        return self._casts[key]

    def fits(self, dtype: Any) -> bool:
        """Whether `dtype` holds the numbers, with their digits.

        Those that become known when the program runs, such as a count, may be of any size.
        """
        if not self.weak or self.dtype == dtype:
            return True
        if self.constant is not None:
            return _holds(dtype, self.constant)
        return jnp.finfo(dtype).maxexp >= jnp.finfo(FLOAT32).maxexp


def join(values: Sequence[Traits]) -> Traits:
    """Returns the traits of several that meet; the weak ones yield."""
    strong = {value.dtype for value in values if not value.weak}
    dtypes = strong or {value.dtype for value in values}
    dtype = dtypes.pop() if len(dtypes) == 1 else FLOAT32
    return Traits(dtype, not strong, any(value.tangent for value in values))


def saturated(number: Any, dtype: Any) -> Any:
    """Returns a constant in `dtype`: what is finite in it stays finite."""
    return _cast(np.asarray(number), np.dtype(dtype), saturate=True)


def _holds(dtype: Any, array: Any) -> bool:
    """Whether no number overflows in `dtype`, or is so small there that it loses digits."""
    numbers = np.asarray(array)
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.asarray(np.asarray(numbers, dtype), FLOAT32)
    normal = np.abs(rounded) >= float(jnp.finfo(dtype).smallest_normal)
    kept = (np.isfinite(rounded) & normal) | (rounded == numbers) | ~np.isfinite(numbers)
    return bool(kept.all())


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
