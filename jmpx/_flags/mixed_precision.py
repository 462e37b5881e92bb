"""The flags of `jmpx.flags.define_mp_flags`, what they mean together, and what contradicts."""

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
from absl import flags

from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import PyTree
from jmpx._base.messages import user_stacklevel
from jmpx._flags.define import POLICY_MAP
from jmpx._flags.kinds import (
    BooleanFlag,
    EnumFlag,
    Flag,
    Parser,
    from_variable,
    parsed,
    refuse_default,
    warn_of_variables,
)
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy
from jmpx._scales.kinds import LossScale, NoOpLossScale
from jmpx._scales.mixed_precision import MixedPrecision
from jmpx._scales.strings import LossScaleLike, get_loss_scale
from jmpx._steps.checks import LARGEST_COUNT, MAX_CONSECUTIVE_SKIPS

if TYPE_CHECKING:
    import optax  # pyright: ignore[reportMissingTypeStubs]

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

ParamsRounding: TypeAlias = Literal["nearest", "stochastic", "split"]

# A flag belongs to the module that calls a function of this one, and --help lists it there.
flags.disclaim_key_flags()

_SCALE_TYPE, _SCALE_VALUE = "auto", 2.0**15  # the defaults


def _scale_text(spec: LossScaleLike) -> str:
    """Returns the string of a loss scale, checked, on one line; nothing decides `auto` yet."""
    loss_scale = get_loss_scale(spec, policy="float16")
    return " ".join(spec.split()) if isinstance(spec, str) else str(loss_scale)


_LOSS_SCALE_OR_AUTO = Parser(
    _scale_text, "loss scale", "a loss scale such as dynamic,init=2**15, static=1024, none or auto"
)


class _LossScaleFlag(Flag[str]):
    """`--mp_loss_scale`, which is not written where its parts replace its default."""

    parts: tuple[flags.Flag[Any], ...] = ()

    def serialize(self) -> str:
        is_replaced = any(flag.value != flag.default for flag in self.parts)
        return "" if is_replaced and self.value == self.default else super().serialize()


class MixedPrecisionFlags:
    """The flags of `define_mp_flags`. Read them after the program has parsed its flags."""

    __module__ = "jmpx.flags"

    def __init__(self, prefix: str, flag_values: flags.FlagValues) -> None:
        self._prefix, self._flag_values = prefix, flag_values

    def _read(self, name: str) -> object:
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

    @property
    def max_consecutive_skips(self) -> int | None:
        """How many steps in a row may be skipped; None for any number, or where none is."""
        return (cast(int, self._read("max_skips")) or None) if self.skip_nonfinite else None

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

            name = f"--{self._prefix}_max_skips={limit}"
            raise_if_stuck(opt_state, loss_scale, grads, limit, name)

    @property
    def params_rounding(self) -> ParamsRounding:
        """How `--mp_params_rounding` rounds parameters: `nearest`, `stochastic` or `split`."""
        return cast(ParamsRounding, self._read("params_rounding"))

    def low_precision_params(
        self, optimizer: "optax.GradientTransformation", **options: object
    ) -> "optax.GradientTransformation":
        """Wraps an optimizer as `--mp_params_rounding` says; with `nearest` returns it as it is.

        Args:
            optimizer: an optax gradient transformation.
            **options: the other keyword arguments of `jmpx.optim.low_precision_params`.
        """
        rounding = self.params_rounding
        if rounding == "nearest":
            return optimizer
        from jmpx._storage.low_precision_params import low_precision_params  # few programs need it

        return low_precision_params(optimizer, rounding, **options)  # pyright: ignore[reportArgumentType]

    def loss_scale(self) -> LossScale:
        """Makes the loss scale that the flags describe.

        Warns:
            UserWarning: if the loss scale does not have a number that `--mp_scale_value` sets.
        """
        whole, kind, value = map(self._read, ("loss_scale", "scale_type", "scale_value"))
        default = self._flag_values[f"{self._prefix}_loss_scale"].default
        spec = _in_force(whole, kind, value, default)
        loss_scale = get_loss_scale(spec, self.policy_map)
        if isinstance(loss_scale, NoOpLossScale) and spec != whole and value != _SCALE_VALUE:
            warnings.warn(
                f"--{self._prefix}_scale_value={value} does nothing, because the loss scale is "
                f"'none' with --{self._prefix}_policy='{self.policy_map}': leave it out, or write "
                f"--{self._prefix}_scale_type=Dynamic.",
                stacklevel=user_stacklevel(),
            )
        return loss_scale

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

    With the prefix `mp` they are

    - `--mp_policy`: a policy or a policy map,
    - `--mp_loss_scale`: a loss scale, such as `dynamic,init=2**15,hysteresis=2`; see
      `jmpx.get_loss_scale`,
    - `--mp_scale_type` and `--mp_scale_value`, as in JMP's examples, in its place: `NoOp`,
      `Static`, `Dynamic` or `auto`, which is Dynamic if anything computes in float16, else NoOp;
      and the scale of Static, the first one of Dynamic,
    - `--mp_skip_nonfinite`: whether the program shall skip steps with non-finite gradients,
    - `--mp_max_skips`: how many in a row before it ends, see `jmpx.inspect.check_progress`; 0 for
      any,
    - `--mp_params_rounding`: how 16-bit parameters are rounded: `nearest`, `stochastic` or `split`.

    Flags that contradict each other are a usage error: `--mp_loss_scale` and one of the two in its
    place, `--nomp_skip_nonfinite` and a limit, `--mp_params_rounding=split` and float32 parameters.

    The environment variables `JMPX_POLICY` and `JMPX_LOSS_SCALE` set the defaults of `--mp_policy`
    and `--mp_loss_scale`, for any prefix, when this function runs; they take precedence over
    `default_policy`. The command line takes precedence over them, so that `--mp_scale_type` or
    `--mp_scale_value` replaces `JMPX_LOSS_SCALE`. An empty variable counts as unset. A wrong one is
    a usage error when the program parses its flags.

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
    group = _Group(prefix, flag_values)
    _define_policy(group, default_policy)
    _define_loss_scale(group)
    _define_skips(group)
    _define_rounding(group)
    return MixedPrecisionFlags(prefix, flag_values)


