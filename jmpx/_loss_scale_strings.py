"""Loss scales from strings and mappings: their grammar."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import jax.core
import numpy as np

from jmpx._dtypes import parse_dtype
from jmpx._leaves import is_array
from jmpx._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jmpx._loss_scale_numbers import ARGUMENTS, format_number, parse_number
from jmpx._messages import did_you_mean, position
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, get_policy_map
from jmpx._policy_strings import without_last_semicolon
from jmpx._scaling import HIGHEST_SCALE, LARGEST_FLOAT32, LONGEST_PERIOD, LOWEST_SCALE

LossScaleT = TypeVar("LossScaleT", bound=LossScale)

# Each kind, and the keys that it takes.
KEYS = {
    "dynamic": tuple(ARGUMENTS),
    "static": ("init",),
    "none": (),
    "auto": tuple(ARGUMENTS),
}
_KINDS = {**{kind: kind for kind in KEYS}, "noop": "none"}

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
_EXAMPLE = "'dynamic,init=2**15'"


@overload
def get_loss_scale(
    spec: LossScaleT, policy: PolicyMap | Policy | str | None = ...
) -> LossScaleT: ...


@overload
def get_loss_scale(
    spec: str | Mapping[str, Any], policy: PolicyMap | Policy | str | None = ...
) -> LossScale: ...


def get_loss_scale(
    spec: str | Mapping[str, Any] | LossScale, policy: PolicyMap | Policy | str | None = None
) -> LossScale:
    """Makes a loss scale from a string, such as `"dynamic, init=2**15, period=500"`.

    The string begins with a kind:

    - `dynamic`, a `DynamicLossScale`,
    - `static`, a `StaticLossScale`, whose factor follows: `static=1024`,
    - `none` or `noop`, a `NoOpLossScale`,
    - `auto`, which is `dynamic` if the default of `policy` or one of its rules computes in
      float16, and `none` otherwise.

    Parts `key=number` follow, separated by commas; `dynamic` and `auto` take them, and those of
    `auto` hold if it is `dynamic`. The keys are the arguments of `DynamicLossScale`: `init`, the
    scale to begin with, which may also stand behind the kind (`dynamic=2**15`); `period`; `factor`;
    `min` and `max`, the bounds of the scale; `backoff`; `hysteresis`; and `counter`. Defaults are
    those of `DynamicLossScale`. White space, case and one semicolon at the end are ignored.

    A number is written as `32768`, `2**15`, `0.5` or `1e4`. Nothing else is evaluated.

    Args:
        spec: the string; or a mapping such as `{"type": "dynamic", "init": 32768}`, whose numbers
            may be strings; or a loss scale, which is returned as it is.
        policy: a policy or a policy map, or the string of either. Only `auto` needs it.

    Returns:
        The loss scale. `str()` of it is a string that gives an equal one, `.to_dict()` a mapping.

    Raises:
        TypeError: if `spec` or `policy` is of another type, or a number of a mapping is none.
        ValueError: if the string does not follow the grammar, a number is out of its range or
            contradicts another, or `auto` has no policy. The message gives the position.

    Example:
        >>> import jmpx
        >>> loss_scale = jmpx.get_loss_scale("dynamic, init=2**10, max=2**24, hysteresis=2")
        >>> float(loss_scale.loss_scale)
        1024.0
        >>> str(loss_scale)
        'dynamic,init=1024,max=16777216,hysteresis=2'
        >>> jmpx.get_loss_scale("auto", policy="c=bf16,o=f32")
        NoOpLossScale()
        >>> jmpx.get_loss_scale("dynamic, perod=500")
        Traceback (most recent call last):
        ...
        ValueError: Unknown key 'perod' at position 9 of loss scale 'dynamic, perod=500': expected \
