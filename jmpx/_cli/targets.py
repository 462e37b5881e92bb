"""What the command line names as `pkg.module:make` or `folder/script.py:make`, and its flags."""

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from jmpx._base.leaves import PyTree

R = TypeVar("R")

_LONGEST = 500  # of an error that becomes one line: some of JAX's have a sentence per array


def load(target: str, flags: Sequence[str]) -> PyTree:
    """Returns what the function that a target names returns; a ValueError says why it cannot.

    `sys.argv` holds the flags of its program from here on, and absl, if that has flags of it,
    parses them.
    """
    name, _, attribute = target.rpartition(":")
    if not name or not attribute:
        raise ValueError(
            f"Expected MODULE:FUNCTION, got {target!r}: name a module or a .py file and, after a "
            "colon, the function in it to call."
        )
    sys.argv = [name, *flags]
    module: Any = attempt(f"Cannot import {name!r}", lambda: _import(name))
    attempt(f"The flags of {name!r} after -- are wrong", lambda: _parse_flags(module))
    return attempt(f"The function {target} failed", lambda: getattr(module, attribute)())


def attempt(what: str, func: Callable[[], R]) -> R:
    """Runs code of the user; an error of it becomes one line, with the line of the user's code."""
    try:
        return func()
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        raise ValueError(
            f"{what}: {type(error).__name__}{f': {text}' if text else ''}{_place(error)}"
        ) from error


def _place(error: BaseException) -> str:
    """Returns where an error was raised, as the last line that is of no installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not _is_installed(frame.filename):
            return f" ({os.path.relpath(frame.filename)}:{frame.lineno})"
    return ""


def _is_installed(file: str) -> bool:
    """Whether a file is of jmpx, of Python, or of an installed package."""
    paths = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    return file.startswith((os.path.dirname(os.path.dirname(__file__)), *paths))


def _import(name: str) -> ModuleType:
    """Imports a module; a script as Python would, with its folder before all others on the path."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = os.path.realpath(name)
    if not os.path.isfile(path):
        raise FileNotFoundError("there is no such file")
    folder, file = os.path.split(path)
    sys.path.insert(0, folder)
    module = importlib.import_module(file.removesuffix(".py"))
    if os.path.realpath(module.__file__ or "") != path:
        raise ImportError(f"another module has the name {module.__name__!r}: {module.__file__}")
    return module


def _parse_flags(module: ModuleType) -> None:
    """Parses `sys.argv` by absl, as `app.run` would, if the program defines flags of absl.

    Libraries define flags of absl, too. If only these do, the program reads `sys.argv` by itself:
    a flag that absl does not know is not an error then.
    """
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is None:
        return
    by_module = absl_flags.FLAGS.flags_by_module_dict()
    is_own = any(_is_of_program(name, module) for name in by_module if by_module[name])
    absl_flags.FLAGS(sys.argv, known_only=not is_own)


def _is_of_program(name: str, module: ModuleType) -> bool:
    """Whether a module is of the same package as the program, or of no installed one."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_beside = name.partition(".")[0] == module.__name__.partition(".")[0]
    return is_beside or not _is_installed(file)