class _Group(NamedTuple):
    """The flags of one prefix, while they are defined."""

    prefix: str
    flag_values: flags.FlagValues

    @property
    def optional(self) -> str:
        """The flag that may be None."""
        return f"{self.prefix}_loss_scale"

    def add(self, flag: flags.Flag[Any], mistake: str | None = None) -> None:
        """Defines a flag, and refuses None, which a program may set, and a wrong variable."""
        flags.DEFINE_flag(flag, self.flag_values)
        if flag.name != self.optional:
            message = "must have a value"
            flags.register_validator(flag.name, _is_given, message, self.flag_values)
        if mistake:
            refuse_default(flag.name, mistake, self.flag_values)

    def refuse(self, names: tuple[str, ...], mistake_of: Callable[..., str]) -> None:
        """Registers a function that returns the mistake in the values of several flags."""
        names = tuple(f"{self.prefix}_{name}" for name in names)

        def check(values: dict[str, object]) -> bool:
            unset = [each for each in names if values[each] is None and each != self.optional]
            if unset:  # absl 2.0 keeps it, though a validator has refused it
                raise flags.IllegalFlagValueError(f"--{unset[0]} must have a value")
            mistake = mistake_of(self.prefix, *(values[name] for name in names))
            if mistake:  # absl would begin a ValidationError with the values of all flags
                raise flags.IllegalFlagValueError(mistake)
            return True

        flags.register_multi_flags_validator(names, check, flag_values=self.flag_values)


def _is_given(value: object) -> bool:
    return value is not None


def _define_policy(group: _Group, default: PolicyMapLike) -> None:
    start, mistake = from_variable(POLICY_MAP, "JMPX_POLICY", default)
    help = (
        "In which dtypes parameters are stored, computation runs and results leave, with rules for "
        "parts of the model. The environment variable JMPX_POLICY sets the default."
    )
    group.add(parsed(POLICY_MAP, f"{group.prefix}_policy", start, help), mistake)


