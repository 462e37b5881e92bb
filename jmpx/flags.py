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
    """Writes a policy or policy map as the string that parses back to it."""

    def serialize(self, value: Policy | PolicyMap) -> str:
        return str(value)


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
    return flags.DEFINE(
        _PolicyParser(),
        name,
        default,
        help,
        flag_values=flag_values,
        serializer=_StrSerializer(),
        required=required,
        **args,
    )


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
    return flags.DEFINE(
        _PolicyMapParser(),
        name,
        default,
        help,
        flag_values=flag_values,
        serializer=_StrSerializer(),
        required=required,
        **args,
    )


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
        """The policy of `--mp_policy`; the default of its policy map where it has rules."""
        return self.policy_map.default

    @property
    def skip_nonfinite(self) -> bool:
        """Whether `--mp_skip_nonfinite` asks for steps with non-finite gradients to be skipped."""
        return self._holders["skip_nonfinite"].value

    def loss_scale(self) -> LossScale:
        """Makes the loss scale that the `--mp_scale_*` flags and `--mp_min_scale` describe."""
        kind = self._holders["scale_type"].value
        if kind == "auto":
            computes_in = {self.policy.compute_dtype, *(r.compute for r in self.policy_map.rules)}
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
    skip_nonfinite = flags.DEFINE_bool(
        f"{prefix}_skip_nonfinite",
        True,
        "Whether to skip the optimizer step where gradients are not finite.",
        flag_values=flag_values,
    )
    scale = _define_scale_flags(prefix, flag_values)
    return MixedPrecisionFlags({"policy": policy, "skip_nonfinite": skip_nonfinite, **scale})


def _define_scale_flags(prefix: str, flag_values: flags.FlagValues) -> dict[str, flags.FlagHolder]:
    """Defines the flags that describe a loss scale, and what holds between them."""
    scale_type, scale_value = f"{prefix}_scale_type", f"{prefix}_scale_value"
    min_scale = f"{prefix}_min_scale"
    holders = {
        "scale_type": flags.DEFINE_enum(
            scale_type,
            "auto",
            _SCALE_TYPES,
            "The kind of loss scale; auto is Dynamic if the policy computes in float16, else NoOp.",
            flag_values,
            case_sensitive=False,
        ),
        "scale_value": flags.DEFINE_float(
            scale_value,
            2.0**15,
            "The loss scale of Static; the one that Dynamic begins with.",
            flag_values=flag_values,
        ),
        "scale_period": flags.DEFINE_integer(
            f"{prefix}_scale_period",
            2000,
            "After how many finite steps the dynamic loss scale doubles.",
            lower_bound=1,
            flag_values=flag_values,
        ),
        "min_scale": flags.DEFINE_float(
            min_scale,
            1.0,
            "What the dynamic loss scale never falls below; may be less than 1.",
            flag_values=flag_values,
        ),
    }
    for name in (scale_value, min_scale):
        flags.register_validator(
            name,
            lambda value: 0 < value <= _LARGEST,
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
