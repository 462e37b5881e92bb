"""Functions whose body runs after their call, out of reach: these are refused."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

import jax

# In the order in which functions of each kind are asked for.
_KINDS: dict[type, Callable[[object], bool]] = {
    Generator: inspect.isgeneratorfunction,
    AsyncGenerator: inspect.isasyncgenfunction,
    Coroutine: inspect.iscoroutinefunction,
}
_NAMES = {Generator: "a generator", AsyncGenerator: "an async generator", Coroutine: "a coroutine"}


def check_runs_at_once(func: Callable[..., Any]) -> None:
    """Refuses a function that is written as a generator or as a coroutine."""
    is_function = inspect.isroutine(func) or isinstance(func, functools.partial)
    code = func if is_function else type(func).__call__
    for kind, is_of_kind in _KINDS.items():
        if is_of_kind(code):
            raise _error(kind)


def refuse_delayed(result: Any) -> Any:
    """Returns the result of a function, which has computed it."""
    for leaf in jax.tree.leaves(result, is_leaf=_is_delayed):
        if _is_delayed(leaf):
            if isinstance(leaf, Coroutine):
                leaf.close()  # Python would warn that nothing awaits it.
            raise _error(next(kind for kind in _KINDS if isinstance(leaf, kind)))
    return result


def _is_delayed(node: object) -> bool:
    return isinstance(node, Generator | AsyncGenerator | Coroutine)


def _error(kind: type) -> TypeError:
    return TypeError(
        f"Expected a function that computes its result when it is called, got one that returns "
        f"{_NAMES[kind]}, whose body runs later, out of jmpx's reach: wrap the functions that it "
        "calls, or return a list of the results."
    )
