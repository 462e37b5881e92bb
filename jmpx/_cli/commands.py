"""The commands of `python -m jmpx` that look at a program: audit, ranges and first-nonfinite.

Each takes the parsed arguments and the flags of the program, prints what it finds, and returns the
exit code. It raises a ValueError of one sentence if the program cannot be made, traced or run.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from jmpx._base.leaves import PyTree
from jmpx._cli.targets import attempt, load

Program: TypeAlias = tuple[Callable[..., PyTree], tuple[PyTree, ...]]

_RETURNS = "a pair of a function and the tuple of its arguments"


def audit(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Prints what runs in which dtype."""
    from jmpx._inspect.audit.api import audit  # here, as below: a command needs one of them

    with _made(given, flags) as (fn, args):
        trying = lambda: audit(fn, platform=given.platform)(*args)  # noqa: E731
        _print(attempt(f"The audit of {given.target} failed", trying), given)
    return 0


def ranges(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Prints which magnitudes occur, and what a dtype would need."""
    from jmpx._inspect.ranges.api import ranges

    with _made(given, flags) as (fn, args):
        found = attempt(f"The run of {given.target} failed", lambda: ranges(fn)(*args))
        _print(found, given)
    if given.dtype is not None:
        _print_note(f"\npolicy map for {given.dtype}: {found.rules(given.dtype)}", given)
    if given.plot is not None:
        attempt(f"Cannot draw {given.plot!r}", lambda: found.plot(given.plot))
        _print_note(f"wrote {given.plot}", given)
    return 0


def first_nonfinite(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Prints the first operation that makes an inf or NaN; the exit code is 1 if there is one."""
    from jmpx._inspect.first_nonfinite.api import first_nonfinite

    with _made(given, flags) as (fn, args):
        found = attempt(f"The run of {given.target} failed", lambda: first_nonfinite(fn)(*args))
        if found is not None:
            _print(found, given)
            return 1
    print("null" if given.json else "no operation makes an inf or NaN")
    return 0


@contextlib.contextmanager
def _made(given: argparse.Namespace, flags: Sequence[str]) -> Iterator[Program]:
    """Makes the program; its flags are in `sys.argv` while the context lasts."""
    before = sys.argv
    try:
        made = load(given.target, given.command, _RETURNS, flags)
        is_pair = type(made) is tuple and len(made) == 2
        if not is_pair or not callable(made[0]) or not isinstance(made[1], tuple | list):
            got = f"a value of type {type(made).__name__}"
            if is_pair:
                got = f"({', '.join(type(part).__name__ for part in made)})"
            raise ValueError(
                f"Expected {given.target} to return {_RETURNS}, which may be shapes, got {got}."
            )
        yield made[0], tuple(made[1])
    finally:
        sys.argv = before


def _print(found: PyTree, given: argparse.Namespace) -> None:
    """Prints a result, or its JSON."""
    print(found.to_json() if given.json else found)


def _print_note(line: str, given: argparse.Namespace) -> None:
    """Prints a line beside a result, which is not part of its JSON."""
    print(line, file=sys.stderr if given.json else sys.stdout)
