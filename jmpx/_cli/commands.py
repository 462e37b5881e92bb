"""The commands of `python -m jmpx`.

Each takes the parsed arguments, prints what it finds, and returns the exit code. It raises a
ValueError of one sentence if the program cannot be made, traced or run.
"""

import argparse
import sys
from collections.abc import Callable
from typing import TypeAlias

from jmpx._base.leaves import PyTree
from jmpx._base.messages import describe
from jmpx._cli.targets import attempt, load

Program: TypeAlias = tuple[Callable[..., PyTree], tuple[PyTree, ...]]

_RETURNS = "a pair of a function and the tuple of its arguments, which may be shapes"


def explain(given: argparse.Namespace) -> int:
    """Prints what a policy string means."""
    print(*_explained(given.precision), sep="\n")
    return 0


def doctor(given: argparse.Namespace) -> int:
    """Prints what is installed and set here; the exit code is 1 if that does not fit together."""
    from jmpx._cli.doctor import doctor  # here, as below: a command needs one of them

    return doctor()


def audit(given: argparse.Namespace) -> int:
    """Prints what runs in which dtype."""
    from jmpx._inspect.audit.api import audit

    fn, args = _made(given)
    trying = lambda: audit(fn, platform=given.platform)(*args)  # noqa: E731
    _print(attempt(f"The audit of {given.target} failed", trying), given)
    return 0


def ranges(given: argparse.Namespace) -> int:
    """Prints which magnitudes occur, and what narrower dtypes would lose."""
    from jmpx._inspect.ranges.api import ranges

    fn, args = _made(given)
    found = attempt(f"The run of {given.target} failed", lambda: ranges(fn)(*args))
    _print(found, given)
    if given.plot is not None:
        attempt(f"Cannot draw {given.plot!r}", lambda: found.plot(given.plot))
        print(f"wrote {given.plot}", file=sys.stderr)  # which is not part of the JSON
    return 0


def first_nonfinite(given: argparse.Namespace) -> int:
    """Prints the first operation that makes an inf or NaN; the exit code is 1 if there is one."""
    from jmpx._inspect.first_nonfinite.api import first_nonfinite

    fn, args = _made(given)
    found = attempt(f"The run of {given.target} failed", lambda: first_nonfinite(fn)(*args))
    if found is not None:
        _print(found, given)
        return 1
    print("null" if given.json else "no operation makes an inf or NaN")
    return 0


def choose(given: argparse.Namespace) -> int:
    """Prints policy strings that hold a bound on the error, with what they cost."""
    from jmpx._inspect.choose.api import choose

    func, batches, make_step = _losses(given.target, load(given.target, given.flags))
    run = choose(func, given.policy, error=given.error, make_step=make_step, chip=given.chip)
    found = attempt(f"The run of {given.target} failed", lambda: run(*batches))
    _print(found, given)
    if given.plot is not None:
        attempt(f"Cannot draw {given.plot!r}", lambda: found.plot(given.plot))
        print(f"wrote {given.plot}", file=sys.stderr)
    return 0 if found.chosen else 1


def migrate(given: argparse.Namespace) -> int:
    """Prints the edits that take a program to jmpx, and makes them if asked to."""
    from jmpx._migrate.files import migrate_files

    print(*migrate_files(given.files, given.write), sep="\n")
    return 0


def _losses(target: str, made: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the loss, its batches, and the function that makes a train step or None."""
    if type(made) is tuple and len(made) in (2, 3) and callable(made[0]):
        func, batches, make_step = (*made, None)[:3]
        if isinstance(batches, list) and (make_step is None or callable(make_step)):
            return func, batches, make_step
    raise ValueError(
        f"Expected {target} to return a loss, the list of its batches and maybe a function that "
        f"makes a step of a policy, got {describe(made)}: write `return loss_fn, [(params, x), "
        "(params, x2)], make_step`."
    )


def _made(given: argparse.Namespace) -> Program:
    """Makes the program."""
    made = load(given.target, given.flags)
    if type(made) is tuple and len(made) == 2:
        fn, args = made
        if callable(fn) and isinstance(args, tuple | list):
            return fn, tuple(args)
    got = type(made).__name__
    if type(made) is tuple:
        got = f"({', '.join(type(part).__name__ for part in made)})"
    raise ValueError(f"Expected {given.target} to return {_RETURNS}, got {got}.")


def _print(found: PyTree, given: argparse.Namespace) -> None:
    print(found.to_json() if given.json else found)
