"""The flag that says how updates of 16-bit parameters are rounded."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import numpy as np
from absl import flags

from jmpx._base.dtypes import dtype_name
from jmpx._flags.kinds import EnumFlag, is_given
from jmpx._policies.maps import PolicyMap

if TYPE_CHECKING:
    import optax

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

ParamsRounding: TypeAlias = Literal["nearest", "stochastic", "split"]

# A flag belongs to the module that calls a function of jmpx.flags, and --help lists it there.
flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True)
class RoundingFlags:
    """The flag. Read it after the program has parsed its flags.

    Args:
        holder: the flag itself.
    """

    holder: flags.FlagHolder[str]

    @property
    def rounding(self) -> ParamsRounding:
        """How parameters are rounded."""
        return cast("ParamsRounding", self.holder.value)

    def wrap(
        self, optimizer: "optax.GradientTransformation", **options: Any
    ) -> "optax.GradientTransformation":
        """Wraps an optimizer by `low_precision_params`, unless parameters round to nearest."""
        rounding = self.rounding
        if rounding == "nearest":
            return optimizer
        from jmpx._storage.low_precision_params import low_precision_params  # few programs need it

        return low_precision_params(optimizer, rounding, **options)


def define_rounding_flags(prefix: str, flag_values: flags.FlagValues) -> RoundingFlags:
    """Defines the flag of `jmpx.flags.define_mp_flags` that is about the rounding of parameters."""
    policy, rounding = f"{prefix}_policy", f"{prefix}_params_rounding"
    flag = EnumFlag(
        rounding,
        "nearest",
        "How updates of 16-bit parameters are rounded: nearest drops the small ones, stochastic "
        "rounds by chance, right on average, and split keeps the low bits of float32 beside "
        "bfloat16.",
        list(get_args(ParamsRounding)),
        case_sensitive=False,
    )
    holder = flags.DEFINE_flag(flag, flag_values)

    def agree(values: Mapping[str, Any]) -> bool:
        mistake = _mistake(values[policy], values[rounding], f"--{policy}", f"--{rounding}")
        if mistake:
            raise flags.ValidationError(mistake)
        return True

    flags.register_validator(rounding, is_given, "must have a value", flag_values)
    flags.register_multi_flags_validator([policy, rounding], agree, flag_values=flag_values)
    return RoundingFlags(holder)


def _mistake(policy_map: PolicyMap | None, rounding: str, policy: str, flag: str) -> str:
    """Returns what is wrong with a rounding for the parameters of a policy map, or nothing.

    Args:
        policy_map: the policy map; None is refused elsewhere.
        rounding: how its parameters are to be rounded.
        policy: the flag of the policy map.
        flag: the flag of the rounding.
    """
    if policy_map is None or rounding == "nearest":
        return ""
    stored = [policy_map.default.param_dtype, *(rule.params for rule in policy_map.rules)]
    narrow = [dtype_name(each) for each in stored if each and np.dtype(each).itemsize < 4]
    if not narrow:
        return (
            f"{flag}={rounding} rounds parameters of 16 bits, of which {policy} has none: write "
            f"params=bfloat16 in {policy}, or leave {flag} out"
        )
    others = [name for name in narrow if name != "bfloat16"]
    if rounding == "split" and others:
        return (
            f"{flag}=split keeps the low bits of bfloat16 parameters, and {policy} has {others[0]} "
            f"ones: write params=bfloat16 there, or {flag}=stochastic"
        )
    return ""
