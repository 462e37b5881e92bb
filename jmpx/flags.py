"""absl flags for policies and loss scales. Importing this module registers no flag."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import numpy as np
from absl import flags

from jmpx._dtypes import parse_dtype
from jmpx._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, get_policy_map
from jmpx._policy_strings import get_policy

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

T = TypeVar("T")

# A flag belongs to the module that calls a function of this one, and --help lists it there.
flags.disclaim_key_flags()

_LARGEST = float(np.finfo(np.float32).max)


class _Parser(flags.ArgumentParser[T]):
    """Parses with a function. It accepts a parsed value too, because a default may be one."""

    def __init__(self, parse: Callable[[str | T], T], flag_type: str, syntactic_help: str) -> None:
        super().__init__()
        self._parse = parse
        self._flag_type = flag_type
        self.syntactic_help = syntactic_help

    def parse(self, argument: str | T) -> T:
        return self._parse(argument)

    def flag_type(self) -> str:
        return self._flag_type


_POLICY = _Parser(
    get_policy,
    "policy",
    "a policy such as params=float32,compute=bfloat16,output=float32 or bf16-mixed",
)
_POLICY_MAP = _Parser(
    get_policy_map,
    "policy map",
    "a policy, or a policy map such as 'c=bf16,o=f32; BatchNorm: full'",
)


class _Flag(flags.Flag[T]):
    """A flag that also parses the values that a program sets.

    absl stores `FLAGS.mp_policy = "c=f16"` and `flagsaver(mp_policy="c=f16")` as strings.
    """

    @property
    def value(self) -> T | None:
        """The parsed value, None if there is none."""
        return self._value

    @value.setter
    def value(self, value: T | str | None) -> None:
        self._value = None if value is None else self._parse(value)


class _BooleanFlag(_Flag[bool], flags.BooleanFlag):
    """A boolean flag that also parses the values that a program sets, such as "false"."""


class _EnumFlag(_Flag[str], flags.EnumFlag):
    """An enum flag that also parses the values that a program sets, such as "static"."""


def _define(
    parser: flags.ArgumentParser[T],
    name: str,
    default: Any,  # what the parser accepts
    help: str,
    flag_values: flags.FlagValues,
    required: bool = False,
    module_name: str | None = None,
    **args: Any,
) -> flags.FlagHolder[T]:
    """Does the same as `flags.DEFINE`, but defines a `_Flag`."""
    flag = _Flag(parser, flags.ArgumentSerializer(), name, default, help, **args)
    holder = flags.DEFINE_flag(flag, flag_values, module_name, required=required)
    return cast("flags.FlagHolder[T]", holder)  # the callers' types say whether it may hold None


# The types follow those of absl's own flags: the value may be None if the default is None and the
# flag is not required, and further arguments are Any.
@overload
def DEFINE_policy(
    name: str,
    default: Policy | str | None,
    help: str,
    flag_values: flags.FlagValues = ...,
    *,
    required: Literal[True],
    **args: Any,
) -> flags.FlagHolder[Policy]: ...
@overload
def DEFINE_policy(
    name: str,
    default: None,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[Policy | None]: ...
@overload
def DEFINE_policy(
    name: str,
    default: Policy | str,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[Policy]: ...
def DEFINE_policy(
    name: str,
    default: Policy | str | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    required: bool = False,
    **args: Any,
) -> flags.FlagHolder[Policy | None]:
    """Defines an absl flag whose value is a `jmpx.Policy`.

    The dtype `half` starts JAX's backend: as a default at once, on the command line when flags are
    parsed. A multi-host program does both before it calls `jax.distributed.initialize`, so there
    name the dtype instead.

    Args:
        name: the name of the flag.
        default: a policy, a policy string, or None.
        help: the help text. The accepted form of a value is added to it.
        flag_values: the flag registry.
        required: whether the flag must be given on the command line.
        **args: further arguments of `flags.DEFINE`, such as `short_name`.

    Returns:
        A flag holder, whose `value` is the policy. A bad value on the command line is a usage
        error of absl. `flags.FLAGS.flags_into_string()` and flag files restore an equal policy.

    Raises:
        absl.flags.IllegalFlagValueError: if `default` is not a policy, a policy string or None.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> policy = jmpx.flags.DEFINE_policy("policy", "f32", "The policy.", flag_values=values)
        >>> _ = values(["program", "--policy=c=bf16,o=f32"])
        >>> str(policy.value)
        'params=float32,compute=bfloat16,output=float32'
    """
    return _define(_POLICY, name, default, help, flag_values, required, **args)


@overload
def DEFINE_policy_map(
    name: str,
    default: PolicyMap | Policy | str | None,
    help: str,
    flag_values: flags.FlagValues = ...,
    *,
    required: Literal[True],
    **args: Any,
) -> flags.FlagHolder[PolicyMap]: ...
@overload
def DEFINE_policy_map(
    name: str,
    default: None,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[PolicyMap | None]: ...
@overload
def DEFINE_policy_map(
    name: str,
    default: PolicyMap | Policy | str,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[PolicyMap]: ...
def DEFINE_policy_map(
    name: str,
    default: PolicyMap | Policy | str | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    required: bool = False,
    **args: Any,
) -> flags.FlagHolder[PolicyMap | None]:
    """Defines an absl flag whose value is a `jmpx.PolicyMap`.

    Args:
        name: the name of the flag.
        default: a policy map, a policy, a string of either, or None.
        help: the help text. The accepted form of a value is added to it.
        flag_values: the flag registry.
        required: whether the flag must be given on the command line.
        **args: further arguments of `flags.DEFINE`, such as `short_name`.

    Returns:
        A flag holder, whose `value` is the policy map. It behaves like that of `DEFINE_policy`.

    Raises:
        absl.flags.IllegalFlagValueError: if `default` is none of the above.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> rules = jmpx.flags.DEFINE_policy_map("rules", "f32", "Rules.", flag_values=values)
        >>> _ = values(["program", "--rules=c=bf16; BatchNorm: full"])
        >>> str(rules.value.rules[0])
        'BatchNorm: compute=float32'
    """
    return _define(_POLICY_MAP, name, default, help, flag_values, required, **args)


@dataclasses.dataclass(frozen=True)
class MixedPrecisionFlags:
    """The flags of `define_mp_flags`. Read them after the program has parsed its flags."""

    _policy: flags.FlagHolder[PolicyMap]
    _skip_nonfinite: flags.FlagHolder[bool]
    _scale_type: flags.FlagHolder[str]
    _scale_value: flags.FlagHolder[float]
    _scale_period: flags.FlagHolder[int]
    _min_scale: flags.FlagHolder[float]

    @property
    def policy_map(self) -> PolicyMap:
        """The policy map of `--mp_policy`. It has no rules if the flag is a policy."""
        return self._policy.value

    @property
    def policy(self) -> Policy:
        """The policy of `--mp_policy`.

        Raises:
            ValueError: if the flag has rules, which a policy cannot hold.
        """
        policy_map = self.policy_map
        if policy_map.rules:
            raise ValueError(
                f"Cannot read one policy from --{self._policy.name}='{policy_map}', "
                "whose rules it would drop: give the flag a policy without rules, or let the "
                "program read policy_map, whose .default is the policy without them."
            )
        return policy_map.default

    @property
    def skip_nonfinite(self) -> bool:
        """Whether `--mp_skip_nonfinite` asks to skip steps whose gradients are not finite."""
        return self._skip_nonfinite.value

    def loss_scale(self) -> LossScale:
        """Makes the loss scale that the `--mp_scale_*` flags and `--mp_min_scale` describe."""
        kind = self._scale_type.value
        if kind == "auto":
            policy_map = self.policy_map
            default = policy_map.default.compute_dtype
            computes_in = {default, *(rule.compute for rule in policy_map.rules)}
            kind = "Dynamic" if parse_dtype("float16") in computes_in else "NoOp"
        if kind == "NoOp":
            return NoOpLossScale()
        if kind == "Static":
            return StaticLossScale(self._scale_value.value)
        return DynamicLossScale(
            self._scale_value.value,
            period=self._scale_period.value,
            min_loss_scale=self._min_scale.value,
        )


def define_mp_flags(
    prefix: str = "mp",
    *,
    default_policy: PolicyMap | Policy | str = "float32",
    flag_values: flags.FlagValues = flags.FLAGS,
) -> MixedPrecisionFlags:
    """Defines the flags that select a policy and a loss scale.

    With the prefix `mp` they are

    - `--mp_policy`: a policy or a policy map,
    - `--mp_scale_type`: `NoOp`, `Static`, `Dynamic` or `auto`, which is Dynamic if the policy or
      one of its rules computes in float16, else NoOp,
    - `--mp_scale_value`, `--mp_scale_period` and `--mp_min_scale`: the numbers of the loss scale,
    - `--mp_skip_nonfinite`: whether the program shall skip steps with non-finite gradients.

    Args:
        prefix: the first word of the names of the flags.
        default_policy: the default of `--mp_policy`.
        flag_values: the flag registry.

    Returns:
        An object with `policy`, `policy_map`, `skip_nonfinite` and `loss_scale()`, which read the
        flags.

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
    mp = MixedPrecisionFlags(
        _define(
            _POLICY_MAP,
            f"{prefix}_policy",
            default_policy,
            "In which dtypes parameters are stored, computation runs and results leave, with "
            "rules for parts of the model.",
            flag_values,
        ),
        flags.DEFINE_flag(
            _BooleanFlag(
                f"{prefix}_skip_nonfinite",
                True,
                "Whether to skip the optimizer step where gradients are not finite.",
            ),
            flag_values,
        ),
        flags.DEFINE_flag(
            _EnumFlag(
                f"{prefix}_scale_type",
                "auto",
                "The kind of loss scale; auto is Dynamic if the policy computes in float16, else "
                "NoOp.",
                ["auto", "NoOp", "Static", "Dynamic"],
                case_sensitive=False,
            ),
            flag_values,
        ),
        _define(
            flags.FloatParser(),
            f"{prefix}_scale_value",
            2.0**15,
            "The loss scale of Static; the one that Dynamic begins with.",
            flag_values,
        ),
        _define(
            flags.IntegerParser(lower_bound=1),
            f"{prefix}_scale_period",
            2000,
            "After how many finite steps the dynamic loss scale doubles.",
            flag_values,
        ),
        _define(
            flags.FloatParser(),
            f"{prefix}_min_scale",
            1.0,
            "What the dynamic loss scale never falls below; may be less than 1.",
            flag_values,
        ),
    )
    _register_validators(prefix, flag_values)
    return mp


def _is_given(value: object) -> bool:
    return value is not None


def _is_positive(value: float | None) -> bool:
    return value is not None and 0 < value <= _LARGEST


def _register_validators(prefix: str, flag_values: flags.FlagValues) -> None:
    """Registers the conditions on the values of the flags that `define_mp_flags` defines."""
    kind, start, least = (f"{prefix}_{name}" for name in ("scale_type", "scale_value", "min_scale"))

    def is_ordered(values: dict[str, Any]) -> bool:
        return values[kind] in ("NoOp", "Static") or values[least] <= values[start]

    message = "must be a positive number that float32 can hold"
    for name in (start, least):
        flags.register_validator(name, _is_positive, message, flag_values)
    message = f"--{least} must not exceed --{start}, which the dynamic scale begins with"
    flags.register_multi_flags_validator([kind, start, least], is_ordered, message, flag_values)
    message = "must have a value"  # a program may set None
    for name in ("policy", "skip_nonfinite", "scale_type", "scale_period"):
        flags.register_validator(f"{prefix}_{name}", _is_given, message, flag_values)
