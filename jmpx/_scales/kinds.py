"""The loss scales: none, static and dynamic."""

import dataclasses
import functools
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, Union, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._base.messages import describe, is_mapping, user_stacklevel
from jmpx._base.trees import ArrayLeaf, Flag, as_flag, is_array, is_floating, serialized
from jmpx._scales.scaling import (
    DYNAMIC,
    HIGHEST_SCALE,
    LOWEST_SCALE,
    STATIC,
    Scaling,
    as_leaf,
    check_number,
    concrete_leaf,
    plain_number,
    register_with_flax,
    shortest,
)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(Scaling):
    """A loss scale that grows while gradients are finite and shrinks when they are not.

    After every `period` finite steps, `factor` multiplies the scale. After an overflow, a step with
    non-finite gradients, `backoff_factor` does; with `hysteresis`, only if enough steps before it
    overflowed too. Follows JMP's `DynamicLossScale`, which has the first five arguments
    (Micikevicius et al., arXiv 1710.03740).

    As a pytree, its leaves are `loss_scale` and `counter`. The other arguments are configuration,
    so a checkpoint restores two numbers into a template that keeps its configuration. A restored
    scale beyond the template's bounds counts as the nearer bound. A subclass is one, too, after
    `jax.tree_util.register_pytree_node_class(Subclass)`, as in JMP; the fields that it adds are
    configuration.

    Args:
        loss_scale: the initial factor: a number or an array of shape (), of any dtype. It is kept
            between the two bounds below, as a float32 that is not weakly typed; a number becomes a
            NumPy array, so that no backend starts. An integer array is converted with a warning.
            Other objects, such as a `jax.ShapeDtypeStruct` or a sharding, stay as they are.
        counter: finite steps since the scale last changed or a step overflowed; below 0, overflows
            in a row, which count up to `hysteresis` - 1. Kept as an int32 in the same way.
        period: finite steps from one growth to the next.
        factor: the scale is multiplied by this when it grows; up to 2**126.
        min_loss_scale: the smallest scale: it may be below 1, but not below 2**-126.
        max_loss_scale: the largest scale, at most 2**126. None means 2**126.
        backoff_factor: the scale is multiplied by this when it shrinks; at least 2**-126. None
            means 1 / `factor`.
        hysteresis: how many overflows in a row shrink the scale. Each further one in the same row
            shrinks it again; a finite step ends the row. Every overflow restarts the count of
            finite steps, even if the scale stays.

    Raises:
        TypeError: if a configuration value is traced or not a number.
        ValueError: if a number is out of its range.

    Example:
        >>> import jmpx
        >>> loss_scale = jmpx.DynamicLossScale(2**15, period=2)
        >>> print(loss_scale.adjust(False), loss_scale.adjust(True).adjust(True))
        dynamic,init=16384,period=2 dynamic,init=65536,period=2
    """

    __module__ = "jmpx"
    _kind: ClassVar[str] = "dynamic"

    # Any: in trees of axes, masks, shapes or shardings, these are not arrays.
    loss_scale: Any = 2**15
    counter: Any = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None
    backoff_factor: float | None = None
    hysteresis: int = 1

    def __post_init__(self) -> None:
        if is_mapping(self.loss_scale):
            raise TypeError(
                "Expected DynamicLossScale.loss_scale to be a number, got "
                f"{describe(self.loss_scale)}: write jmpx.get_loss_scale(mapping)."
            )
        for name in ("loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if is_array(value) and jnp.issubdtype(value.dtype, jnp.integer):  # JMP's warning
                warnings.warn(
                    f"Expected floating type for {name}, got {value.dtype}: it is converted.",
                    stacklevel=user_stacklevel(),
                )
        for argument in DYNAMIC.values():
            value = getattr(self, argument.name)
            if argument.name not in LEAVES and (value is not None or argument.name not in _MAYBE):
                number = check_number(argument, value, f"DynamicLossScale.{argument.name}")
                self._set(argument.name, number)
        self._check()
        scale = as_leaf(self.loss_scale, np.float32, DYNAMIC["init"])
        self._set("loss_scale", self._clip(scale) if is_array(scale) else scale)
        counter = as_leaf(self.counter, np.int32, DYNAMIC["counter"])
        if isinstance(counter, np.ndarray):
            counter = np.asarray(np.maximum(counter, np.int32(1 - self.hysteresis)))
        self._set("counter", counter)
        register_with_flax(type(self), LEAVES)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Refuses arguments that contradict each other."""
        if self.factor == 1 and self.backoff_factor is None:
            raise ValueError(
                "Expected a factor above 1 where backoff_factor is left out, which is 1 / factor "
                "then, so that the scale could not shrink: give one of the two."
            )
        low, high = self._bounds
        if low > high:
            raise ValueError(
                f"Expected max_loss_scale to be at least min_loss_scale, got "
                f"{self.max_loss_scale} and {self.min_loss_scale}: swap them, or leave one out."
            )

    @property
    def _bounds(self) -> tuple[float, float]:
        """The smallest and the largest scale."""
        high = HIGHEST_SCALE if self.max_loss_scale is None else self.max_loss_scale
        return max(self.min_loss_scale, LOWEST_SCALE), min(high, HIGHEST_SCALE)

    def _clip(self, scale: ArrayLeaf) -> jax.Array | np.ndarray:
        low, high = map(np.float32, self._bounds)
        if isinstance(scale, jax.Array):
            return jnp.minimum(jnp.maximum(scale, low), high)
        return np.asarray(np.minimum(np.maximum(scale, low), high))

    @property
    def _effective_scale(self) -> jax.Array | np.ndarray:
        """The scale clipped to its bounds, so that one multiplication undoes it."""
        # The constructor clips, too, but a restored checkpoint bypasses it.
        if jnp.ndim(self.loss_scale) != 0:
            raise ValueError(
                f"Expected a loss scale of shape (), got {jnp.shape(self.loss_scale)}: map over a "
                "stack of loss scales with jax.vmap."
            )
        return self._clip(as_leaf(self.loss_scale, np.float32, DYNAMIC["init"]))

    def adjust(self, grads_finite: Flag) -> Self:
        """Returns the loss scale of the next step, of the same configuration.

        Args:
            grads_finite: whether this step's gradients were finite: a Python bool or a bool array
                of shape (), traced or not.

        Raises:
            TypeError: if `grads_finite` is not a scalar bool.
            ValueError: if the scale is a stack of scales outside `jax.vmap`.
        """
        finite = as_flag(grads_finite, "grads_finite")
        scale = jnp.asarray(self._effective_scale)
        grown = scale * float(self.factor)
        # Not scale / factor: XLA turns some divisions by a constant into products, so that compiled
        # and eager steps would differ.
        shrunk = scale * (1 / self.factor if self.backoff_factor is None else self.backoff_factor)
        due = self._finite_steps >= self.period - 1
        if self.hysteresis != 1:
            shrunk = jnp.where(self._overflows >= self.hysteresis - 1, shrunk, scale)
        return dataclasses.replace(  # Its constructor clips the scale.
            self,
            loss_scale=jnp.where(finite, jnp.where(due, grown, scale), shrunk),
            counter=self._count(finite, due),
        )

    @property
    def _finite_steps(self) -> jax.Array:
        """How many finite steps came since the scale last changed or a step overflowed."""
        return jnp.asarray(self.counter) if self.hysteresis == 1 else jnp.maximum(self.counter, 0)

    @property
    def _overflows(self) -> jax.Array:
        """How many overflows came in a row."""
        return jnp.maximum(-self.counter, 0)

    def _count(self, finite: jax.Array, due: jax.Array) -> jax.Array:
        """Returns the counter of the next step."""
        if self.hysteresis == 1:
            return jnp.where(finite & ~due, self.counter + 1, 0)
        # A full row stays one overflow short of its length, so that the next one shrinks, too.
        overflows = jnp.minimum(self._overflows + 1, self.hysteresis - 1)
        return jnp.where(finite, jnp.where(due, 0, self._finite_steps + 1), -overflows)

    # JMP's subclasses call `jax.tree_util.register_pytree_node_class`, which needs these two.

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[object, ...]]:
        """Returns the two leaves, and the other fields, also those of a subclass."""
        leaves, configuration = _flatten(self)
        return tuple(leaf for _, leaf in leaves), configuration

    @classmethod
    def tree_unflatten(cls, configuration: tuple[object, ...], leaves: Iterable[object]) -> Self:
        """Returns the loss scale with these leaves and this configuration."""
        return _unflatten(cls, configuration, leaves)

    def _numbers(self) -> dict[str, int | float]:
        leaf, counter = (concrete_leaf(getattr(self, name), name) for name in LEAVES)
        scale = np.float32(self._clip(leaf.astype(np.float32)))
        if not np.isfinite(scale):
            raise TypeError(
                f"Expected loss_scale of the loss scale to be finite, got {scale}: restore another "
                "one."
            )
        values = {key: getattr(self, argument.name) for key, argument in DYNAMIC.items()}
        values |= {"init": shortest(scale), "counter": int(counter)}
        defaults = {field.name: field.default for field in dataclasses.fields(DynamicLossScale)}
        return {
            key: plain_number(value)
            for key, value in values.items()
            if key == "init" or value != defaults[DYNAMIC[key].name]
        }


LEAVES = ("loss_scale", "counter")
_KEYS = tuple(map(jax.tree_util.GetAttrKey, LEAVES))  # made once: each dispatch flattens a scale
_MAYBE = ("max_loss_scale", "backoff_factor")  # may be None


@functools.cache
def _configuration(cls: type[DynamicLossScale]) -> tuple[str, ...]:
    """Returns the fields that are no leaves, also those of a subclass."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.name not in LEAVES)


def _flatten(scale: DynamicLossScale) -> tuple[list[Any], tuple[object, ...]]:
    leaves = [(key, getattr(scale, key.name)) for key in _KEYS]
    return leaves, tuple(getattr(scale, name) for name in _configuration(type(scale)))


ScaleT = TypeVar("ScaleT", bound=DynamicLossScale)


def _unflatten(
    cls: type[ScaleT], configuration: tuple[object, ...], leaves: Iterable[object]
) -> ScaleT:
    # Bypasses the constructor, which converts and clips: trees of axes, masks or shardings hold 0,
    # True or a sharding, which must stay. A floating array becomes a strong float32.
    scale = object.__new__(cls)
    names = LEAVES + _configuration(cls)
    for name, value in zip(names, (*leaves, *configuration), strict=True):
        scale._set(name, value)
    if is_array(scale.loss_scale) and is_floating(scale.loss_scale):
        scale._set("loss_scale", as_leaf(scale.loss_scale, np.float32, DYNAMIC["init"]))
    return scale


def register_pytree(cls: type[DynamicLossScale]) -> None:
    """Tells JAX which leaves a class of dynamic loss scales has, and how it is exported."""
    jax.tree_util.register_pytree_with_keys(cls, _flatten, functools.partial(_unflatten, cls))
    serialized(cls, read=tuple)


register_pytree(DynamicLossScale)


# Loss scales that never change, and functions of all loss scales.
#
# All arithmetic is in float32 or float64, never in 16 bits. Every scale is between 2**-126 and
# 2**126: there the reciprocal is a normal float32 number, too, and one product undoes the scale.


T = TypeVar("T")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(Scaling):
    """The loss scale that does nothing, for float32 and bfloat16.

    Follows JMP's `NoOpLossScale`. As a pytree it has no leaves.

    Example:
        >>> import jmpx
        >>> jmpx.NoOpLossScale().scale({"loss": 3.0})
        {'loss': 3.0}
    """

    __module__ = "jmpx"
    _kind: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        register_with_flax(type(self))

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

    def _numbers(self) -> dict[str, int | float]:
        return {}


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
        >>> import jax.numpy as jnp, jmpx
        >>> jmpx.StaticLossScale(2**15).scale(jnp.float16(4))  # more than float16 can hold
        Array(131072., dtype=float32)
    """

    __module__ = "jmpx"
    _kind: ClassVar[str] = "static"

    loss_scale: np.float32

    if TYPE_CHECKING:

        def __init__(self, loss_scale: ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        number = check_number(STATIC["init"], self.loss_scale, "StaticLossScale.loss_scale")
        if 0 < number < LOWEST_SCALE:
            raise ValueError(
                f"Expected StaticLossScale.loss_scale to be {STATIC['init'].expected}, which a "
                f"product in float32 undoes, got {number}."
            )
        object.__setattr__(self, "loss_scale", np.float32(number))
        register_with_flax(type(self))

    @property
    def _effective_scale(self) -> np.float32:
        if self.loss_scale == 0:
            raise ValueError(
                "Cannot scale a loss or unscale gradients by StaticLossScale(0): give a scale such "
                "as 2.0**15, or use NoOpLossScale()."
            )
        return self.loss_scale

    def _numbers(self) -> dict[str, int | float]:
        return {"init": shortest(self.loss_scale)}


# These nodes have no children; the configuration is the loss scale itself.
serialized(NoOpLossScale, lambda scale: None, lambda value: NoOpLossScale())
serialized(StaticLossScale, lambda scale: float(scale.loss_scale), StaticLossScale)

LossScale = Union[NoOpLossScale, StaticLossScale, DynamicLossScale]  # noqa: UP007 (as in JMP)


@runtime_checkable
class _Scales(Protocol):
    """The interface of all loss scales, also of other libraries, such as JMP."""

    def scale(self, tree: T) -> T: ...
    def unscale(self, tree: T) -> T: ...
    def adjust(self, grads_finite: Flag) -> object: ...


def is_loss_scale(value: object) -> bool:
    """Whether a value is a loss scale, rather than a class of them."""
    return isinstance(value, _Scales) and not isinstance(value, type)


def is_at_least_1(scaling: LossScale) -> bool:
    """Whether the scale is always at least 1, so that unscaling cannot overflow."""
    if isinstance(scaling, DynamicLossScale):
        # A subclass may scale otherwise; MPX's does not.
        names = ("scale", "unscale", "_effective_scale")
        cls = type(scaling)
        as_made = all(getattr(cls, name) is getattr(DynamicLossScale, name) for name in names)
        return as_made and scaling.min_loss_scale >= 1
    if type(scaling) is StaticLossScale:
        return bool(scaling.loss_scale >= 1)
    return type(scaling) is NoOpLossScale
