"""Gradients in mixed precision, with loss scaling, of a function of any pytree."""

import dataclasses
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from jmpx._casts import at_least_float32
from jmpx._contexts import parameters_cast
from jmpx._leaves import is_array, is_floating, is_inexact_array
from jmpx._loss_scale import LossScale, NoOpLossScale, is_at_least_1
from jmpx._policy import Policy, get_policy
from jmpx._sharding import without_shards
from jmpx._stateful import Pure, call, sparing
from jmpx._tree import all_finite


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Policy | str | None = None,
    axis_name: Any = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Makes a function that computes a loss and its gradients in mixed precision.

    Follows MPX's `filter_value_and_grad` (arXiv 2507.03312, section 3.4) in names, order and
    meaning, for any pytree and any of the three loss scales. The returned function

    1. casts the floating leaves of its arguments to the policy's compute dtype,
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
        policy: a policy or a policy string, of which the compute dtype is used; None means `half`,
            which is found out when the returned function is called. Pass "full" where something
            inside `func`, such as a policy map, Haiku's class policies or `jmpx.autocast`, does the
            casts: it would cast parameters that are rounded already.
        axis_name: the name (or names) of the mapped axis of `jax.pmap`, `jax.shard_map` or
            `jax.vmap` over which value and gradients are averaged, in float32. The parameters are
            to be replicas, each of which may differ, and no shards that `func` gathers; the flag
            and the loss scale are then the same on all of it.
        uncast_argnums: the positions of arguments that are left as they are, such as targets that
            float16 cannot hold, or positions in a sequence; negative ones count from the end. With
            the first argument left uncast, `func` casts the parameters itself.
        uncast_argnames: the names of such arguments.

    Returns:
        A function with the arguments of `func` that returns `(value, scaling, grads_finite, grads)`
        or, with `has_aux`, `((value, aux), scaling, grads_finite, grads)`: the unscaled loss in
        float32 of shape (); `aux` as `func` made it; the loss scale of the next step; a bool array
        of shape (); and gradients of the structure, shapes and dtypes of the first argument, with
        None for what cannot be differentiated; for an NNX module, an `nnx.State` of its parameters.

    Raises:
        TypeError: if `func`, `scaling` or `policy` is not what it should be; when called, if there
            is no argument to differentiate, if `func` does not return a floating scalar, or if it
            gathers an array of its first argument over `axis_name`.
        ValueError: if `policy` is not a policy string; when called, if an argument to leave uncast
            is none of `func`, or if `func` changes an NNX module that it closes over.

    Warns:
        UserWarning: when called, if something inside `func` casts what has been cast to 16 bits.

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
    find_policy, uncast = _policy_finder(policy), _Uncast.of(func, uncast_argnums, uncast_argnames)
    wide = at_least_float32 if use_mixed_precision else _identity

    def differentiate(pure: Pure, state: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        params, merge = _partition(args)
        to_compute = find_policy().cast_to_compute if use_mixed_precision else _identity
        cast = uncast.exempt(sparing(to_compute))
        scale = scaling if use_mixed_precision else NoOpLossScale()

        def scaled_loss(params: list[Any]) -> tuple[Any, tuple[Any, Any, Any]]:
            model = merge(params)
            inputs, options = cast((model, *args[1:]), kwargs)
            with parameters_cast(_are_rounded(model, inputs[0])) as casts_inside:
                result, updates = pure(state, *inputs, **options)
            _warn_of_casts(casts_inside)
            value, aux = _loss_and_aux(result, has_aux)
            value = wide(value)
            return scale.scale(value), (value, aux, updates)

        run: Callable[[list[Any]], Any] = scaled_loss
        if axis_name is not None:
            params = _make_varying(params, axis_name)
            run = without_shards(scaled_loss, params, _paths(args[0]), axis_name)
        (_, (value, aux, updates)), scaled = jax.value_and_grad(run, has_aux=True)(params)
        grads = scale.unscale([wide(grad) for grad in scaled])
        if axis_name is not None:
            value, grads = jax.lax.pmean((value, grads), axis_name)
        grads = [grad.astype(param.dtype) for grad, param in zip(grads, params, strict=True)]

        grads_finite, new_scaling = jnp.array(True), scaling
        if use_mixed_precision:
            # As they arrived, without the product, where unscaling cannot change the answer.
            as_arrived = axis_name is None and is_at_least_1(scaling)
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
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
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
        uncast_argnums: the positions of arguments that are left as they are.
        uncast_argnames: the names of such arguments.

    Returns:
        A function with the arguments of `func` that returns `(scaling, grads_finite, grads)`, with
        `has_aux` `(scaling, grads_finite, grads, aux)`.

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
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result, new_scaling, grads_finite, grads = value_and_grad(*args, **kwargs)
        aux = (result[1],) if has_aux else ()
        return new_scaling, grads_finite, grads, *aux

    return wrapper


def _identity(x: Any) -> Any:
    return x


def _policy_finder(policy: Policy | str | None) -> Callable[[], Policy]:
    """Returns what gives the policy when the gradient function is called.

    Only `half` waits until then, because it starts JAX's backend; mistakes are found at once.
    """
    if policy is None:
        policy = "half"
    if not isinstance(policy, str) or not _HALF.search(policy):
        policy = get_policy(policy)
    else:
        try:
            get_policy(_HALF.sub("float16", policy))
        except ValueError:
            get_policy(policy)  # raises the same, of the string as it was written
    return lambda: get_policy(policy)


_HALF = re.compile(r"\bhalf\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class _Uncast:
    """The arguments that a gradient function leaves as they are.

    Args:
        numbers: their positions.
        names: their names.
        positional: the names of the arguments that the function takes by position, in order.
        known: the names of all arguments of the function.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    positional: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, func: Callable[..., Any], argnums: Any, argnames: Any) -> "_Uncast":
        numbers = _as_tuple(argnums, Integral, "Expected uncast_argnums to be an int or several")
        names = _as_tuple(argnames, str, "Expected uncast_argnames to be a string or several")
        try:
            parameters = inspect.signature(func).parameters.values() if numbers or names else ()
        except (TypeError, ValueError):  # of a function that is not written in Python
            parameters = ()
        by_position = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        known = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            numbers, names, *(tuple(p.name for p in group) for group in (by_position, known))
        )

    def exempt(self, cast: Callable[[Any], Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns what casts the arguments of a call but for these."""

        def cast_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            numbers, names = self._places(args, kwargs)
            left = {number: args[number] for number in numbers}
            left_by_name = {name: kwargs[name] for name in names}
            args = tuple(None if i in left else arg for i, arg in enumerate(args))
            args, kwargs = cast((args, {k: v for k, v in kwargs.items() if k not in names}))
            return tuple(left.get(i, arg) for i, arg in enumerate(args)), {**kwargs, **left_by_name}

        return cast_others

    def _places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], set[str]]:
        """Returns where they stand in a call: which by position, which by name."""
        numbers, names = set(), set(self.names)
        for number in self.numbers:
            if -len(args) <= number < len(args):
                numbers.add(number % len(args))
            elif 0 <= number < len(self.positional):
                names.add(self.positional[number])
            else:
                raise ValueError(
                    f"Cannot leave argument {number} uncast, as uncast_argnums says, in a call "
                    f"with {len(args)} positional arguments: count from 0, or name it in "
                    "uncast_argnames."
                )
        for name in names - kwargs.keys():
            if name in self.positional[: len(args)]:
                numbers.add(self.positional.index(name))
            elif name not in self.known:
                raise ValueError(
                    f"Cannot leave argument {name!r} uncast, as uncast_argnames says, which is "
                    "neither passed nor an argument of the function: expected one of "
                    f"{sorted({*self.known, *kwargs})}."
                )
        return numbers, names & kwargs.keys()


