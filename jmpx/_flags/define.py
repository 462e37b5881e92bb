"""Flags of one policy, one policy map or one loss scale."""

from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags

from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy, PolicyLike
from jmpx._policies.strings import get_policy
from jmpx._scales.kinds import LossScale
from jmpx._scales.strings import LossScaleLike, get_loss_scale

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
    """Defines a flag whose values a parser makes of what users and programs write."""
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
    parser = Parser(lambda spec: get_loss_scale(spec), "loss scale", form)
    return define(parser, name, default, help, flag_values, **args)
