"""Flags of one policy, one policy map or one loss scale."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, cast, overload

from absl import flags

from jmpx._flags.kinds import Parser, parsed
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy, PolicyLike
from jmpx._policies.strings import get_policy
from jmpx._scales.kinds import LossScale
from jmpx._scales.strings import LossScaleLike, get_loss_scale

DefaultT = TypeVar("DefaultT", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

# A flag belongs to the module that calls a function of this one, and --help lists it there.
flags.disclaim_key_flags()

_POLICY = Parser(
    get_policy,
    "policy",
    "a policy such as params=float32,compute=bfloat16,output=float32 or bf16-mixed",
)
POLICY_MAP = Parser(
    get_policy_map,
    "policy map",
    "a policy, or a policy map such as 'c=bf16,o=f32; BatchNorm: full'",
)


def _get_loss_scale(spec: LossScaleLike) -> LossScale:
    return get_loss_scale(spec)


_LOSS_SCALE = Parser(
    _get_loss_scale, "loss scale", "a loss scale such as dynamic,init=2**15, static=1024 or none"
)


class _Define(Protocol[DefaultT, T_co]):
    """The types of absl's own `DEFINE_` functions.

    The value may be None if the default is None and the flag is not required.
    """

    @overload
    def __call__(
        self, name: str, default: DefaultT | None, help: str, flag_values: flags.FlagValues = ...,
        *, required: Literal[True], **args: Any,
    ) -> flags.FlagHolder[T_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, name: str, default: None, help: str, flag_values: flags.FlagValues = ..., **args: Any
    ) -> flags.FlagHolder[T_co | None]: ...
    @overload
    def __call__(
        self, name: str, default: DefaultT, help: str, flag_values: flags.FlagValues = ...,
        **args: Any,
    ) -> flags.FlagHolder[T_co]: ...  # fmt: skip


def _typed_by(
    parse: Callable[[DefaultT], T],
) -> Callable[[Callable[..., object]], _Define[DefaultT, T]]:
    """Gives a function the types above, for the defaults and the values of a parser."""
    del parse
    return lambda func: cast("_Define[DefaultT, T]", func)


def _define(
    parser: Parser[T],
    name: str,
    default: object,
    help: str,
    flag_values: flags.FlagValues,
    required: bool = False,
    module_name: str | None = None,
    **args: Any,
) -> flags.FlagHolder[T]:
    flag = parsed(parser, name, default, help, **args)
    holder = flags.DEFINE_flag(flag, flag_values, module_name, required=required)
    return cast("flags.FlagHolder[T]", holder)  # the types above say whether it may hold None


@_typed_by(get_policy)
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
        A flag holder, whose `value` is the policy. A bad value on the command line is a usage
        error of absl. `flags.FLAGS.flags_into_string()` and flag files restore an equal policy.

    Raises:
        absl.flags.IllegalFlagValueError: if `default` is none of the above.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> policy = jmpx.flags.DEFINE_policy("policy", "f32", "The policy.", flag_values=values)
        >>> _ = values(["program", "--policy=c=bf16,o=f32"])
        >>> str(policy.value)
        'params=float32,compute=bfloat16,output=float32'
    """
    return _define(_POLICY, name, default, help, flag_values, **args)


@_typed_by(get_policy_map)
def DEFINE_policy_map(
    name: str,
    default: PolicyMapLike | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    **args: Any,
) -> flags.FlagHolder[PolicyMap]:
    """Defines an absl flag whose value is a `jmpx.PolicyMap`.

    The arguments and the result are those of `DEFINE_policy`; `default` is anything that
    `get_policy_map` takes, or None.

    Raises:
        absl.flags.IllegalFlagValueError: if `default` is none of these.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> rules = jmpx.flags.DEFINE_policy_map("rules", "f32", "Rules.", flag_values=values)
        >>> _ = values(["program", "--rules=c=bf16; BatchNorm: full"])
        >>> str(rules.value.rules[0])
        'BatchNorm: compute=float32'
    """
    return _define(POLICY_MAP, name, default, help, flag_values, **args)


@_typed_by(_get_loss_scale)
def DEFINE_loss_scale(
    name: str,
    default: LossScaleLike | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    **args: Any,
) -> flags.FlagHolder[LossScale]:
    """Defines an absl flag whose value is a loss scale.

    The arguments and the result are those of `DEFINE_policy`; `default` is anything that
    `get_loss_scale` takes, or None. `auto` is refused, because no policy decides it:
    `define_mp_flags` defines a flag that takes it.

    Raises:
        absl.flags.IllegalFlagValueError: if `default` is none of these.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> scale = jmpx.flags.DEFINE_loss_scale("scale", "none", "Scale.", flag_values=values)
        >>> _ = values(["program", "--scale=dynamic, init=2**10"])
        >>> str(scale.value)
        'dynamic,init=1024'
    """
    return _define(_LOSS_SCALE, name, default, help, flag_values, **args)
