"""Named scopes that jmpx itself enters, and that autocast reads."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import jax

FULL_PRECISION = "jmpx.full_precision"  # autocast leaves operations in it in float32
RESTORE = "jmpx.restore"  # in it, autocast gives results their traced dtypes back

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def full_precision(func: None = None) -> AbstractContextManager[object]: ...


@overload
def full_precision(func: _Function) -> _Function: ...


def full_precision(func: Callable[..., Any] | None = None) -> Any:
    """Marks code that `jmpx.autocast` leaves as it was traced: in float32.

    A context manager, `with jmpx.full_precision():`, and a decorator, `@jmpx.full_precision`. It
    casts nothing by itself; outside of autocast it only names a scope. It holds through `jit`,
    loops and gradients, and no rule of a policy map overrides it. An autocast that is called
    inside runs as its own policy says. See `force_full_precision` for a function that casts its
    arguments.

    Args:
        func: any callable; None for a context manager.

    Returns:
        A function with the signature of `func`, or a context manager.

    Raises:
        TypeError: if `func` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> @jmpx.autocast
        ... def f(x):
        ...     with jmpx.full_precision():
        ...         return x @ x
        >>> x = jnp.eye(2) * (1 + 2**-12)  # bfloat16 would round it to 1
        >>> bool(f(x)[0, 0] > 1)
        True
    """
    if func is None:
        return jax.named_scope(FULL_PRECISION)
    if not callable(func):
        raise TypeError(f"Expected a function to wrap, got {func!r}: pass the callable itself.")

    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(FULL_PRECISION):
            return func(*args, **kwargs)

    return wrapper
