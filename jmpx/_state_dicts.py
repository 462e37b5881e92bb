"""State dicts of loss scales, which `flax.serialization` saves and restores."""

import contextlib
import dataclasses
import functools
from typing import Any


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
        return dataclasses.replace(template, **state)

    for cls in classes:
        with contextlib.suppress(ValueError):  # Flax refuses a class that is registered.
            serialization.register_serialization_state(cls, to_state_dict, from_state_dict)
