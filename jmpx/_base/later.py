"""Public names that their first use imports, so that `import jmpx` is fast."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def later(
    module: str, files: Mapping[str, str], rooms: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]], tuple[str, ...]]:
    """Makes the `__getattr__`, `__dir__` and `__all__` of a module whose names are imported later.

    `files` has the public names that each file of `jmpx` defines, with spaces between them, `rooms`
    the public modules inside of this one, with the packages that they need.
    """
    names = vars(sys.modules[module])
    places = {name: file for file, found in files.items() for name in found.split()}

    def getattr_(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{module}.{name}")
        if name not in places:
            raise _missing(module, name)
        file = importlib.import_module(f"jmpx.{places[name]}")
        names.update((each, getattr(file, each)) for each in files[places[name]].split())
        return names[name]

    def dir_() -> list[str]:
        own = {name for name in names if name.startswith("__")}
        return sorted({*own, *places, *(room for room in rooms if _is_installed(rooms[room]))})

    return getattr_, dir_, tuple(sorted(places))


def _is_installed(package: str) -> bool:
    try:
        return not package or importlib.util.find_spec(package) is not None
    except ValueError:  # An import of it is made to fail.
        return False


def _missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module does not have: it says what to write, if known."""
    from jmpx._base.moved import message  # here, because few programs need it

    if text := message(module, name):
        return AttributeError(text)
    # Python adds a name that is near.
    text = f"module {module!r} has no attribute {name!r}"
    return AttributeError(text, name=name, obj=sys.modules[module])