def _define_loss_scale(group: _Group) -> None:
    prefix = group.prefix
    default, mistake = from_variable(_LOSS_SCALE_OR_AUTO, "JMPX_LOSS_SCALE", None)
    help = "The loss scale. The environment variable JMPX_LOSS_SCALE sets the default."
    serializer = flags.ArgumentSerializer()
    whole = _LossScaleFlag(_LOSS_SCALE_OR_AUTO, serializer, group.optional, default, help)
    help = "The kind of loss scale; auto is Dynamic if the policy computes in float16, else NoOp."
    kinds = ["auto", "NoOp", "Static", "Dynamic"]
    kind = EnumFlag(f"{prefix}_scale_type", _SCALE_TYPE, help, kinds, case_sensitive=False)
    help = "The loss scale of Static; the one that Dynamic begins with."
    value = parsed(flags.FloatParser(lower_bound=0), f"{prefix}_scale_value", _SCALE_VALUE, help)
    whole.parts = kind, value
    group.add(whole, mistake)
    group.add(kind)
    group.add(value)
    names = ("policy", "scale_type", "scale_value", "loss_scale")
    group.refuse(names, functools.partial(_mistake_of_scale, default))


def _mistake_of_scale(
    default: object, prefix: str, policy_map: PolicyMap, kind: str, value: float, whole: str | None
) -> str:
    """Returns the mistake in the flags of the loss scale, empty if there is none."""
    spec = _in_force(whole, kind, value, default)
    if spec == whole and (kind, value) != (_SCALE_TYPE, _SCALE_VALUE):
        part = f"scale_type={kind}" if kind != _SCALE_TYPE else f"scale_value={value}"
        return (
            f"--{prefix}_{part} contradicts --{prefix}_loss_scale={whole}, which is the whole loss "
            "scale: give one of the two"
        )
    try:
        get_loss_scale(spec, policy_map)
    except ValueError as error:
        return str(error) if spec == whole else f"--{prefix}_scale_value={value}: {error}"
    return ""


def _in_force(whole: object, kind: object, value: object, default: object) -> str:
    """Returns the string of the loss scale in force: of the whole, unless parts replace it."""
    is_replaced = whole == default and (kind, value) != (_SCALE_TYPE, _SCALE_VALUE)
    if isinstance(whole, str) and not is_replaced:
        return whole
    return "none" if kind == "NoOp" else f"{str(kind).lower()},init={value}"


def _define_skips(group: _Group) -> None:
    help = "Whether to skip the optimizer step where gradients are not finite."
    group.add(BooleanFlag(f"{group.prefix}_skip_nonfinite", True, help))
    parser = flags.IntegerParser(lower_bound=0, upper_bound=LARGEST_COUNT)
    help = (
        "How many steps in a row may be skipped: one more, and training has diverged and ends. 0 "
        "sets no limit."
    )
    group.add(parsed(parser, f"{group.prefix}_max_skips", MAX_CONSECUTIVE_SKIPS, help))
    group.refuse(("skip_nonfinite", "max_skips"), _mistake_of_skips)


def _mistake_of_skips(prefix: str, skips: bool, limit: int) -> str:
    # A flag file has the default, too, so that it cannot contradict.
    if skips or limit in (0, MAX_CONSECUTIVE_SKIPS):
        return ""
    return (
        f"--{prefix}_max_skips counts skipped steps, of which --no{prefix}_skip_nonfinite leaves "
        "none: give one of the two"
    )


def _define_rounding(group: _Group) -> None:
    help = (
        "How updates of 16-bit parameters are rounded: nearest drops the small ones, stochastic "
        "rounds by chance, right on average, and split keeps the low bits of float32 beside "
        "bfloat16."
    )
    name, ways = f"{group.prefix}_params_rounding", list(get_args(ParamsRounding))
    group.add(EnumFlag(name, "nearest", help, ways, case_sensitive=False))
    group.refuse(("policy", "params_rounding"), _mistake_of_rounding)


def _mistake_of_rounding(prefix: str, policy_map: PolicyMap, way: str) -> str:
    """Returns the mistake in a rounding of the parameters of a policy map."""
    policy, rounding = f"--{prefix}_policy", f"--{prefix}_params_rounding"
    if way == "nearest":
        return ""
    stored = [policy_map.default.param_dtype, *(rule.params for rule in policy_map.rules)]
    narrow = [dtype_name(each) for each in stored if each and np.dtype(each).itemsize < 4]
    if not narrow:
        return (
            f"{rounding}={way} rounds parameters of 16 bits, of which {policy} has none: write "
            f"params=bfloat16 in {policy}, or leave {rounding} out"
        )
    others = [name for name in narrow if name != "bfloat16"]
    if way == "split" and others:
        return (
            f"{rounding}=split keeps the low bits of bfloat16 parameters, and {policy} has "
            f"{others[0]} ones: write params=bfloat16 there, or {rounding}=stochastic"
        )
    return ""
