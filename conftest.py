"""Doctests of public classes, which say that they are of `jmpx` or of a room, not of their file."""

import doctest
import inspect
import re

ROOMS = {"jmpx", *(f"jmpx.{room}" for room in ("flags", "inspect", "mpx", "optim", "types"))}


def _from_module(finder, module, thing):
    """Whether the text of a module defines a thing: a public class, too."""
    if inspect.isclass(thing) and thing.__module__ in ROOMS:
        pattern = rf"^class {thing.__name__}\b"
        return re.search(pattern, inspect.getsource(module), re.MULTILINE) is not None
    return _as_it_was(finder, module, thing)


_as_it_was = doctest.DocTestFinder._from_module  # pyright: ignore[reportAttributeAccessIssue]
doctest.DocTestFinder._from_module = _from_module  # pyright: ignore[reportAttributeAccessIssue]
