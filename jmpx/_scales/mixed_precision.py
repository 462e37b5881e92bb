"""The mixed precision of a program as one value: a policy map, and a loss scale."""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

from jmpx._base.mappings import (
    Located,
    MappingLike,
    is_mapping,
    read_entries,
    whole_text,
)
from jmpx._policies.map_strings import get_policy_map, map_of, parse_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy
from jmpx._scales.arguments import concrete_leaf
from jmpx._scales.dynamic import LEAVES, DynamicLossScale
from jmpx._scales.kinds import LossScale
from jmpx._scales.strings import (
    LossScaleLike,
    get_loss_scale,
    parse_loss_scale,
    read_loss_scale,
)


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """A policy map and the loss scale to begin with: what one string says about a program.

    A frozen, hashable, picklable value (not a pytree), whose numbers are those of the first step:
    the loss scale that changes belongs in the train state. `str()` gives one line that
    `get_mixed_precision` parses back to an equal value.

    Args:
        policy_map: a policy map, or anything else that `get_policy_map` takes.
        loss_scale: a loss scale, or anything else that `get_loss_scale` takes. `auto` is decided by
            the policy map. Arrays are copied into NumPy's, so that no step donates them.

    Raises:
        TypeError: if an argument is of another type, or the loss scale is traced or a stack.
        ValueError: if a string or a mapping does not follow its grammar.

    Example:
        >>> import jmpx
        >>> precision = jmpx.MixedPrecision("c=f16,o=f32; LayerNorm: full", "dynamic, period=500")
        >>> print(precision.policy_map.rules[0])
        LayerNorm: compute=float32
        >>> precision.loss_scale.period
        500
    """

    __module__ = "jmpx"

    policy_map: PolicyMap
    loss_scale: LossScale = "auto"  # pyright: ignore[reportAssignmentType]

    if TYPE_CHECKING:

        def __init__(
            self, policy_map: PolicyMapLike, loss_scale: LossScaleLike = "auto"
        ) -> None: ...

    def __post_init__(self) -> None:
        policy_map = get_policy_map(self.policy_map)
        loss_scale = get_loss_scale(self.loss_scale, policy=policy_map)
        object.__setattr__(self, "policy_map", policy_map)
        object.__setattr__(self, "loss_scale", _with_numpy_arrays(loss_scale))

    @property
    def policy(self) -> Policy:
        """The policy; a ValueError if the map has rules or `by`, which a policy cannot hold."""
        return self.policy_map.alone("the policy map ")

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, which `get_mixed_precision` reads back."""
        return {**self.policy_map.to_dict(), "loss_scale": self.loss_scale.to_dict()}

    def __str__(self) -> str:
        """Returns the policy map string, a bar, and the loss scale's string."""
        return f"{self.policy_map} | {self.loss_scale}"

    def __hash__(self) -> int:
        return hash((self.policy_map, str(self.loss_scale)))  # arrays have no hash


def _with_numpy_arrays(loss_scale: LossScale) -> LossScale:
    """Returns a loss scale whose leaves are NumPy's arrays of shape ()."""
    if not isinstance(loss_scale, DynamicLossScale):
        return loss_scale
    leaves = {name: concrete_leaf(getattr(loss_scale, name), name) for name in LEAVES}
    return dataclasses.replace(loss_scale, **leaves)


# What `get_mixed_precision` takes.
MixedPrecisionLike: TypeAlias = PolicyMapLike | MixedPrecision


def policy_map_of(policy: MixedPrecisionLike) -> PolicyMap:
    """Returns the policy map of what takes a policy, a policy map or a mixed precision."""
    return policy.policy_map if isinstance(policy, MixedPrecision) else get_policy_map(policy)


def get_mixed_precision(spec: MixedPrecisionLike) -> MixedPrecision:
    """Parses a policy map and a loss scale, `"c=bf16,o=f32; LayerNorm: full | dynamic"`.

    A bar separates them; `get_policy_map` and `get_loss_scale` explain their grammars. Without a
    bar, the loss scale is `auto`: a `DynamicLossScale` if the default policy or a rule computes in
    float16, and a `NoOpLossScale` otherwise.

    Args:
        spec: a string; or a mapping with the keys that `get_policy_map` reads, and `loss_scale`,
            whose values may be mappings or strings; or a policy map, a policy or a dtype; or a
            mixed precision, which is returned as it is.

    Raises:
        TypeError: if `spec` is of another type, or a value of the mapping is.
        ValueError: if the string or the mapping does not follow the grammar. The message gives the
            position in the string, or the path in the mapping.

    Example:
        >>> import jmpx
        >>> print(jmpx.get_mixed_precision("c=f16; op.exp: f32 | dynamic, init=2**10"))
        params=float32,compute=float16; op.exp: compute=float32 | dynamic,init=1024
        >>> scale = {"type": "static", "init": 1024}
        >>> print(jmpx.get_mixed_precision({"policy": "16-mixed", "loss_scale": scale}))
        params=float32,compute=float16,output=float32 | static=1024
    """
    if isinstance(spec, MixedPrecision):
        return spec
    if isinstance(spec, str):
        return _parse(spec)
    return _read(Located(spec)) if is_mapping(spec) else MixedPrecision(spec)


def _read(found: Located[MappingLike]) -> MixedPrecision:
    """Reads the mapping of a mixed precision: that of a policy map, with `loss_scale` beside it."""
    entries = read_entries(found.value)
    scales = [entry for entry in entries if entry[0].value.strip().lower() == "loss_scale"]
    policy_map = map_of([entry for entry in entries if entry not in scales], found)
    if not scales:
        return MixedPrecision(policy_map)
    if len(scales) > 1:
        raise ValueError(f"Duplicate key 'loss_scale'{scales[1][0].at}: give it once.")
    return MixedPrecision(policy_map, read_loss_scale(scales[0][1], policy_map))


def _parse(text: str) -> MixedPrecision:
    """Parses the string of a mixed precision."""
    policy_map, loss_scale = whole_text(text, "policy").cut("|")
    parsed = parse_policy_map(policy_map)
    if "|" not in text:
        return MixedPrecision(parsed)
    return MixedPrecision(parsed, parse_loss_scale(loss_scale, parsed))
