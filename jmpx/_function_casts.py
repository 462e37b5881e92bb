"""Casts around a function: its arguments on the way in, its results on the way out."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmpx._casts import cast_tree
from jmpx._dtypes import DTypeLike, as_dtype
from jmpx._leaves import is_floating
from jmpx._scopes import full_precision
from jmpx._stateful import apply, call, sparing


def _widest_floating(tree: Any) -> Any:
    """Returns the widest dtype of the floating leaves; None without any.

    Of two that are equally wide, such as float16 and bfloat16, neither holds the other: float32.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(tree) if is_floating(leaf)}
    if not dtypes:
        return None
    width = max(dtype.itemsize for dtype in dtypes)
    widest = [dtype for dtype in dtypes if dtype.itemsize == width]
    return widest[0] if len(widest) == 1 else jnp.float32


def cast_function(
    func: Callable[..., Any], dtype: DTypeLike, return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function run on arguments of one dtype and return another.

    Follows MPX's `cast_function` (arXiv 2507.03312, section 3.2), for results of any pytree.
    A callable that is itself a pytree, such as an Equinox module, is cast too, so that its
    parameters agree with its inputs.

    Args:
        func: any callable of pytrees.
        dtype: what the floating leaves of all arguments are cast to.
        return_dtype: what the floating leaves of the result are cast to; None means `dtype`.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if `func` is not callable or a dtype is not one.
        ValueError: if a dtype is not a floating one.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> f = jmpx.cast_function(lambda x: {"y": 2 * x}, jnp.bfloat16, jnp.float32)
        >>> f(jnp.ones(3))["y"].dtype.name
        'float32'
    """
    inside = as_dtype(dtype)
    outside = inside if return_dtype is None else as_dtype(return_dtype)
    return _recast(func, inside, lambda inputs: outside)


def force_full_precision(
    func: Callable[..., Any], return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function run in float32, whatever dtype it is called with.

    Follows MPX's `force_full_precision` (arXiv 2507.03312, section 3.2): for sums, means, norms,
    softmax and whatever else overflows or loses digits in 16 bits. Works as a decorator. As in
    `cast_function`, a callable that is a pytree is cast too.

    Args:
        func: any callable of pytrees.
        return_dtype: what the floating leaves of the result are cast to. None gives back the
            dtype that came in: that of the floating arguments, the wider one where they differ;
            without any floating argument the result stays as it is.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if `func` is not callable or `return_dtype` is not a dtype.
        ValueError: if `return_dtype` is not a floating dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> x = jnp.full(4096, 100, jnp.float16)  # sums to 409600, beyond float16
        >>> mean = jmpx.force_full_precision(lambda x: x.sum() / x.size)
        >>> mean(x)
        Array(100., dtype=float16)
    """
    if return_dtype is None:
        return _recast(func, jnp.float32, _widest_floating)
    outside = as_dtype(return_dtype)
    return _recast(func, jnp.float32, lambda inputs: outside)


def _recast(
    func: Callable[..., Any], inside: Any, outside: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Wraps `func`: arguments to dtype `inside`, results to dtype `outside(arguments)`."""
    if not callable(func):
        raise TypeError(f"Expected a function to wrap, got {func!r}: pass the callable itself.")

    def recast(pure: Any, state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return_dtype = outside((args[1:], kwargs))
        args, kwargs = sparing(lambda tree: cast_tree(tree, inside))((args, kwargs))
        with full_precision() if inside is jnp.float32 else contextlib.nullcontext():
            result, updates = pure(state, *args, **kwargs)
        return result if return_dtype is None else cast_tree(result, return_dtype), updates

    @functools.wraps(func, updated=())  # not the __dict__: a module's would be its parameters
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(recast, apply, (func, *args), kwargs)

    return wrapper
