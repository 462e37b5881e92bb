"""The loss scales that never change, and what all three are in a train step.

All arithmetic is in float32 or float64, never in 16 bits. Every scale is between 2**-126 and
2**126: there the reciprocal is a normal float32 number too, so that one product undoes the scale.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar, Union, runtime_checkable

import jax
import numpy as np
from jax.typing import ArrayLike

from jmpx._base.exported import serialized
from jmpx._base.trees import Flag
from jmpx._scales.arguments import LOWEST_SCALE, STATIC, check_number
from jmpx._scales.dynamic import DynamicLossScale
from jmpx._scales.flax_states import register_with_flax
from jmpx._scales.numbers import shortest
from jmpx._scales.scaling import Scaling

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


# Such a node has no children, and its configuration is the loss scale.
serialized(NoOpLossScale, lambda scale: None, lambda value: NoOpLossScale())
serialized(StaticLossScale, lambda scale: float(scale.loss_scale), StaticLossScale)

LossScale = Union[NoOpLossScale, StaticLossScale, DynamicLossScale]  # noqa: UP007 (as in JMP)


@runtime_checkable
class _Scales(Protocol):
    """What all loss scales have, also those of other libraries, such as JMP."""

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
