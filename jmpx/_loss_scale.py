"""Loss scales: pytrees that keep float16 gradients from underflowing.

The loss is multiplied by the scale, its gradients are divided by it. The three classes have the
same methods, so that a train step works with any of them:

    loss = loss_scale.scale(loss)               # inside the differentiated function
    grads = loss_scale.unscale(grads)           # with the scale that the backward pass used
    grads_finite = jmpx.all_finite(grads)
    loss_scale = loss_scale.adjust(grads_finite)

All arithmetic is in float32 or float64, never in 16 bits. Every scale is between 2**-126 and
2**126: there the reciprocal is a normal float32 number too, so that one product undoes the scale.
"""

import dataclasses
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self, TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._leaves import is_array, is_floating
from jmpx._scaling import (
    HIGHEST_SCALE,
    LARGEST_FLOAT16,
    LONGEST_PERIOD,
    LOWEST_SCALE,
    Scaling,
    as_leaf,
    as_number,
    is_integer_array,
)
from jmpx._tree import Flag, as_flag

T = TypeVar("T")


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

    def adjust(self, grads_finite: Flag) -> Self:
        """Returns this loss scale, for finite gradients and for others."""
        del grads_finite
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(Scaling):
    """A loss scale that never changes.

    Follows JMP's `StaticLossScale`. As a pytree it has no leaves: the factor is part of the
    compiled program.

    Args:
        loss_scale: the factor, a number or a concrete scalar array of any dtype, between 2**-126
            and 2**126; kept as a `np.float32`. A scale of 0 is a placeholder that cannot scale.

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

    loss_scale: np.float32

    if TYPE_CHECKING:

        def __init__(self, loss_scale: ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        number = as_number(self.loss_scale, "StaticLossScale.loss_scale")
        if number != 0 and not LOWEST_SCALE <= number <= HIGHEST_SCALE:
            raise ValueError(
                "Expected StaticLossScale.loss_scale to be between 2**-126 and 2**126, which a "
                f"product in float32 undoes, got {number}: give for example 2.0**15."
            )
        object.__setattr__(self, "loss_scale", np.float32(number))
        register_with_flax()

    @property
    def _effective_scale(self) -> np.float32:
        if self.loss_scale == 0:
            raise ValueError(
                "Cannot scale a loss or unscale gradients by StaticLossScale(0): give a scale such "
                "as 2.0**15, or use NoOpLossScale()."
            )
        return self.loss_scale

    def adjust(self, grads_finite: Flag) -> Self:
        """Returns this loss scale, for finite gradients and for others."""
        del grads_finite
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(Scaling):
    """A loss scale that grows while gradients are finite and shrinks when they are not.

    Every `period` finite steps the scale is multiplied by `factor`. A step with non-finite
    gradients multiplies it by `backoff_factor`. Follows JMP's `DynamicLossScale`, which has the
    first five arguments, and torch's `GradScaler`, which bounds and shrinks a scale as
    `max_loss_scale` and `backoff_factor` do. Micikevicius et al., arXiv 1710.03740.

    As a pytree its leaves are `loss_scale` and `counter`; the other arguments are configuration. A
    checkpoint therefore restores two numbers into a template, whose configuration holds: a restored
    scale beyond the template's bounds counts as the nearer bound.

    Args:
        loss_scale: the factor to begin with: a number or an array of shape (), of any dtype. It is
            kept within the two bounds below, as a float32 that is not weakly typed; a number as a
            NumPy array, so that no backend starts. An integer array is converted with a warning.
            Other objects, such as a `jax.ShapeDtypeStruct` or a sharding, are kept as they are.
        counter: finite steps since the scale last changed; kept as an int32 in the same way.
        period: finite steps from one growth to the next.
        factor: what the scale is multiplied by when it grows, up to 2**126.
        min_loss_scale: the scale never falls below this number, which may be less than 1, nor below
            2**-126.
        max_loss_scale: the scale never grows beyond this number, nor beyond 2**126, which None
            means.
        backoff_factor: what the scale is multiplied by when it shrinks, at least 2**-126; None
            means 1 / `factor`.

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

    # Any, because trees of axes, masks, shapes or shardings hold other objects than arrays here.
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
            if is_integer_array(value):
                warnings.warn(
                    f"Expected floating type for {name}, got {value.dtype}: it is converted.",
                    stacklevel=3,
                )
        for name in _CONFIGURATION:
            value = getattr(self, name)
            if value is not None or name in ("period", "factor", "min_loss_scale"):
                self._set(name, as_number(value, f"DynamicLossScale.{name}"))
        self._check()
        scale = as_leaf(self.loss_scale, np.float32, "loss_scale")
        self._set("loss_scale", self._clip(scale) if is_array(scale) else scale)
        self._set("counter", as_leaf(self.counter, np.int32, "counter"))
        register_with_flax()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Refuses a configuration that cannot work."""
        if not 1 <= self.period <= LONGEST_PERIOD or self.period != int(self.period):
            raise ValueError(
                f"Expected a period of 1, 2, 3 ... steps, up to 2**31 - 1, got {self.period}."
            )
        if not 1 <= self.factor <= HIGHEST_SCALE:
            raise ValueError(
                f"Expected a factor between 1 and 2**126, such as 2, got {self.factor}."
            )
        backoff = 1 / self.factor if self.backoff_factor is None else self.backoff_factor
        if not LOWEST_SCALE <= backoff < 1:
            raise ValueError(
                "Expected a backoff_factor of at least 2**-126 and below 1, which lets the scale "
                f"shrink, got {backoff}: leave it out for 1 / factor, with a factor above 1."
            )
        if self.min_loss_scale > HIGHEST_SCALE:
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
        """The smallest and the largest scale."""
        high = HIGHEST_SCALE if self.max_loss_scale is None else self.max_loss_scale
        return max(self.min_loss_scale, LOWEST_SCALE), min(high, HIGHEST_SCALE)

    def _clip(self, scale: Any) -> Any:
        low, high = map(np.float32, self._bounds)
        if isinstance(scale, jax.Array):
            return jnp.minimum(jnp.maximum(scale, low), high)
        return np.asarray(np.minimum(np.maximum(scale, low), high))

    @property
    def _effective_scale(self) -> Any:
        """The scale clipped to its bounds, so that one multiplication undoes it.

        The constructor clips, too; a scale that a checkpoint restored has not been through it.
        """
        if jnp.ndim(self.loss_scale) != 0:
            raise ValueError(
                f"Expected a loss scale of shape (), got {jnp.shape(self.loss_scale)}: map over a "
                "stack of loss scales with jax.vmap."
            )
        return self._clip(as_leaf(self.loss_scale, np.float32, "loss_scale"))

    def adjust(self, grads_finite: Flag) -> Self:
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
        scale = jnp.asarray(self._effective_scale)
        grown = scale * float(self.factor)
        if self.backoff_factor is None:
            shrunk = scale / float(self.factor)
        else:
            shrunk = scale * self.backoff_factor
        due = jnp.asarray(self.counter) >= int(self.period) - 1
        return dataclasses.replace(  # Its constructor clips the scale.
            self,
            loss_scale=jnp.where(finite, jnp.where(due, grown, scale), shrunk),
            counter=jnp.where(finite & ~due, self.counter + 1, 0),
        )


def DynamicLossScaling(  # MPX has a class of this name.
    loss_scaling: Any = 2**15,
    min_loss_scaling: Any = 1.0,
    factor: float = 2,
    period: int = 2000,
    counter: Any = None,
) -> DynamicLossScale:
    """Makes a `DynamicLossScale` by MPX's name and arguments (arXiv 2507.03312, section 3.3).

    It never grows beyond 65504, float16's largest number. Neither does MPX's, so that a run takes
    the same steps with both. A `DynamicLossScale` made by its own name grows beyond that.

    Args:
        loss_scaling: the factor to begin with.
        min_loss_scaling: the scale never falls below this number.
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
        loss_scaling, counter, period, factor, min_loss_scaling, max_loss_scale=LARGEST_FLOAT16
    )


