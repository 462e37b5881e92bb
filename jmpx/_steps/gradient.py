"""Gradients in mixed precision, with loss scaling, of a function of any pytree."""

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar, overload

from jax.typing import ArrayLike

from jmpx._adapters.applying import UncastLike
from jmpx._base.axes import AxisName
from jmpx._base.dtypes import DTypeLike
from jmpx._base.stateful import call
from jmpx._base.trees import PyTree
from jmpx._devices.shards import Over
from jmpx._scales.kinds import LossScale
from jmpx._scales.strings import MixedPrecisionLike
from jmpx._steps.batches import Batch
from jmpx._steps.differentiation import differentiate
from jmpx._steps.options import Gradients, GradientsAndAux, Options, ValueAndGradients

P = ParamSpec("P")
AuxT = TypeVar("AuxT")
ValueT = TypeVar("ValueT")
ScalingT = TypeVar("ScalingT", bound=LossScale)


def value_and_grad(
    func: Callable[P, ValueT],
    loss_scale: ScalingT,
    has_aux: bool = False,
    *,
    policy: MixedPrecisionLike | None = None,
    grad_dtype: DTypeLike | None = None,
    uncast: UncastLike = (),
    state_argnum: int | None = None,
    microbatches: int | None = None,
    batch: Batch | None = None,
    over: Over | AxisName | None = None,
) -> Callable[P, ValueAndGradients[ValueT, ScalingT]]:
    """Makes a function that computes a loss and its gradients in mixed precision.

    It runs `func` under the policy, scales the loss in float32, differentiates it with respect to
    the first argument, unscales the gradients in float32, checks once whether all are finite, and
    adjusts the loss scale. NNX modules among the arguments get their new state. If
    a gradient is not finite and there is a loss scale, model state stays as it was; select other
    state in aux yourself, with `jmpx.select_tree`.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar, or `(loss, aux)`. The
            floating and complex arrays in its first argument are differentiated.
        loss_scale: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        policy: anything that `jmpx.apply_policy` takes, such as `"c=bf16"`, `"c=f16"`, which needs
            a dynamic loss scale, or `"full"` for float32. It casts operations, unless it says
            `by=modules` or `by=arguments`; with `save=products`, the backward pass keeps less, see
            `jmpx.remat`. With `r=f32`, gradients leave their products in float32, and are summed in
            it over batches and devices, under `jax.jit`, too; see docs/gradients.md.
        grad_dtype: the dtype of the gradients of floating parameters; None means the dtype of each
            parameter. Float32 implies `r=f32`, so that 16-bit and 8-bit parameters get gradients
            that were not rounded.
        uncast: the position or the name of an argument that is not cast, or several, such as
            targets that float16 cannot hold. Negative positions count from the end. With
            `by=modules`, the outermost module gets them so, and modules inside cast as ever.
        state_argnum: the position of model state whose new value `func` returns as its aux, or as
            the first element of an aux tuple. It is neither cast nor split.
        microbatches: how many parts all arguments but the first are split into, one after the
            other, so that the memory of activations is that of one part.
        batch: a `jmpx.Batch`, which says which arguments are split, too.
        over: the name of the mapped axis over which to average value and gradients, or a
            `jmpx.Over` for parameters that are shards.

    Returns:
        A function with the arguments of `func`. It returns a `ValueAndGradients`, which unpacks as
        `(value, loss_scale, grads_finite, grads)`: the unscaled loss in float32 (with `has_aux`,
        `(loss, aux)`), the next loss scale, a bool array of shape (), and gradients of the
        structure of the first argument, with None for what cannot be differentiated.

    Raises:
        TypeError: if an argument is of another type; when called, if `func` returns no floating
            scalar, or if there is nothing to differentiate or split.
        ValueError: if an option has no such value, or two contradict each other, as a reduce dtype
            in which nothing is summed; when called, if they do not fit the call, or are float64
            while JAX's 64-bit types are disabled.

    Warns:
        UserWarning: if a part of the policy has no effect, rounds twice, or needs a loss scale;
            when called, if parameters are stored in 16 bits, against the policy.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> params, x = {"w": jnp.ones(3)}, jnp.ones((2, 3))
        >>> loss_scale = jmpx.DynamicLossScale(2**12)
        >>> grad_fn = jmpx.value_and_grad(loss_fn, loss_scale, policy="c=f16")
        >>> value, loss_scale, grads_finite, grads = grad_fn(params, x)
        >>> value, grads_finite, grads["w"]
        (Array(9., dtype=float32), Array(True, dtype=bool), Array([6., 6., 6.], dtype=float32))
    """
    given = policy, grad_dtype, uncast, state_argnum, microbatches, batch, over
    return _gradient_function(Options(func, loss_scale, has_aux, *given))


@overload
def grad(
    func: Callable[P, ArrayLike],
    loss_scale: ScalingT,
    has_aux: Literal[False] = False,
    *,
    policy: MixedPrecisionLike,
    grad_dtype: DTypeLike | None = None,
    uncast: UncastLike = (),
    state_argnum: int | None = None,
    microbatches: int | None = None,
    batch: Batch | None = None,
    over: Over | AxisName | None = None,
) -> Callable[P, Gradients[ScalingT]]: ...


@overload
def grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    loss_scale: ScalingT,
    has_aux: Literal[True],
    *,
    policy: MixedPrecisionLike,
    grad_dtype: DTypeLike | None = None,
    uncast: UncastLike = (),
    state_argnum: int | None = None,
    microbatches: int | None = None,
    batch: Batch | None = None,
    over: Over | AxisName | None = None,
) -> Callable[P, GradientsAndAux[ScalingT, AuxT]]: ...


def grad(
    func: Callable[P, ValueT],
    loss_scale: ScalingT,  # pyright: ignore[reportInvalidTypeVarUse]: as of `value_and_grad`
    has_aux: bool = False,
    *,
    policy: MixedPrecisionLike | None = None,
    grad_dtype: DTypeLike | None = None,
    uncast: UncastLike = (),
    state_argnum: int | None = None,
    microbatches: int | None = None,
    batch: Batch | None = None,
    over: Over | AxisName | None = None,
) -> Callable[..., PyTree]:
    """Makes a function that computes gradients in mixed precision, without their loss.

    The arguments, errors and warnings are those of `value_and_grad`.

    Returns:
        A function with the arguments of `func`. It returns a `Gradients`, which unpacks as
        `(loss_scale, grads_finite, grads)`, or with `has_aux` a `GradientsAndAux`, which unpacks as
        `(loss_scale, grads_finite, grads, aux)`.
    """
    given = policy, grad_dtype, uncast, state_argnum, microbatches, batch, over
    return without_value(_gradient_function(Options(func, loss_scale, has_aux, *given)), has_aux)


def _gradient_function(options: Options) -> Callable[..., ValueAndGradients[PyTree, PyTree]]:
    run = functools.partial(differentiate, options)

    @functools.wraps(options.func, updated=())  # A module's __dict__ would be its parameters.
    def wrapper(*args: PyTree, **kwargs: PyTree) -> ValueAndGradients[PyTree, PyTree]:
        return call(run, options.func, args, kwargs)

    return wrapper


def without_value(
    run: Callable[P, ValueAndGradients[PyTree, PyTree]], has_aux: bool
) -> Callable[P, PyTree]:
    """Makes a gradient function that leaves out its loss."""

    @functools.wraps(run, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        value, new_scale, grads_finite, grads = run(*args, **kwargs)
        if has_aux:
            return GradientsAndAux(new_scale, grads_finite, grads, aux=value[1])
        return Gradients(new_scale, grads_finite, grads)

    return wrapper
