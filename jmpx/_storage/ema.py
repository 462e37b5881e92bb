"""Moving averages of parameters, in float32 whatever dtype the parameters are stored in."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.casts import at_least_float32
from jmpx._base.leaves import PyTree, is_array, is_floating, is_inexact_array, is_traceable, spell
from jmpx._base.messages import describe
from jmpx._base.trees import Flag, as_flag, select_tree

LARGEST_COUNT = 2**31 - 1  # an int32
_LEAST_WEIGHT = 2.0**-24  # Half of an epsilon of float32: a smaller part of a number is lost in it.


class EmaState(NamedTuple):
    """The state of `ema`.

    Attributes:
        average: the average, of the structure of the parameters, in float32.
        count: how many steps went into it: an int32 array of shape ().

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> state = jmpx.optim.ema(0.999).init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> isinstance(state, jmpx.types.EmaState), state.average["w"].dtype.name, int(state.count)
        (True, 'float32', 0)
    """

    __module__ = "jmpx.types"

    average: PyTree
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Ema:
    """An exponential moving average of parameters, as `jmpx.optim.ema` returns it.

    Args:
        decay: as in `jmpx.optim.ema`, whose errors it raises.
        debias: as in `jmpx.optim.ema`.

    Example:
        >>> import jmpx
        >>> jmpx.optim.ema(0.999)
        Ema(decay=0.999, debias=False)
    """

    __module__ = "jmpx.optim"

    decay: float
    debias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", _as_decay(self.decay))
        if not isinstance(self.debias, bool | np.bool_):
            raise TypeError(
                f"Expected debias to be True or False, got {describe(self.debias)}: leave it out "
                "to begin the average with the first parameters."
            )

    def init(self, params: PyTree) -> EmaState:
        """Returns the state that begins with these parameters.

        Args:
            params: any pytree. Its floating and complex arrays are averaged.

        Returns:
            The state. Its arrays are copies, so that a step may donate it and the parameters.
        """
        return EmaState(jax.tree.map(_begin, params), jnp.zeros((), jnp.int32))

    def update(
        self, params: PyTree, state: EmaState, grads_finite: Flag | None = None
    ) -> tuple[PyTree, EmaState]:
        """Takes the parameters of one step into the average.

        Args:
            params: the parameters after the optimizer's step, of the structure and the shapes of
                those that `init` was given, in any dtype.
            state: the state.
            grads_finite: whether the step was taken: a scalar bool, traced or not. A step that
                was skipped leaves the average and its count alone. None means that it was taken.

        Returns:
            The average, and the new state, which holds it.

        Raises:
            TypeError: if `state` is not one of `init`, an average is not in float32 or wider, or
                `grads_finite` is not a scalar bool.
            ValueError: if the parameters differ from those of `init` in structure or shapes.
        """
        _check_state(state, params)
        count = jnp.minimum(state.count, LARGEST_COUNT - 1) + 1
        weight = self._weight(count)
        average = jax.tree.map(lambda a, p: _step(a, p, weight), state.average, params)
        new = EmaState(average, count)
        if grads_finite is not None and grads_finite is not True:
            new = select_tree(as_flag(grads_finite, "grads_finite"), new, state)
        return new.average, new

    def _weight(self, count: jax.Array) -> PyTree:
        """Returns the weight of the newest parameters, as a number or a float32.

        Bias correction divides an average that began with zeros by 1 - decay**count. The same comes
        out if the newest parameters weigh (1 - decay) / (1 - decay**count), and no second tree is
        needed.
        """
        if not self.debias or self.decay == 0:
            return 1 - self.decay
        steps = count.astype(jnp.float32)
        return (1 - self.decay) / -jnp.expm1(steps * math.log(self.decay))


def ema(decay: float, debias: bool = False) -> Ema:
    """Averages parameters over the steps of a training: each one moves 1 - decay of the way.

    The average is float32 for parameters of 8 and 16 bits; wider parameters are averaged in their
    own dtype. In the dtype of the parameters, as `optax.incremental_update` keeps it, an average
    stalls: at a decay of 0.999, one of 1 in bfloat16 stays 1 for any parameter between 1 and 3.
    Leaves that are not floating or complex arrays are those of the newest parameters.

    Args:
        decay: how much of the average a step keeps: at least 0, and at most 1 - 2**-24, beyond
            which float32 would stall, too.
        debias: whether to correct for the beginning. Without, the average begins with the
            parameters of `init`, which weigh `decay` to the power of the number of steps. With it,
            they weigh nothing: the average is that of the steps so far.

    Returns:
        An object with `init(params)`, which returns an `EmaState`, and
        `update(params, state, grads_finite=None)`, which returns the average and the new state.
        Both may be called under `jax.jit` and in a `jax.lax.scan`.

    Raises:
        TypeError: if `decay` is traced or not a number, or `debias` is not a bool.
        ValueError: if `decay` is out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> average = jmpx.optim.ema(0.5)
        >>> state = average.init({"w": jnp.zeros(2, jnp.bfloat16)})
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> averaged, state = average.update(params, state)
        >>> averaged, state = average.update(params, state, grads_finite=False)  # skipped
        >>> averaged["w"], int(state.count)
        (Array([0.5, 0.5], dtype=float32), 1)
    """
    return Ema(decay, debias)


def _as_decay(decay: PyTree) -> float:
    if isinstance(decay, jax.core.Tracer):
        raise TypeError(
            f"Expected decay to be a number, got the traced {decay.aval}: make the average outside "
            "of jax.jit."
        )
    number = decay.item() if is_array(decay) and decay.ndim == 0 else decay
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"Expected decay to be a number, got {describe(decay)}: give 0.999.")
    if not 0 <= number <= 1 - _LEAST_WEIGHT:
        raise ValueError(
            f"Expected decay to be at least 0 and at most 1 - 2**-24, beyond which an average in "
            f"float32 stands still, got {number}: give for example 0.999."
        )
    return float(number)


def _is_averaged(leaf: object) -> bool:
    return is_inexact_array(leaf) and is_traceable(leaf)


def _begin(leaf: PyTree) -> PyTree:
    """Returns a leaf in the dtype of its average, as an array of its own."""
    if not is_traceable(leaf):
        return leaf
    return jnp.array(at_least_float32(leaf) if is_floating(leaf) else leaf, copy=True)


def _step(average: PyTree, leaf: PyTree, weight: jax.Array | float) -> PyTree:
    """Moves an average towards a leaf: equal ones stay equal, which a weighted sum would not."""
    if not _is_averaged(leaf):
        return leaf
    wide = jnp.asarray(leaf, average.dtype)
    return average + jnp.asarray(weight, average.dtype) * (wide - average)


def _check_state(state: object, params: PyTree) -> None:
    """Refuses what is not a state of `ema`, or not of these parameters."""
    if not isinstance(state, EmaState):
        raise TypeError(
            "Expected the state of jmpx.optim.ema as the second argument, got a "
            f"{type(state).__name__}: call update(params, state), and restore a checkpoint into "
            "init(params)."
        )
    averages, structure = jax.tree_util.tree_flatten_with_path(state.average)
    if structure != jax.tree.structure(params):
        raise ValueError(
            "Expected parameters of the structure that init was given, got another: give the same "
            "part of the model to both, and restore a checkpoint into init(params)."
        )
    for (path, average), leaf in zip(averages, jax.tree.leaves(params), strict=True):
        where = jax.tree_util.keystr(path)
        if not _is_averaged(leaf):
            continue
        if not is_inexact_array(average) or average.shape != leaf.shape:
            raise ValueError(
                f"Expected parameters of the shapes that init was given, got {spell(leaf)} for "
                f"an average of {spell(average)} at {where}: make a new state by init."
            )
        if is_floating(average) and average.dtype.itemsize < 4:
            raise TypeError(
                f"Expected an average in float32, got {spell(average)} at {where}, which would "
                "stall: keep casts away from the state, and restore it into init(params)."
            )
