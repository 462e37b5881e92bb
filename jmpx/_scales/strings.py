"""The grammar of loss scales, and of a policy map with a loss scale."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import jax.numpy as jnp
import numpy as np

from jmpx._base.messages import (
    Entry,
    Found,
    Located,
    MappingLike,
    Text,
    by_name,
    is_mapping,
    read_entries,
    refuse_value,
    unknown,
    whole_text,
)
from jmpx._policies.map_strings import get_policy_map, map_of, parse_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy
from jmpx._scales.kinds import (
    LEAVES,
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    is_loss_scale,
)
from jmpx._scales.scaling import ARGUMENTS, DYNAMIC, check_number, concrete_leaf, parse_number

LossScaleT = TypeVar("LossScaleT", bound=LossScale)

# What `get_loss_scale` takes.
LossScaleLike: TypeAlias = str | MappingLike | LossScale

# The words for each kind.
KINDS = {**{kind: kind for kind in ARGUMENTS}, "noop": "none"}
_KIND_WORDS = ", ".join(map(repr, KINDS))
_KEYS = {key: key for key in DYNAMIC}
_OF_JMP: dict[str, Any] = {
    f"jmp.{cls.__name__}": cls for cls in (NoOpLossScale, StaticLossScale, DynamicLossScale)
}


@overload
def get_loss_scale(spec: LossScaleT, policy: PolicyMapLike | None = ...) -> LossScaleT: ...
@overload
def get_loss_scale(spec: LossScaleLike, policy: PolicyMapLike | None = ...) -> LossScale: ...
def get_loss_scale(spec: LossScaleLike, policy: PolicyMapLike | None = None) -> LossScale:
    """Makes a loss scale from a string, such as `"dynamic, init=2**15, period=500"`.

    The string begins with `dynamic`, `static=1024`, `none` (or `noop`), or `auto`, which is
    `dynamic` if the default of `policy` or one of its rules computes in float16, and `none`
    otherwise. Parts `key=number` follow `dynamic` and `auto`: `init`, which may also stand behind
    the kind (`dynamic=2**15`), `period`, `factor`, `min`, `max`, `backoff`, `hysteresis` and
    `counter` are the arguments of `DynamicLossScale`. White space, case and one semicolon at the
    end are ignored. A number is written as `32768`, `2**15`, `0.5` or `1e4`.

    Args:
        spec: the string; or a mapping such as `{"type": "dynamic", "init": 32768}`, whose numbers
            may be strings; or a loss scale, which is returned as it is; or one of JMP's, as an old
            checkpoint has it, which is converted.
        policy: a policy map, or anything else that `get_policy_map` takes. Only `auto` needs it.

    Returns:
        The loss scale. Its string and its `to_dict()` give an equal one.

    Raises:
        TypeError: if `spec`, `policy` or a number of a mapping is of another type.
        ValueError: if the string does not follow the grammar, a number is out of its range or
            contradicts another, or `auto` has no policy. The message gives the place.

    Example:
        >>> import jmpx
        >>> str(jmpx.get_loss_scale("dynamic, init=2**10, max=2**24, hysteresis=2"))
        'dynamic,init=1024,max=16777216,hysteresis=2'
        >>> jmpx.get_loss_scale("auto", policy="c=bf16,o=f32")
        NoOpLossScale()
    """
    policy_map = None if policy is None else get_policy_map(policy)
    return read_loss_scale(Located(spec), policy_map)


def read_loss_scale(found: Found, policy_map: PolicyMap | None) -> LossScale:
    """Makes a loss scale from any value that `get_loss_scale` takes."""
    spec = found.value
    spec = _of_jmp(spec)
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str):
        return parse_loss_scale(whole_text(spec, "loss scale", found.at), policy_map)
    if is_mapping(spec):
        entries = read_entries(spec, found.path)
        given = by_name(entries, {"type": "type", **_KEYS})
        if "type" not in given:
            raise ValueError(f"Missing key 'type'{found.at}: expected one of {_KIND_WORDS}.")
        return _make(given.pop("type"), given, policy_map)
    what = "the string of a loss scale, a mapping or a loss scale"
    remedy = "write for example 'dynamic,init=2**15', or 'none'"
    if isinstance(spec, int | float) and not isinstance(spec, bool):
        remedy = f"write 'static={spec}' or 'dynamic,init={spec}'"
    elif isinstance(spec, Policy | PolicyMap):
        remedy = "give it as policy=, behind for example 'auto'"
    raise refuse_value(what, found, remedy)


def _of_jmp(spec: object) -> object:
    """Returns a loss scale of JMP, as an old checkpoint has one, as jmpx's; other values as is."""
    cls = _OF_JMP.get(f"{type(spec).__module__.partition('.')[0]}.{type(spec).__name__}")
    if cls is None or not is_loss_scale(spec):
        return spec
    names = [field.name for field in dataclasses.fields(cls) if hasattr(spec, field.name)]
    return cls(**{name: getattr(spec, name) for name in names})