one of 'init', 'period', 'factor', 'min', 'max', 'backoff', 'hysteresis', 'counter'; did you mean \
'period'?
    """
    policy_map = None if policy is None else get_policy_map(policy)
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        kind, numbers, places = parse_loss_scale(spec)
        return build(kind, numbers, places.__getitem__, policy_map)
    if isinstance(spec, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        fields = {str(key): value for key, value in spec.items()}
        where = f"of loss scale {fields!r}"
        return make_loss_scale(fields, lambda key: f"at {key!r} {where}", policy_map)
    raise TypeError(
        f"Expected the string of a loss scale, a mapping or a loss scale, got {spec!r}: write for "
        f"example {_EXAMPLE}."
    )


def make_loss_scale(
    fields: Mapping[str, object],
    place: Callable[[str], str],
    policy: PolicyMap | Policy | str | None = None,
) -> LossScale:
    """Makes a loss scale from the fields of a mapping.

    Args:
        fields: the kind by the key `type`, and a number or its string by each other key.
        place: returns where the value of a key stands, such as "at 'loss_scale.init'", for error
            messages; it takes the key as `fields` has it, and `type` also if it is missing.
        policy: what decides `auto`.

    Raises:
        TypeError: if the kind is no string, or a value no number.
        ValueError: as `get_loss_scale`.
    """
    words = {word.strip().lower(): word for word in fields}
    if "type" not in words:
        raise ValueError(
            f"Missing type {place('type')}: expected one of {', '.join(map(repr, _KINDS))}."
        )
    where = place(words["type"])
    kind = fields[words["type"]]
    if not isinstance(kind, str):
        raise TypeError(
            f"Expected the kind of a loss scale, got {kind!r} {where}: write one of "
            f"{', '.join(map(repr, _KINDS))}."
        )
    kind = find_kind(kind, where)
    numbers: dict[str, int | float] = {}
    places = {"type": where}
    for word, value in fields.items():
        if word != words["type"]:
            key = find_key(word, kind, numbers, place(word))
            numbers[key], places[key] = as_number_of(key, value, place(word)), place(word)
    policy_map = None if policy is None else get_policy_map(policy)
    return build(kind, numbers, places.__getitem__, policy_map)


def parse_loss_scale(text: str) -> tuple[str, dict[str, int | float], dict[str, str]]:
    """Parses the string of a loss scale.

    Returns:
        The kind; the numbers by their keys; and where the kind, by the key `type`, and each number
        stand, for error messages.

    Raises:
        ValueError: if the string does not follow the grammar, or a number is out of its range.
    """
    of = f"of loss scale {text!r}"
    whole = without_last_semicolon(text)
    if ";" in whole:
        raise ValueError(
            f"Unexpected ';' at position {whole.index(';')} {of}: give one loss scale, with commas "
            "between its parts."
        )
    fields = whole.split(",")
    word, equals, number = fields[0].partition("=")
    where = f"{position(word, 0)} {of}"
    kind = find_kind(word, where)
    numbers: dict[str, int | float] = {}
    places = {"type": where}
    if equals:
        find_key("init", kind, numbers, f"{position(number, len(word) + 1)} {of}")
        fields[0] = f"init={number}"
    start = len(word) - len("init") if equals else len(fields.pop(0)) + 1
    for field in fields:
        word, number = _split(field, start, of)
        key = find_key(word, kind, numbers, f"{position(word, start)} {of}")
        where = f"{position(number, start + len(word) + 1)} {of}"
        numbers[key], places[key] = as_number_of(key, number, where), where
        start += len(field) + 1
    return kind, numbers, places


def _split(field: str, start: int, of: str) -> tuple[str, str]:
    """Splits the `key=number` that begins at index `start` of a string."""
    where = f"{position(field, start)} {of}"
    if not field.strip():
        raise ValueError(f"Empty part {where}: write 'key=number' on both sides of each comma.")
    word, equals, number = field.partition("=")
    if word.strip().lower() in _KINDS:
        raise ValueError(
            f"Second loss scale {field.strip()!r} {where}: give one kind, then 'key=number'."
        )
    if not equals and ":" in field:
        raise ValueError(
            f"Unexpected ':' at position {start + field.index(':')} {of}: write 'key=number', with "
            "an equals sign."
        )
    if not equals:
        raise ValueError(
            f"Missing key for {field.strip()!r} {where}: write 'key=number' with one of "
            f"{_describe(ARGUMENTS)}{did_you_mean(field, [f'{key}=' for key in ARGUMENTS])}"
        )
    return word, number


def find_kind(word: str, where: str) -> str:
    """Returns the kind of loss scale that a word names.

    Raises:
        ValueError: if it names none.
    """
    kind = _KINDS.get(word.strip().lower())
    if kind is None:
        what = f"Unknown kind {word.strip()!r}" if word.strip() else "Missing kind"
        near = did_you_mean(word, _spellings(word))
        raise ValueError(f"{what} {where}: expected one of {_describe(_KINDS)}{near}")
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
    return {**_KINDS, **names, "no-op": "none", "null": "none", "constant": "static"}


def find_key(word: str, kind: str, given: Mapping[str, object], where: str) -> str:
    """Returns the key that a word names.

    Args:
        word: the word.
        kind: the kind of loss scale.
        given: the keys before it.
        where: where the word stands.

    Raises:
        ValueError: if it names none, one that the kind does not take, or one that is given.
    """
    key = word.strip().lower()
    if key not in ARGUMENTS:
        what = f"Unknown key {word.strip()!r}" if key else "Missing key"
        names = {
            **{key: key for key in ARGUMENTS},
            **{name: key for key, name in ARGUMENTS.items()},
        }
        raise ValueError(
            f"{what} {where}: expected one of {_describe(KEYS[kind] or ARGUMENTS)}"
            f"{did_you_mean(word, names)}"
        )
    if key not in KEYS[kind]:
        takes = (
            "takes its factor alone, as 'static=1024'" if kind == "static" else "takes no number"
        )
        raise ValueError(
            f"Unexpected {key!r} {where}: {kind!r} {takes}, so leave it out or write 'dynamic'."
        )
    if key in given:
        raise ValueError(f"Duplicate key {key!r} {where}: give each key at most once.")
    return key


def _describe(words: Any) -> str:
    return ", ".join(map(repr, words))


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
    got = f"got {shown!r}" if shown != "" else "got nothing"
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
