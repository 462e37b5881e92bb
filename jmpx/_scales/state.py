"""Loss scales from a checkpoint's plain numbers, even if the run has changed their kind."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import TypeVar, overload

import numpy as np

from jmpx._base.leaves import is_array
from jmpx._base.mappings import Located, unknown
from jmpx._base.messages import describe
from jmpx._scales.arguments import DYNAMIC, STATIC, check_number
from jmpx._scales.flax_states import note_choice
from jmpx._scales.kinds import DynamicLossScale, LossScale
from jmpx._scales.mixed_precision import MixedPrecision
from jmpx._scales.numbers import as_text, shortest
from jmpx._scales.strings import LossScaleLike, get_loss_scale

LossScaleT = TypeVar("LossScaleT", bound=LossScale)

# What `state_dict` has of each kind besides its kind.
_NUMBERS = {
    "dynamic": {"loss_scale": STATIC["init"], "counter": DYNAMIC["counter"]},
    "static": {"loss_scale": STATIC["init"]},
    "none": {},
}
_REMEDY = "give what state_dict() of the loss scale returned, or restore an older checkpoint"


@overload
def restore_loss_scale(state: Mapping[str, object], like: LossScaleT) -> LossScaleT: ...
@overload
def restore_loss_scale(
    state: Mapping[str, object], like: LossScaleLike | MixedPrecision
) -> LossScale: ...
def restore_loss_scale(
    state: Mapping[str, object], like: LossScaleLike | MixedPrecision
) -> LossScale:
    """Makes the loss scale with which a run goes on from a checkpoint.

    Its class and its configuration are those of `like`, the loss scale that the run would begin
    with. Only a dynamic loss scale learns while it trains: if both are dynamic, its scale and its
    counter are those of the checkpoint, within the bounds of `like`. In every other case the run
    goes on with `like` itself, so that a run may change its policy: from bfloat16 without a loss
    scale to float16 with one, or back.

    The logger `jmpx` of `logging` gets a line that says what was chosen: a warning where the
    checkpoint's loss scale is of another kind or beyond the bounds, an information otherwise.

    Args:
        state: what `state_dict()` of a loss scale returned, or what `flax.serialization` made of
            one. Its values may be numbers or arrays of shape ().
        like: a loss scale, or its string or mapping, as `jmpx.get_loss_scale` takes it; or a
            `jmpx.MixedPrecision`, whose loss scale is taken.

    Raises:
        TypeError: if `state` is not a mapping, or one of its values is not a number; or as
            `get_loss_scale`.
        ValueError: if `state` has other keys, or a number is out of its range; or as
            `get_loss_scale`.

    Example:
        >>> import jmpx
        >>> state = jmpx.DynamicLossScale(2.0**12, counter=7).state_dict()
        >>> state
        {'type': 'dynamic', 'loss_scale': 4096.0, 'counter': 7}
        >>> print(jmpx.restore_loss_scale(state, like=jmpx.DynamicLossScale(period=500)))
        dynamic,init=4096,period=500,counter=7
        >>> print(jmpx.restore_loss_scale(state, like="none"))  # bfloat16 from now on
        none
    """
    like = like.loss_scale if isinstance(like, MixedPrecision) else get_loss_scale(like)
    kind, numbers = _read(state)
    text = as_text(kind, {{"loss_scale": "init"}.get(key, key): n for key, n in numbers.items()})
    if kind != "dynamic" or not isinstance(like, DynamicLossScale):
        note_choice(like, text, logging.INFO if str(like) == text else logging.WARNING)
        return like
    restored = dataclasses.replace(like, **numbers)
    kept = restored.loss_scale == numbers["loss_scale"] and restored.counter == numbers["counter"]
    note_choice(restored, text, logging.INFO if kept else logging.WARNING)
    return restored


def _read(state: object) -> tuple[str, dict[str, int | float]]:
    """Returns the kind of a checkpoint's loss scale, and its numbers by their keys."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"Expected the state of a loss scale as a mapping, got {describe(state)}: {_REMEDY}."
        )
    kind = state.get("type", "dynamic" if state else "none")  # Flax's state does not name it
    kind = kind.item() if is_array(kind) and kind.ndim == 0 else kind
    if not isinstance(kind, str) or kind not in _NUMBERS:
        found = Located(kind, "'type' of the state of a loss scale")
        raise unknown("kind", found, ", ".join(map(repr, _NUMBERS)), [*_NUMBERS])
    keys = [key for key in state if key != "type"]
    if sorted(map(str, keys)) != sorted(_NUMBERS[kind]):
        raise ValueError(
            f"Expected the state of a {kind!r} loss scale to hold {list(_NUMBERS[kind])}, got "
            f"{describe(keys)}: {_REMEDY}."
        )
    numbers = {
        key: check_number(argument, state[key], f"{key} in the state of a loss scale")
        for key, argument in _NUMBERS[kind].items()
    }
    if "loss_scale" in numbers:
        numbers["loss_scale"] = shortest(np.float32(numbers["loss_scale"]))
    return kind, numbers
