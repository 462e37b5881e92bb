"""Loss scales from a kind and numbers by keys, which strings and mappings have in common.

Every function takes where a word or number stands, so that its error names the place.
"""

from collections.abc import Callable, Iterable, Mapping

import jax.core
import numpy as np

from jmpx._base.dtypes import parse_dtype
from jmpx._base.leaves import is_array
from jmpx._base.messages import describe as describe_value, did_you_mean
from jmpx._base.moved import SCALES
from jmpx._policies.maps import PolicyMap
from jmpx._scales.kinds import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jmpx._scales.numbers import ARGUMENTS, format_number, parse_number
from jmpx._scales.scaling import HIGHEST_SCALE, LARGEST_FLOAT32, LONGEST_PERIOD, LOWEST_SCALE

# Each kind, and the keys that it takes.
KEYS = {
    "dynamic": tuple(ARGUMENTS),
    "static": ("init",),
    "none": (),
    "auto": tuple(ARGUMENTS),
}
KINDS = {**{kind: kind for kind in KEYS}, "noop": "none"}

# The least and the largest number of each key, and how errors describe it.
_RANGES = {
    "init": (0, HIGHEST_SCALE, "a number between 2**-126 and 2**126"),
    "period": (1, LONGEST_PERIOD, "a whole number between 1 and 2**31 - 1"),
    "factor": (1, HIGHEST_SCALE, "a number between 1 and 2**126"),
    "min": (0, HIGHEST_SCALE, "a number between 0 and 2**126"),
    "max": (LOWEST_SCALE, LARGEST_FLOAT32, "a number of at least 2**-126 that float32 can hold"),
    "backoff": (LOWEST_SCALE, float(np.nextafter(1, 0)), "a number of at least 2**-126, below 1"),
    "hysteresis": (1, LONGEST_PERIOD, "a whole number between 1 and 2**31 - 1"),
    "counter": (-LONGEST_PERIOD, LONGEST_PERIOD, "a whole number of at most 2**31 - 1"),
}
_WHOLE = ("period", "hysteresis", "counter")


def describe(words: Iterable[str]) -> str:
    """Returns the list of accepted words for error messages."""
    return ", ".join(map(repr, words))


def find_kind(word: str, where: str) -> str:
    """Returns the kind of loss scale that a word names.

    Raises:
        ValueError: if it names none.
    """
    kind = KINDS.get(word.strip().lower())
    if kind is None:
        what = f"Unknown kind {word.strip()!r}" if word.strip() else "Missing kind"
        near = did_you_mean(word, _spellings(word))
        raise ValueError(f"{what} {where}: expected one of {describe(KINDS)}{near}")
    return kind


def _spellings(word: str) -> dict[str, str]:
    """What users may write in place of a kind -> what they mean."""
    try:
        parse_number(word)
    except ValueError:
        pass
    else:
        return {word.strip(): f"static={word.strip()}"}
    names = {"NoOpLossScale": "none", "StaticLossScale": "static", "DynamicLossScale": "dynamic"}
    return {**KINDS, **names, "no-op": "none", "null": "none", "constant": "static"}


def find_key(
    word: str, kind: str, given: Mapping[str, object], where: str, written: str | None = None
) -> str:
    """Returns the key that a word names.

    Args:
        word: the word.
        kind: the kind of loss scale.
        given: the keys before it.
        where: where the word stands.
        written: what stands there in its place, as the number of `dynamic=8`, which means `init`.

    Raises:
        ValueError: if it names none, one that the kind does not take, or one that is given.
    """
    key = word.strip().lower()
    if key not in ARGUMENTS:
        what = f"Unknown key {word.strip()!r}" if key else "Missing key"
        keys = {name: key for key, name in ARGUMENTS.items()}
        names = {key: key for key in ARGUMENTS} | keys
        names |= {word: keys[name] for word, name in SCALES.items()}
        raise ValueError(
            f"{what} {where}: expected one of {describe(KEYS[kind] or ARGUMENTS)}"
            f"{did_you_mean(word, names)}"
        )
    if key not in KEYS[kind]:
        takes = (
            "takes its factor alone, as 'static=1024'" if kind == "static" else "takes no number"
        )
        found = describe_value(key if written is None else written.strip())
        raise ValueError(
            f"Unexpected {found} {where}: {kind!r} {takes}, so leave it out or write 'dynamic'."
        )
    if key in given:
        raise ValueError(f"Duplicate key {key!r} {where}: give each key at most once.")
    return key


