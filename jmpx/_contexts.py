"""What is in force in this thread: the contexts that are open, and what JAX's caches know of them.

Contexts are per thread, as JAX's user contexts and the frameworks' interceptors are. Coroutines and
generators may end them in another order than that in which they were entered, so no context is
restored from what it found at its entry: what is in force follows from the list of those open.
"""

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax


@dataclasses.dataclass(eq=False)  # not frozen, which takes twice as long to import
class Context:
    """A context that a user enters.

    Args:
        name: the function that makes it, as the user calls it; the innermost context of each name
            is the one in force.
        value: what the context puts in force.
        key: what JAX's caches are to tell it by; None for a context that they need not know.
        install: makes the context manager that hooks into a framework. It is entered once for all
            open contexts that have it: a framework's stack could not be left in another order.
    """

    name: str
    value: Any
    key: Hashable = None
    install: Callable[[], AbstractContextManager[Any]] | None = None


class _State:
    """What is in force in one thread."""

    def __init__(self) -> None:
        self.open: list[Context] = []
        self.installed: dict[Any, contextlib.ExitStack] = {}
        self.facts: dict[str, Hashable] = {}
        self.casts: dict[str, None] | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_thread = _Thread()

# The contexts that the running task, or the one that started it, has entered.
_entered: contextvars.ContextVar[tuple[Context, ...]] = contextvars.ContextVar("jmpx", default=())

# A jitted function that is called with another value than the one it was traced with is traced
# anew. Each thread has one value, which `_tell_jax` replaces; it is never left, as a `with` would,
# because the value before it may be that of a context which is over.
_trace_key = jax.make_user_context(None)


def _tell_jax() -> None:
    state = _thread.state
    keys = {context.name: context.key for context in state.open if context.key is not None}
    _trace_key(frozenset({**state.facts, **keys}.items()) or None).__enter__()


def set_fact(topic: str, value: Hashable) -> None:
    """Makes a value part of what this thread's jitted functions are cached by.

    Args:
        topic: what the value is about.
        value: a value that is equal where traces may be shared; None takes the topic out.
    """
    facts = _thread.state.facts
    facts.pop(topic, None)
    if value is not None:
        facts[topic] = value
    _tell_jax()


def refuse_other_tasks(action: str) -> None:
    """Refuses to do something while a task is in a context that the running task is not in.

    A thread has one cache key and one list of interceptors for all its tasks. Two tasks that hold
    contexts at once, or one that traces a module while another holds a context, would get casts
    that they did not ask for, and leave them in JAX's caches. Context variables tell tasks apart
    in every event loop; a task that is started within a context is in it, too.

    Raises:
        ValueError: if there is such a context.
    """
    inside = _entered.get()
    others = [context for context in _thread.state.open if context not in inside]
    if others:
        raise ValueError(
            f"Cannot {action} while another task of this thread is inside {others[-1].name}, which "
            "holds for the thread as a whole: leave that context before each await, or run the "
            "tasks in threads of their own."
        )


@contextlib.contextmanager
def entered(context: Context) -> Iterator[None]:
    """Keeps a context open; contexts may end in any order.

    Raises:
        ValueError: at entry, if another task of this thread is in a context.
    """
    refuse_other_tasks(f"enter {context.name}")
    state, install = _thread.state, context.install
    if install is not None and install not in state.installed:
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(install())
            state.installed[install] = hooks.pop_all()
    state.open.append(context)
    _entered.set((*_entered.get(), context))
    _tell_jax()
    try:
        yield
    finally:
        state.open.remove(context)
        _entered.set(tuple(other for other in _entered.get() if other is not context))
        # A generator that was forgotten may end in another thread, whose stacks are not these.
        if state is _thread.state:
            _tell_jax()
            if install is not None and install not in [other.install for other in state.open]:
                state.installed.pop(install).close()


def opened(name: str) -> list[Any]:
    """Returns the values of the open contexts of this name, the innermost last."""
    return [context.value for context in _thread.state.open if context.name == name]


def opened_here(name: str, value: Any) -> list[Any]:
    """Returns `opened(name)`, in which `value` must be.

    Raises:
        ValueError: if it is not, because its context was entered in another thread.
    """
    values = opened(name)
    if value not in values:
        raise ValueError(
            f"Cannot give back the policies that {name} replaced in the thread that entered it: "
            "end a context, or close the generator that holds it, in its own thread."
        )
    return values


@contextlib.contextmanager
def parameters_cast(are_rounded: bool) -> Iterator[dict[str, None]]:
    """Marks that a gradient function has cast its parameters to 16 bits, while its function runs.

    They arrive rounded then, so that every other cast inside is one too many. The mark is
    part of JAX's cache key: what was jitted and traced outside is traced anew, and seen.

    Args:
        are_rounded: whether it has; if not, nothing is marked.

    Yields:
        The names of what has cast inside, in order. Of nested marks the outermost one is told,
        whose casts come first.
    """
    state = _thread.state
    casts: dict[str, None] = {}
    if not are_rounded or state.casts is not None:
        yield casts
        return
    state.casts = casts
    set_fact("parameters are cast", True)
    try:
        yield casts
    finally:
        state.casts = None
        set_fact("parameters are cast", None)


def note_cast(by: str) -> None:
    """Tells the gradient function around that something inside of it casts, too."""
    if _thread.state.casts is not None:
        _thread.state.casts[by] = None