def parse_loss_scale(text: Text, policy_map: PolicyMap | None) -> LossScale:
    """Parses the string of a loss scale, or the last part of a mixed precision's."""
    text.refuse("|", "write one policy map, a bar and one loss scale, for jmpx.get_mixed_precision")
    text.refuse(";", "give one loss scale, with commas between its parts")
    first, *parts = text.split(",")
    kind, number = first.cut("=")
    entries: list[Entry] = [(Located("init"), number)] if "=" in first.text else []
    for part in parts:
        if "=" not in part.text:
            what = f"Expected 'key=number', got {part.value!r}" if part.value else "Empty part"
            words = ", ".join(map(repr, DYNAMIC))
            raise ValueError(f"{what}{part.at}: write one of {words} and an equals sign.")
        entries.append(part.cut("="))
    return _make(kind, by_name(entries, _KEYS), policy_map)


def _make(kind: Found, given: Mapping[str, Found], policy_map: PolicyMap | None) -> LossScale:
    """Makes a loss scale from its kind, and from its numbers by their keys."""
    if not isinstance(kind.value, str):
        raise refuse_value("the kind of a loss scale", kind, f"write one of {_KIND_WORDS}")
    word = KINDS.get(kind.value.strip().lower())
    if word is None:
        raise unknown("kind", kind, _KIND_WORDS, KINDS)
    numbers = {key: _read_number(word, key, value) for key, value in given.items()}
    try:
        made = _make_kind(word, numbers)
    except ValueError as error:
        raise ValueError(f"Cannot make the loss scale{kind.at}: {error}") from None
    if "init" in numbers and made.loss_scale != np.float32(numbers["init"]):
        raise ValueError(
            f"Expected 'init' to be within 'min' and 'max', got {numbers['init']}"
            f"{given['init'].at}: give other bounds."
        )
    return NoOpLossScale() if word == "auto" and not _any_float16(kind, policy_map) else made


def _make_kind(kind: str, numbers: dict[str, Any]) -> LossScale:
    if kind == "none":
        return NoOpLossScale()
    if kind == "static":
        if not numbers:
            raise ValueError("its factor is missing, so write it as 'static=1024'.")
        return StaticLossScale(numbers["init"])
    return DynamicLossScale(**{DYNAMIC[key].name: number for key, number in numbers.items()})


def _read_number(kind: str, key: str, found: Found) -> int | float:
    """Reads the number of a key, which a string may write as `2**15`."""
    if key not in ARGUMENTS[kind]:
        raise ValueError(
            f"Expected no {key!r}, got {found.value!r}{found.at}: {kind!r} does not take it, so "
            "leave it out, or write 'dynamic'."
        )
    number = found.value
    if isinstance(number, str):
        try:
            number = parse_number(number)
        except ValueError:
            raise ValueError(
                f"Expected the number of {key!r}, got {number.strip()!r}{found.at}: write it as "
                "32768, 2**15, 0.5 or 1e4, because nothing is evaluated."
            ) from None
    return check_number(ARGUMENTS[kind][key], number, repr(key), found.at)


def _any_float16(kind: Found, policy_map: PolicyMap | None) -> bool:
    """Whether anything computes in float16, so that `auto` means a dynamic loss scale."""
    if policy_map is None:
        raise ValueError(
            f"Cannot decide 'auto'{kind.at} without a policy: give get_loss_scale a policy=, or "
            "write 'dynamic' or 'none'."
        )
    computes_in = {policy_map.default.compute_dtype, *(rule.compute for rule in policy_map.rules)}
    return jnp.float16 in computes_in


