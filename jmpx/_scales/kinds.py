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
from typing import TYPE_CHECKING, Self, TypeVar, Union

import jax
import numpy as np
from jax.typing import ArrayLike

from jmpx._base.trees import Flag
from jmpx._scales.dynamic import LEAVES, DynamicLossScale
from jmpx._scales.numbers import as_text, shortest
from jmpx._scales.scaling import (
    HIGHEST_SCALE,
    LOWEST_SCALE,
    Scaling,
    as_number,
    register_with_flax,
)

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

    __module__ = "jmpx"

    def __post_init__(self) -> None:
        register_with_flax(NoOpLossScale, StaticLossScale)

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

    def to_dict(self) -> dict[str, str]:
        """Returns the mapping `{"type": "none"}`, which `jmpx.get_loss_scale` reads."""
        return {"type": "none"}

    def state_dict(self) -> dict[str, str]:
        """Returns `{"type": "none"}`, which `jmpx.restore_loss_scale` reads from a checkpoint."""
        return {"type": "none"}

    def __str__(self) -> str:
        """Returns the string `none`, which `jmpx.get_loss_scale` reads."""
        return "none"


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

    __module__ = "jmpx"

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
        register_with_flax(NoOpLossScale, StaticLossScale)

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

    def to_dict(self) -> dict[str, str | int | float]:
        """Returns a mapping such as `{"type": "static", "init": 1024}`.

        `jmpx.get_loss_scale` reads it, and `json.dumps` takes it.
        """
        return {"type": "static", "init": shortest(self.loss_scale)}

    def state_dict(self) -> dict[str, str | float]:
        """Returns what `jmpx.restore_loss_scale` reads from a checkpoint, such as JSON or msgpack.

        That is `{"type": "static", "loss_scale": 1024.0}`.
        """
        return {"type": "static", "loss_scale": float(self.loss_scale)}

    def __str__(self) -> str:
        """Returns a string such as `static=1024`, which `jmpx.get_loss_scale` reads."""
        return as_text("static", {"init": shortest(self.loss_scale)})


LossScale = Union[NoOpLossScale, StaticLossScale, DynamicLossScale]  # noqa: UP007 (as in JMP)


def is_loss_scale(value: object) -> bool:
    """Whether a value has the methods of a loss scale. A class has none that can be called."""
    names = ("scale", "unscale", "adjust")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def in_place_of_loss_scale(value: object, otherwise: str) -> str:
    """Returns the remedy for a value that is no loss scale: to call it, if that makes one."""
    if not isinstance(value, type) or not issubclass(value, LossScale):
        return otherwise
    number = "2.0**15" if value is StaticLossScale else ""
    return (
        f"call it, as {value.__module__}.{value.__qualname__}({number}), which makes a loss scale"
    )


def is_at_least_1(scaling: LossScale) -> bool:
    """Whether the scale is always at least 1, so that unscaling cannot overflow."""
    if isinstance(scaling, DynamicLossScale) and _scales_as_made(type(scaling)):
        return scaling.min_loss_scale >= 1
    if type(scaling) is StaticLossScale:
        return bool(scaling.loss_scale >= 1)
    return type(scaling) is NoOpLossScale


def _scales_as_made(cls: type[DynamicLossScale]) -> bool:
    """Whether a subclass scales as its base does, as MPX's does."""
    methods = ("scale", "unscale", "_effective_scale")
    return all(getattr(cls, name) is getattr(DynamicLossScale, name) for name in methods)


def register_all_with_flax() -> None:
    """Lets `flax.serialization` save and restore loss scales that were made before its import."""
    register_with_flax(NoOpLossScale, StaticLossScale)
    register_with_flax(DynamicLossScale, names=LEAVES)
