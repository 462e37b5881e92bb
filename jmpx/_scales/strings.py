"""Loss scales from strings and mappings: their grammar."""

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar, overload

from jmpx._base.mappings import (
    Located,
    MappingLike,
    child,
    is_mapping,
    quote,
    read_keys,
    refuse_value,
)
from jmpx._base.messages import describe as describe_value, did_you_mean, position
from jmpx._policies.maps import PolicyMap, PolicyMapLike, get_policy_map
from jmpx._policies.strings import without_last_semicolon
from jmpx._scales.fields import (
    KINDS,
    as_number_of,
    build,
    describe,
    find_key,
    find_kind,
)
from jmpx._scales.kinds import LossScale, in_place_of_loss_scale
from jmpx._scales.numbers import ARGUMENTS

LossScaleT = TypeVar("LossScaleT", bound=LossScale)

# What `get_loss_scale` takes.
LossScaleLike: TypeAlias = str | MappingLike | LossScale

_EXAMPLE = "'dynamic,init=2**15'"


@overload
def get_loss_scale(spec: LossScaleT, policy: PolicyMapLike | None = ...) -> LossScaleT: ...


@overload
def get_loss_scale(spec: LossScaleLike, policy: PolicyMapLike | None = ...) -> LossScale: ...


def get_loss_scale(spec: LossScaleLike, policy: PolicyMapLike | None = None) -> LossScale:
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
        policy: a policy map, or anything else that `get_policy_map` takes. Only `auto` needs it.

    Returns:
        The loss scale. `str()` of it is a string that gives an equal one, `.to_dict()` a mapping.

    Raises:
        TypeError: if `spec` or `policy` is of another type, or a number of a mapping is none.
        ValueError: if the string does not follow the grammar, a number is out of its range or
            contradicts another, or `auto` has no policy. The message gives the position in the
            string, or the path in the mapping.

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
    return read_loss_scale(Located(spec, ""), policy_map)


def read_loss_scale(found: Located, policy_map: PolicyMap | None) -> LossScale:
    """Makes a loss scale from what a user gave, or from what a mapping has at a path.

    Args:
        found: the string, mapping or loss scale; and its path, empty for what is not in a mapping.
        policy_map: what decides `auto`.

    Raises:
        TypeError: if the value is of another type, or a number of a mapping is none.
        ValueError: as `get_loss_scale`.
    """
    spec, path = found
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        kind, numbers, places = parse_loss_scale(spec, quote(spec, path))
        return build(kind, numbers, places.__getitem__, policy_map)
    if is_mapping(spec):
        given = read_keys(spec, path, {word: word for word in ("type", *ARGUMENTS)})
        fields = {key: found.value for key, found in given.items()}
        paths = {"type": child(path, "type")} | {key: each.path for key, each in given.items()}
        return make_loss_scale(fields, lambda key: f"at {paths[key]}", policy_map)
    what = "the string of a loss scale, a mapping or a loss scale"
    remedy = in_place_of_loss_scale(spec, f"write for example {_EXAMPLE}, or 'none'")
    raise refuse_value(what, spec, path, remedy)


def make_loss_scale(
    fields: Mapping[str, object],
    place: Callable[[str], str],
    policy: PolicyMapLike | None = None,
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
        raise ValueError(f"Missing type {place('type')}: expected one of {describe(KINDS)}.")
    where = place(words["type"])
    kind = fields[words["type"]]
    if not isinstance(kind, str):
        raise TypeError(
            f"Expected the kind of a loss scale, got {describe_value(kind)} {where}: write one of "
            f"{describe(KINDS)}."
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


def parse_loss_scale(
    text: str, quoted: str | None = None, start: int = 0
) -> tuple[str, dict[str, int | float], dict[str, str]]:
    """Parses the string of a loss scale, which may be the end of a longer string.

    Args:
        text: the string.
        quoted: the user's whole string as error messages quote it; None means `text`.
        start: the index of `text` in the whole string.

    Returns:
        The kind; the numbers by their keys; and where the kind, by the key `type`, and each number
        stand, for error messages.

    Raises:
        ValueError: if the string does not follow the grammar, or a number is out of its range.
    """
    of = f"of loss scale {text!r}" if quoted is None else f"of loss scale {quoted}"
    whole = without_last_semicolon(text)
    if "|" in whole:
        raise ValueError(
            f"Unexpected '|' at position {start + whole.index('|')} {of}: give a policy and a loss "
            "scale together to jmpx.get_mixed_precision, which takes both."
        )
    if ";" in whole:
        raise ValueError(
            f"Unexpected ';' at position {start + whole.index(';')} {of}: give one loss scale, "
            "with commas between its parts."
        )
    fields = whole.split(",")
    word, equals, number = fields[0].partition("=")
    where = f"{position(word, start)} {of}"
    kind = find_kind(word, where)
    numbers: dict[str, int | float] = {}
    places = {"type": where}
    if equals:
        place = f"{position(number, start + len(word) + 1)} {of}"
        find_key("init", kind, numbers, place, written=number)
        fields[0] = f"init={number}"
    start += len(word) - len("init") if equals else len(fields.pop(0)) + 1
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
    if word.strip().lower() in KINDS:
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
            f"{describe(ARGUMENTS)}{did_you_mean(field, [f'{key}=' for key in ARGUMENTS])}"
        )
    return word, number
