"""The lines of the user's code in which equations were traced."""

import functools
import os
import sys
import sysconfig
from typing import NamedTuple

from jmpx._jaxprs.core import Equation


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str  # which holds the line
    caller: "Place | None" = None  # the user's own line, if this one is in an installed package

    def __str__(self) -> str:
        """Returns for example `model.py:12 (apply)`; in an installed package, with the caller."""
        file = self.file
        for folder in (os.getcwd() + os.sep, *(_packages() if self.caller else ())):
            file = file.removeprefix(folder)
        called = f", called at {self.caller}" if self.caller else ""
        return f"{file}:{self.line} ({self.function}){called}"


_LIBRARIES = ("jax", "jaxlib", "jmpx", "flax", "haiku", "equinox", "jaxtyping", "optax", "chex")
_NOTE = "jmpx's autocast was running"


def place_of(eqn: Equation, called: str = "") -> Place | None:
    """Returns the innermost line of the user's code in which an equation was traced, if any.

    `called` names the jitted function whose jaxpr holds the equation: JAX traces `jnp.where`, for
    example, once for all calls, and until JAX 0.8 its equations have the lines of the first one.
    """
    traceback = eqn.source_info.traceback
    found: Place | None = None
    for frame in () if traceback is None else traceback.frames:
        name = frame.function_name.rpartition(".")[2]
        if not is_of_library(frame.file_name):
            place = Place(frame.file_name, frame.line_num, name)
            if not place.file.startswith(_packages()):
                return place if found is None else found._replace(caller=place)
            found = found or place
        if called and name == called:
            break
    return found


@functools.cache
def _packages() -> tuple[str, ...]:
    """Returns the folders of installed packages, with a separator at their ends."""
    return tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))


def call_of(eqn: Equation) -> object:
    """Returns what identifies the call in the user's code that traced an equation, or None.

    It is equal for the operations of one call, such as a promotion and the product that needs it,
    and differs for two calls on one line.
    """
    traceback = eqn.source_info.traceback
    for code, at in () if traceback is None else zip(*traceback.raw_frames(), strict=True):
        if not is_of_library(code.co_filename):
            return code, at
    return None


@functools.cache
def is_of_library(file: str) -> bool:
    """Returns whether a file is of JAX, jmpx, a framework, or Python itself."""
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [os.path.dirname(module.__file__ or "") for module in modules]
    if file.startswith(tuple(folder + os.sep for folder in folders)) or file.startswith("<frozen"):
        return True
    return file.startswith(sysconfig.get_path("stdlib")) and not file.startswith(_packages())


def note_source(error: Exception, eqn: Equation) -> None:
    """Adds the line of the user's code to an error of an equation, unless one inside of it has."""
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    place = place_of(eqn)
    if place is not None:
        source = f"{place.file}:{place.line} ({place.function})"
        error.add_note(f"{_NOTE} `{eqn.primitive.name}` of {source}.")
