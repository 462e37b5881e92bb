"""absl flags for policies and loss scales: single ones, and the set of `define_mp_flags`."""

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from absl import flags

from jmpx._base.trees import PyTree
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy, PolicyLike
from jmpx._policies.strings import get_policy
from jmpx._scales.kinds import LossScale
from jmpx._scales.strings import LossScaleLike, MixedPrecision, get_loss_scale
from jmpx._steps.checks import LARGEST_COUNT, MAX_CONSECUTIVE_SKIPS

T = TypeVar("T")

# A flag belongs to the module that calls a function of this one, and --help lists it there.
flags.disclaim_key_flags()


class Parser(flags.ArgumentParser[T]):
    """Parses with a function. It accepts a parsed value too, because a default may be one."""

    def __init__(self, parse: Callable[[Any], T], flag_type: str, syntactic_help: str) -> None:
        super().__init__()
        self._parse, self._flag_type = parse, flag_type
        self.syntactic_help = syntactic_help

    def parse(self, argument: str | T) -> T:
        return self._parse(argument)

    def flag_type(self) -> str:
        return self._flag_type


class Flag(flags.Flag[T]):
    """A flag that also parses the values that a program sets, and refuses None without asking.

    absl stores `FLAGS.mp_policy = "c=f16"` and `flagsaver(mp_policy="c=f16")` as strings.
    """

    @property
    def value(self) -> T | None:
        """The parsed value, None if there is none."""
        return self._value

    @value.setter
    def value(self, value: T | str | None) -> None:
        if value is None and self.default is not None:
            raise flags.IllegalFlagValueError(f"flag --{self.name} must have a value")
        self._value = None if value is None else self._parse(value)


def define(
    parser: flags.ArgumentParser[Any],
    name: str,
    default: object,
    help: str,
    flag_values: flags.FlagValues,
    required: bool = False,
    module_name: str | None = None,
    **args: Any,
) -> flags.FlagHolder[Any]:
    """Defines a flag that parses values from the command line and from programs."""
    flag = Flag(parser, flags.ArgumentSerializer(), name, default, help, **args)
    return flags.DEFINE_flag(flag, flag_values, module_name, required=required)


POLICY_MAP = Parser(
    get_policy_map,
    "policy map",
    "a policy, or a policy map such as 'c=bf16,o=f32; BatchNorm: full'",
)


def DEFINE_policy(
    name: str,
    default: PolicyLike | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    **args: Any,
) -> flags.FlagHolder[Policy]:
    """Defines an absl flag whose value is a `jmpx.Policy`.

    The dtype `half` starts JAX's backend: as a default at once, on the command line when flags are
    parsed. A multi-host program does both before it calls `jax.distributed.initialize`, so there
    name the dtype instead.

    Args:
        name: the name of the flag.
        default: a policy, anything else that `get_policy` takes, or None.
        help: the help text. The accepted form of a value is added to it.
        flag_values: the flag registry.
        **args: further arguments of `flags.DEFINE`, such as `required` and `short_name`.

    Returns:
        A flag holder, whose `value` is the policy, or None if that is the default. A bad value is a
        usage error of absl. `flags.FLAGS.flags_into_string()` and flag files restore it.

    Raises:
        IllegalFlagValueError: of absl, if `default` is none of the above.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> policy = jmpx.flags.DEFINE_policy("policy", "f32", "The policy.", flag_values=values)
        >>> _ = values(["program", "--policy=c=bf16,o=f32"])
        >>> str(policy.value)
        'params=float32,compute=bfloat16,output=float32'
    """
    form = "a policy such as params=float32,compute=bfloat16,output=float32 or bf16-mixed"
    return define(Parser(get_policy, "policy", form), name, default, help, flag_values, **args)


def DEFINE_policy_map(
    name: str,
    default: PolicyMapLike | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    **args: Any,
) -> flags.FlagHolder[PolicyMap]:
    """Defines an absl flag whose value is a `jmpx.PolicyMap`.

    The arguments are those of `DEFINE_policy`; `default` is anything that `get_policy_map` takes,
    or None.
    """
    return define(POLICY_MAP, name, default, help, flag_values, **args)


