"""Lets `flax.serialization` save and restore loss scales."""

import contextlib
import dataclasses
import sys
from typing import Any

_known: set[type] = set()


def register_with_flax(cls: type, names: tuple[str, ...] = ()) -> None:
    """Tells Flax, once it is imported, which fields of a class it saves; a template has others."""
    # Each instance asks for it when it is made, because jmpx imports no framework.
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or cls in _known:
        return
    _known.add(cls)

    def to_state_dict(value: object) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names}

    def from_state_dict(template: Any, state: Any) -> Any:
        got = sorted(state) if isinstance(state, dict) else type(state).__name__
        if got != sorted(names):
            raise ValueError(
                f"Expected the state of a {cls.__name__} to hold {sorted(names)}, got {got}: the "
                "checkpoint is of another loss scale or program, so restore it into a template of "
                "the kind that was saved."
            )
        for name, value in state.items():
            is_missing = value is None and getattr(template, name) is not None
            if is_missing or isinstance(value, dict | list | str):
                raise ValueError(
                    f"Expected {name} in the state of a {cls.__name__} to be a number, got "
                    f"{type(value).__name__}: the checkpoint is torn, so restore an older one."
                )
        return dataclasses.replace(template, **state)

    with contextlib.suppress(ValueError):  # A registration of the user's own stays.
        serialization.register_serialization_state(cls, to_state_dict, from_state_dict)