# Mixed precision: a policy map and a loss scale as one value.


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """A policy map and the initial loss scale: the mixed precision of a program in one string.

    A frozen, hashable, picklable value (not a pytree) for the beginning of a training: the loss
    scale that changes belongs in the train state. `str()` gives one line that
    `get_mixed_precision` parses back to an equal value.

    Args:
        policy_map: a policy map, or anything else that `get_policy_map` takes.
        loss_scale: a loss scale, or anything else that `get_loss_scale` takes. `auto` is decided by
            the policy map. Arrays are copied into NumPy's, so that no step donates them.

    Raises:
        TypeError: if an argument is of another type, or the loss scale is traced or a stack.
        ValueError: if a string or a mapping does not follow its grammar.

    Example:
        >>> import jmpx
        >>> precision = jmpx.MixedPrecision("c=f16,o=f32; LayerNorm: full", "dynamic, period=500")
        >>> print(precision.policy_map.rules[0])
        LayerNorm: compute=float32
        >>> precision.loss_scale.period
        500
    """

    __module__ = "jmpx"

    policy_map: PolicyMap
    loss_scale: LossScale = "auto"  # pyright: ignore[reportAssignmentType]

    if TYPE_CHECKING:

        def __init__(
            self, policy_map: PolicyMapLike, loss_scale: LossScaleLike = "auto"
        ) -> None: ...

    def __post_init__(self) -> None:
        policy_map = get_policy_map(self.policy_map)
        loss_scale = get_loss_scale(self.loss_scale, policy=policy_map)
        if isinstance(loss_scale, DynamicLossScale):
            leaves = {name: concrete_leaf(getattr(loss_scale, name), name) for name in LEAVES}
            loss_scale = dataclasses.replace(loss_scale, **leaves)
        object.__setattr__(self, "policy_map", policy_map)
        object.__setattr__(self, "loss_scale", loss_scale)

    @property
    def policy(self) -> Policy:
        """The policy; a ValueError if the map has rules or `by`, which a policy cannot hold."""
        return self.policy_map.alone("the policy map ")

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, which `get_mixed_precision` reads back."""
        return {**self.policy_map.to_dict(), "loss_scale": self.loss_scale.to_dict()}

    def __str__(self) -> str:
        """Returns the policy map string, a bar, and the loss scale's string."""
        return f"{self.policy_map} | {self.loss_scale}"

    def __hash__(self) -> int:
        return hash((self.policy_map, str(self.loss_scale)))  # arrays have no hash


# What `get_mixed_precision` takes.
MixedPrecisionLike: TypeAlias = PolicyMapLike | MixedPrecision


def policy_map_of(policy: MixedPrecisionLike) -> PolicyMap:
    """Returns the policy map of a mixed precision, or of anything that `get_policy_map` takes."""
    return policy.policy_map if isinstance(policy, MixedPrecision) else get_policy_map(policy)


def get_mixed_precision(spec: MixedPrecisionLike) -> MixedPrecision:
    """Parses a policy map and a loss scale, `"c=bf16,o=f32; LayerNorm: full | dynamic"`.

    A bar separates them; `get_policy_map` and `get_loss_scale` explain their grammars. Without a
    bar, the loss scale is `auto`: a `DynamicLossScale` if the default policy or a rule computes in
    float16, and a `NoOpLossScale` otherwise.

    Args:
        spec: a string; or a mapping with the keys that `get_policy_map` reads, and `loss_scale`,
            whose values may be mappings or strings; or a policy map, a policy or a dtype; or a
            mixed precision, which is returned as it is.

    Raises:
        TypeError: if `spec` is of another type, or a value of the mapping is.
        ValueError: if the string or the mapping does not follow the grammar. The message gives the
            position in the string, or the path in the mapping.

    Example:
        >>> import jmpx
        >>> print(jmpx.get_mixed_precision("c=f16; op.exp: f32 | dynamic, init=2**10"))
        params=float32,compute=float16; op.exp: compute=float32 | dynamic,init=1024
        >>> scale = {"type": "static", "init": 1024}
        >>> print(jmpx.get_mixed_precision({"policy": "16-mixed", "loss_scale": scale}))
        params=float32,compute=float16,output=float32 | static=1024
    """
    if isinstance(spec, MixedPrecision):
        return spec
    if is_mapping(spec):
        return _read(Located(spec))
    if not isinstance(spec, str):
        return MixedPrecision(spec)
    text, loss_scale = whole_text(spec, "policy").cut("|")
    policy_map = parse_policy_map(text)
    if "|" not in spec:
        return MixedPrecision(policy_map)
    return MixedPrecision(policy_map, parse_loss_scale(loss_scale, policy_map))


def _read(found: Located[MappingLike]) -> MixedPrecision:
    """Reads the mapping of a policy map that may have `loss_scale` among its keys."""
    entries = read_entries(found.value)
    scales = [entry for entry in entries if entry[0].value.strip().lower() == "loss_scale"]
    policy_map = map_of([entry for entry in entries if entry not in scales], found)
    if not scales:
        return MixedPrecision(policy_map)
    if len(scales) > 1:
        raise ValueError(f"Duplicate key 'loss_scale'{scales[1][0].at}: give it once.")
    return MixedPrecision(policy_map, read_loss_scale(scales[0][1], policy_map))
