"""Marks: which module an operation belongs to, as long as autocast works on a function.

Scopes name a module's path at most. So while autocast traces, the adapters enter a scope more for
each method call of a module, a mark, which stands for the module's class and path. The second run
reads the marks and leaves them out of the scopes under which it runs.
"""

import contextlib
import itertools
import threading
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


def is_unmarking() -> bool:
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


def is_mark(name: str) -> bool:
    """Whether the name of a scope is a mark."""
    return name.startswith(_MARK)


def module_of(scope: str) -> Module | None:
    """Returns the module that the last name of a scope marks, None if it is no mark."""
    return _modules.get(scope.rpartition("/")[2])


def without_marks(scope: str) -> str:
    """Returns a scope as the user sees it."""
    return "/".join(name for name in scope.split("/") if not is_mark(name))


def is_own_name(module: Module, name: str) -> bool:
    """Whether a scope next to a module's mark bears the module's name: the two are one.

    It is the last name of its path, in Linen with the method (`Dense_0.attend`); the name of the
    class for Linen's outermost module; or that of a class of Equinox's own (`eqx.nn.Linear`).
    """
    path = module.path.rpartition("/")[2]
    names = {base.__name__ for base in module.cls.__mro__}
    return path in (name, name.partition(".")[0]) or name.rpartition(".")[2] in names