def as_number_of(key: str, value: object, where: str) -> int | float:
    """Returns the number of a key.

    Args:
        key: the key.
        value: a number, a concrete scalar array, or the text of a number.
        where: where the value stands.

    Raises:
        TypeError: if the value is something else.
        ValueError: if the text is no number, or the number is out of its range.
    """
    low, high, described = _RANGES[key]
    shown = value.strip() if isinstance(value, str) else value
    got = "got nothing" if isinstance(shown, str) and not shown else f"got {describe_value(shown)}"
    if isinstance(value, str):
        try:
            number = parse_number(value)
        except ValueError:
            end = "; did you mean '2**15'?" if "^" in value else "."
            raise ValueError(
                f"Expected the number of {key!r}, {got} {where}: write it as 32768, 2**15, 0.5 or "
                f"1e4, because nothing is evaluated{end}"
            ) from None
    elif is_array(value) and value.ndim == 0 and not isinstance(value, jax.core.Tracer):
        number = value.item()
    else:
        number = value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"Expected {key!r} to be {described}, {got} {where}.")
    if not low <= number <= high or (key in _WHOLE and number != int(number)):
        raise ValueError(f"Expected {key!r} to be {described}, {got} {where}.")
    return int(number) if key in _WHOLE else number


def decide(kind: str, policy_map: PolicyMap | None, where: str) -> str:
    """Returns the kind itself, or, for `auto`, the kind that the policy map asks for.

    Raises:
        ValueError: if there is no policy map for `auto`.
    """
    if kind != "auto":
        return kind
    if policy_map is None:
        raise ValueError(
            f"Cannot decide 'auto' {where} without a policy: give get_loss_scale a policy=, or "
            "write 'dynamic' or 'none'."
        )
    computes_in = {policy_map.default.compute_dtype, *(rule.compute for rule in policy_map.rules)}
    return "dynamic" if parse_dtype("float16") in computes_in else "none"


def build(
    kind: str,
    numbers: Mapping[str, int | float],
    place: Callable[[str], str],
    policy_map: PolicyMap | None = None,
) -> LossScale:
    """Makes a loss scale from a kind and from numbers, each of which is within its range.

    Args:
        kind: the kind.
        numbers: the numbers by their keys.
        place: returns where the kind, by the key `type`, or a number that is given stands.
        policy_map: what decides `auto`.

    Raises:
        ValueError: if numbers contradict each other, a number is missing, or `auto` has no policy.
    """
    if kind in ("dynamic", "auto"):
        _check_together(numbers, place)
    kind = decide(kind, policy_map, place("type"))
    if kind == "none":
        return NoOpLossScale()
    if kind == "dynamic":
        return DynamicLossScale(**{ARGUMENTS[key]: number for key, number in numbers.items()})  # pyright: ignore[reportArgumentType]
    factor = numbers.get("init")
    if factor is None:
        raise ValueError(f"Missing factor of 'static' {place('type')}: write it as 'static=1024'.")
    if 0 < factor < LOWEST_SCALE:
        raise ValueError(
            f"Expected 'init' to be {_RANGES['init'][2]}, got {factor} {place('init')}."
        )
    return StaticLossScale(factor)


def _check_together(numbers: Mapping[str, int | float], place: Callable[[str], str]) -> None:
    """Refuses numbers of a dynamic loss scale that contradict each other."""
    numbers = {"factor": 2, "min": 1, **numbers}
    low, high = max(numbers["min"], LOWEST_SCALE), min(numbers.get("max", np.inf), HIGHEST_SCALE)
    if low > high:
        least, most = (format_number(numbers[key]) for key in ("min", "max"))
        raise ValueError(
            f"Expected 'max' to be at least 'min', which is {least}, got {most} {place('max')}: "
            "swap them, or leave one out."
        )
    # In float32, as the loss scale compares them.
    init = np.float32(numbers.get("init", np.clip(2.0**15, low, high)))
    bounds = {"min": np.float32(low), "max": np.float32(high)}
    if not bounds["min"] <= init <= bounds["max"]:
        key = "min" if init < bounds["min"] else "max"
        shown = format_number(numbers.get(key, HIGHEST_SCALE))
        raise ValueError(
            f"Expected 'init' to be at {'least' if key == 'min' else 'most'} {key!r}, which is "
            f"{shown}, got {format_number(numbers['init'])} {place('init')}: give another {key!r}, "
            "or leave one out."
        )
    if numbers["factor"] == 1 and "backoff" not in numbers:
        raise ValueError(
            f"Expected 'factor' to be above 1, got 1 {place('factor')}: without 'backoff', the "
            "scale could not shrink."
        )
