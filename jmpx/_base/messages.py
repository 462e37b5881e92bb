"""Words of errors and warnings, and the refusal of generators and coroutines."""

import contextlib
import functools
import inspect
import os
import reprlib
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

import jax

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def did_you_mean(word: str, choices: list[str] | dict[str, str]) -> str:
    """Returns the end of an error message: `; did you mean 'x'?`, or a full stop.

    The choices are words, or a dict from words to the suggestions for them.
    """
    import difflib  # here, because only errors need it

    known = choices if isinstance(choices, dict) else {choice: choice for choice in choices}
    word = word.strip()
    near = [n for w in (word, word.lower()) for n in difflib.get_close_matches(w, known, n=1)]
    return f"; did you mean {known[near[0]]!r}?" if near else "."


def user_stacklevel(*packages: str) -> int:
    """Returns the `stacklevel` at which the caller's `warnings.warn` names the user's line.

    Skips lines of jmpx, of these packages, of Python's contexts and decorators, and of the
    constructors that dataclasses generate ("<string>"). Python 3.11 lacks the `skip_file_prefixes`
    of `warnings.warn`.
    """
    loaded = [sys.modules[name] for name in ("jmpx", *packages) if name in sys.modules]
    folders = [os.path.dirname(module.__file__ or "") + os.sep for module in loaded]
    others = (*folders, contextlib.__file__, functools.__file__, "<string>")
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    levels = (n for n, frame in enumerate(stack) if not frame.filename.startswith(others))
    return next(levels, len(stack) - 1)


def describe(value: object) -> str:
    """Returns the `repr` of any value on one line, shortened if it is long or deeply nested."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python refuses to write integers of several thousand digits.
        text = f"<{type(value).__name__}>"
    return " ".join(text.splitlines())


# Generators and coroutines are refused: their bodies run after the call, out of reach.


# The type of what such a function returns -> its name, and the test of functions, in this order.
_KINDS: dict[type, tuple[str, Callable[[object], bool]]] = {
    Generator: ("a generator", inspect.isgeneratorfunction),
    AsyncGenerator: ("an async generator", inspect.isasyncgenfunction),
    Coroutine: ("a coroutine", inspect.iscoroutinefunction),
}


def check_runs_at_once(func: Callable[..., Any]) -> None:
    """Refuses a function that is written as a generator or as a coroutine."""
    is_function = inspect.isroutine(func) or isinstance(func, functools.partial)
    code = func if is_function else type(func).__call__
    for name, is_of_kind in _KINDS.values():
        if is_of_kind(code):
            raise _error(name)


def refuse_delayed(result: Any) -> Any:
    """Returns the result of a function; refuses one whose computation is still to come."""
    for leaf in jax.tree.leaves(result, is_leaf=_is_delayed):
        if _is_delayed(leaf):
            if isinstance(leaf, Coroutine):
                leaf.close()  # Python would warn that nothing awaits it.
            raise _error(next(_KINDS[kind][0] for kind in _KINDS if isinstance(leaf, kind)))
    return result


def _is_delayed(node: object) -> bool:
    return isinstance(node, tuple(_KINDS))


def _error(name: str) -> TypeError:
    return TypeError(
        f"Expected a function that computes its result when it is called, got one that returns "
        f"{name}, whose body runs later, out of jmpx's reach: wrap the functions that it "
        "calls, or return a list of the results."
    )
