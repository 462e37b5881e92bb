"""Loss scales: pytrees that keep float16 gradients from underflowing.

A loss is multiplied by the scale, its gradients are divided by it. The three classes have the
same methods, so that a train step works with any of them:

    loss = loss_scale.scale(loss)               # inside the differentiated function
    grads = loss_scale.unscale(grads)           # with the scale that the backward pass used
    grads_finite = jmpx.all_finite(grads)
    loss_scale = loss_scale.adjust(grads_finite)

All arithmetic is in float32 (or float64), never in 16 bits.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, Union

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._tree import as_flag, is_array, is_floating, is_inexact_array, widen

T = TypeVar("T")

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST_NORMAL = 2.0**-126  # of float32: below it, hardware may flush to 0
_LARGEST_INVERTIBLE = 2.0**126  # 1 / s is a normal float32 up to here


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
        loss_scale: the factor, a number or a concrete scalar array of any dtype; kept as a
            `np.float32`.

    Raises:
        TypeError: if `loss_scale` is traced or not a scalar number.
        ValueError: if it is negative, or not finite in float32.

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
        object.__setattr__(self, "loss_scale", np.float32(number))

    def scale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays multiplied by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.
        """
        return _map_inexact(_multiply_by(self.loss_scale), tree)

    def unscale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays divided by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.
        """
        scale = self.loss_scale
        if scale > _LARGEST_INVERTIBLE:
            return _map_inexact(_divide_by(jnp.asarray(scale)), tree)
        return _map_inexact(lambda x: x / jnp.asarray(scale, x.dtype), tree)

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
    checkpoint restores the two numbers and the template's configuration holds.

    Args:
        loss_scale: the factor to begin with: a number or an array of shape (), of any dtype; kept
            as a strong float32 array. An integer array is taken with a warning. What is neither a
            number nor an array, such as a `jax.ShapeDtypeStruct` or a sharding, is kept as it is.
        counter: finite steps since the scale last changed; kept as an int32 array of shape ().
        period: finite steps from one growth to the next.
        factor: what the scale is multiplied by when it grows.
        min_loss_scale: the scale never falls below this number, which may be less than 1.
        max_loss_scale: the scale never grows beyond this number, and what it starts with counts as
            this number where it is more; None means float32's largest. With a maximum of up to
            2**126, `unscale` takes one product an entry instead of two operations.
        backoff_factor: what the scale is multiplied by when it shrinks; None means 1 / `factor`.

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
        self._set("loss_scale", _leaf(self.loss_scale, jnp.float32, "loss_scale"))
        self._set("counter", _leaf(self.counter, jnp.int32, "counter"))
        for name in _CONFIGURATION:
            value = getattr(self, name)
            if value is not None or name in ("period", "factor", "min_loss_scale"):
                self._set(name, _number(value, f"DynamicLossScale.{name}"))
        self._check()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Refuses a configuration that cannot work."""
        if self.period < 1 or self.period != int(self.period):
            raise ValueError(f"Expected a period of 1, 2, 3 ... steps, got {self.period}.")
        if self.factor < 1:
            raise ValueError(f"Expected a factor of at least 1, such as 2, got {self.factor}.")
        if not 0 < self._backoff < 1:
            raise ValueError(
                f"Expected a backoff_factor between 0 and 1, which lets the scale shrink, got "
                f"{self._backoff}: leave it out for 1 / factor, with a factor above 1."
            )
        if self.max_loss_scale is not None and self.max_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"Expected max_loss_scale to be at least min_loss_scale, got {self.max_loss_scale} "
                f"and {self.min_loss_scale}: swap them."
            )

    @property
    def _backoff(self) -> float:
        return 1 / self.factor if self.backoff_factor is None else self.backoff_factor

    @property
    def _scalar(self) -> jax.Array:
        """The scale as a float32 array of shape (), which a mapped stack of scales is not."""
        if jnp.ndim(self.loss_scale) != 0:
            raise ValueError(
                f"Expected a loss scale of shape (), got {jnp.shape(self.loss_scale)}: map over a "
                "stack of loss scales with jax.vmap."
            )
        return jnp.asarray(self.loss_scale, jnp.float32)

    @property
    def _factor(self) -> jax.Array:
        """What is multiplied by: the scale, if it is no more than the maximum."""
        scale = self._scalar
        return scale if self.max_loss_scale is None else jnp.minimum(scale, self.max_loss_scale)

    def scale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays multiplied by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is a stack of scales outside `jax.vmap`.
        """
        return _map_inexact(_multiply_by(self._factor), tree)

    def unscale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays divided by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is a stack of scales outside `jax.vmap`.
        """
        if self.max_loss_scale is not None and self.max_loss_scale <= _LARGEST_INVERTIBLE:
            return _map_inexact(_multiply_by(1 / self._factor), tree)
        return _map_inexact(_divide_by(self._factor), tree)

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
        scale = self._scalar
        grown = scale * self.factor
        grown = jnp.where(jnp.isfinite(grown), grown, scale)
        if self.max_loss_scale is not None:
            grown = jnp.minimum(grown, self.max_loss_scale)
        shrunk = jnp.maximum(scale * self._backoff, max(self.min_loss_scale, _SMALLEST_NORMAL))
        due = self.counter >= self.period - 1
        return dataclasses.replace(
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
    return DynamicLossScale(loss_scaling, counter, period, factor, min_loss_scaling)


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
        scale._set("loss_scale", _leaf(scale.loss_scale, jnp.float32, "loss_scale"))
    return scale


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale, _flatten_with_keys, _unflatten, flatten_func=_flatten
)


