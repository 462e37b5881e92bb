"""Gradients in mixed precision, with loss scaling, of a function of any pytree."""

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar, Unpack, overload

from jax.typing import ArrayLike

from jmpx._base.leaves import PyTree
from jmpx._base.stateful import call
from jmpx._scales.kinds import LossScale
from jmpx._steps.differentiation import differentiate
from jmpx._steps.options import GradientOptions, Options, with_options_spelled
from jmpx._steps.results import Gradients, GradientsAndAux, ValueAndGradients

P = ParamSpec("P")
AuxT = TypeVar("AuxT")
ValueT = TypeVar("ValueT")
ScalingT = TypeVar("ScalingT", bound=LossScale)


@with_options_spelled
def filter_value_and_grad(
    func: Callable[P, ValueT],
    scaling: ScalingT,
    has_aux: bool = False,
    **options: Unpack[GradientOptions],
) -> Callable[P, ValueAndGradients[ValueT, ScalingT]]:
    """Makes a function that computes a loss and its gradients in mixed precision.

    It casts the arguments of `func` by the policy, scales the loss in float32, differentiates it
    with respect to the first argument, unscales the gradients in float32, checks once whether all
    are finite, and adjusts the loss scale. NNX modules among the arguments get their new state. If
    a gradient is not finite and there is a loss scale, model state stays as it was; select other
    state in aux yourself, with `jmpx.select_tree`.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar, or `(loss, aux)`. The
            floating and complex arrays in its first argument are differentiated.
        scaling: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        policy: anything that `jmpx.apply_policy` takes; None means `half`. Its reduce dtype is the
            one in which gradients are summed over devices.
        grad_dtype: the dtype of the gradients of floating parameters; None means the dtype of each
            parameter. With float32, 16-bit and 8-bit parameters get gradients that were not
            rounded.
        uncast: the position or the name of an argument that is not cast, or several, such as
            targets that float16 cannot hold. Negative positions count from the end. With
            `by=modules`, the outermost module gets them so, and modules inside cast as ever.
        state_argnum: the position of model state whose new value `func` returns as its aux, or as
            the first element of an aux tuple. It is neither cast nor split.
        batch: a `jmpx.Batch`: micro-batches, or a batch that `jax.jit` splits over devices.
        over: a `jmpx.Over`: the mapped axis over which to average value and gradients.

    Returns:
        A function with the arguments of `func`. It returns a `ValueAndGradients`, which unpacks as
        `(value, scaling, grads_finite, grads)`: the unscaled loss in float32 (with `has_aux`,
        `(loss, aux)`), the next loss scale, a bool array of shape (), and gradients of the
        structure of the first argument, with None for what cannot be differentiated.

    Raises:
        TypeError: if an option is unknown or of another type; when called, if `func` returns no
            floating scalar, or if there is nothing to differentiate or to split.
        ValueError: if an option has no such value, or two contradict each other; when called, if
            they do not fit the call, or are float64 while JAX's 64-bit types are disabled.

    Warns:
        UserWarning: if a part of the policy has no effect, rounds twice, or needs a loss scale;
            when called, if parameters are stored in 16 bits, against the policy.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> params, x, scaling = {"w": jnp.ones(3)}, jnp.ones((2, 3)), jmpx.DynamicLossScale(2**12)
        >>> grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy="c=f16")
        >>> value, scaling, grads_finite, grads = grad_fn(params, x)
        >>> value, grads_finite, grads["w"]
        (Array(9., dtype=float32), Array(True, dtype=bool), Array([6., 6., 6.], dtype=float32))
    """
    return value_and_gradients_of(Options(func, scaling, has_aux, True, **options))


@overload
def filter_grad(
    func: Callable[P, ArrayLike],
    scaling: ScalingT,
    has_aux: Literal[False] = False,
    **options: Unpack[GradientOptions],
) -> Callable[P, Gradients[ScalingT]]: ...


@overload
def filter_grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    scaling: ScalingT,
    has_aux: Literal[True],
    **options: Unpack[GradientOptions],
) -> Callable[P, GradientsAndAux[ScalingT, AuxT]]: ...


@with_options_spelled
def filter_grad(
    func: Callable[P, ValueT],
    scaling: ScalingT,  # pyright: ignore[reportInvalidTypeVarUse]: as of `filter_value_and_grad`
    has_aux: bool = False,
    **options: Unpack[GradientOptions],
) -> Callable[..., PyTree]:
    """Makes a function that computes gradients in mixed precision, without their loss.

    The arguments, errors and warnings are those of `filter_value_and_grad`.

    Returns:
        A function with the arguments of `func`. It returns a `Gradients`, which unpacks as
        `(scaling, grads_finite, grads)`, or with `has_aux` a `GradientsAndAux`, which unpacks as
        `(scaling, grads_finite, grads, aux)`.
    """
    return gradients_of(Options(func, scaling, has_aux, True, **options))


def value_and_gradients_of(options: Options) -> Callable[..., ValueAndGradients[PyTree, PyTree]]:
    """Returns the function that computes a loss and its gradients."""
    run = functools.partial(differentiate, options)

    @functools.wraps(options.func, updated=())  # A module's __dict__ would be its parameters.
    def wrapper(*args: PyTree, **kwargs: PyTree) -> ValueAndGradients[PyTree, PyTree]:
        return call(run, options.func, args, kwargs)

    return wrapper


def gradients_of(options: Options) -> Callable[..., PyTree]:
    """Returns the function that computes gradients, without their loss."""
    value_and_grad = value_and_gradients_of(options)

    @functools.wraps(options.func, updated=())
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, new_scaling, grads_finite, grads = value_and_grad(*args, **kwargs)
        if options.has_aux:
            return GradientsAndAux(new_scaling, grads_finite, grads, aux=value[1])
        return Gradients(new_scaling, grads_finite, grads)

    return wrapper
