"""Moving averages of parameters, in float32 whatever dtype the parameters are stored in."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmpx._base.messages import describe
from jmpx._base.trees import (
    Flag,
    PyTree,
    as_flag,
    at_least_float32,
    is_floating,
    is_inexact_array,
    is_traceable,
    select_tree,
    serialized,
    spell,
)

LARGEST_COUNT = 2**31 - 1  # an int32
_LARGEST_DECAY = 1 - 2.0**-24  # float32 loses a smaller step


@serialized
class EmaState(NamedTuple):
    """The state of `jmpx.optim.ema`.

    Attributes:
        average: the average, of the structure of the parameters, in float32.
        count: how many steps went into it: an int32 array of shape ().
    """

    __module__ = "jmpx.types"

    average: PyTree
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Ema:
    """An exponential moving average of parameters, as `jmpx.optim.ema` returns it."""

    __module__ = "jmpx.optim"

    decay: float
    debias: bool = False

    def __post_init__(self) -> None:
        decay = float(self.decay)
        if not 0 <= decay <= _LARGEST_DECAY:
            raise ValueError(
                "Expected decay to be at least 0 and at most 1 - 2**-24, beyond which an average "
                f"in float32 stands still, got {decay}: give for example 0.999."
            )
        if not isinstance(self.debias, bool):
            raise TypeError(
                f"Expected debias to be True or False, got {describe(self.debias)}: leave it out "
                "to begin the average with the first parameters."
            )
        object.__setattr__(self, "decay", decay)

    def init(self, params: PyTree) -> EmaState:
        """Returns the state that begins with copies of these parameters."""
        return EmaState(jax.tree.map(_begin, params), jnp.zeros((), jnp.int32))

    def update(
        self, params: PyTree, state: EmaState, grads_finite: Flag | None = None
    ) -> tuple[PyTree, EmaState]:
        """Adds the parameters of one step to the average.

        Args:
            params: the parameters after the optimizer's step, as `init` was given them.
            state: the state.
            grads_finite: whether the step was taken: a scalar bool, traced or not. A skipped step
                leaves the average and its count alone. None means that it was taken.

        Returns:
            The average, and the new state, which holds it.

        Raises:
            ValueError: if the parameters differ from those of `init` in structure or shapes, or the
                average is no longer in float32.
        """
        count = jnp.minimum(state.count, LARGEST_COUNT - 1) + 1
        weight = self._weight(count)
        average = jax.tree.map(lambda a, p: _step(a, p, weight), state.average, params)
        new = EmaState(average, count)
        if grads_finite is not None and grads_finite is not True:
            new = select_tree(as_flag(grads_finite, "grads_finite"), new, state)
        return new.average, new

    def _weight(self, count: jax.Array) -> PyTree:
        # Bias correction divides an average that began with zeros by 1 - decay**count. With this
        # weight of the newest parameters, the result is the same without a second tree.
        if not self.debias or self.decay == 0:
            return 1 - self.decay
        steps = count.astype(jnp.float32)
        return (1 - self.decay) / -jnp.expm1(steps * math.log(self.decay))


def ema(decay: float, debias: bool = False) -> Ema:
    """Averages parameters over the steps of a training: each one moves 1 - decay of the way.

    The average is float32 or wider. Leaves that are not floating or complex arrays are taken from
    the newest parameters.

    Args:
        decay: how much of the average a step keeps: from 0 to 1 - 2**-24.
        debias: whether to correct for the beginning. Without, the average begins with the
            parameters of `init`, which weigh `decay` to the power of the number of steps. With it,
            they weigh nothing: only the steps so far are averaged.

    Returns:
        An `Ema`, whose `init` and `update` may be called under `jax.jit` and in a `jax.lax.scan`.

    Raises:
        ValueError: if `decay` is out of its range.
        TypeError: if `debias` is no bool.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> average = jmpx.optim.ema(0.5)
        >>> state = average.init({"w": jnp.zeros(2, jnp.bfloat16)})
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> averaged, state = average.update(params, state)
        >>> averaged, state = average.update(params, state, grads_finite=False)  # skipped
        >>> averaged["w"], int(state.count)
        (Array([0.5, 0.5], dtype=float32), 1)
    """
    return Ema(decay, debias)


def _begin(leaf: PyTree) -> PyTree:
    """Returns a copy of a leaf in the dtype of its average."""
    if not is_traceable(leaf):
        return leaf
    return jnp.array(at_least_float32(leaf) if is_floating(leaf) else leaf, copy=True)


def _step(average: PyTree, leaf: PyTree, weight: jax.Array | float) -> PyTree:
    """Moves an average towards a leaf; unlike a weighted sum, it keeps equal numbers equal."""
    if not (is_inexact_array(leaf) and is_traceable(leaf)):
        return leaf
    is_narrow = is_floating(average) and average.dtype.itemsize < 4
    if is_narrow or not is_inexact_array(average) or average.shape != leaf.shape:
        raise ValueError(
            f"Expected the average of {spell(leaf)} in float32 and of its shape, got "
            f"{spell(average)}: make the state by init, restore a checkpoint into it, and keep "
            "casts away from it."
        )
    wide = jnp.asarray(leaf, average.dtype)
    return average + jnp.asarray(weight, average.dtype) * (wide - average)