def _map_inexact(operation: Callable[[jax.Array], jax.Array], tree: T) -> T:
    """Applies a real operation to every floating array and to both parts of every complex one."""

    def apply(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        if is_floating(leaf):
            return operation(jnp.asarray(widen(leaf)))
        return jax.lax.complex(operation(jnp.real(leaf)), operation(jnp.imag(leaf)))

    return jax.tree.map(apply, tree)


def _multiply_by(scale: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x * jnp.asarray(scale, x.dtype)


def for_one_step(scaling: LossScale) -> LossScale:
    """Returns what one step is to scale and to unscale by.

    A dynamic scale is taken as at least its minimum and at most 2**126, which a single product
    undoes: the gradients are the same.
    """
    if not isinstance(scaling, DynamicLossScale):
        return scaling
    low, high = scaling.min_loss_scale, scaling.max_loss_scale
    if low <= _LARGEST_INVERTIBLE:
        high = min(_LARGEST_INVERTIBLE, _LARGEST if high is None else high)
    return dataclasses.replace(
        scaling, loss_scale=jnp.maximum(scaling._scalar, low), max_loss_scale=high
    )


def never_enlarges(scaling: LossScale) -> bool:
    """Whether unscaling by `for_one_step(scaling)` divides by 1 or more, whatever comes."""
    if type(scaling) is DynamicLossScale:
        return scaling.min_loss_scale >= 1
    return type(scaling) is NoOpLossScale or (
        type(scaling) is StaticLossScale and scaling.loss_scale >= 1
    )


def _divide_by(scale: jax.Array) -> Callable[[jax.Array], jax.Array]:
    # XLA computes x / s as x * (1 / s), and 1 / 2**127 is no normal float32: it becomes 0. Halving
    # both where s is that large changes no digit of the quotient.
    half = jnp.where(scale > _LARGEST_INVERTIBLE, 0.5, 1.0)
    # The barrier keeps it from folding a constant scale into 1 / s all the same.
    half, divisor = jax.lax.optimization_barrier((half, scale * half))
    return lambda x: x * half.astype(x.dtype) / divisor.astype(x.dtype)


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
    """Returns a number or an array as a strong array of `dtype`, and anything else as it is."""
    if isinstance(value, int | float | str) and not is_array(value):
        value = _number(value, f"DynamicLossScale.{name}")
        return jnp.asarray(value, dtype)
    return jnp.asarray(value, dtype) if is_array(value) else value


def _is_integer_array(value: Any) -> bool:
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.integer)
