"""absl flags for policies and loss scales. Importing this module registers no flag."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from absl import flags

from jmpx._base.leaves import PyTree
from jmpx._flags.kinds import (
    Flag,
    Parser,
    define,
    define_with_variable,
    is_given,
    warn_of_variables,
)
from jmpx._flags.loss_scale import LOSS_SCALE, LossScaleFlags, define_loss_scale_flags
from jmpx._flags.rounding import ParamsRounding, RoundingFlags, define_rounding_flags
from jmpx._flags.skip import SkipFlags, define_skip_flags
from jmpx._policies.maps import PolicyMap, PolicyMapLike, get_policy_map
from jmpx._policies.policy import Policy
from jmpx._policies.strings import PolicyLike, get_policy
from jmpx._scales.kinds import LossScale

if TYPE_CHECKING:
    import optax  # pyright: ignore[reportMissingTypeStubs]

    from jmpx._scales.mixed_precision import MixedPrecision

__all__ = (
    "DEFINE_loss_scale",
    "DEFINE_policy",
    "DEFINE_policy_map",
    "MixedPrecisionFlags",
    "define_mp_flags",
)

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

# A flag belongs to the module that calls a function of this one, and --help lists it there.
flags.disclaim_key_flags()

_POLICY = Parser(
    get_policy,
    "policy",
    "a policy such as params=float32,compute=bfloat16,output=float32 or bf16-mixed",
)
_POLICY_MAP = Parser(
    get_policy_map,
    "policy map",
    "a policy, or a policy map such as 'c=bf16,o=f32; BatchNorm: full'",
)


# The types follow those of absl's own flags: the value may be None if the default is None and the
# flag is not required, and further arguments are Any.
@overload
def DEFINE_policy(
    name: str,
    default: PolicyLike | None,
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
    default: PolicyLike,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[Policy]: ...
def DEFINE_policy(
    name: str,
    default: PolicyLike | None,
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
        default: a policy, anything else that `get_policy` takes, or None.
        help: the help text. The accepted form of a value is added to it.
        flag_values: the flag registry.
        required: whether the flag must be given on the command line.
        **args: further arguments of `flags.DEFINE`, such as `short_name`.

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
    return define(_POLICY, name, default, help, flag_values, required, **args)


@overload
def DEFINE_policy_map(
    name: str,
    default: PolicyMapLike | None,
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
    default: PolicyMapLike,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[PolicyMap]: ...
def DEFINE_policy_map(
    name: str,
    default: PolicyMapLike | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    required: bool = False,
    **args: Any,
) -> flags.FlagHolder[PolicyMap | None]:
    """Defines an absl flag whose value is a `jmpx.PolicyMap`.

    Args:
        name: the name of the flag.
        default: a policy map, anything else that `get_policy_map` takes, or None.
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
    return define(_POLICY_MAP, name, default, help, flag_values, required, **args)


