"""Lets `flax.serialization` save and restore loss scales, whichever is imported first."""

import contextlib
import dataclasses
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax

from jmpx._base.leaves import ARRAYS

_LOG = logging.getLogger("jmpx")
_FLAX = "flax.serialization"
# What checkpoints have of the classes: nothing, or the leaves of a dynamic one.
_SAVED = ([], ["counter", "loss_scale"])
# The classes that have instances, and the leaves that a checkpoint has of each.
_known: dict[type, tuple[str, ...]] = {}


def register_with_flax(cls: type, names: tuple[str, ...] = ()) -> None:
    """Tells Flax how to save and restore a class, now or when Flax is imported.

    That is when its first instance is made, so that a registration of the user's own stays.

    Args:
        cls: the class, a dataclass.
        names: the fields that a checkpoint holds; a template has the others.
    """
    if cls in _known:
        return
    _known[cls] = names
    serialization = sys.modules.get(_FLAX)
    if serialization is not None:
        _register(serialization, cls)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `flax.serialization` once, as the next finders do, and registers all known classes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _FLAX:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for cls in _known:
                    _register(module, cls)

            spec.loader.exec_module = exec_module
        return spec


_finder = _Finder()


def note_choice(chosen: object, saved: str, level: int) -> None:
    """Logs the loss scale with which a run goes on, and that of the checkpoint, as its string."""
    _LOG.log(
        level, "The loss scale goes on as '%s'; that of the checkpoint was '%s'.", chosen, saved
    )


def _register(serialization: ModuleType, cls: type) -> None:
    """Registers a class with Flax, unless the user has done so."""
    names = _known[cls]

    def to_state_dict(value: object) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names}

    with contextlib.suppress(ValueError):  # Flax refuses a class that is registered.
        serialization.register_serialization_state(cls, to_state_dict, _restored)


def _restored(template: Any, state: Any) -> Any:
    """Returns the template with the leaves of a checkpoint, or as it is if the kind has changed."""
    names = sorted(_known[type(template)])
    got = sorted(state) if isinstance(state, dict) else type(state).__name__
    if got != names and got in _SAVED:  # The policy of the run has changed.
        note_choice(template, f"dynamic: {state}" if state else "none", logging.WARNING)
        return template
    if got != names:
        raise ValueError(
            f"Expected the state of a {type(template).__name__} to hold {names}, got {got}: the "
            "checkpoint is of another program, so restore another one."
        )
    for name, value in state.items():
        if _is_number(getattr(template, name)) and not _is_number(value):
            raise ValueError(
                f"Expected {name} in the state of a {type(template).__name__} to be a number, got "
                f"{type(value).__name__}: the checkpoint is torn or of another program, so restore "
                "an older one."
            )
    return dataclasses.replace(template, **state)


def _is_number(value: object) -> bool:
    """Whether a value is a number or an array, rather than a sharding or an axis."""
    return isinstance(value, (*ARRAYS, jax.ShapeDtypeStruct, int, float))
