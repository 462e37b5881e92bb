"""The flags that select a loss scale: one that says all of it, and one for each of its parts."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from jmpx._base.messages import user_stacklevel
from jmpx._flags.kinds import EnumFlag, Flag, Parser, define, define_with_variable, is_given
from jmpx._policies.maps import PolicyMap
from jmpx._scales.fields import KEYS, build, decide
from jmpx._scales.kinds import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jmpx._scales.numbers import as_text, format_number
from jmpx._scales.strings import get_loss_scale, parse_loss_scale

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

# A flag belongs to the module that calls a function of jmpx.flags, and --help lists it there.
flags.disclaim_key_flags()

_LARGEST = float(np.finfo(np.float32).max)

# The values of --mp_scale_type -> the kinds of strings.
_KINDS = {"auto": "auto", "NoOp": "none", "Static": "static", "Dynamic": "dynamic"}
# The flags for parts -> the keys of strings.
_PARTS = {"scale_value": "init", "scale_period": "period", "min_scale": "min"}


def _canonical(spec: str | Mapping[str, Any] | LossScale) -> str:
    """Returns the string of a loss scale, which may be `auto`, without deciding it."""
    text = spec if isinstance(spec, str) else str(get_loss_scale(spec))
    get_loss_scale(text, policy="float16")
    kind, numbers, _ = parse_loss_scale(text)
    return as_text(kind, numbers)


LOSS_SCALE = Parser(
    get_loss_scale, "loss scale", "a loss scale such as dynamic,init=2**15, static=1024 or none"
)
_LOSS_SCALE_OR_AUTO = Parser(
    _canonical, "loss scale", "a loss scale such as dynamic,init=2**15, static=1024, none or auto"
)


class _WholeFlag(Flag[str]):
    """The flag that says all. It is written with the parts that go before its default."""

    together: "LossScaleFlags"

    def serialize(self) -> str:
        text = self.together.text()
        return "" if text is None else self._serialize(text)


class _PartFlag(Flag[Any]):
    """A flag for a part. It is not written beside the flag that says all."""

    together: "LossScaleFlags"

    def serialize(self) -> str:
        return super().serialize() if self.together.text() is None else ""


class _TypeFlag(_PartFlag, EnumFlag):
    """The flag for the kind."""


@dataclasses.dataclass(frozen=True, eq=False)
class LossScaleFlags:
    """The flags that select a loss scale.

    Where the command line or the program sets both the whole and parts, they must agree. Where the
    whole is the default, which an environment variable sets, each part that is set goes before it;
    another type goes before all of it.

    Args:
        policy: the flag of the policy map, which decides `auto`.
        whole: the flag of the loss scale's string.
        kind: the flag of its type.
        parts: the flags of its numbers, by the keys of strings.
    """

    policy: Flag[PolicyMap]
    whole: Flag[str]
    kind: Flag[str]
    parts: dict[str, Flag[Any]]

    def loss_scale(self) -> LossScale:
        """Makes the loss scale, and warns of parts that it does not have.

        Raises:
            ValueError: if numbers contradict each other.
        """
        loss_scale = self._made()
        self._warn_of_unused(str(loss_scale.to_dict()["type"]))
        return loss_scale

    def _made(self) -> LossScale:
        in_force = self._in_force()
        kind, numbers = in_force or (_KINDS[str(self.kind.value)], self._values())
        if in_force is not None:
            return build(kind, numbers, self._place, self.policy.value)
        kind = decide(kind, self.policy.value, "")
        if kind == "none":
            return NoOpLossScale()
        if kind == "static":
            return StaticLossScale(numbers["init"])
        start, period, least = (numbers[key] for key in ("init", "period", "min"))
        return DynamicLossScale(start, period=int(period), min_loss_scale=least)

    def _warn_of_unused(self, kind: str) -> None:
        """Warns of a part that is set, and that a loss scale of this kind does not have."""
        for key, flag in self.parts.items():
            if key not in KEYS[kind] and flag.value != flag.default and not self.whole.is_given:
                warnings.warn(
                    f"--{flag.name}={flag.value} does nothing, because the loss scale is {kind!r} "
                    f"with --{self.policy.name}='{self.policy.value}': leave it out, or ask for a "
                    f"dynamic one, by --{self.kind.name}=Dynamic.",
                    stacklevel=user_stacklevel(),
                )

    def text(self) -> str | None:
        """Returns the string of the loss scale; None if the flags for parts alone describe it."""
        in_force = self._in_force()
        return None if in_force is None else as_text(*in_force)

    def _values(self) -> dict[str, Any]:
        return {key: flag.value for key, flag in self.parts.items()}

    def _in_force(self) -> tuple[str, dict[str, int | float]] | None:
        """Returns the kind and the numbers, if the flag that says all has a say."""
        if self.whole.value is None:
            return None
        kind, numbers, _ = parse_loss_scale(self.whole.value)
        if self.whole.is_given:
            return kind, numbers
        if self.kind.is_given and _KINDS.get(str(self.kind.value)) != kind:
            return None
        given = {key: value for key, value in self._values().items() if self.parts[key].is_given}
        return kind, numbers | {key: given[key] for key in given if key in KEYS[kind]}

    def _place(self, key: str) -> str:
        """Returns where a number of the default comes from."""
        if key in self.parts and self.parts[key].is_given and not self.whole.is_given:
            return f"of --{self.parts[key].name}"
        return f"of --{self.whole.name}={self.whole.value}"

    def agree(self, values: Mapping[str, object]) -> bool:
        """The validator of all flags: refuses parts that contradict the whole.

        Raises:
            absl.flags.IllegalFlagValueError: if they do.
        """
        del values
        if self.whole.value is None or self.policy.value is None:
            return True
        if self.whole.is_given:
            self._check_kind(self.policy.value)
            for key, flag in self.parts.items():
                if flag.is_given:
                    self._check_part(key, flag)
            return True
        try:
            self._made()
        except ValueError as error:
            raise flags.IllegalFlagValueError(str(error)) from None
        return True

    def _check_kind(self, policy_map: PolicyMap) -> None:
        if not self.kind.is_given:
            return
        kind = parse_loss_scale(str(self.whole.value))[0]
        kinds = {decide(each, policy_map, "") for each in (kind, _KINDS[str(self.kind.value)])}
        if len(kinds) != 1:
            decided = decide(kind, policy_map, "")
            means = "" if decided == kind else f", which the policy decides to be {decided!r}"
            self._refuse(self.kind, f"whose kind is {kind!r}{means}")

    def _check_part(self, key: str, flag: Flag[Any]) -> None:
        scale = get_loss_scale(str(self.whole.value), policy="float16")
        attribute = {"init": "loss_scale", "period": "period", "min": "min_loss_scale"}[key]
        if key not in KEYS[parse_loss_scale(str(self.whole.value))[0]]:
            self._refuse(flag, f"which has no {key!r}")
        value, given = getattr(scale, attribute), flag.value
        if key == "init":  # the loss scale holds a float32
            given = np.float32(given)
        if value != given:
            self._refuse(flag, f"whose {key!r} is {format_number(np.asarray(value).item())}")

    def _refuse(self, flag: Flag[Any], why: str) -> None:
        # absl would begin a ValidationError with the values of all flags.
        raise flags.IllegalFlagValueError(
            f"flag --{flag.name}={flag.value} contradicts --{self.whole.name}={self.whole.value}, "
            f"{why}: give one of the two."
        )

    def is_ordered(self, flag_values: Mapping[str, object]) -> bool:
        """The validator of the flags for parts: whether the scale begins within its bounds."""
        del flag_values
        values = self._values()
        is_bounded = self.text() is None and self.kind.value not in ("NoOp", "Static")
        return not is_bounded or values["min"] <= values["init"]


def define_loss_scale_flags(
    prefix: str, policy: Flag[PolicyMap], flag_values: flags.FlagValues
) -> LossScaleFlags:
    """Defines the flags of `jmpx.flags.define_mp_flags` that select a loss scale."""
    define_with_variable(
        _LOSS_SCALE_OR_AUTO,
        f"{prefix}_loss_scale",
        "JMPX_LOSS_SCALE",
        None,
        "The loss scale as a whole, in place of the flags for its parts. The environment variable "
        "JMPX_LOSS_SCALE sets the default.",
        flag_values,
        _WholeFlag,
    )
    flags.DEFINE_flag(
        _TypeFlag(
            f"{prefix}_scale_type",
            "auto",
            "The kind of loss scale; auto is Dynamic if the policy computes in float16, else NoOp.",
            list(_KINDS),
            case_sensitive=False,
        ),
        flag_values,
    )

    def part(name: str, parser: flags.ArgumentParser[Any], default: float, help: str) -> None:
        define(parser, f"{prefix}_{name}", default, help, flag_values, flag_class=_PartFlag)

    start = "The loss scale of Static; the one that Dynamic begins with."
    period = "After how many finite steps the dynamic loss scale doubles."
    least = "What the dynamic loss scale never falls below; may be less than 1."
    part("scale_value", flags.FloatParser(), 2.0**15, start)
    part("scale_period", flags.IntegerParser(lower_bound=1), 2000, period)
    part("min_scale", flags.FloatParser(), 1.0, least)
    return _link(prefix, policy, flag_values)


def _link(prefix: str, policy: Flag[PolicyMap], flag_values: flags.FlagValues) -> LossScaleFlags:
    """Makes the flags know of each other, and registers the conditions on their values."""
    own: dict[str, Any] = {
        name: flag_values[f"{prefix}_{name}"] for name in ("loss_scale", "scale_type", *_PARTS)
    }
    parts = {key: own[name] for name, key in _PARTS.items()}
    together = LossScaleFlags(policy, own["loss_scale"], own["scale_type"], parts)
    for flag in own.values():
        flag.together = together
    message = "must be a positive number that float32 can hold"
    for name in ("scale_value", "min_scale"):
        flags.register_validator(f"{prefix}_{name}", _is_positive, message, flag_values)
    message = "must have a value"  # a program may set None
    for name in ("scale_type", "scale_period"):
        flags.register_validator(f"{prefix}_{name}", is_given, message, flag_values)
    names = [flag.name for flag in (own["scale_type"], own["scale_value"], own["min_scale"])]
    kind, start, least = names
    message = f"--{least} must not exceed --{start}, which the dynamic scale begins with"
    flags.register_multi_flags_validator(names, together.is_ordered, message, flag_values)
    names = [policy.name, *(flag.name for flag in own.values())]
    flags.register_multi_flags_validator(names, together.agree, "must agree", flag_values)
    return together


def _is_positive(value: float | None) -> bool:
    return value is not None and 0 < value <= _LARGEST
