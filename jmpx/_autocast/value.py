"""An array on its way through autocast: its dtype, whether it is weak, its casts."""

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array | np.ndarray  # a tracer, an array, or a constant of a jaxpr
FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(jnp.bfloat16)
LOW = (BFLOAT16, np.dtype(np.float16))


class Traits(NamedTuple):
    """What is known of an array before the array exists: it is part of the keys of caches."""

    dtype: np.dtype
    # Whether it takes the dtype of an array that is not weak, where the two meet: a float32 bias
    # leaves a bfloat16 activation bfloat16. True until a 16-bit operation contributes. Unrelated to
    # JAX's `weak_type`.
    is_weak: bool
    # Whether it is a tangent, or computed from one. It is cast linearly, so that it can be
    # transposed and an overflow shows.
    tangent: bool = False
    uniform: bool = False  # whether all its elements are the same number
    power: bool = False  # whether it is float32 only because a power in float16 could overflow
    # The 16-bit dtypes in which a constant other than 0, 1 and -1 becomes one of them.
    onto_bound: frozenset[np.dtype] = frozenset()
    # The 16-bit dtypes that hold all numbers of a constant; None where the numbers are not known.
    held_by: frozenset[np.dtype] | None = None
    number: bytes | None = None  # the number of a float32 constant of one element
    # Whether an input other than a parameter, or an array that is closed over, contributes to it
    # while it is weak; it is then weak only on the path to a product.
    data: bool = False
    statistic: int = 0  # how many numbers a sum of activations, or what is made of it, has; else 0
    pending: np.dtype | None = None  # the dtype in which what is no norm reads it; see `pending.py`


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array while autocast evaluates, in the dtype that was traced or a narrower one.

    `Traits` describes what is not described here.

    Attributes:
        array: the array or the tracer.
        casts: the array in other dtypes, by the dtype and whether finite numbers stay finite.
        source: the value that holds the same numbers in another shape, and the function that makes
            this array of it; None without one. What both are cast to is cast once.
    """

    array: Array
    is_weak: bool
    tangent: bool = False
    uniform: bool = False
    power: bool = False
    onto_bound: frozenset[np.dtype] = frozenset()
    held_by: frozenset[np.dtype] | None = None
    number: bytes | None = None
    data: bool = False
    statistic: int = 0
    pending: np.dtype | None = None
    casts: dict[tuple[np.dtype, bool], Array] = dataclasses.field(default_factory=dict)
    source: "tuple[Value, Callable[[Array], Array]] | None" = None

    def __post_init__(self) -> None:
        self.uniform |= self.array.size == 1

    @classmethod
    def of(cls, array: Array, traits: Traits) -> "Value":
        """Returns the value of an array of which the traits are known."""
        return cls(array, *traits[1:])

    @classmethod
    def of_constant(cls, array: Array) -> "Value":
        """Returns the value of a constant of a jaxpr."""
        value = cls(array, is_weak=True)
        if not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True):
            value.note_constant(array)
        return value

    def note_constant(self, array: Array) -> None:
        """Notes what is known of an array that holds the same numbers in any shape.

        Weights that a function closes over are constants, too: large arrays are not examined.
        """
        kinds = jnp.floating, jnp.integer, jnp.bool_
        if array.size > 2**16 or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            return
        with np.errstate(over="ignore", under="ignore"):
            numbers = np.asarray(array, FLOAT32)
            rounded = [(dtype, numbers.astype(dtype).astype(FLOAT32)) for dtype in LOW]
        self.onto_bound = frozenset(d for d, each in rounded if _moves_to_bound(numbers, each))
        self.held_by = frozenset(d for d, each in rounded if _holds(d, numbers, each))
        self.number = numbers.tobytes() if array.size == 1 else None

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def traits(self) -> Traits:
        return Traits(self.dtype, *(getattr(self, name) for name in Traits._fields[1:]))

    def kept(self) -> "Value":
        """Returns the value where it reaches no product: data is not weak there."""
        if not self.data:
            return self
        return dataclasses.replace(self, is_weak=False, data=False, source=None)

    def to(self, dtype: np.dtype) -> Array:
        """Returns the array in `dtype`; each cast is made once, however many equations read it."""
        return self._cast(dtype, saturate=False)

    def to_finite(self, dtype: np.dtype) -> Array:
        """Returns the array in `dtype`; finite numbers stay finite, but for computed ones."""
        return self._cast(dtype, saturate=self.is_weak and not self.tangent)

    def _cast(self, dtype: np.dtype, saturate: bool) -> Array:
        if self.dtype == dtype:
            return self.array
        key = dtype, saturate
        if key not in self.casts:
            self.casts[key] = self._cast_anew(dtype, saturate)
        return self.casts[key]

    def _cast_anew(self, dtype: np.dtype, saturate: bool) -> Array:
        if self.source is not None:
            source, reshape = self.source
            return reshape(source._cast(dtype, saturate))
        if not saturate:
            return _cast(self.array, dtype)
        return _saturate(self.array, self._cast(dtype, saturate=False))

    def fits(self, dtype: np.dtype) -> bool:
        """Whether `dtype` holds the numbers of a weak array, with their digits.

        Numbers that are known only when the program runs, such as a count, may have any size.
        """
        if not self.is_weak or self.dtype == dtype:
            return True
        if self.held_by is not None:
            return dtype in self.held_by
        return jnp.finfo(dtype).maxexp >= jnp.finfo(FLOAT32).maxexp


def join(several: Sequence[Traits]) -> Traits:
    """Returns the traits of the array that others become where they meet, as in two branches."""
    if all(traits == several[0] for traits in several):
        return several[0]
    several = [traits._replace(dtype=traits.pending or traits.dtype) for traits in several]
    return Traits(
        promoted(several),
        is_weak=all(traits.is_weak for traits in several),
        tangent=any(traits.tangent for traits in several),
        uniform=all(traits.uniform for traits in several),
        power=all(traits.power for traits in several),
        onto_bound=frozenset[np.dtype]().union(*(traits.onto_bound for traits in several)),
        data=any(traits.data for traits in several),
    )


def promoted(several: Sequence[Traits]) -> np.dtype:
    """Returns the widest dtype among arrays, or among those that are not weak, if there are any."""
    computed = {traits.dtype for traits in several if not traits.is_weak}
    dtypes = computed or {traits.dtype for traits in several}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def finite_constant(number: complex, dtype: np.dtype) -> Array:
    """Returns a constant in `dtype`; if it is finite, it stays finite."""
    array = np.asarray(number)
    return _saturate(array, _cast(array, dtype))


def _holds(dtype: np.dtype, numbers: np.ndarray, rounded: np.ndarray) -> bool:
    """Whether no number overflows in `dtype`, or is so small there that it loses digits."""
    normal = np.abs(rounded) >= float(jnp.finfo(dtype).smallest_normal)
    kept = (np.isfinite(rounded) & normal) | (rounded == numbers) | ~np.isfinite(numbers)
    return bool(kept.all())


def _moves_to_bound(numbers: np.ndarray, rounded: np.ndarray) -> bool:
    """Whether a number other than 0, 1 and -1 becomes one of them."""
    return bool((np.isin(rounded, (-1, 0, 1)) & (rounded != numbers)).any())


def _cast(array: Array, dtype: np.dtype) -> Array:
    if isinstance(array, jax.Array):
        return lax.convert_element_type(array, dtype)
    with np.errstate(over="ignore"):  # a constant of the jaxpr: cast now, staging no operation
        return np.asarray(array, dtype)


def _saturate(x: Array, y: Array) -> Array:
    """Returns `y`, the cast of `x`, with a large finite number where only `y` is infinite."""
    # A mask of -1e9 becomes half of the least number, so that a logit can be added to it. In
    # float16 it would be -inf, and a row that is masked as a whole NaN.
    if isinstance(x, jax.Array):
        return _saturate_traced(x, y)
    with np.errstate(over="ignore"):
        return _saturated(np, np.asarray(x), y)


def _saturated(xp: ModuleType, x: Array, y: Array) -> Array:
    bound = np.asarray(float(jnp.finfo(y.dtype).max) / 2, y.dtype)
    lost = xp.isfinite(x) & ~xp.isfinite(y)
    return xp.where(lost, xp.where(x > 0, bound, -bound), y)


@jax.custom_jvp
def _saturate_with_jvp(x: Array, y: Array) -> Array:
    return _saturated(jnp, x, y)


_saturate_traced = jax.jit(_saturate_with_jvp)


@_saturate_with_jvp.defjvp
def _saturate_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Gives a saturated cast the derivative of a plain one."""
    return _saturate_with_jvp(*primals), tangents[1]
