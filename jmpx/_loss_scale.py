"""Loss scales: pytrees that keep float16 gradients from underflowing.

A loss is multiplied by the scale, its gradients are divided by it. The three classes have the
same methods, so that a train step works with any of them:

    loss = loss_scale.scale(loss)               # inside the differentiated function
    grads = loss_scale.unscale(grads)           # with the scale that the backward pass used
    grads_finite = jmpx.all_finite(grads)
    loss_scale = loss_scale.adjust(grads_finite)

All arithmetic is in float32 (or float64), never in 16 bits. Every scale is between 2**-126 and
2**126, whose reciprocals are normal float32 numbers, too, so that one product undoes it.
"""

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, Union

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._casts import widen
from jmpx._leaves import is_array, is_floating, is_inexact_array
from jmpx._tree import as_flag

T = TypeVar("T")

_LARGEST = float(np.finfo(np.float32).max)
# Below the first, hardware may flush a float32 to 0; above the second, it may flush its reciprocal.
_LOWEST_SCALE, _HIGHEST_SCALE = 2.0**-126, 2.0**126
_LARGEST_FLOAT16 = (2 - 2.0**-10) * 2**15
_LONGEST_PERIOD = 2**31 - 1  # that of an int32 counter


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """The loss scale that does nothing, for float32 and bfloat16.

    Follows JMP's `NoOpLossScale`. As a pytree it has no leaves.

    Example:
        >>> import jmpx
        >>> jmpx.NoOpLossScale().scale({"loss": 3.0})
        {'loss': 3.0}
    """

    def __post_init__(self) -> None:
        register_with_flax()

    @property
    def loss_scale(self) -> float:
        """The factor, always 1."""
        return 1.0

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Returns this loss scale, whatever `grads_finite` says."""
        del grads_finite
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that never changes.

    Follows JMP's `StaticLossScale`. As a pytree it has no leaves: the factor is part of the
    compiled program.

    Args:
        loss_scale: the factor, a number or a concrete scalar array of any dtype, between 2**-126
            and 2**126; kept as a `np.float32`. A scale of 0 holds a place: it cannot scale.

    Raises:
        TypeError: if `loss_scale` is traced or not a scalar number.
        ValueError: if it is out of its range, or 0 when `scale` or `unscale` is called.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> loss_scale = jmpx.StaticLossScale(2**15)
        >>> loss_scale.scale(jnp.float16(4))  # more than float16 can hold
        Array(131072., dtype=float32)
        >>> loss_scale.unscale(jnp.float16(4))
        Array(0.00012207, dtype=float32)
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        number = _number(self.loss_scale, "StaticLossScale.loss_scale")
        if number != 0 and not _LOWEST_SCALE <= number <= _HIGHEST_SCALE:
            raise ValueError(
                "Expected StaticLossScale.loss_scale to be between 2**-126 and 2**126, which a "
                f"product in float32 undoes, got {number}: give for example 2.0**15."
            )
        object.__setattr__(self, "loss_scale", np.float32(number))
        register_with_flax()

    @property
    def _effective(self) -> np.float32:
        """The scale, which must not be 0."""
        if self.loss_scale == 0:
            raise ValueError(
                "Cannot scale a loss or unscale gradients by StaticLossScale(0): give a scale such "
                "as 2.0**15, or use NoOpLossScale()."
            )
        return self.loss_scale

    def scale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays multiplied by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is 0.
        """
        return _multiply(tree, self._effective.astype)

    def unscale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays divided by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is 0.
        """
        scale = self._effective
        return _multiply(tree, lambda dtype: 1 / scale.astype(dtype))

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Returns this loss scale, whatever `grads_finite` says."""
        del grads_finite
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite and shrinks when they are not.

    Every `period` finite steps the scale is multiplied by `factor`; a step with non-finite
    gradients multiplies it by `backoff_factor`. Follows JMP's `DynamicLossScale`, whose first five
    arguments these are; `max_loss_scale` and `backoff_factor` are those of torch's `GradScaler` and
    its kin. Micikevicius et al., arXiv 1710.03740.

    As a pytree its leaves are `loss_scale` and `counter`; all else is configuration, so that a
    checkpoint restores the two numbers and the template's configuration holds: a restored scale
    beyond its bounds counts as the nearer of them.

    Args:
        loss_scale: the factor to begin with: a number or an array of shape (), of any dtype; kept
            as a strong float32, within the two bounds below: a number as a NumPy array, so that
            no backend starts, a JAX array as one. An integer array is taken with a warning. What is
            neither a number nor an array, such as a `jax.ShapeDtypeStruct` or a sharding, is kept
            as it is.
        counter: finite steps since the scale last changed; kept as an int32 in the same way.
        period: finite steps from one growth to the next.
        factor: what the scale is multiplied by when it grows, up to 2**126.
        min_loss_scale: the scale never falls below this number, which may be less than 1, nor below
            2**-126.
        max_loss_scale: the scale never grows beyond this number, nor beyond 2**126, which None
            means.
        backoff_factor: what the scale is multiplied by when it shrinks, from 2**-126 on; None means
            1 / `factor`.

    Raises:
        TypeError: if a configuration value is traced or not a number.
        ValueError: if a number is out of its range.

    Example:
        >>> import jmpx
        >>> loss_scale = jmpx.DynamicLossScale(2**15, period=2)
        >>> [float(loss_scale.adjust(finite).loss_scale) for finite in (True, False)]
        [32768.0, 16384.0]
        >>> float(loss_scale.adjust(True).adjust(True).loss_scale)
        65536.0
    """

    loss_scale: Any = 2**15
    counter: Any = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None
    backoff_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if _is_integer_array(value):
                warnings.warn(
                    f"Expected floating type for {name}, got {value.dtype}: it is converted.",
                    stacklevel=3,
                )
        for name in _CONFIGURATION:
            value = getattr(self, name)
            if value is not None or name in ("period", "factor", "min_loss_scale"):
                self._set(name, _number(value, f"DynamicLossScale.{name}"))
        self._check()
        scale = _leaf(self.loss_scale, np.float32, "loss_scale")
        self._set("loss_scale", self._clip(scale) if is_array(scale) else scale)
        self._set("counter", _leaf(self.counter, np.int32, "counter"))
        register_with_flax()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Refuses a configuration that cannot work."""
        if not 1 <= self.period <= _LONGEST_PERIOD or self.period != int(self.period):
            raise ValueError(
                f"Expected a period of 1, 2, 3 ... steps, up to 2**31 - 1, got {self.period}."
            )
        if not 1 <= self.factor <= _HIGHEST_SCALE:
            raise ValueError(
                f"Expected a factor between 1 and 2**126, such as 2, got {self.factor}."
            )
        backoff = 1 / self.factor if self.backoff_factor is None else self.backoff_factor
        if not _LOWEST_SCALE <= backoff < 1:
            raise ValueError(
                "Expected a backoff_factor of at least 2**-126 and below 1, which lets the scale "
                f"shrink, got {backoff}: leave it out for 1 / factor, with a factor above 1."
            )
        if self.min_loss_scale > _HIGHEST_SCALE:
            raise ValueError(
                "Expected a min_loss_scale of at most 2**126, which a product in float32 undoes, "
                f"got {self.min_loss_scale}: give for example 1.0."
            )
        low, high = self._bounds
        if low > high:
            raise ValueError(
                f"Expected max_loss_scale to be at least min_loss_scale and at least 2**-126, got "
                f"{self.max_loss_scale} and {self.min_loss_scale}: swap them, or leave one out."
            )

    @property
    def _bounds(self) -> tuple[float, float]:
        """What the scale is never below and never above."""
        high = _HIGHEST_SCALE if self.max_loss_scale is None else self.max_loss_scale
        return max(self.min_loss_scale, _LOWEST_SCALE), min(high, _HIGHEST_SCALE)

    def _clip(self, scale: Any) -> Any:
        low, high = map(np.float32, self._bounds)
        if isinstance(scale, jax.Array):
            return jnp.minimum(jnp.maximum(scale, low), high)
        return np.asarray(np.minimum(np.maximum(scale, low), high))

    @property
    def _effective(self) -> Any:
        """The scale as a float32 of shape (), also where no constructor clipped it."""
        if jnp.ndim(self.loss_scale) != 0:
            raise ValueError(
                f"Expected a loss scale of shape (), got {jnp.shape(self.loss_scale)}: map over a "
                "stack of loss scales with jax.vmap."
            )
        return self._clip(_leaf(self.loss_scale, np.float32, "loss_scale"))

    def scale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays multiplied by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is a stack of scales outside `jax.vmap`.
        """
        return _multiply(tree, self._effective.astype)

    def unscale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays divided by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is a stack of scales outside `jax.vmap`.
        """
        scale = self._effective
        return _multiply(tree, lambda dtype: 1 / scale.astype(dtype))

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the loss scale of the next step.

        Args:
            grads_finite: whether this step's gradients were finite: a Python bool or a bool array
                of shape (), traced or not.

        Returns:
            A loss scale of the same configuration.

        Raises:
            TypeError: if `grads_finite` is not a scalar bool.
            ValueError: if the scale is a stack of scales outside `jax.vmap`.
        """
        finite = as_flag(grads_finite, "grads_finite")
        scale = jnp.asarray(self._effective)
        grown = scale * float(self.factor)
        if self.backoff_factor is None:
            shrunk = scale / float(self.factor)
        else:
            shrunk = scale * self.backoff_factor
        due = jnp.asarray(self.counter) >= int(self.period) - 1
        return dataclasses.replace(  # whose constructor clips
            self,
            loss_scale=jnp.where(finite, jnp.where(due, grown, scale), shrunk),
            counter=jnp.where(finite & ~due, self.counter + 1, 0),
        )


def DynamicLossScaling(  # a class of MPX's, and called as one
    loss_scaling: Any = 2**15,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
    counter: Any = None,
) -> DynamicLossScale:
    """Makes a `DynamicLossScale` by MPX's name and arguments (arXiv 2507.03312, section 3.3).

    It never grows beyond 65504, float16's largest number, as MPX's never does, so that a run takes
    the same steps as with MPX; a `DynamicLossScale` grows beyond it.

    Args:
        loss_scaling: the factor to begin with.
        min_loss_scaling: what the scale never falls below.
        factor: what the scale is multiplied by when it grows, and divided by when it shrinks.
        period: finite steps from one growth to the next.
        counter: finite steps since the scale last changed; None means 0.

    Returns:
        The loss scale.

    Raises:
        TypeError: as `DynamicLossScale`.
        ValueError: as `DynamicLossScale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx as mpx
        >>> scaling = mpx.DynamicLossScaling(jnp.float32(2**15), jnp.float32(1), period=100)
        >>> float(scaling.scale(jnp.float16(2)))
        65536.0
    """
    counter = 0 if counter is None else counter
    return DynamicLossScale(
        loss_scaling, counter, period, factor, min_loss_scaling, max_loss_scale=_LARGEST_FLOAT16
    )


LossScale = Union[NoOpLossScale, StaticLossScale, DynamicLossScale]  # noqa: UP007 (as in JMP)

_LEAVES = ("loss_scale", "counter")
_CONFIGURATION = tuple(
    field.name for field in dataclasses.fields(DynamicLossScale) if field.name not in _LEAVES
)


def _flatten(scale: DynamicLossScale) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves = tuple(getattr(scale, name) for name in _LEAVES)
    return leaves, tuple(getattr(scale, name) for name in _CONFIGURATION)


def _flatten_with_keys(scale: DynamicLossScale) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves, configuration = _flatten(scale)
    keys = map(jax.tree_util.GetAttrKey, _LEAVES)
    return tuple(zip(keys, leaves, strict=True)), configuration


def _unflatten(configuration: tuple[Any, ...], leaves: Any) -> DynamicLossScale:
    # Not the constructor: a tree of axes (0), masks (True) or shardings has this structure too,
    # and what it holds must stay as it is. A floating array is a scale: always a strong float32.
    scale = object.__new__(DynamicLossScale)
    for name, value in zip(_LEAVES + _CONFIGURATION, (*leaves, *configuration), strict=True):
        scale._set(name, value)
    if is_array(scale.loss_scale) and is_floating(scale.loss_scale):
        scale._set("loss_scale", _leaf(scale.loss_scale, np.float32, "loss_scale"))
    return scale


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale, _flatten_with_keys, _unflatten, flatten_func=_flatten
)


def register_with_flax() -> None:
    """Lets `flax.serialization` save and restore loss scales, if Flax has been imported."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        _register_with(serialization)


@functools.cache
def _register_with(serialization: Any) -> None:
    for cls in (NoOpLossScale, StaticLossScale, DynamicLossScale):
        with contextlib.suppress(ValueError):  # where the user has registered it already
            serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict)


def _to_state_dict(scaling: LossScale) -> dict[str, Any]:
    """Returns what a checkpoint holds: the leaves, by their names."""
    names = _LEAVES if isinstance(scaling, DynamicLossScale) else ()
    return {name: getattr(scaling, name) for name in names}


def _from_state_dict(scaling: LossScale, state: Any) -> LossScale:
    """Returns a loss scale of the same configuration with the leaves of a checkpoint."""
    expected = list(_to_state_dict(scaling))
    got = sorted(state) if isinstance(state, dict) else type(state).__name__
    if got != sorted(expected):
        raise ValueError(
            f"Expected the state of a {type(scaling).__name__} to hold {expected}, got {got}: "
            "restore it into a loss scale of the class that was saved."
        )
    return dataclasses.replace(scaling, **state)


def _multiply(tree: T, factor: Callable[[Any], Any]) -> T:
    """Multiplies floating and complex arrays, in at least float32, by a number of their dtype."""
    factor = functools.cache(factor)  # computed once for each dtype, not for each leaf

    def multiply(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        if not is_floating(leaf):
            return jax.lax.complex(multiply(jnp.real(leaf)), multiply(jnp.imag(leaf)))
        wide = jnp.asarray(widen(leaf))
        return wide * factor(wide.dtype)

    return jax.tree.map(multiply, tree)


def is_at_least_1(scaling: LossScale) -> bool:
    """Whether the scale is always at least 1, so that unscaling cannot overflow."""
    if type(scaling) is DynamicLossScale:  # no subclass: it may scale in a way of its own
        return scaling.min_loss_scale >= 1
    return type(scaling) is NoOpLossScale or (
        type(scaling) is StaticLossScale and scaling.loss_scale >= 1
    )


def _number(value: Any, name: str) -> int | float:
    """Returns a setting, a number or a concrete scalar array, as a Python number."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"Expected {name} to be a number, got the traced {value.aval}: set it outside jax.jit, "
            "or keep what changes in the loss_scale of a DynamicLossScale, which may be traced."
        )
    number = value.item() if is_array(value) and value.ndim == 0 else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"Expected {name} to be a number, got {value!r}: give for example 2.0**15.")
    if not 0 <= number <= _LARGEST:
        raise ValueError(
            f"Expected {name} to be between 0 and float32's largest number, got {number}: give for "
            "example 2.0**15."
        )
    return number


def _leaf(value: Any, dtype: Any, name: str) -> Any:
    """Returns a number or an array as a strong one of `dtype`, and anything else as it is.

    What is not JAX's yet becomes a NumPy array, which starts no backend; no NumPy scalar, which
    Orbax refuses to save.
    """
    if isinstance(value, jax.Array):
        return jnp.asarray(value, dtype)
    if is_array(value):
        with np.errstate(all="ignore"):  # a float64 beyond float32 becomes inf, as in JAX
            return np.asarray(value).astype(dtype)
    if not isinstance(value, int | float | str):
        return value
    number = _number(value, f"DynamicLossScale.{name}")
    if dtype is np.int32 and number > _LONGEST_PERIOD:
        raise ValueError(
            f"Expected DynamicLossScale.{name} to be at most 2**31 - 1, got {number}: leave it out "
            "to begin with 0."
        )
    return np.asarray(number, dtype)


def _is_integer_array(value: Any) -> bool:
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.integer)
