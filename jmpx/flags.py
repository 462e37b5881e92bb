"""absl flags for policies and loss scales. Importing this module registers no flag."""

import dataclasses
from typing import Any

import numpy as np
from absl import flags

from jmpx._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jmpx._policy import Policy, get_policy
from jmpx._policy_map import PolicyMap, get_policy_map

# Flags that are defined here belong to the module that asked for them, in --help too.
flags.disclaim_key_flags()

_SCALE_TYPES = ["auto", "NoOp", "Static", "Dynamic"]
_LARGEST = float(np.finfo(np.float32).max)


class _PolicyParser(flags.ArgumentParser):
    """Parses a policy string; a policy, as a default may be, passes."""

    syntactic_help = "a policy such as params=float32,compute=bfloat16,output=float32 or bf16-mixed"

    def parse(self, argument: Any) -> Policy:
        return get_policy(argument)

    def flag_type(self) -> str:
        return "policy"


class _PolicyMapParser(flags.ArgumentParser):
    """Parses a policy map string; a policy map, as a default may be, passes."""

    syntactic_help = "a policy, or a policy map such as 'c=bf16,o=f32; BatchNorm: full'"

    def parse(self, argument: Any) -> PolicyMap:
        return get_policy_map(argument)

    def flag_type(self) -> str:
        return "policy map"


class _StrSerializer(flags.ArgumentSerializer):
    """Writes a value as the string that parses back to it."""

    def serialize(self, value: Any) -> str:
        return str(value)


