"""The contexts that are open in a thread, as parts of the keys of JAX's caches.

Contexts are per thread, as JAX's user contexts and the frameworks' interceptors are. Coroutines and
generators may leave contexts in any order, so leaving one restores nothing: the contexts that are
still open determine what is active.

A generator may also be closed or collected in another thread, which cannot change the state of the
thread that entered the context. That is an error, and the thread that entered ends the context
itself before it runs a module again (`late`, `epochs`, `catch_up`). The error alone is not enough:
Python only prints the errors of a generator that is collected, and modules would go on in silence
under a policy whose context is over, in programs that JAX's caches keep.
"""

import collections
import contextlib
import contextvars
import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

T = TypeVar("T")

# Makes the context manager that hooks into a framework.
Hook: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclasses.dataclass(eq=False)  # not frozen: a frozen dataclass takes twice as long to import
class Context:
    """A context that a user enters.

    Args:
        name: the function that makes the context, as the user calls it.
        value: what the context activates. Of the open contexts whose values have one type, the
            innermost one is active.
        key: tells the context apart from others of its name in JAX's caches; None for a context
            that does not change what JAX traces.
        hook: hooks into a framework. All open contexts of one hook share it: it is entered with the
            first and left with the last of them, because a framework's stack of hooks has to be
            left in the reverse order.
        undo: restores what the contexts of one value have replaced, in the thread that entered
            them, while the last of them still counts as open; None if there is nothing to restore.
    """

    name: str
    value: object
    key: Hashable = None
    hook: Hook | None = None
    undo: Callable[[], None] | None = None


# Topics of facts: the policies of autocast, for what a tool of `jmpx.inspect` traces, and whether
# it has all modules mark their calls, those that are made inside of the function, too.
AUTOCAST = "autocast traces"
INSPECTED = "a tool traces"
MARKED = "all modules mark their calls"
# The values of the second one: to look at the program, maybe for another chip; to run it here and
# round as it says; to measure numbers, which products in 8 bits would scale.
SHOWN, RUN, MEASURED = "shown", "run", "measured"


class _State:
    """What is active in one thread."""

    def __init__(self) -> None:
        self.open: list[Context] = []  # the innermost last
        self.hooks: dict[Hook, contextlib.ExitStack] = {}  # the entered hooks, with their exits
        self.facts: dict[str, Hashable] = {}  # other parts of the keys of JAX's caches, by topic
        self.told = contextlib.ExitStack()  # leaves the value that is in the keys of JAX's caches
        self.late: collections.deque[Context] = collections.deque()  # left by another thread
        self.epochs = 0  # how often this thread has found such contexts
        # For each open watch of casts: the names of the functions that cast inside of it, and the
        # dtype to which a cast does not count; None if all casts count.
        self.watches: list[tuple[dict[str, None], np.dtype | None]] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_thread = _Thread()

# The contexts that the running task, or the task that started it, has entered.
_entered: contextvars.ContextVar[tuple[Context, ...]] = contextvars.ContextVar("jmpx", default=())

# Part of the key of JAX's caches: a jitted function is traced anew when it is called under another
# value. One value at most is entered in a thread: `_tell_jax` leaves it before it enters the next
# one, so that no value comes back whose contexts are over.
_trace_key: Any = jax.make_user_context(None)  # Any, because JAX does not annotate it

# For `_jaxprs/marks.py`, which is imported later. User contexts have to be made when jmpx is
# imported: each one adds a part to the keys of all of JAX's caches, so a step during whose first
# trace one was made would be compiled again. And making one is not safe while other threads run.
traced_with_marks: Any = jax.make_user_context(False)


def _tell_jax() -> None:
    """Makes the active contexts and facts this thread's part of the key of JAX's caches."""
    state = _thread.state
    keys = {context.name: context.key for context in state.open if context.key is not None}
    told: dict[str, Hashable] = {**state.facts, **keys}
    if told and state.epochs:
        told["epochs"] = state.epochs
    state.told.close()
    if told:
        state.told.enter_context(_trace_key(frozenset(told.items())))


def catch_up() -> None:
    """Leaves the contexts of this thread that other threads have left.

    Call this before looking up what is active. A trace that began after such a context had ended is
    stored under the key of that context, so the number of epochs makes this thread's keys new.
    """
    state = _thread.state
    if state.late:
        state.epochs += 1
        while state.late:
            _leave(state.late.popleft())
        _tell_jax()


def set_fact(topic: str, value: Hashable) -> None:
    """Makes a value part of the key of JAX's caches in this thread.

    Args:
        topic: what the value is about.
        value: a value that is equal where traces may be shared; None removes the topic.
    """
    facts = _thread.state.facts
    facts.pop(topic, None)
    if value is not None:
        facts[topic] = value
    _tell_jax()


def fact(topic: str) -> Hashable:
    """Returns the value that `set_fact` gave this thread for a topic; None if there is none."""
    return _thread.state.facts.get(topic)


