"""Gradients in mixed precision, with loss scaling, of a function of any pytree."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmpx._loss_scale import LossScale, NoOpLossScale, for_one_step, never_enlarges
from jmpx._policy import Policy, get_policy
from jmpx._stateful import Pure, call, sparing
from jmpx._tree import all_finite, is_array, is_floating, is_inexact_array, widen


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Policy | str | None = None,
    axis_name: Any = None,
) -> Callable[..., Any]:
    """Makes a function that computes a loss and its gradients in mixed precision.

    Follows MPX's `filter_value_and_grad` (arXiv 2507.03312, section 3.4) in names, order and
    meaning, for any pytree and any of the three loss scales. The returned function

    1. casts the floating leaves of all arguments to the policy's compute dtype,
    2. runs `func` and scales the loss, which it takes to float32 first,
    3. differentiates with respect to the first argument, backwards in the compute dtype,
    4. takes the gradients to float32, divides them by the scale of step 2, and averages them over
       `axis_name`,
    5. checks once whether all of them are finite, and adjusts the loss scale by that.

    Objects of Flax's NNX among the arguments get their new state back, as from
    `nnx.value_and_grad`. Of their variables `nnx.Param`s are cast and, in the first argument,
    differentiated; all others, such as running statistics, arrive and come back in the dtype in
    which they are stored.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar; with `has_aux` a pair of
            a loss and any pytree. Its first argument is differentiated: the floating and complex
            arrays in it, whatever else the pytree holds.
        scaling: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast, scaled or checked: the plain gradient.
        policy: a policy or a policy string, of which the compute dtype is used; None means `half`.
            Pass "full" where something inside `func`, such as Haiku's class policies, does the
            casts.
        axis_name: the name (or names) of the mapped axis of `jax.pmap`, `jax.shard_map` or
            `jax.vmap` over which value and gradients are averaged, in float32. The parameters are
            to be the same on all of it, and so are then flag and loss scale.

    Returns:
        A function with the arguments of `func` that returns `(value, scaling, grads_finite, grads)`
        or, with `has_aux`, `((value, aux), scaling, grads_finite, grads)`: the unscaled loss in
        float32 of shape (); `aux` as `func` made it; the loss scale of the next step; a bool array
        of shape (); and gradients of the structure, shapes and dtypes of the first argument, with
        None for what cannot be differentiated; for an NNX module, an `nnx.State` of its parameters.

    Raises:
        TypeError: if `func`, `scaling` or `policy` is not what it should be; when called, if there
            is no argument to differentiate or `func` does not return a floating scalar.
        ValueError: if `policy` is not a policy string; when called, if `func` changes an NNX module
            that it closes over.

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
    _check_arguments(func, scaling)
    if use_mixed_precision:
        cast = sparing(get_policy("half" if policy is None else policy).cast_to_compute)
        wide = widen
    else:
        cast, wide = sparing(_identity), _identity

    def differentiate(pure: Pure, state: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        params, merge = _partition(args)
        scale = for_one_step(scaling) if use_mixed_precision else NoOpLossScale()
        if axis_name is not None:
            params = _make_varying(params, axis_name)

        def scaled_loss(params: list[Any]) -> tuple[Any, tuple[Any, Any, Any]]:
            inputs, options = cast(((merge(params), *args[1:]), kwargs))
            result, updates = pure(state, *inputs, **options)
            value, aux = _loss_and_aux(result, has_aux)
            value = wide(value)
            return scale.scale(value), (value, aux, updates)

        (_, (value, aux, updates)), scaled = jax.value_and_grad(scaled_loss, has_aux=True)(params)
        grads = scale.unscale([wide(grad) for grad in scaled])
        if axis_name is not None:
            value, grads = jax.lax.pmean((value, grads), axis_name)
        grads = [grad.astype(param.dtype) for grad, param in zip(grads, params, strict=True)]

        grads_finite, new_scaling = jnp.array(True), scaling
        if use_mixed_precision:
            # As they arrived, without the product, where unscaling cannot change the answer.
            as_arrived = axis_name is None and never_enlarges(scaling)
            grads_finite = all_finite(scaled if as_arrived else grads)
            new_scaling = scaling.adjust(grads_finite)
        result = (value, aux) if has_aux else value
        return (result, new_scaling, grads_finite, merge(grads, others=None)), updates

    @functools.wraps(func, updated=())  # not the __dict__: a module's would be its parameters
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(differentiate, func, args, kwargs)

    return wrapper


def filter_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Policy | str | None = None,
    axis_name: Any = None,
) -> Callable[..., Any]:
    """Makes a function that computes gradients in mixed precision.

    Follows MPX's `filter_grad` (arXiv 2507.03312, section 3.4). The same as
    `filter_value_and_grad`, which explains it all, without the value.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar; with `has_aux` a pair of
            a loss and any pytree.
        scaling: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast, scaled or checked: the plain gradient.
        policy: a policy or a policy string, of which the compute dtype is used; None means `half`.
        axis_name: the name (or names) of the mapped axis over which gradients are averaged.

    Returns:
        A function with the arguments of `func` that returns `(scaling, grads_finite, grads)`, with
        `has_aux` `(scaling, grads_finite, grads, aux)`.

    Raises:
        TypeError: as `filter_value_and_grad`.
        ValueError: as `filter_value_and_grad`.

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
        func, scaling, has_aux, use_mixed_precision, policy=policy, axis_name=axis_name
    )

    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result, new_scaling, grads_finite, grads = value_and_grad(*args, **kwargs)
        aux = (result[1],) if has_aux else ()
        return new_scaling, grads_finite, grads, *aux

    return wrapper


def _identity(x: Any) -> Any:
    return x


def _check_arguments(func: Any, scaling: Any) -> None:
    if not callable(func):
        raise TypeError(
            f"Expected a function to differentiate, got {func!r}: pass the callable itself."
        )
    if not all(hasattr(scaling, name) for name in ("scale", "unscale", "adjust")):
        raise TypeError(
            f"Expected a loss scale as the second argument, got {scaling!r}: pass for example "
            "jmpx.NoOpLossScale() or jmpx.DynamicLossScale()."
        )


def _partition(args: tuple[Any, ...]) -> tuple[list[Any], Callable[..., Any]]:
    """Takes the differentiable arrays out of the first argument.

    Returns:
        The arrays, and a function that puts such a list back in their places, between what else the
        argument holds or, with `others=None`, between Nones.
    """
    if not args:
        raise TypeError(
            "Expected the parameters to differentiate as the first positional argument, got none: "
            "pass them by position."
        )
    leaves, treedef = jax.tree.flatten(args[0])
    places = [place for place, leaf in enumerate(leaves) if is_inexact_array(leaf)]

    def merge(arrays: list[Any], others: list[Any] | None = leaves) -> Any:
        merged: list[Any] = [None] * len(leaves) if others is None else list(others)
        for place, array in zip(places, arrays, strict=True):
            merged[place] = array
        return treedef.unflatten(merged)

    # As JAX arrays, whose dtype is the gradient's: NumPy's float64 is float32 without x64.
    return [jnp.asarray(leaves[place]) for place in places], merge


def _make_varying(arrays: list[Any], axis_name: Any) -> list[Any]:
    """Returns the same arrays, as ones that may differ along the axis.

    Under `jax.shard_map`, the gradient of a parameter that is the same on all of the axis is summed
    over it at once, in the 16 bits that it arrives in; that of a varying one is left to us. To
    select by the axis index makes it varying on every version (the explicit cast is `lax.pvary` on
    JAX 0.7 and `lax.pcast` on 0.10), compiles to nothing, and does no harm under `jax.pmap` and
    `jax.vmap`.
    """
    here = jax.lax.axis_index(axis_name) >= 0
    return [jax.lax.select(here, array, array) for array in arrays]


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Splits what the user's function returned, and checks that its loss is one."""
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
