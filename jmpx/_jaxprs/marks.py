"""Types of jaxprs, marks of modules in name stacks, and the scopes that autocast reads."""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import jax

from jmpx._base.contexts import AUTOCAST, fact_set, traced_with_marks
from jmpx._base.dtypes import as_matmul, matmul_precision
from jmpx._base.messages import check_runs_at_once, refuse_delayed

# Types of jaxprs. All are Any, because JAX has no public types that all supported versions share:
# since 0.11, open and closed jaxprs are one class; and the public type of operands has no dtype.

Jaxpr: TypeAlias = Any
Equation: TypeAlias = Any
Atom: TypeAlias = Any  # an operand or a result of an equation: a variable or a literal
Aval: TypeAlias = Any  # an abstract array: a shape, a dtype and more
Primitive: TypeAlias = Any
Array: TypeAlias = Any  # an operand's value: an array of JAX or NumPy, or a tracer
Params: TypeAlias = dict[str, Any]  # the parameters of an equation
NameStack: TypeAlias = Any
Scopes: TypeAlias = tuple[Any, ...]  # the entries of a name stack


def is_jaxpr(value: object) -> bool:
    """Whether a value is a jaxpr, closed or open."""
    return hasattr(value, "eqns")


# Marks: scopes that tell autocast which module an operation belongs to.
#
# A framework's scopes name at most a module's path. So while autocast traces a function, the
# adapters enter one more scope around each method call of a module: a mark, which stands for the
# module's class and path. Autocast reads the marks in the jaxpr, and runs operations without them.


_MARK = "jmpx.module:"
_POLICY = "jmpx.policy:"  # begins the scope of an operation while autocast is inspected
WHY = "; "  # in it, between the policy and why a product does not run in 8 bits


class Module(NamedTuple):
    """A module that was called."""

    cls: type  # its class
    path: str  # its path in the model


class _Mark(NamedTuple):
    """The meaning of a mark."""

    module: Module
    policy: Hashable  # of its class, when it was called; None without one


# These last as long as the process, so that a mark in a cached jaxpr always means the same.
_names: dict[_Mark, str] = {}
_marks: dict[str, _Mark] = {}
_count = itertools.count()

# Whether a rule or a class policy selects a module, given its class and path.
Selects: TypeAlias = Callable[[type, str], bool]


class _Thread(threading.local):
    is_marking = False  # whether this thread traces a function for autocast
    selects: Selects | None = None  # of the innermost autocast; None if it has no rules


_thread = _Thread()


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Lets the adapters make marks while the context lasts."""
    before = _thread.is_marking
    _thread.is_marking = True
    try:
        # Part of the keys of JAX's caches: a jitted function that was traced without marks is
        # traced again, and the result of tracing it with marks is used nowhere else.
        with traced_with_marks(True):
            yield
    finally:
        _thread.is_marking = before


def is_marking() -> bool:
    """Whether this thread traces a function in which the adapters mark the calls of modules."""
    return _thread.is_marking


@contextlib.contextmanager
def selecting(selects: Selects | None) -> Iterator[None]:
    """Sets the value of `selects()` while the context lasts."""
    before, _thread.selects = _thread.selects, selects
    try:
        yield
    finally:
        _thread.selects = before


def selects() -> Selects | None:
    """Returns which modules the innermost running autocast selects; None if it has no rules."""
    return _thread.selects


def in_module(cls: type, path: str, policy: Hashable = None) -> AbstractContextManager[object]:
    """Returns the context of a call of a module's method: its mark, while autocast traces.

    A module whose class has a `policy` is always marked.
    """
    if not _thread.is_marking and policy is None:
        return contextlib.nullcontext()
    return jax.named_scope(_name(_Mark(Module(cls, path), policy)))


def _name(mark: _Mark) -> str:
    """Returns the name of a mark, always the same one."""
    if mark not in _names:
        name = f"{_MARK}{next(_count)}"
        _marks[name] = mark  # before another thread can find the name
        _names.setdefault(mark, name)
    return _names[mark]


def module_of(scope: str) -> Module | None:
    """Returns the module whose mark is the last name of a scope; None if that is no mark."""
    mark = _marks.get(scope.rpartition("/")[2])
    return None if mark is None else mark.module


def class_policy_of(scope: str) -> Hashable:
    """Returns the class policy in the mark that is the last name of a scope; None without one."""
    mark = _marks.get(scope.rpartition("/")[2])
    return None if mark is None else mark.policy


def without_marks(scope: str) -> str:
    """Returns a scope as the user sees it."""
    return "/".join(name for name in scope.split("/") if not name.startswith((_MARK, _POLICY)))


def policy_mark(policy: str) -> str:
    """Returns the scope that names the policy under which autocast runs an operation."""
    return _POLICY + policy


def before_policy(scopes: Scopes) -> Scopes:
    """Returns the scopes before the first mark of a policy, as JAX keeps them."""
    return tuple(itertools.takewhile(lambda scope: not scope.name.startswith(_POLICY), scopes))


def split_policy(scope: str) -> tuple[str, str]:
    """Returns a scope without marks of policies, and the policy of the innermost one, if any."""
    if _POLICY not in scope:
        return scope, ""
    names = scope.split("/")
    marks = [name for name in names if name.startswith(_POLICY)]
    return "/".join(n for n in names if n not in marks), marks[-1].removeprefix(_POLICY)


def is_own_name(module: Module, name: str) -> bool:
    """Whether a scope next to a module's mark is the one that its framework gives the module."""
    # Haiku and Linen use the last part of the module's path, in Linen with the method at its end
    # (`Dense_0.attend`). Linen's outermost module and Equinox's own layers are named by their class
    # (`eqx.nn.Linear`).
    path = module.path.rpartition("/")[2]
    names = {base.__name__ for base in module.cls.__mro__}
    return path in (name, name.partition(".")[0]) or name.rpartition(".")[2] in names


def unmarked_stack(stack: NameStack) -> NameStack:
    """Returns a name stack without marks, unless an outer autocast is tracing and reads them."""
    unmarked = tuple(scope for scope in stack.stack if not scope.name.startswith((_MARK, _POLICY)))
    return stack if _thread.is_marking else type(stack)(unmarked)


# Named scopes that jmpx itself enters, and that autocast reads.


FULL_PRECISION = "jmpx.full_precision"  # autocast leaves operations in it in float32
ROUNDED = "jmpx.rounded_gradient"  # in it, gradients rounded to 16 bits are widened
SCALED = "jmpx.scaled"  # in it, a product is multiplied by what its operands were divided by
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
    # Without the fact, an autocast inside would do nothing if one of the same policies is around.
    with jax.named_scope(FULL_PRECISION), matmul_precision(matmul), fact_set(AUTOCAST, None):
        yield