LossScale = Union[NoOpLossScale, StaticLossScale, DynamicLossScale]  # noqa: UP007 (as in JMP)


def is_at_least_1(scaling: LossScale) -> bool:
    """Whether the scale is always at least 1, so that unscaling cannot overflow."""
    if type(scaling) is DynamicLossScale:  # A subclass may scale in another way.
        return scaling.min_loss_scale >= 1
    if type(scaling) is StaticLossScale:
        return bool(scaling.loss_scale >= 1)
    return type(scaling) is NoOpLossScale


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


def _unflatten(configuration: tuple[Any, ...], leaves: Iterable[Any]) -> DynamicLossScale:
    # Made without the constructor, which converts and clips: trees of axes, masks or shardings hold
    # 0, True or a sharding, which must stay. A floating array is a scale, and becomes a float32
    # that is not weakly typed.
    scale = object.__new__(DynamicLossScale)
    for name, value in zip(_LEAVES + _CONFIGURATION, (*leaves, *configuration), strict=True):
        scale._set(name, value)
    if is_array(scale.loss_scale) and is_floating(scale.loss_scale):
        scale._set("loss_scale", as_leaf(scale.loss_scale, np.float32, "loss_scale"))
    return scale


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale, _flatten_with_keys, _unflatten, flatten_func=_flatten
)


def register_with_flax() -> None:
    """Lets `flax.serialization` save and restore loss scales, if Flax has been imported."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        from jmpx._state_dicts import register_states  # here, because few programs need it

        register_states(serialization, (NoOpLossScale, StaticLossScale))
        register_states(serialization, (DynamicLossScale,), _LEAVES)
