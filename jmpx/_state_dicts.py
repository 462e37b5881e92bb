"""State dicts of loss scales, which `flax.serialization` saves and restores."""

import contextlib
import dataclasses
import functools
from typing import Any


def _is_number(value: object) -> bool:
    """Whether a value is a number or an array, and no part of a tree of shardings or axes."""
    return hasattr(value, "dtype") or isinstance(value, int | float)


@functools.cache
def register_states(
    serialization: Any, classes: tuple[type, ...], names: tuple[str, ...] = ()
) -> None:
    """Tells Flax how to save and restore dataclasses, unless the user has told it already.

    Args:
        serialization: the module `flax.serialization`.
        classes: the dataclasses.
        names: the fields that a checkpoint holds; a template has the others.
    """

    def to_state_dict(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names}

    def from_state_dict(template: Any, state: Any) -> Any:
        got = sorted(state) if isinstance(state, dict) else type(state).__name__
        if got != sorted(names):
            raise ValueError(
                f"Expected the state of a {type(template).__name__} to hold {list(names)}, got "
                f"{got}: restore it into a loss scale of the class that was saved."
            )
        for name, value in state.items():
            if _is_number(getattr(template, name)) and not _is_number(value):
                raise ValueError(
                    f"Expected {name} in the state of a {type(template).__name__} to be a number, "
                    f"got {type(value).__name__}: the checkpoint is torn or of another program, so "
                    "restore an older one."
                )
        return dataclasses.replace(template, **state)

    for cls in classes:
        with contextlib.suppress(ValueError):  # Flax refuses a class that is registered.
            serialization.register_serialization_state(cls, to_state_dict, from_state_dict)