def DEFINE_loss_scale(
    name: str,
    default: LossScaleLike | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    **args: Any,
) -> flags.FlagHolder[LossScale]:
    """Defines an absl flag whose value is a loss scale.

    The arguments are those of `DEFINE_policy`; `default` is anything that `get_loss_scale` takes,
    or None. `auto` is refused, because no policy decides it: `define_mp_flags` defines a flag that
    takes it.
    """
    form = "a loss scale such as dynamic,init=2**15, static=1024 or none"
    parser = Parser(get_loss_scale, "loss scale", form)
    return define(parser, name, default, help, flag_values, **args)


# The flags of `define_mp_flags`: their meaning together, and contradictions.


_PARTS = "auto", 2.0**15  # the defaults of --mp_scale_type and --mp_scale_value


def _scale_text(spec: LossScaleLike) -> str:
    """Returns the string of a loss scale, checked, on one line; nothing decides `auto` yet."""
    loss_scale = get_loss_scale(spec, policy="float16")
    return " ".join(spec.split()) if isinstance(spec, str) else str(loss_scale)


_LOSS_SCALE_OR_AUTO = Parser(
    _scale_text, "loss scale", "a loss scale such as dynamic,init=2**15, static=1024, none or auto"
)


class MixedPrecisionFlags:
    """The flags of `define_mp_flags`. Read them after the program has parsed its flags."""

    __module__ = "jmpx.flags"

    def __init__(self, prefix: str, flag_values: flags.FlagValues) -> None:
        self._prefix, self._flag_values = prefix, flag_values

    def _read(self, name: str) -> Any:
        return getattr(self._flag_values, f"{self._prefix}_{name}")

    @property
    def policy_map(self) -> PolicyMap:
        """The policy map of `--mp_policy`. It has no rules if the flag is a policy."""
        return cast(PolicyMap, self._read("policy"))

    @property
    def policy(self) -> Policy:
        """The policy of `--mp_policy`; a ValueError if the flag has rules or `by`."""
        return self.policy_map.alone(f"--{self._prefix}_policy=")

    @property
    def skip_nonfinite(self) -> bool:
        """Whether `--mp_skip_nonfinite` asks to skip steps whose gradients are not finite."""
        return bool(self._read("skip_nonfinite"))

    def check_progress(
        self, opt_state: PyTree, loss_scale: LossScale, grads: PyTree = None
    ) -> None:
        """Calls `jmpx.inspect.check_progress` with the limit of `--mp_max_skips`.

        Without a limit, or where no step is skipped, it does nothing.
        """
        limit = self._read("max_skips")
        if limit and self.skip_nonfinite:
            from jmpx._steps.progress import check_progress  # here, because few programs need it

            check_progress(opt_state, loss_scale, grads, limit)

    def loss_scale(self) -> LossScale:
        """Makes the loss scale that the flags describe."""
        whole, kind, value = map(self._read, ("loss_scale", "scale_type", "scale_value"))
        default = self._flag_values[f"{self._prefix}_loss_scale"].default
        return get_loss_scale(_chosen(whole, default, kind, value), self.policy_map)

    def mixed_precision(self) -> MixedPrecision:
        """Returns the policy map and the loss scale as one `jmpx.MixedPrecision`."""
        return MixedPrecision(self.policy_map, self.loss_scale())


