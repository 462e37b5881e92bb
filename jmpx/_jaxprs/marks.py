"""Marks: scopes that tell autocast which module an operation belongs to.

A framework's scopes name a module's path at most. So while autocast traces a function, the adapters
enter one more scope around each method call of a module: a mark, which stands for the module's
class and path. When autocast evaluates the jaxpr, it reads the marks, and leaves them out of the
scopes in which operations run.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from jmpx._base.contexts import traced_with_marks
from jmpx._jaxprs.rewriting import with_equations, with_jaxprs

_MARK = "jmpx.module:"


class Module(NamedTuple):
    """A module that was called.

    Args:
        cls: its class.
        path: its path in the model.
    """

    cls: type
    path: str


# These last as long as the process: JAX caches jaxprs, so that a mark has to mean the same module
# each time it is read.
_marks: dict[Module, str] = {}
_modules: dict[str, Module] = {}
_count = itertools.count()


class _Thread(threading.local):
    """Whether this thread traces a function for autocast, so that adapters make marks."""

    def __init__(self) -> None:
        self.is_marking = False


_thread = _Thread()


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Has the adapters make marks while the context lasts."""
    before = _thread.is_marking
    _thread.is_marking = True
    try:
        # It is part of the keys of JAX's caches: autocast traces a jitted function again that was
        # traced without marks, and a function that was traced with marks never runs outside of it.
        with traced_with_marks(True):
            yield
    finally:
        _thread.is_marking = before


def is_marking() -> bool:
    """Whether this thread traces a function in which the adapters mark the calls of modules."""
    return _thread.is_marking


def _is_unmarking() -> bool:
    """Whether operations run without marks: with them, if an outer autocast is tracing."""
    return bool(_modules) and not _thread.is_marking


def in_module(cls: type, path: str) -> AbstractContextManager[object]:
    """Returns the context of a call of a module's method: the mark, while autocast traces."""
    if not _thread.is_marking:
        return contextlib.nullcontext()
    return jax.named_scope(_mark(Module(cls, path)))


def _mark(module: Module) -> str:
    """Returns the mark of a module, always the same one."""
    if module not in _marks:
        mark = f"{_MARK}{next(_count)}"
        _modules[mark] = module  # before another thread can find the mark
        _marks.setdefault(module, mark)
    return _marks[module]


def _is_mark(name: str) -> bool:
    """Whether the name of a scope is a mark."""
    return name.startswith(_MARK)


def module_of(scope: str) -> Module | None:
    """Returns the module that the last name of a scope marks; None if that name is no mark."""
    return _modules.get(scope.rpartition("/")[2])


def without_marks(scope: str) -> str:
    """Returns a scope as the user sees it."""
    return "/".join(name for name in scope.split("/") if not _is_mark(name))


def is_own_name(module: Module, name: str) -> bool:
    """Whether a scope next to a module's mark is the scope that its framework gives the module.

    Haiku and Linen name it as the last part of the module's path, Linen with the method at its end
    (`Dense_0.attend`), and Linen's outermost module by its class. Equinox names its own layers by
    their class (`eqx.nn.Linear`).
    """
    path = module.path.rpartition("/")[2]
    names = {base.__name__ for base in module.cls.__mro__}
    return path in (name, name.partition(".")[0]) or name.rpartition(".")[2] in names


# Autocast runs operations without their marks.


def unmarked_stack(stack: Any) -> Any:
    """Returns a name stack without marks; the same object if it has none."""
    if not _is_unmarking() or not any(_is_mark(scope.name) for scope in stack.stack):
        return stack
    return type(stack)(tuple(scope for scope in stack.stack if not _is_mark(scope.name)))


# A jaxpr -> the same one without marks. None stands for the key itself, as a value that refers to
# its key would keep it alive.
_unmarked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _unmarked_jaxpr(jaxpr: Any) -> Any:
    """Returns a jaxpr without marks, also in inner jaxprs; the same object if it has none."""
    if jaxpr not in _unmarked:
        new = with_equations(jaxpr, _unmarked_equation)
        _unmarked[jaxpr] = None if new is jaxpr else new
    new = _unmarked[jaxpr]
    return jaxpr if new is None else new


def _unmarked_equation(eqn: Any) -> Any:
    stack, params = unmarked_stack(eqn.source_info.name_stack), unmarked_params(eqn.params)
    if stack is eqn.source_info.name_stack and params is eqn.params:
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack), params=params)


def unmarked_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation; the jaxprs among them have no marks."""
    return with_jaxprs(params, _unmarked_jaxpr) if _is_unmarking() else params
