"""State dicts of loss scales: what `flax.serialization` saves, and the log of what was restored."""

import contextlib
import dataclasses
import functools
import logging
from typing import Any

_LOG = logging.getLogger("jmpx")
# What the classes save: those without state, and the dynamic one.
_SAVED = ((), ("counter", "loss_scale"))


def note_choice(chosen: object, saved: str, level: int) -> None:
    """Logs the loss scale with which a run goes on, and that of the checkpoint.

    Args:
        chosen: the loss scale.
        saved: that of the checkpoint, as its string.
        level: of the log.
    """
    _LOG.log(
        level, "The loss scale goes on as '%s'; that of the checkpoint was '%s'.", chosen, saved
    )


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
        if got != sorted(names) and tuple(got) in _SAVED:  # The policy of the run has changed.
            note_choice(template, f"dynamic: {state}" if state else "none", logging.WARNING)
            return template
        if got != sorted(names):
            raise ValueError(
                f"Expected the state of a {type(template).__name__} to hold {list(names)}, got "
                f"{got}: the checkpoint is of another program, so restore another one."
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
