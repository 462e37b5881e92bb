"""Casts of arguments and results: `cast_function` and `force_full_precision`."""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name, matmul_region
from jmpx._base.messages import check_runs_at_once, describe
from jmpx._base.stateful import (
    Arguments,
    Changes,
    Keywords,
    Leaf,
    PureFunction,
    apply,
    call,
    skip_kept,
)
from jmpx._base.trees import PyTree, cast_tree, holds, is_floating
from jmpx._jaxprs.gathers import summed_in_float32
from jmpx._jaxprs.marks import full_precision
from jmpx._jaxprs.passed_on import without_passed_on

P = ParamSpec("P")
R = TypeVar("R")


def cast_function(
    func: Callable[P, R], dtype: DTypeLike, return_dtype: DTypeLike | None = None
) -> Callable[P, R]:
    """Makes a function run on arguments of one dtype and return another.

    Follows MPX's `cast_function` (arXiv 2507.03312). A callable that is itself a pytree, such as an
    Equinox module, is cast, too.

    Args:
        func: any callable of pytrees.
        dtype: what the floating leaves of all arguments are cast to.
        return_dtype: what those of the result are cast to; None means `dtype`.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a dtype is not a floating one.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> f = jmpx.mpx.cast_function(lambda x: {"y": 2 * x}, jnp.bfloat16, jnp.float32)
        >>> f(jnp.ones(3))["y"].dtype.name
        'float32'
    """
    inside = as_dtype(dtype)
    return _recast(func, inside, inside if return_dtype is None else as_dtype(return_dtype))


def force_full_precision(
    func: Callable[P, R], return_dtype: DTypeLike | None = None
) -> Callable[P, R]:
    """Makes a function run in float32, for arguments of any floating dtype.

    Follows MPX's `force_full_precision` (arXiv 2507.03312). Use it for sums, means, norms, softmax
    and other functions that overflow or lose digits in 16 bits. Works as a decorator. A callable
    that is a pytree is cast, too.

    Args:
        func: any callable of pytrees.
        return_dtype: what the floating leaves of the result are cast to; None means the widest
            dtype of the floating arguments, if there are any.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `return_dtype` is not a floating dtype.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> x = jnp.full(4096, 100, jnp.float16)  # sums to 409600, beyond float16
        >>> mean = jmpx.force_full_precision(lambda x: x.sum() / x.size)
        >>> mean(x)
        Array(100., dtype=float16)
    """
    return _recast(func, jnp.float32, None if return_dtype is None else as_dtype(return_dtype))


def _recast(func: Callable[P, R], inside: DTypeLike, outside: DTypeLike | None) -> Callable[P, R]:
    """Casts the arguments of a function and its result; None means the widest of the arguments."""
    if not callable(func):
        raise TypeError(
            f"Expected a function to wrap, got {describe(func)}: pass the callable itself."
        )
    check_runs_at_once(func)

    def recast(
        pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords
    ) -> tuple[PyTree, Changes]:
        return_dtype = _widest_floating((args[1:], kwargs)) if outside is None else outside
        args, kwargs = skip_kept(lambda tree: cast_tree(tree, inside))((args, kwargs))
        scope = full_precision() if inside is jnp.float32 else contextlib.nullcontext()
        with scope, matmul_region(None, inside), summed_in_float32():
            result, updates = pure(state, *args, **kwargs)
            updates = refuse_set(pure, state, args, kwargs, updates)
        return result if return_dtype is None else cast_tree(result, return_dtype), updates

    @functools.wraps(func, updated=())  # A module's __dict__ would be its parameters.
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return call(recast, apply, (func, *args), kwargs)

    return wrapper


def _widest_floating(tree: PyTree) -> DTypeLike | None:
    """Returns the widest dtype of the floating leaves, or None if there are none."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(tree) if is_floating(leaf)}
    width = max((dtype.itemsize for dtype in dtypes), default=0)
    widest = [dtype for dtype in dtypes if dtype.itemsize == width]
    # Neither of float16 and bfloat16 holds the other's numbers.
    return jnp.float32 if len(widest) > 1 else next(iter(widest), None)


def refuse_set(
    pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords, changes: Changes
) -> Changes:
    """Returns the changes of a call on cast arguments, of which none stores a rounded parameter.

    Raises:
        ValueError: if the function has set a parameter that it was given rounded.
    """
    given, stored = pure.given(state, args, kwargs), changes.record.leaves

    def rounded() -> list[int]:
        new = changes.new_parameters().values()
        pairs = ((place, given[place], stored[place]) for place in new)
        return [
            n for n, low, leaf in pairs if is_floating(leaf) and not holds(low.dtype, leaf.dtype)
        ]

    if rounded():
        changes = without_passed_on(
            lambda pure, state, args, kwargs: pure(state, *args, **kwargs),
            *(pure, state, args, kwargs, changes),
        )
    for place in rounded():
        dtypes = dtype_name(given[place].dtype), dtype_name(stored[place].dtype)
        raise ValueError(
            f"Cannot set a parameter of shape {given[place].shape} inside of a function whose "
            f"arguments are cast, where it is a copy in {dtypes[0]} of the one stored in "
            f"{dtypes[1]}: set it outside of the function, or apply the policy with by=operations."
        )
    return changes
