"""Public names: a stub beside each module lists them, and their first use imports them."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
_NEEDS = {"equinox": "equinox", "flags": "absl", "flax": "flax", "haiku": "haiku"}
# Names of other libraries that people look for at the root: what to write.
_ELSEWHERE = {
    "DynamicScale": "jmpx.DynamicLossScale",
    "GradScaler": "jmpx.DynamicLossScale and jmpx.value_and_grad",
    "amp": "jmpx.autocast",
    "filter_grad": "jmpx.grad",
    "filter_value_and_grad": "jmpx.value_and_grad",
}


def public_names(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a module, from the stub beside its file.

    `import jmpx` is fast, because a name is imported when it is used, and the stub is read at the
    first use. The module's `__all__` has the names that are not modules.
    """
    own = vars(sys.modules[module])
    places: dict[str, str] = {}  # name -> the module that defines it

    def read() -> dict[str, str]:
        if not places:
            lines = _IMPORT.findall(Path(file).with_suffix(".pyi").read_text())
            words = ((place, re.findall(r"(\w+) as", "".join(names))) for place, *names in lines)
            found = {word: place for place, several in words for word in several}
            own["__all__"] = tuple(sorted(name for name in found if found[name] != module))
            places.update(found)  # at once, for other threads
        return places

    def getattr_(name: str) -> Any:
        place = None if name.startswith("__") and name != "__all__" else read().get(name)
        if place == module:
            return importlib.import_module(f"{module}.{name}")
        if place is not None:
            own[name] = getattr(importlib.import_module(place), name)
        if name not in own:
            raise _missing(module, name)
        return own[name]

    def dir_() -> list[str]:
        shown = (each for each in read() if _is_installed(_NEEDS.get(each, "")))
        return sorted({*shown, *(each for each in own if each.startswith("__"))})

    return getattr_, dir_


def _is_installed(package: str) -> bool:
    try:
        return not package or importlib.util.find_spec(package) is not None
    except ValueError:  # `sys.modules` holds a stand-in without a spec.
        return False


def _missing(module: str, name: str) -> AttributeError:
    """Returns the error for a missing name: it says what to write, if that is known."""
    text = f"module {module!r} has no attribute {name!r}"
    if name in _ELSEWHERE:
        return AttributeError(f"{text}: write {_ELSEWHERE[name]} instead.")
    for other in ("", ".inspect", ".optim", ".distributed", ".types", ".mpx"):
        if not name.startswith("_") and name in importlib.import_module(f"jmpx{other}").__all__:
            return AttributeError(f"{text}: write jmpx{other}.{name} instead.")
    # Python suggests the nearest name.
    return AttributeError(text, name=name, obj=sys.modules[module])