class _Flag(flags.Flag):
    """A flag that parses what a program sets, too.

    absl keeps `FLAGS.mp_policy = "c=f16"` and `flagsaver(mp_policy="c=f16")` as the string that
    they are, to be met only where it is used.
    """

    @property
    def value(self) -> Any:
        """The value, parsed; None where there is none."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = None if value is None else self._parse(value)


class _BooleanFlag(_Flag, flags.BooleanFlag):
    """A boolean flag that parses what a program sets, too: "false" is not true."""


class _EnumFlag(_Flag, flags.EnumFlag):
    """An enum flag that parses what a program sets, too: "static" is Static."""


def _define(
    parser: flags.ArgumentParser,
    name: str,
    default: Any,
    help: str,
    flag_values: flags.FlagValues,
    required: bool = False,
    module_name: str | None = None,
    **args: Any,
) -> flags.FlagHolder:
    """Does what `flags.DEFINE` does, with a flag that parses what a program sets, too."""
    flag = _Flag(parser, _StrSerializer(), name, default, help, **args)
    return flags.DEFINE_flag(flag, flag_values, module_name, required=required)


def DEFINE_policy(
    name: str,
    default: Policy | str | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    required: bool = False,
    **args: Any,
) -> "flags.FlagHolder[Policy]":
    """Defines an absl flag whose value is a `jmpx.Policy`.

    Args:
        name: the flag's name.
        default: a policy, a policy string, or None. A default of `half` asks JAX for its backend
            at once, and a flag of `half` when flags are parsed: in a multi-host program that is
            before `jax.distributed.initialize`, so name the dtype there instead.
        help: the help text; the accepted form of a value is added to it.
        flag_values: the flag registry.
        required: whether the flag must be given on the command line.
        **args: what `flags.DEFINE` takes besides.

    Returns:
        A flag holder, whose `value` is the policy. A bad value on the command line is absl's usage
        error; `flags.FLAGS.flags_into_string()` and flag files bring the same policy back.

    Raises:
        TypeError: if `default` is neither a policy, a string nor None.
        absl.flags.IllegalFlagValueError: if `default` is not a policy string.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> policy = jmpx.flags.DEFINE_policy("policy", "f32", "The policy.", flag_values=values)
        >>> _ = values(["program", "--policy=c=bf16,o=f32"])
        >>> str(policy.value)
        'params=float32,compute=bfloat16,output=float32'
    """
    return _define(_PolicyParser(), name, default, help, flag_values, required, **args)


def DEFINE_policy_map(
    name: str,
    default: PolicyMap | Policy | str | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    required: bool = False,
    **args: Any,
) -> "flags.FlagHolder[PolicyMap]":
    """Defines an absl flag whose value is a `jmpx.PolicyMap`.

    Args:
        name: the flag's name.
        default: a policy map, a policy, a string of either, or None.
        help: the help text; the accepted form of a value is added to it.
        flag_values: the flag registry.
        required: whether the flag must be given on the command line.
        **args: what `flags.DEFINE` takes besides.

    Returns:
        A flag holder, whose `value` is the policy map; all else as in `DEFINE_policy`.

    Raises:
        TypeError: if `default` is of another type.
        absl.flags.IllegalFlagValueError: if `default` is not a policy map string.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> rules = jmpx.flags.DEFINE_policy_map("rules", "f32", "Rules.", flag_values=values)
        >>> _ = values(["program", "--rules=c=bf16; BatchNorm: full"])
        >>> str(rules.value.rules[0])
        'BatchNorm: compute=float32'
    """
    return _define(_PolicyMapParser(), name, default, help, flag_values, required, **args)


@dataclasses.dataclass(frozen=True)
class MixedPrecisionFlags:
    """The values of the flags that `define_mp_flags` defined, once flags are parsed."""

    _holders: dict[str, flags.FlagHolder]

    @property
    def policy_map(self) -> PolicyMap:
        """The policy map of `--mp_policy`; without rules where it is a policy."""
        return self._holders["policy"].value

    @property
    def policy(self) -> Policy:
        """The policy of `--mp_policy`.

        Raises:
            ValueError: if the flag has rules, which a policy would drop.
        """
        policy_map = self.policy_map
        if policy_map.rules:
            raise ValueError(
                f"Cannot read one policy from --{self._holders['policy'].name}='{policy_map}', "
                "whose rules it would drop: give the flag a policy without rules, or let the "
                "program read policy_map, whose .default is the policy without them."
            )
        return policy_map.default

    @property
    def skip_nonfinite(self) -> bool:
        """Whether `--mp_skip_nonfinite` asks for steps with non-finite gradients to be skipped."""
        return self._holders["skip_nonfinite"].value

    def loss_scale(self) -> LossScale:
        """Makes the loss scale that the `--mp_scale_*` flags and `--mp_min_scale` describe."""
        kind = self._holders["scale_type"].value
        if kind == "auto":
            policy_map = self.policy_map
            default = policy_map.default.compute_dtype
            computes_in = {default, *(rule.compute for rule in policy_map.rules)}
            kind = "Dynamic" if get_policy("float16").compute_dtype in computes_in else "NoOp"
        if kind == "NoOp":
            return NoOpLossScale()
        value = self._holders["scale_value"].value
        if kind == "Static":
            return StaticLossScale(value)
        return DynamicLossScale(
            value,
            period=self._holders["scale_period"].value,
            min_loss_scale=self._holders["min_scale"].value,
        )


def define_mp_flags(
    prefix: str = "mp",
    *,
    default_policy: PolicyMap | Policy | str = "float32",
    flag_values: flags.FlagValues = flags.FLAGS,
) -> MixedPrecisionFlags:
    """Defines the flags that select a policy and a loss scale.

    With the prefix `mp` they are `--mp_policy`, `--mp_scale_type` (`auto`, `NoOp`, `Static` or
    `Dynamic`; auto is Dynamic where the policy or one of its rules computes in float16, else NoOp),
    `--mp_scale_value`, `--mp_scale_period`, `--mp_min_scale` and `--mp_skip_nonfinite`.
    `--mp_policy` takes a policy or a policy map.

    Args:
        prefix: what the flags' names begin with.
        default_policy: the default of `--mp_policy`.
        flag_values: the flag registry.

    Returns:
        A holder whose `policy`, `policy_map`, `skip_nonfinite` and `loss_scale()` follow the flags.

    Raises:
        absl.flags.DuplicateFlagError: if one of the flags exists already.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> mp = jmpx.flags.define_mp_flags(flag_values=values)
        >>> _ = values(["program", "--mp_policy=16-mixed", "--mp_scale_value=1024"])
        >>> float(mp.loss_scale().loss_scale)
        1024.0
    """
    policy = DEFINE_policy_map(
        f"{prefix}_policy",
        default_policy,
        "In which dtypes parameters are stored, computation runs and results leave, with rules "
        "for parts of the model.",
        flag_values,
    )
    skip_nonfinite = flags.DEFINE_flag(
        _BooleanFlag(
            f"{prefix}_skip_nonfinite",
            True,
            "Whether to skip the optimizer step where gradients are not finite.",
        ),
        flag_values,
    )
    scale = _define_scale_flags(prefix, flag_values)
    holders = {"policy": policy, "skip_nonfinite": skip_nonfinite, **scale}
    for holder in holders.values():  # a program may set None, which would pass for a value
        flags.register_validator(
            holder.name, lambda value: value is not None, "must have a value", flag_values
        )
    return MixedPrecisionFlags(holders)


def _define_scale_flags(prefix: str, flag_values: flags.FlagValues) -> dict[str, flags.FlagHolder]:
    """Defines the flags that describe a loss scale, and what holds between them."""
    scale_type, scale_value = f"{prefix}_scale_type", f"{prefix}_scale_value"
    min_scale = f"{prefix}_min_scale"
    holders = {
        "scale_type": flags.DEFINE_flag(
            _EnumFlag(
                scale_type,
                "auto",
                "The kind of loss scale; auto is Dynamic if the policy computes in float16, else "
                "NoOp.",
                _SCALE_TYPES,
                case_sensitive=False,
            ),
            flag_values,
        ),
        "scale_value": _define(
            flags.FloatParser(),
            scale_value,
            2.0**15,
            "The loss scale of Static; the one that Dynamic begins with.",
            flag_values,
        ),
        "scale_period": _define(
            flags.IntegerParser(lower_bound=1),
            f"{prefix}_scale_period",
            2000,
            "After how many finite steps the dynamic loss scale doubles.",
            flag_values,
        ),
        "min_scale": _define(
            flags.FloatParser(),
            min_scale,
            1.0,
            "What the dynamic loss scale never falls below; may be less than 1.",
            flag_values,
        ),
    }
    for name in (scale_value, min_scale):
        flags.register_validator(
            name,
            lambda value: value is not None and 0 < value <= _LARGEST,
            "must be a positive number that float32 can hold",
            flag_values=flag_values,
        )
    flags.register_multi_flags_validator(
        [scale_type, scale_value, min_scale],
        lambda values: (
            values[scale_type] in ("NoOp", "Static") or values[min_scale] <= values[scale_value]
        ),
        f"--{min_scale} must not exceed --{scale_value}, which the dynamic scale begins with",
        flag_values=flag_values,
    )
    return holders
