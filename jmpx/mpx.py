"""MPX's names, casts and defaults: `import jmpx.mpx as mpx` is all that its users change.

MPX (arXiv 2507.03312) computes in float16 by default, and its loss scale stays within float16. jmpx
differs from it in three ways: gradients are unscaled by the scale that the backward pass used, the
loss is scaled in float32, and casts reach NumPy arrays and float64, too.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._adapters.function_casts import cast_function, force_full_precision as _in_float32
from jmpx._base.dtypes import DTypeLike, as_dtype
from jmpx._base.stateful import call
from jmpx._base.trees import (
    PyTree,
    all_finite,
    cast_to_full as cast_to_float32,
    cast_tree,
    select_tree,
)
from jmpx._scales.kinds import DynamicLossScale, LossScale, register_pytree
from jmpx._scales.scaling import LARGEST_FLOAT16
from jmpx._steps.batches import split_parameters
from jmpx._steps.gradient import ValueAndGradients, value_and_grad, without_value
from jmpx._steps.optimizer import optimizer_update

# fmt: off
__all__ = (
    "BFLOAT16_MAX", "DynamicLossScaling", "FLOAT16_MAX", "HALF_PRECISION_DATATYPE",
    "all_finite", "calculate_scaled_grad", "cast_function", "cast_to_bfloat16",
    "cast_to_float16", "cast_to_float32", "cast_to_full_precision", "cast_to_half_precision",
    "cast_tree", "filter_grad", "filter_value_and_grad", "force_full_precision",
    "half_precision_datatype", "optimizer_update", "scaled", "select_tree",
    "set_half_precision_datatype",
)
# fmt: on

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
ScalingT = TypeVar("ScalingT", bound=LossScale)

FLOAT16_MAX, BFLOAT16_MAX = np.float32(LARGEST_FLOAT16), np.float32(255 * 2.0**120)
HALF_PRECISION_DATATYPE: type[Any] = jnp.float16  # the default
_half: type[Any] = HALF_PRECISION_DATATYPE
cast_to_full_precision = cast_to_float32


def half_precision_datatype() -> type[Any]:
    """Returns the dtype of half precision: float16, or what `set_half_precision_datatype` set."""
    return _half


def set_half_precision_datatype(datatype: DTypeLike) -> None:
    """Sets the dtype of half precision, float16 or bfloat16, for what is traced from now on."""
    global _half
    name = np.dtype(as_dtype(datatype)).name
    if name not in ("float16", "bfloat16"):
        raise ValueError(
            f"Expected float16 or bfloat16 as half precision, got {name}: jmpx.mpx.cast_tree and "
            "jmpx.mpx.cast_function take other dtypes."
        )
    _half = jnp.float16 if name == "float16" else jnp.bfloat16


def cast_to_float16(tree: T) -> T:
    """Casts floating leaves to float16; values above 65504 become inf."""
    return cast_tree(tree, jnp.float16)


def cast_to_bfloat16(tree: T) -> T:
    """Casts floating leaves to bfloat16."""
    return cast_tree(tree, jnp.bfloat16)


def cast_to_half_precision(tree: T) -> T:
    """Casts floating leaves to `half_precision_datatype()`."""
    return cast_tree(tree, _half)


def force_full_precision(
    func: Callable[P, R], return_dtype: DTypeLike = "float16"
) -> Callable[P, R]:
    """Makes a function run in float32 and return float16; `jmpx` has one with other defaults."""
    return _in_float32(func, return_dtype)


class DynamicLossScaling(DynamicLossScale):
    """A `jmpx.DynamicLossScale` by MPX's names, which never grows beyond 65504, as MPX's.

    Example:
        >>> import jmpx.mpx as mpx
        >>> scaling = mpx.DynamicLossScaling(2**15, period=1)
        >>> float(scaling.adjust(True).loss_scaling)
        65504.0
    """

    __module__ = "jmpx.mpx"

    def __init__(
        self,
        loss_scaling: ArrayLike = 2**15,
        min_loss_scaling: ArrayLike = 1.0,
        factor: float = 2,
        period: int = 2000,
        counter: ArrayLike | None = None,
        **others: Any,
    ) -> None:
        given: dict[str, Any] = {"loss_scale": loss_scaling, "min_loss_scale": min_loss_scaling}
        given |= {"max_loss_scale": LARGEST_FLOAT16, "counter": 0 if counter is None else counter}
        super().__init__(factor=factor, period=period, **given | others)

    @property
    def loss_scaling(self) -> Any:
        """The factor, `.loss_scale` of jmpx's loss scales."""
        return self.loss_scale

    @property
    def min_loss_scaling(self) -> float:
        """The number below which the scale never falls."""
        return self.min_loss_scale


register_pytree(DynamicLossScaling)


def scaled(
    func: Callable[P, PyTree], scaling: LossScale, has_aux: bool = False
) -> Callable[P, PyTree]:
    """Makes a function that returns the scaled loss of `func`, in float32, and aux as it is."""

    @functools.wraps(func, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        result: PyTree = func(*args, **kwargs)
        return (scaling.scale(result[0]), result[1]) if has_aux else scaling.scale(result)

    return wrapper


def calculate_scaled_grad(
    func: Callable[..., R],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., tuple[R, PyTree]]:
    """Makes a function of `(value, grads)`, both scaled, in half precision."""

    def differentiate(pure: PyTree, state: PyTree, args: PyTree, kwargs: PyTree) -> PyTree:
        params, merge = split_parameters(args)

        def loss_fn(params: PyTree) -> tuple[PyTree, PyTree]:
            result, changes = pure(state, merge(params), *args[1:], **kwargs)
            return result[0] if has_aux else result, (result, changes)

        (_, (value, changes)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (value, merge(grads, None)), changes

    def gradient(*args: PyTree, **kwargs: PyTree) -> tuple[R, PyTree]:
        if not use_mixed_precision:
            return call(differentiate, func, args, kwargs)
        args, kwargs = cast_to_half_precision((args, kwargs))
        return call(differentiate, scaled(func, scaling, has_aux), args, kwargs)

    return gradient


def filter_value_and_grad(
    func: Callable[P, R], scaling: ScalingT, has_aux: bool = False, use_mixed_precision: bool = True
) -> Callable[P, ValueAndGradients[R, ScalingT]]:
    """Makes a function of a loss and its gradients: `jmpx.value_and_grad`, by arguments.

    With `use_mixed_precision=False`, nothing is cast, scaled or checked.
    """
    make = functools.partial(value_and_grad, func, scaling, has_aux)
    make(policy="full")  # checks the arguments, before the first call

    @functools.wraps(func, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> ValueAndGradients[R, ScalingT]:
        if use_mixed_precision:
            return make(policy=f"by=arguments,{np.dtype(_half).name}")(*args, **kwargs)
        value, grads = calculate_scaled_grad(func, scaling, has_aux, False)(*args, **kwargs)
        return ValueAndGradients(value, scaling, jnp.array(True), grads)

    return wrapper


def filter_grad(
    func: Callable[P, PyTree],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[P, PyTree]:
    """Makes a function of gradients, otherwise as `filter_value_and_grad`."""
    run = filter_value_and_grad(func, scaling, has_aux, use_mixed_precision)
    return without_value(run, has_aux)