def _as_tuple(value: Any, kind: type, expected: str) -> tuple[Any, ...]:
    several = isinstance(value, Iterable) and not isinstance(value, str)
    values = tuple(value) if several else (value,)
    if any(not isinstance(value, kind) or isinstance(value, bool) for value in values):
        raise TypeError(f"{expected}, got {value!r}: say which arguments are not to be cast.")
    return values


def _are_rounded(before: Any, after: Any) -> bool:
    """Whether a cast has taken any floating leaf to fewer bits, 16 at most."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=False)
    return any(
        is_floating(new) and new.dtype.itemsize < min(4, old.dtype.itemsize)
        for old, new in pairs
        if is_floating(old)
    )


def _warn_of_casts(casts: Iterable[str]) -> None:
    """Warns of what has cast inside of a function whose arguments had been cast to 16 bits."""
    names = " and ".join(casts)
    if not names:
        return
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"The gradient function has cast its arguments to 16 bits before {names} inside of it "
        "casts them again, so that parts which are to run in float32 get rounded parameters: pass "
        'policy="full" to the gradient function, or leave its first argument uncast by '
        "uncast_argnums=0.",
        stacklevel=level,
    )


# The files of jmpx and JAX, which are on the stack between the warning and the user's call.
_INTERNAL = (os.path.dirname(__file__) + os.sep, os.path.dirname(jax.__file__) + os.sep)


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


def _paths(tree: Any) -> list[str]:
    """Returns what to call the differentiable arrays of a pytree in an error message."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        jax.tree_util.keystr(path) or "array" for path, leaf in leaves if is_inexact_array(leaf)
    ]


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
