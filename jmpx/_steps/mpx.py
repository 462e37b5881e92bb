"""The functions of `jmpx.mpx` that jmpx has nowhere else: MPX's names, arguments and defaults."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._adapters.function_casts import force_full_precision as _force_full_precision
from jmpx._base.casts import cast_tree
from jmpx._base.dtypes import DTypeLike, as_dtype
from jmpx._base.leaves import PyTree
from jmpx._policies.maps import PolicyMap
from jmpx._scales.arguments import LARGEST_FLOAT16
from jmpx._scales.dynamic import DynamicLossScale, register_pytree
from jmpx._scales.kinds import LossScale
from jmpx._scales.mixed_precision import MixedPrecisionLike, policy_map_of
from jmpx._steps.gradient import P, ScalingT, ValueT, gradients_of, value_and_gradients_of
from jmpx._steps.options import MpxOptions, Options, with_options_spelled
from jmpx._steps.results import ValueAndGradients

T = TypeVar("T")
R = TypeVar("R")

FLOAT16_MAX, BFLOAT16_MAX = np.float32(LARGEST_FLOAT16), np.float32(255 * 2.0**120)
HALF_PRECISION_DATATYPE: type[Any] = jnp.float16  # the default
_half: type[Any] = HALF_PRECISION_DATATYPE


def half_precision_datatype() -> type[Any]:
    """Returns the dtype of half precision: float16, or what `set_half_precision_datatype` set."""
    return _half


def set_half_precision_datatype(datatype: DTypeLike) -> None:
    """Sets the dtype of half precision, for calls from now on: float16 or bfloat16.

    What `jax.jit` has compiled before keeps its dtype.

    Raises:
        TypeError: if it is not a dtype.
        ValueError: if it is another dtype.
    """
    global _half
    name = np.dtype(as_dtype(datatype)).name
    if name not in ("float16", "bfloat16"):
        raise ValueError(
            f"Expected float16 or bfloat16 as half precision, got {name}: jmpx.mpx.cast_tree and "
            "jmpx.mpx.cast_function take other dtypes."
        )
    _half = jnp.float16 if name == "float16" else jnp.bfloat16


def cast_to_float16(tree: T) -> T:
    """Casts the floating leaves of a pytree to float16; values above 65504 become inf."""
    return cast_tree(tree, jnp.float16)


def cast_to_bfloat16(tree: T) -> T:
    """Casts the floating leaves of a pytree to bfloat16."""
    return cast_tree(tree, jnp.bfloat16)


def cast_to_half_precision(tree: T) -> T:
    """Casts the floating leaves of a pytree to `half_precision_datatype()`."""
    return cast_tree(tree, _half)


def force_full_precision(
    func: Callable[P, R], return_dtype: DTypeLike = "float16"
) -> Callable[P, R]:
    """Makes a function run in float32 and return float16.

    It is `jmpx.force_full_precision`, which returns the dtype of the arguments unless
    `return_dtype` is given, and is the better default.
    """
    return _force_full_precision(func, return_dtype)


class DynamicLossScaling(DynamicLossScale):
    """A `jmpx.DynamicLossScale` by MPX's name and arguments (arXiv 2507.03312, section 3.3).

    It never grows beyond 65504, float16's largest number. Neither does MPX's, so that a run takes
    the same steps with both. A `jmpx.DynamicLossScale` grows beyond that.

    Args:
        loss_scaling: the factor to begin with.
        min_loss_scaling: the scale never falls below this number.
        factor: what the scale is multiplied by when it grows, and divided by when it shrinks.
        period: finite steps from one growth to the next.
        counter: finite steps since the scale last changed; None means 0.
        **others: arguments of `jmpx.DynamicLossScale`, which has the errors, too.

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
        given |= {"max_loss_scale": LARGEST_FLOAT16} | others
        counter = 0 if counter is None else counter
        super().__init__(factor=factor, period=period, counter=counter, **given)

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
    """Makes a function that returns the scaled loss of `func`, in float32.

    With `has_aux`, `func` returns the pair `(loss, aux)`, and `aux` stays as it is.
    """

    @functools.wraps(func, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        if not has_aux:
            return scaling.scale(func(*args, **kwargs))
        value, aux = func(*args, **kwargs)
        return scaling.scale(value), aux

    return wrapper


def calculate_scaled_grad(
    func: Callable[..., PyTree],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Makes a function that computes a scaled loss and its scaled gradients, in half precision.

    The arguments are those of `filter_value_and_grad`, which also unscales the gradients, in
    float32, and tells whether they are finite.

    Returns:
        A function that returns `(value, grads)`, with `has_aux` `((value, aux), grads)`.
    """
    run = scaled(func, scaling, has_aux) if use_mixed_precision else func
    plain = filter_value_and_grad(run, scaling, has_aux, use_mixed_precision=False)

    def gradient(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        if use_mixed_precision:
            args, kwargs = cast_to_half_precision((args, kwargs))
        result = plain(*args, **kwargs)
        return result.value, result.grads

    return gradient


@with_options_spelled(needs_policy=False)
def filter_value_and_grad(
    func: Callable[P, ValueT],
    scaling: ScalingT,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Unpack[MpxOptions],
) -> Callable[P, ValueAndGradients[ValueT, ScalingT]]:
    """Makes a function that computes a loss and its gradients, as MPX's of this name.

    It is `jmpx.value_and_grad` with MPX's fourth argument (arXiv 2507.03312, section 3.4), and
    casts arguments, as MPX does: without a policy to `half_precision_datatype()`, as it is at the
    call, and by a policy that has neither rules nor `by`.
    With `use_mixed_precision=False`, nothing is cast, scaled or checked, the policy has no effect,
    and the gradient is the plain one, averaged in its own dtype, and cast to `grad_dtype` at the
    end.

    Returns:
        A function that returns `(value, scaling, grads_finite, grads)`, a `ValueAndGradients`.
    """
    return _in_half(value_and_gradients_of, func, scaling, has_aux, use_mixed_precision, options)


@with_options_spelled(needs_policy=False)
def filter_grad(
    func: Callable[P, ValueT],
    scaling: ScalingT,  # pyright: ignore[reportInvalidTypeVarUse]: as of `filter_value_and_grad`
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Unpack[MpxOptions],
) -> Callable[P, PyTree]:
    """Makes a function that computes gradients, otherwise as `filter_value_and_grad`.

    Returns:
        A function that returns `(scaling, grads_finite, grads)` or, with `has_aux`,
        `(scaling, grads_finite, grads, aux)`: a `Gradients` or a `GradientsAndAux`.
    """
    return _in_half(gradients_of, func, scaling, has_aux, use_mixed_precision, options)


def _in_half(
    made_of: Callable[[Options], Callable[..., R]],
    func: Callable[..., PyTree],
    scaling: LossScale,
    has_aux: bool,
    is_mixed: bool,
    options: MpxOptions,
) -> Callable[..., R]:
    """Makes a gradient function; without a policy, its half precision is that of each call."""

    def make() -> Callable[..., R]:
        policy = options.get("policy")
        given: MpxOptions = {**options, "policy": _by_arguments(policy or np.dtype(_half).name)}
        return made_of(Options(func, scaling, has_aux, is_mixed, **given))

    if options.get("policy") is not None:
        return make()

    @functools.wraps(make(), updated=())
    def wrapper(*args: PyTree, **kwargs: PyTree) -> R:
        return make()(*args, **kwargs)

    return wrapper


def _by_arguments(policy: MixedPrecisionLike) -> PolicyMap:
    """Returns the policy map of MPX's functions, which casts arguments unless it says more."""
    policy_map = policy_map_of(policy)
    if policy_map.by is None and not policy_map.rules:
        return dataclasses.replace(policy_map, by="arguments")
    return policy_map