def define_mp_flags(
    prefix: str = "mp",
    *,
    default_policy: PolicyMapLike = "float32",
    flag_values: flags.FlagValues = flags.FLAGS,
) -> MixedPrecisionFlags:
    """Defines the flags that select a policy and a loss scale.

    With the prefix `mp` they are `--mp_policy`, a policy or a policy map; `--mp_loss_scale`, such
    as `dynamic,init=2**15`, or in its place, as in JMP's examples, `--mp_scale_type` and
    `--mp_scale_value`; `--mp_skip_nonfinite`; and `--mp_max_skips`, after how many skips in a row
    `check_progress` raises, 0 for never. The page "Flags and configuration files" explains them.

    The environment variables `JMPX_POLICY` and `JMPX_LOSS_SCALE` set the defaults of `--mp_policy`
    and `--mp_loss_scale`, for any prefix, when this function runs; they take precedence over
    `default_policy`, and the command line over them. An empty variable counts as unset.

    Args:
        prefix: the first word of the names of the flags.
        default_policy: the default of `--mp_policy`, unless `JMPX_POLICY` is set.
        flag_values: the flag registry.

    Returns:
        An object with `policy`, `policy_map`, `skip_nonfinite`, `loss_scale()`,
        `mixed_precision()` and `check_progress(...)`, which read the flags. Wrong values, and
        `--mp_loss_scale` beside a flag in its place, are usage errors of absl.

    Raises:
        DuplicateFlagError: of absl, if one of the flags exists already.
        IllegalFlagValueError: of absl, if the default or a variable is wrong.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> mp = jmpx.flags.define_mp_flags(flag_values=values)
        >>> _ = values(["program", "--mp_policy=16-mixed", "--mp_scale_value=1024"])
        >>> float(mp.loss_scale().loss_scale)
        1024.0
    """
    default = _of_variable("JMPX_POLICY", POLICY_MAP) or default_policy
    help = (
        "In which dtypes parameters are stored, computation runs and results leave, with rules for "
        "parts of the model. The environment variable JMPX_POLICY sets the default."
    )
    define(POLICY_MAP, f"{prefix}_policy", default, help, flag_values)
    _define_loss_scale(prefix, flag_values)
    help = "Whether to skip the optimizer step where gradients are not finite."
    name = f"{prefix}_skip_nonfinite"
    define(flags.BooleanParser(), name, True, help, flag_values, boolean=True)
    help = (
        "How many steps in a row may be skipped: one more, and training has diverged and ends. 0 "
        "sets no limit."
    )
    parser = flags.IntegerParser(lower_bound=0, upper_bound=LARGEST_COUNT)
    define(parser, f"{prefix}_max_skips", MAX_CONSECUTIVE_SKIPS, help, flag_values)
    return MixedPrecisionFlags(prefix, flag_values)


def _of_variable(variable: str, parser: Parser[Any]) -> Any:
    """Returns the default that an environment variable sets, None if it is unset or empty."""
    text = os.environ.get(variable, "")
    if not text.strip():
        return None
    try:
        return parser.parse(text)
    except (TypeError, ValueError) as error:
        message = f"environment variable {variable}={text}: {error}"
        raise flags.IllegalFlagValueError(message) from None


def _define_loss_scale(prefix: str, flag_values: flags.FlagValues) -> None:
    words = ("policy", "loss_scale", "scale_type", "scale_value")
    names = _, whole, kind, value = [f"{prefix}_{word}" for word in words]
    default = _of_variable("JMPX_LOSS_SCALE", _LOSS_SCALE_OR_AUTO)
    help = "The loss scale. The environment variable JMPX_LOSS_SCALE sets the default."
    define(_LOSS_SCALE_OR_AUTO, whole, default, help, flag_values)
    help = "NoOp, Static, Dynamic, or auto: Dynamic if the policy computes in float16, else NoOp."
    kinds = flags.EnumParser(["auto", "NoOp", "Static", "Dynamic"], case_sensitive=False)
    define(kinds, kind, _PARTS[0], help, flag_values)
    help = "The loss scale of Static; the one that Dynamic begins with."
    define(flags.FloatParser(lower_bound=0), value, _PARTS[1], help, flag_values)

    def check(values: dict[str, Any]) -> bool:
        policy_map, *given = (values[name] for name in names)
        spec = _chosen(given[0], default, *given[1:])
        parts = f"--{kind}={given[1]} --{value}={given[2]}"
        # absl would begin a ValidationError with the values of all flags.
        if spec == given[0] and (given[1], given[2]) != _PARTS:
            raise flags.IllegalFlagValueError(
                f"{parts} contradict --{whole}={spec}, the whole loss scale: give one of the two"
            )
        try:
            get_loss_scale(spec, policy_map)
        except ValueError as error:
            raise flags.IllegalFlagValueError(f"{parts}: {error}") from None
        return True

    flags.register_multi_flags_validator(names, check, flag_values=flag_values)


def _chosen(whole: str | None, default: str | None, kind: str, value: float) -> str:
    """Returns the string of the loss scale: parts take precedence over the default of a whole."""
    if whole is not None and (whole != default or (kind, value) == _PARTS):
        return whole
    return "none" if kind == "NoOp" else f"{kind.lower()},init={value}"
