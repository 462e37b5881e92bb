"""The commands of `python -m jmpx` that look at a program: audit, ranges and first-nonfinite."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO, TypeAlias

from jmpx._cli.targets import attempt, load

Program: TypeAlias = tuple[Any, tuple[Any, ...]]

_RETURNS = "a pair of a function and the tuple of its arguments"


class Target(NamedTuple):
    """The program that a command looks at.

    Args:
        command: the name of the command.
        name: what makes the program, such as `"pkg.module:make"`.
        program_flags: the flags of the program itself.
    """

    command: str
    name: str
    program_flags: Sequence[str]


def audit(target: Target, platform: str | None, as_json: bool, lock: str | None) -> int:
    """Prints what runs in which dtype, and compares it with a lock file.

    Args:
        target: the program.
        platform: the platform that is asked about, None for none.
        as_json: whether to print JSON.
        lock: the path of a lock file, which is written if it is not there.

    Returns:
        The exit code: 1 if the program differs from the lock file.

    Raises:
        ValueError: if the program cannot be made or traced, or the file is no lock file.
        OSError: if the lock file cannot be read or written.
    """
    with _made(target) as (fn, args):
        from jmpx._inspect.audit.api import (
            audit,  # here, as the others below: a command needs one of them
        )

        report = attempt(
            f"The audit of {target.name} failed", lambda: audit(fn, platform=platform)(*args)
        )
        differs, lines = (False, []) if lock is None else _compared(report.entries, lock)
        _print(report, as_json)
    for line in lines:
        print(line, file=_notes(as_json))
    return int(differs)


def _compared(entries: Sequence[Any], path: str) -> tuple[bool, list[str]]:
    """Returns whether a program differs from a lock file, and the lines that tell how."""
    from jmpx._inspect.audit.lock import differences, write

    if not os.path.exists(path):
        write(entries, path)
        return False, ["", f"wrote {path}, which was not there"]
    found = differences(entries, path)
    if not found:
        return False, ["", f"{path}: no difference"]
    count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
    accept = f"{path}: {count}; to accept what there is now, delete the file and run this again"
    return True, ["", *map(str, found), accept]


def ranges(target: Target, dtype: str | None, as_json: bool, plot: str | None) -> int:
    """Prints which magnitudes occur, and what the dtype would need.

    Args:
        target: the program.
        dtype: the 16-bit dtype for which to print a policy map, None for none.
        as_json: whether to print JSON.
        plot: the file to draw the histogram into, None for none.

    Returns:
        The exit code.

    Raises:
        ValueError: if the program cannot be made or run, or the plot cannot be drawn.
    """
    with _made(target) as (fn, args):
        from jmpx._inspect.ranges.api import ranges

        found = attempt(f"The run of {target.name} failed", lambda: ranges(fn)(*args))
        _print(found, as_json)
    if dtype is not None:
        print(f"\npolicy map for {dtype}: {found.rules(dtype)}", file=_notes(as_json))
    if plot is not None:
        attempt(f"Cannot draw {plot!r}", lambda: found.plot(plot))
        print(f"wrote {plot}", file=_notes(as_json))
    return 0


def first_nonfinite(target: Target, as_json: bool) -> int:
    """Prints the first operation that makes an inf or NaN.

    Args:
        target: the program.
        as_json: whether to print JSON.

    Returns:
        The exit code: 1 if there is such an operation.

    Raises:
        ValueError: if the program cannot be made or run.
    """
    with _made(target) as (fn, args):
        from jmpx._inspect.first_nonfinite.api import first_nonfinite

        found = attempt(f"The run of {target.name} failed", lambda: first_nonfinite(fn)(*args))
        if found is None:
            print("null" if as_json else "no operation makes an inf or NaN")
            return 0
        _print(found, as_json)
    return 1


@contextlib.contextmanager
def _made(target: Target) -> Iterator[Program]:
    """Makes the program; its flags are in `sys.argv` while the context lasts.

    Raises:
        ValueError: if it cannot be made, or is no program.
    """
    before = sys.argv
    try:
        made = load(target.name, target.command, _RETURNS, target.program_flags)
        is_pair = type(made) is tuple and len(made) == 2
        if not is_pair or not callable(made[0]) or not isinstance(made[1], tuple | list):
            got = ", ".join(type(each).__name__ for each in made) if is_pair else ""
            raise ValueError(
                f"Expected {target.name} to return {_RETURNS}, which may be shapes, got "
                f"{f'({got})' if is_pair else f'a value of type {type(made).__name__}'}."
            )
        yield made[0], tuple(made[1])
    finally:
        sys.argv = before


def _print(found: Any, as_json: bool) -> None:
    """Prints a result, or its JSON."""
    print(found.to_json() if as_json else found)


def _notes(as_json: bool) -> TextIO:
    """Returns where to print what is no JSON."""
    return sys.stderr if as_json else sys.stdout
