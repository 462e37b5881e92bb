"""Haiku: the algorithm of products that the policy of a class sets, where Haiku itself casts.

Haiku's own interceptor casts by the policies of classes, and knows nothing of `matmul`. So an
interceptor of jmpx sets it: that of `jmpx.push_policy` while its context lasts, and another one
from the first policy with `matmul` on that `jmpx.set_policy` sets in a thread.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import haiku as hk
from jax.typing import DTypeLike

from jmpx._adapters.sessions import (
    Args,
    Kwargs,
    Method,
    ignores_matmul,
    is_public,
    warn_of_convolution,
)
from jmpx._base.matmul import matmul_of, matmul_region
from jmpx._base.messages import user_stacklevel
from jmpx._jaxprs.marks import Module
from jmpx._policies.policy import Policy

_store: Any = hk.mixed_precision  # Any, because it is annotated with JMP's policies

_CONVOLUTIONS = (
    hk.ConvND,
    hk.ConvNDTranspose,
    hk.DepthwiseConv1D,
    hk.DepthwiseConv2D,
    hk.DepthwiseConv3D,
    hk.SeparableDepthwiseConv2D,  # pyright: ignore[reportPrivateImportUsage]
)


class _Running(NamedTuple):
    """What holds in the innermost running method of a module whose class has a policy."""

    matmul: str | None
    dtype: DTypeLike


_NOTHING = _Running(None, "float32")


class _Thread(threading.local):
    """What is set in one thread.

    Attributes:
        classes: the classes whose policy sets an algorithm.
        running: what holds in the running methods, the innermost last.
        hooks: how often the interceptor of jmpx's contexts is in Haiku's stack.
        kept: what keeps the interceptor in Haiku's stack.
        has_warned: whether a convolution was warned of since the last policy was set.
    """

    def __init__(self) -> None:
        self.classes: set[type] = set()
        self.running: list[_Running] = []
        self.hooks = 0
        self.kept: _Kept | None = None
        self.has_warned = False


_thread = _Thread()


class _Kept:
    """An interceptor that stays in Haiku's stack as long as its thread lives, as Haiku's own does.

    Haiku's stack has to be left in the reverse order, so nothing can be taken out of it earlier.
    """

    def __init__(self) -> None:
        self._context = hk.intercept_methods(_intercept)
        self._context.__enter__()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the stack may be gone already
            self._context.__exit__(None, None, None)


def _intercept(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> Any:
    """Intercepts each method call; leaves it to the interceptor of a context that is open."""
    if _thread.hooks:
        return method(*args, **kwargs)
    return run_method(method, args, kwargs, context)


def is_convolution(context: hk.MethodContext, kwargs: Kwargs) -> bool:
    """Whether a method call is that of a convolution, without a precision of its own."""
    is_call = isinstance(context.module, _CONVOLUTIONS) and is_public(context.method_name)
    return is_call and kwargs.get("precision") is None


def note_policy(cls: type, policy: Policy | None) -> None:
    """Notes that a class has a new policy, None if it has lost its policy."""
    _thread.has_warned = False
    _thread.classes.discard(cls)
    if matmul_of(policy) is not None:
        _thread.classes.add(cls)
        keep_intercepting()


@contextlib.contextmanager
def hooked() -> Iterator[None]:
    """Leaves method calls to the interceptor of jmpx's contexts, while this context lasts."""
    _thread.hooks += 1
    try:
        yield
    finally:
        _thread.hooks -= 1


def keep_intercepting() -> None:
    """Sets the algorithms of class policies from now on, if there are any and nothing else does."""
    if _thread.classes and not _thread.hooks and _thread.kept is None:
        _thread.kept = _Kept()


def run_method(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> Any:
    """Runs a method with the algorithm of the policy that Haiku's registry has for its class."""
    policy = _store.get_policy(type(context.module))
    outer = _thread.running[-1] if _thread.running else _NOTHING
    if policy is None:
        _check_convolution(context, kwargs, outer)
        return method(*args, **kwargs)
    own = matmul_of(policy)
    running = _Running(outer.matmul if own is None else own, policy.compute_dtype)
    _check_convolution(context, kwargs, running)
    _thread.running.append(running)
    try:
        # What the class around it has, too, is inherited: see `matmul_region`.
        with matmul_region(None if own == outer.matmul else own, running.dtype):
            return method(*args, **kwargs)
    finally:
        _thread.running.pop()


def _check_convolution(context: hk.MethodContext, kwargs: Kwargs, running: _Running) -> None:
    """Warns of a convolution whose algorithm JAX ignores, once for each policy that is set."""
    if _thread.has_warned or not is_convolution(context, kwargs):
        return
    if ignores_matmul(running.matmul, running.dtype):
        _thread.has_warned = True
        called = Module(type(context.module), context.module.module_name)
        warn_of_convolution(called, running.matmul, user_stacklevel("haiku", "jax"))