@contextlib.contextmanager
def fact_set(topic: str, value: Hashable) -> Iterator[None]:
    """Makes a value part of the key of JAX's caches in this thread while the context lasts."""
    outer = fact(topic)
    set_fact(topic, value)
    try:
        yield
    finally:
        set_fact(topic, outer)


def refuse_other_tasks(action: str) -> None:
    """Refuses an action while another task of this thread is inside a context.

    All tasks of a thread share one cache key and one list of interceptors. If two tasks held
    contexts at once, or one traced a module while another held a context, modules would get casts
    of another task, and JAX's caches would keep them. Context variables tell tasks apart in every
    event loop; a task that is started inside a context is inside it, too.
    """
    catch_up()
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
    """Keeps a context open; contexts of a thread may be left in any order.

    Raises:
        ValueError: at entry, if another task of this thread is inside a context; at exit, if that
            is in another thread. Its own thread then leaves the context at its next `catch_up`.
    """
    refuse_other_tasks(f"enter {context.name}")
    state, hook = _thread.state, context.hook
    if hook is not None and hook not in state.hooks:
        with contextlib.ExitStack() as stack:
            stack.enter_context(hook())
            state.hooks[hook] = stack.pop_all()
    state.open.append(context)
    _entered.set((*_entered.get(), context))
    _tell_jax()
    try:
        yield
    finally:
        if state is _thread.state:
            _leave(context)
            _tell_jax()
            if hook is not None and hook not in [other.hook for other in state.open]:
                state.hooks.pop(hook).close()
        else:
            state.late.append(context)
            raise ValueError(
                f"Cannot leave {context.name} in another thread than the one that entered it, "
                "where compiled functions go on under its policies until a module is traced or a "
                "context of jmpx is entered: close the generator that holds it in its own thread."
            )


def _leave(context: Context) -> None:
    """Ends a context in its own thread; its hook may be left later: an idle hook does nothing."""
    still_open = _thread.state.open
    is_last = [other.value is context.value for other in still_open].count(True) == 1
    try:
        if context.undo is not None and is_last:
            context.undo()
    finally:
        still_open.remove(context)
        _entered.set(tuple(other for other in _entered.get() if other is not context))


def opened(kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Returns the values of a type that open contexts of this thread hold, the innermost last."""
    catch_up()
    values = (context.value for context in _thread.state.open)
    return [value for value in values if isinstance(value, kind)]


def is_held(value: object) -> bool:
    """Whether an open context of this thread holds this very object as its value."""
    return any(context.value is value for context in _thread.state.open)


def is_hooked(hook: Hook) -> bool:
    """Whether an open context of this thread hooks into a framework by this hook."""
    return hook in _thread.state.hooks


@contextlib.contextmanager
def parameters_rounded(dtype: np.dtype | None) -> Iterator[dict[str, None]]:
    """Notes which functions cast inside of a function whose parameters were rounded to 16 bits.

    A cast to the dtype of the parameters changes nothing; every other one would widen rounded
    values. The dtype is part of the key of JAX's caches: a jitted function that was traced
    elsewhere is traced anew, so that its casts are noticed. Without a dtype, nothing is noted.

    Yields:
        The names of the functions that cast to another dtype, in order. If contexts are nested, the
        outermost one gets them, because its casts come first.
    """
    casts: dict[str, None] = {}
    if dtype is None or any(rounded is not None for _, rounded in _thread.state.watches):
        yield casts
        return
    with _watched(casts, dtype), fact_set("parameters are rounded", dtype.name):
        yield casts


def may_be_rounded() -> bool:
    """Whether this runs inside of a function whose arguments or modules are cast."""
    return bool(_thread.state.watches)


@contextlib.contextmanager
def _watched(casts: dict[str, None], dtype: np.dtype | None) -> Iterator[None]:
    _thread.state.watches.append((casts, dtype))
    try:
        yield
    finally:
        _thread.state.watches.pop()


# By the code of a function and by policy map, the names of the functions that have cast inside of
# it in any call so far; they are forgotten together with the function.
_seen = weakref.WeakKeyDictionary[Hashable, dict[Hashable, dict[str, None]]]()


@contextlib.contextmanager
def casts_watched(code: Hashable, policy_map: Hashable) -> Iterator[dict[str, None]]:
    """Notes which functions cast inside of a function that runs under a policy map.

    The function's code (or its type) and the map are part of the key of JAX's caches, so that a
    jitted function that was traced elsewhere is traced anew, once.

    Yields:
        The names of the functions that cast in this call and in earlier ones: in a later call, a
        jitted function casts without being traced.
    """
    topic = "casts are watched"
    casts = _seen.setdefault(code, {}).setdefault(policy_map, {})
    with _watched(casts, None), fact_set(topic, (fact(topic), code, policy_map)):
        yield casts


def note_cast(by: str, dtype: DTypeLike | None = None) -> None:
    """Tells the watches of casts that are open, if any, that a function casts.

    Args:
        by: the function that casts, as the user calls it.
        dtype: the dtype to which it casts; None if there are several.
    """
    for casts, rounded in _thread.state.watches:
        if rounded is None or dtype is None or np.dtype(dtype) != rounded:
            casts[by] = None
