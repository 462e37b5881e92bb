"""Named scopes that jmpx itself enters, and that autocast reads."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import jax

from jmpx._base.contexts import AUTOCAST, fact_set
from jmpx._base.delayed import check_runs_at_once, refuse_delayed
from jmpx._base.matmul import as_matmul, matmul_precision

FULL_PRECISION = "jmpx.full_precision"  # autocast leaves operations in it in float32
ROUNDED = "jmpx.rounded_gradient"  # in it, a gradient that is rounded to 16 bits is widened
RESTORE = "jmpx.restore"  # in it, autocast gives results their traced dtypes back

P = ParamSpec("P")
R = TypeVar("R")
_Function = TypeVar("_Function", bound=Callable[..., object])


if TYPE_CHECKING:

    class _Scope(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
        """A context manager that is also a decorator."""


@overload
def full_precision(func: None = None, *, matmul: str | None = None) -> "_Scope": ...


@overload
def full_precision(func: _Function, *, matmul: str | None = None) -> _Function: ...


def full_precision(func: Callable[P, R] | None = None, *, matmul: str | None = None) -> Any:
    """Marks code that `jmpx.autocast` leaves as it was traced: in float32.

    A context manager, `with jmpx.full_precision():`, and a decorator, `@jmpx.full_precision`. It
    casts nothing by itself, holds through `jit`, loops and gradients, and takes precedence over all
    rules of policy maps. An autocast that is called inside follows its own policy.

    Args:
        func: any callable; None for a context manager, or for a decorator with `matmul`.
        matmul: the algorithm of the matrix products and convolutions that are traced inside and of
            their gradients, under autocast and outside of it, a name that
            `jax.default_matmul_precision` takes, in any case; None leaves it as it is. See
            docs/matmul.md.

    Returns:
        A function with the signature of `func`, or a context manager.

    Raises:
        TypeError: if `func` is not callable, or `matmul` is not a string.
        ValueError: if the algorithm is unknown.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> @jmpx.autocast
        ... def f(x):
        ...     with jmpx.full_precision(matmul="highest"):
        ...         return x @ x
        >>> x = jnp.eye(2) * (1 + 2**-12)  # bfloat16 would round it to 1
        >>> bool(f(x)[0, 0] > 1)
        True
    """
    matmul = as_matmul(matmul)
    if func is None:
        return _full_precision(matmul)
    if not callable(func):
        raise TypeError(
            f"Expected a function to wrap, got {func!r}: pass the callable itself, and the name of "
            "an algorithm as matmul=."
        )
    check_runs_at_once(func)

    @functools.wraps(func, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with _full_precision(matmul):
            return refuse_delayed(func(*args, **kwargs))

    return wrapper


@contextlib.contextmanager
def _full_precision(matmul: str | None) -> Iterator[None]:
    # An autocast that is called inside has an effect, also if one of the same policies is around.
    with jax.named_scope(FULL_PRECISION), matmul_precision(matmul), fact_set(AUTOCAST, None):
        yield
