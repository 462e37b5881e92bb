"""Gradients in mixed precision, with loss scaling, of a function of any pytree."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmpx._casts import at_least_float32
from jmpx._gradient_arguments import Uncast, check_arguments, make_varying, partition, paths_of
from jmpx._gradient_policy import casts_checked, precision_finder, warning_of_convolutions
from jmpx._gradient_results import Gradients, GradientsAndAux, ValueAndGradients
from jmpx._leaves import PyTree, is_array, is_floating
from jmpx._loss_scale import LossScale, NoOpLossScale, is_at_least_1
from jmpx._matmul import matmul_precision
from jmpx._nnx_objects import sparing
from jmpx._policy_map import PolicyMapLike
from jmpx._reduction import unscaled_mean
from jmpx._sharding import without_shards
from jmpx._stateful import Pure, call
from jmpx._tree import AxisName, all_finite

P = ParamSpec("P")
T = TypeVar("T")
AuxT = TypeVar("AuxT")
ScalingT = TypeVar("ScalingT", bound=LossScale)


@overload
def filter_value_and_grad(
    func: Callable[P, ArrayLike],
    scaling: ScalingT,
    has_aux: Literal[False] = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    axis_name: AxisName | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, ValueAndGradients[jax.Array, ScalingT]]: ...


@overload
def filter_value_and_grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    scaling: ScalingT,
    has_aux: Literal[True],
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    axis_name: AxisName | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, ValueAndGradients[tuple[jax.Array, AuxT], ScalingT]]: ...


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    axis_name: AxisName | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[..., ValueAndGradients[Any, Any]]:
    """Makes a function that computes a loss and its gradients in mixed precision.

    Follows MPX's `filter_value_and_grad` (arXiv 2507.03312, section 3.4) in names, order and
    meaning, for any pytree and any of the three loss scales. The returned function

    1. casts the floating leaves of its arguments to the policy's compute dtype,
    2. runs `func` and scales the loss, which it takes to float32 first,
    3. differentiates with respect to the first argument, backwards in the compute dtype,
    4. takes the gradients to float32, divides them by the scale of step 2, and averages them over
       `axis_name`; if the policy sets reduce, it sums them in that dtype first, and divides then,
    5. checks once whether all of them are finite, and adjusts the loss scale by that.

    Objects of Flax's NNX among the arguments get their new state, as from `nnx.value_and_grad`.
    Their `nnx.Param`s are cast and, in the first argument, differentiated. Their other variables,
    such as running statistics, keep the dtype in which they are stored.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar; with `has_aux` a pair of
            a loss and any pytree. The floating and complex arrays in its first argument are
            differentiated; other leaves may stand beside them.
        scaling: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast, scaled or checked, no field of the policy
            counts, and the gradient is the plain one, averaged in its own dtype.
        policy: a policy, or anything else that `get_policy` takes, whose compute, matmul and reduce
            are used; None means `half`, whose dtype is looked up when the returned function is
            called. Or a policy map, or a string or mapping with rules, by which something inside of
            `func` casts: the adapters, Haiku's class policies or `jmpx.autocast`. Then nothing is
            cast here, where parameters would be rounded before their rule is known, and its reduce
            alone is used. A word of matmul holds forward and backward; a dot algorithm only if
            compute has 32 bits or more, because products of 16 bits would take it, too.
        axis_name: the name (or names) of the mapped axis of `jax.pmap`, `jax.shard_map` or
            `jax.vmap` over which value and gradients are averaged: the value in float32, the
            gradients in the policy's reduce; unset, in float32 or the wider dtype of a parameter.
            In float16 they are divided by the number of devices before they are summed. They are
            scaled then, so that small ones do not underflow, and a sum that overflows is seen by
            step 5. The flag and the loss scale are the same on the whole axis. The parameters have
            to be replicas, which may differ, and no shards that `func` gathers.
        uncast_argnums: the positions of arguments that are not cast, such as targets that float16
            cannot hold, or positions in a sequence. Negative ones count from the end. If the first
            argument is not cast, `func` casts the parameters itself.
        uncast_argnames: the names of arguments that are not cast.

    Returns:
        A function with the arguments of `func` that returns a `ValueAndGradients`, which unpacks as
        `(value, scaling, grads_finite, grads)` or, with `has_aux`, as
        `((value, aux), scaling, grads_finite, grads)`: the unscaled loss in float32 of shape ();
        `aux` as `func` made it; the loss scale of the next step; a bool array of shape (); and
        gradients of the structure, shapes and dtypes of the first argument, with None for what
        cannot be differentiated. For an NNX module, they are an `nnx.State` of its parameters.

    Raises:
        TypeError: if `func` is not callable, `scaling` no loss scale or `policy` no policy; when
            called, if there is no argument to differentiate, if `func` does not return a floating
            scalar, or if it gathers an array of its first argument over `axis_name`.
        ValueError: if `policy` is not a string of policies or maps; when called, if
            `uncast_argnums` or `uncast_argnames` gives an argument that `func` does not have, if
            `func` changes an NNX module that it closes over, or if compute or reduce is float64
            while JAX's 64-bit types are disabled.

    Warns:
        UserWarning: if `policy` sets reduce and there is no `axis_name`, or it sets a dot algorithm
            for 16 bits; when called, if parameters that were cast to 16 bits are cast again in
            `func`, if `policy` is a map and nothing in `func` casts, or if `func` has a convolution
            under a dot algorithm, which JAX ignores there.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> params, x = {"w": jnp.ones(3)}, jnp.ones((2, 3))
        >>> scaling = jmpx.DynamicLossScale(2**12)
        >>> grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy="c=f16")
        >>> value, scaling, grads_finite, grads = grad_fn(params, x)
        >>> value, grads_finite, grads["w"]
        (Array(9., dtype=float32), Array(True, dtype=bool), Array([6., 6., 6.], dtype=float32))
    """
    check_arguments(func, scaling)
    find_precision = precision_finder(policy, use_mixed_precision, axis_name)
    uncast = Uncast.of(func, uncast_argnums, uncast_argnames)
    to_float32 = at_least_float32 if use_mixed_precision else _identity

    def differentiate(
        pure: Pure, state: list[Any], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[ValueAndGradients[Any, Any], list[Any]]:
        params, merge = partition(args)
        precision = find_precision()
        cast = uncast.exempt(sparing(precision.cast))
        scale = scaling if use_mixed_precision else NoOpLossScale()

        def scaled_loss(params: list[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, Any, Any]]:
            model = merge(params)
            inputs, options = cast((model, *args[1:]), kwargs)
            with casts_checked(precision, func, model, inputs[0]):
                result, updates = pure(state, *inputs, **options)
            value, aux = _loss_and_aux(result, has_aux)
            value = to_float32(value)
            return scale.scale(value), (value, aux, updates)

        run = scaled_loss
        with matmul_precision(precision.matmul):  # around all: a custom_vjp is traced backward, too
            if axis_name is not None:
                params = make_varying(params, axis_name)
                run = without_shards(run, params, paths_of(args[0]), axis_name)
            run = warning_of_convolutions(run, params, precision.matmul)
            (_, (value, aux, updates)), scaled = jax.value_and_grad(run, has_aux=True)(params)
        grads = [to_float32(grad) for grad in scaled]
        value, grads = unscaled_mean(value, grads, scale, axis_name, precision.reduce_dtype)
        grads = [grad.astype(param.dtype) for grad, param in zip(grads, params, strict=True)]

        grads_finite, new_scaling = jnp.array(True), scaling
        if use_mixed_precision:
            # Check the scaled gradients if the scale is at least 1: unscaling keeps them finite,
            # and this is cheaper.
            check_scaled = axis_name is None and is_at_least_1(scaling)
            grads_finite = all_finite(scaled if check_scaled else grads)
            new_scaling = scaling.adjust(grads_finite)
        result = (value, aux) if has_aux else value
        grads = merge(grads, others=None)
        return ValueAndGradients(result, new_scaling, grads_finite, grads), updates

    @functools.wraps(func, updated=())  # A module's __dict__ would be its parameters.
    def wrapper(*args: Any, **kwargs: Any) -> ValueAndGradients[Any, Any]:
        return call(differentiate, func, args, kwargs)

    return wrapper


@overload
def filter_grad(
    func: Callable[P, ArrayLike],
    scaling: ScalingT,
    has_aux: Literal[False] = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    axis_name: AxisName | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, Gradients[ScalingT]]: ...


@overload
def filter_grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    scaling: ScalingT,
    has_aux: Literal[True],
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    axis_name: AxisName | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, GradientsAndAux[ScalingT, AuxT]]: ...


def filter_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    axis_name: AxisName | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[..., Gradients[Any] | GradientsAndAux[Any, Any]]:
    """Makes a function that computes gradients in mixed precision.

    Follows MPX's `filter_grad` (arXiv 2507.03312, section 3.4). It does what
    `filter_value_and_grad` does, whose documentation says more, without the value.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar; with `has_aux` a pair of
            a loss and any pytree.
        scaling: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast, scaled or checked, and the gradient is the
            plain one.
        policy: a policy, or anything else that `get_policy` takes; or a policy map, by which `func`
            itself casts. None means `half`.
        axis_name: the name (or names) of the mapped axis over which gradients are averaged.
        uncast_argnums: the positions of arguments that are not cast.
        uncast_argnames: the names of arguments that are not cast.

    Returns:
        A function with the arguments of `func` that returns a `Gradients`, which unpacks as
        `(scaling, grads_finite, grads)`, or, with `has_aux`, a `GradientsAndAux`, which unpacks as
        `(scaling, grads_finite, grads, aux)`.

    Raises:
        TypeError: as `filter_value_and_grad`.
        ValueError: as `filter_value_and_grad`.

    Warns:
        UserWarning: as `filter_value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> loss_fn = lambda w: (2.0**-14 * (2.0**-14 * w)).sum()  # float16 ends at 2**-24
        >>> for scaling in jmpx.NoOpLossScale(), jmpx.StaticLossScale(2**14):
        ...     _, _, grad = jmpx.filter_grad(loss_fn, scaling, policy="c=f16")(jnp.ones(2))
        ...     float(grad[0]) == 2.0**-28
        False
        True
    """
    value_and_grad = filter_value_and_grad(
        func,
        scaling,
        has_aux,
        use_mixed_precision,
        policy=policy,
        axis_name=axis_name,
        uncast_argnums=uncast_argnums,
        uncast_argnames=uncast_argnames,
    )

    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Gradients[Any] | GradientsAndAux[Any, Any]:
        value, new_scaling, grads_finite, grads = value_and_grad(*args, **kwargs)
        if has_aux:
            return GradientsAndAux(new_scaling, grads_finite, grads, aux=value[1])
        return Gradients(new_scaling, grads_finite, grads)

    return wrapper


def _identity(x: T) -> T:
    return x


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Splits the result of the user's function, and checks that its loss is a floating scalar."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"Expected the function to return (loss, aux), as has_aux=True says, got {result!r}: "
            "return a pair, or leave has_aux out."
        )
    loss: Any
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, float) or (is_array(loss) and is_floating(loss) and loss.ndim == 0):
        return jnp.asarray(loss), aux
    got = f"{loss.dtype}{list(loss.shape)}" if is_array(loss) else repr(loss)
    raise TypeError(
        f"Expected the function to return a floating scalar as its loss, got {got}: reduce it, for "
        "example with jnp.mean, and return anything else through has_aux=True."
    )