@overload
def DEFINE_loss_scale(
    name: str,
    default: LossScale | str | None,
    help: str,
    flag_values: flags.FlagValues = ...,
    *,
    required: Literal[True],
    **args: Any,
) -> flags.FlagHolder[LossScale]: ...
@overload
def DEFINE_loss_scale(
    name: str,
    default: None,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[LossScale | None]: ...
@overload
def DEFINE_loss_scale(
    name: str,
    default: LossScale | str,
    help: str,
    flag_values: flags.FlagValues = ...,
    required: bool = ...,
    **args: Any,
) -> flags.FlagHolder[LossScale]: ...
def DEFINE_loss_scale(
    name: str,
    default: LossScale | str | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
    required: bool = False,
    **args: Any,
) -> flags.FlagHolder[LossScale | None]:
    """Defines an absl flag whose value is a loss scale.

    Args:
        name: the name of the flag.
        default: a loss scale, a string as `jmpx.get_loss_scale` takes it, or None. `auto` is
            refused, because no policy decides it: `define_mp_flags` defines a flag that takes it.
        help: the help text. The accepted form of a value is added to it.
        flag_values: the flag registry.
        required: whether the flag must be given on the command line.
        **args: further arguments of `flags.DEFINE`, such as `short_name`.

    Returns:
        A flag holder, whose `value` is the loss scale. It behaves like that of `DEFINE_policy`.

    Raises:
        absl.flags.IllegalFlagValueError: if `default` is none of the above.

    Example:
        >>> from absl import flags
        >>> import jmpx.flags
        >>> values = flags.FlagValues()
        >>> scale = jmpx.flags.DEFINE_loss_scale("scale", "none", "Scale.", flag_values=values)
        >>> _ = values(["program", "--scale=dynamic, init=2**10"])
        >>> str(scale.value)
        'dynamic,init=1024'
    """
    return define(LOSS_SCALE, name, default, help, flag_values, required, **args)


@dataclasses.dataclass(frozen=True)
class MixedPrecisionFlags:
    """The flags of `define_mp_flags`. Read them after the program has parsed its flags."""

    __module__ = "jmpx.flags"

    _policy: flags.FlagHolder[PolicyMap]
    _skips: SkipFlags
    _loss_scale: LossScaleFlags
    _rounding: RoundingFlags

    @property
    def policy_map(self) -> PolicyMap:
        """The policy map of `--mp_policy`. It has no rules if the flag is a policy."""
        return self._policy.value

    @property
    def policy(self) -> Policy:
        """The policy of `--mp_policy`.

        Raises:
            ValueError: if the flag has rules or `by`, which a policy cannot hold.
        """
        policy_map = self.policy_map
        if policy_map.rules or policy_map.by is not None:
            what = "rules" if policy_map.rules else "by"
            raise ValueError(
                f"Cannot read one policy from --{self._policy.name}='{policy_map}', whose {what} "
                f"it would drop: give the flag a policy without {what}, or let the program read "
                "policy_map, whose .default is the policy alone."
            )
        return policy_map.default

    @property
    def skip_nonfinite(self) -> bool:
        """Whether `--mp_skip_nonfinite` asks to skip steps whose gradients are not finite."""
        return self._skips.skip.value

    @property
    def max_consecutive_skips(self) -> int | None:
        """How many steps in a row `--mp_max_skips` lets the program skip.

        None, for any number, if the flag is 0 or no step is skipped; `skip_nonfinite` takes it.
        """
        return self._skips.limit

    def check_progress(
        self, opt_state: PyTree, loss_scale: LossScale, grads: PyTree = None
    ) -> None:
        """Calls `jmpx.inspect.check_progress` with the limit of `--mp_max_skips`, if there is one.

        Raises:
            FloatingPointError: if more steps in a row were skipped than the flag allows.
            TypeError: as `jmpx.inspect.check_progress`.
        """
        limit = self.max_consecutive_skips
        if limit is not None:
            from jmpx._steps.progress import raise_if_stuck  # here, because few programs need it

            raise_if_stuck(
                opt_state, loss_scale, grads, limit, f"--{self._skips.most.name}={limit}"
            )

    @property
    def params_rounding(self) -> ParamsRounding:
        """How `--mp_params_rounding` rounds parameters: `nearest`, `stochastic` or `split`."""
        return self._rounding.rounding

    def low_precision_params(
        self, optimizer: "optax.GradientTransformation", **options: Any
    ) -> "optax.GradientTransformation":
        """Wraps an optimizer as `--mp_params_rounding` says; with `nearest` returns it as it is.

        Args:
            optimizer: an optax gradient transformation.
            **options: the keyword arguments of `jmpx.optim.low_precision_params`, but for
            `rounding`.
        """
        return self._rounding.wrap(optimizer, **options)

    def loss_scale(self) -> LossScale:
        """Makes the loss scale that `--mp_loss_scale` or the flags for its parts describe.

        Raises:
            ValueError: if a program has set flags to values that contradict each other.
        """
        _ = self.policy_map  # an error of absl before the flags are parsed
        return self._loss_scale.loss_scale()

    def mixed_precision(self) -> "MixedPrecision":
        """Returns the policy map and the loss scale as one `jmpx.MixedPrecision`."""
        from jmpx._scales.mixed_precision import (
            MixedPrecision,  # here, because few programs need it
        )

        return MixedPrecision(self.policy_map, self.loss_scale())


def define_mp_flags(
    prefix: str = "mp",
    *,
    default_policy: PolicyMapLike = "float32",
    flag_values: flags.FlagValues = flags.FLAGS,
) -> MixedPrecisionFlags:
    """Defines the flags that select a policy and a loss scale.

    With the prefix `mp` they are

    - `--mp_policy`: a policy or a policy map,
    - `--mp_loss_scale`: a loss scale as a whole, such as `dynamic,init=2**15,hysteresis=2`, in
      place of the next four; see `jmpx.get_loss_scale`,
    - `--mp_scale_type`: `NoOp`, `Static`, `Dynamic` or `auto`, which is Dynamic if the policy or
      one of its rules computes in float16, else NoOp,
    - `--mp_scale_value`, `--mp_scale_period` and `--mp_min_scale`: the numbers of the loss scale,
    - `--mp_skip_nonfinite`: whether the program shall skip steps with non-finite gradients,
    - `--mp_max_skips`: how many in a row before it ends, see `jmpx.inspect.check_progress`; 0 for
      any,
    - `--mp_params_rounding`: how 16-bit parameters are rounded: `nearest`, `stochastic` or `split`.

    Flags that contradict each other are a usage error: `--mp_loss_scale` and one for a part of it,
    `--nomp_skip_nonfinite` and a limit, `--mp_params_rounding=split` and float32 parameters.

    The environment variables `JMPX_POLICY` and `JMPX_LOSS_SCALE` set the defaults of `--mp_policy`
    and `--mp_loss_scale`, for any prefix, when this function runs; they go before `default_policy`.
    The command line goes before them: also each flag for a part of the loss scale before that part
    of `JMPX_LOSS_SCALE`, and another `--mp_scale_type` before all of it. An empty variable counts
    as unset. A wrong one is a usage error when the program parses its flags.

    Args:
        prefix: the first word of the names of the flags.
        default_policy: the default of `--mp_policy`, unless `JMPX_POLICY` is set.
        flag_values: the flag registry.

    Returns:
        An object with `policy`, `policy_map`, `skip_nonfinite`, `max_consecutive_skips`,
        `params_rounding`, `loss_scale()`, `mixed_precision()`, `low_precision_params(...)` and
        `check_progress(...)`, which read the flags.

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
    warn_of_variables(("JMPX_POLICY", "JMPX_LOSS_SCALE"))
    policy: flags.FlagHolder[PolicyMap] = define_with_variable(
        _POLICY_MAP,
        f"{prefix}_policy",
        "JMPX_POLICY",
        default_policy,
        "In which dtypes parameters are stored, computation runs and results leave, with rules for "
        "parts of the model. The environment variable JMPX_POLICY sets the default.",
        flag_values,
    )
    flags.register_validator(f"{prefix}_policy", is_given, "must have a value", flag_values)
    skips = define_skip_flags(prefix, flag_values)
    flag = cast("Flag[PolicyMap]", flag_values[f"{prefix}_policy"])
    loss_scale = define_loss_scale_flags(prefix, flag, flag_values)
    rounding = define_rounding_flags(prefix, flag_values)
    return MixedPrecisionFlags(policy, skips, loss_scale, rounding)
