"""Marks: which module an operation belongs to, as long as autocast works on a function.

Scopes name a module's path at most. So while autocast traces, the adapters enter a scope more for
each method call of a module, a mark, which stands for the module's class and path. The second run
reads the marks and leaves them out of the scopes under which it runs.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

_MARK = "jmpx.module:"


class Module(NamedTuple):
    """A module that was called: its class, and its path in the model."""

    cls: type
    path: str


# For the whole process, because JAX keeps what it traced: a number means the same for ever.
_numbers: dict[Module, str] = {}
_modules: dict[str, Module] = {}
_count = itertools.count()


class _Thread(threading.local):
    """Whether this thread traces a function for autocast, and wants marks."""

    def __init__(self) -> None:
        self.marks = False


_thread = _Thread()
# It tells JAX's caches whether there are marks in what is traced: a jitted function that was traced
# without them is traced anew, and one that was traced with them never runs outside of autocast.
_traced_with_marks = jax.make_user_context(False)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Wants marks while the context lasts."""
    before = _thread.marks
    _thread.marks = True
    try:
        with _traced_with_marks(True):
            yield
    finally:
        _thread.marks = before


def is_marking() -> bool:
    """Whether this thread traces a function in which calls of modules are to be marked."""
    return _thread.marks


def _is_unmarking() -> bool:
    """Whether marks are to be left out of what runs: not for an autocast around this one."""
    return bool(_modules) and not _thread.marks


def in_module(cls: type, path: str) -> Any:
    """Returns the context in which a method of a module runs: its mark, if marks are wanted."""
    return jax.named_scope(_mark(Module(cls, path))) if _thread.marks else contextlib.nullcontext()


def _mark(module: Module) -> str:
    if module not in _numbers:
        mark = f"{_MARK}{next(_count)}"
        _modules[_numbers.setdefault(module, mark)] = module
    return _numbers[module]


def _is_mark(name: str) -> bool:
    """Whether the name of a scope is a mark."""
    return name.startswith(_MARK)


def module_of(scope: str) -> Module | None:
    """Returns the module that the last name of a scope marks, None if it is no mark."""
    return _modules.get(scope.rpartition("/")[2])


def without_marks(scope: str) -> str:
    """Returns a scope as the user sees it."""
    return "/".join(name for name in scope.split("/") if not _is_mark(name))


def is_own_name(module: Module, name: str) -> bool:
    """Whether a scope next to a module's mark bears the module's name: the two are one.

    It is the last name of its path, in Linen with the method (`Dense_0.attend`); the name of the
    class for Linen's outermost module; or that of a class of Equinox's own (`eqx.nn.Linear`).
    """
    path = module.path.rpartition("/")[2]
    names = {base.__name__ for base in module.cls.__mro__}
    return path in (name, name.partition(".")[0]) or name.rpartition(".")[2] in names


# What runs has no marks.


def unmarked_stack(stack: Any) -> Any:
    """Returns a name stack without marks; the same object where there are none to leave out."""
    if not _is_unmarking() or not any(_is_mark(scope.name) for scope in stack.stack):
        return stack
    return type(stack)(tuple(scope for scope in stack.stack if not _is_mark(scope.name)))


# A jaxpr -> the same one without marks, None for itself: a value must not keep its key alive.
_unmarked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _unmarked_jaxpr(jaxpr: Any) -> Any:
    """Returns a jaxpr without marks, in inner ones too; the same object where there are none."""
    if jaxpr not in _unmarked:
        inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr  # of a closed one, until JAX 0.11
        eqns = [_unmarked_equation(eqn) for eqn in inner.eqns]
        changed = any(new is not old for new, old in zip(eqns, inner.eqns, strict=True))
        new = inner.replace(eqns=eqns) if changed else None
        _unmarked[jaxpr] = jaxpr.replace(jaxpr=new) if changed and inner is not jaxpr else new
    new = _unmarked[jaxpr]
    return jaxpr if new is None else new


def _unmarked_equation(eqn: Any) -> Any:
    stack, params = unmarked_stack(eqn.source_info.name_stack), unmarked_params(eqn.params)
    if stack is eqn.source_info.name_stack and params is eqn.params:
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack), params=params)


def unmarked_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation, the jaxprs among them without marks."""

    def unmark(value: Any) -> Any:
        if isinstance(value, tuple):  # or a named one, as of custom_linear_solve
            new = list(map(unmark, value))
            changed = any(a is not b for a, b in zip(new, value, strict=True))
            return getattr(value, "_make", tuple)(new) if changed else value
        return _unmarked_jaxpr(value) if hasattr(value, "eqns") else value

    if not _is_unmarking():
        return params
    new = {key: unmark(value) for key, value in params.items()}
    return new if any(new[key] is not params[key] for key in params) else params
