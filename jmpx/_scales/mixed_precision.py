"""The mixed precision of a program as one value: a policy map, and a loss scale."""

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import jax.core
import numpy as np

from jmpx._base.dtypes import is_dtype
from jmpx._base.leaves import is_array
from jmpx._base.mappings import is_mapping
from jmpx._base.messages import describe, position
from jmpx._base.moved import telling
from jmpx._policies.maps import (
    PolicyMap,
    PolicyMapLike,
    get_policy_map,
    parse_policy_map,
    read_policy_map,
    read_sections,
)
from jmpx._policies.policy import Policy
from jmpx._scales.dynamic import LEAVES, DynamicLossScale
from jmpx._scales.fields import KINDS, build
from jmpx._scales.kinds import LossScale
from jmpx._scales.strings import (
    LossScaleLike,
    get_loss_scale,
    parse_loss_scale,
    read_loss_scale,
)

_EXAMPLE = "'c=bf16,o=f32; LayerNorm: full | dynamic, init=2**15'"


@telling("jmpx.MixedPrecision")
@dataclasses.dataclass(frozen=True, eq=False)
class MixedPrecision:
    """A policy map and the loss scale to begin with: what one string says about a program.

    A frozen, hashable, picklable value (not a pytree), whose numbers are those of the first step:
    the loss scale that changes belongs into the train state. `str()` gives one line that
    `get_mixed_precision` parses back to an equal value. Two of them are equal if their maps are and
    their loss scales have one class and the same numbers.

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
        """The policy.

        Raises:
            ValueError: if the policy map has rules or `by`, which a policy cannot hold.
        """
        if self.policy_map.rules or self.policy_map.by is not None:
            what = "rules" if self.policy_map.rules else "by"
            raise ValueError(
                f"Cannot read one policy from the policy map '{self.policy_map}', whose {what} it "
                "would drop: read policy_map, whose .default is the policy alone."
            )
        return self.policy_map.default

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, which `get_mixed_precision` reads back.

        Example:
            >>> import json
            >>> import jmpx
            >>> precision = jmpx.get_mixed_precision("f32; op.exp: bf16 | static=1024")
            >>> print(json.dumps(precision.to_dict(), indent=1))
            {
             "policy": {
              "params": "float32",
              "compute": "float32",
              "output": "float32"
             },
             "rules": [
              {
               "select": "op.exp",
               "compute": "bfloat16"
              }
             ],
             "loss_scale": {
              "type": "static",
              "init": 1024
             }
            }
        """
        return {**self.policy_map.to_dict(), "loss_scale": self.loss_scale.to_dict()}

    def __str__(self) -> str:
        """Returns the policy map string, a bar, and the loss scale's string."""
        return f"{self.policy_map} | {self.loss_scale}"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def _value(self) -> tuple[Any, ...]:
        """Returns what equality compares; arrays, which have neither `==` nor hash, as numbers."""
        scale = self.loss_scale
        numbers = (getattr(scale, field.name) for field in dataclasses.fields(scale))
        plain = (number.item() if is_array(number) else number for number in numbers)
        return (self.policy_map, type(scale), *plain)


def _with_numpy_arrays(loss_scale: LossScale) -> LossScale:
    """Returns a loss scale whose leaves are NumPy's arrays of shape ().

    Raises:
        TypeError: if a leaf is traced, donated or of another shape, or no array.
    """
    if not isinstance(loss_scale, DynamicLossScale):
        return loss_scale
    leaves = {name: _as_numpy_array(getattr(loss_scale, name), name) for name in LEAVES}
    if all(leaf is getattr(loss_scale, name) for name, leaf in leaves.items()):
        return loss_scale
    return dataclasses.replace(loss_scale, **leaves)


def _as_numpy_array(leaf: Any, name: str) -> Any:
    if is_array(leaf) and leaf.ndim == 0 and not isinstance(leaf, jax.core.Tracer):
        with contextlib.suppress(RuntimeError):  # It was donated, or another process holds it.
            return np.asarray(leaf)
    raise TypeError(
        f"Expected {name} of the loss scale of a MixedPrecision to be one number, got "
        f"{describe(leaf)}: it is the loss scale that a program begins with, so keep the one that "
        "changes in the train state."
    )


# What `get_mixed_precision` takes.
MixedPrecisionLike: TypeAlias = PolicyMapLike | MixedPrecision


def get_mixed_precision(spec: MixedPrecisionLike) -> MixedPrecision:
    """Parses a policy map and a loss scale, `"c=bf16,o=f32; LayerNorm: full | dynamic"`.

    A bar separates the two; `get_policy_map` and `get_loss_scale` explain their grammars. Without
    the bar, the loss scale is `auto`: a `DynamicLossScale` if the default policy or a rule computes
    in float16, and a `NoOpLossScale` otherwise.

    A mapping has the keys that `get_policy_map` reads, and `loss_scale`:

        policy: {compute: bf16, output: f32}
        rules: [{select: LayerNorm, compute: f32}]
        loss_scale: {type: dynamic, init: 32768}

    Each value may also be its string, as `loss_scale: dynamic, init=2**15`.

    Args:
        spec: a string; or a mapping; or a policy map, a policy or a dtype; or a mixed precision,
            which is returned as it is.

    Returns:
        The mixed precision.

    Raises:
        TypeError: if `spec` is of another type, or a value of the mapping is.
        ValueError: if the string or the mapping does not follow the grammar. The message gives the
            position in the string, or the path in the mapping.

    Example:
        >>> import jmpx
        >>> print(jmpx.get_mixed_precision("c=f16; op.exp: f32 | dynamic, init=2**10"))
        params=float32,compute=float16,output=float16; op.exp: compute=float32 | dynamic,init=1024
        >>> print(jmpx.get_mixed_precision({"policy": "bf16-mixed"}))
        params=float32,compute=bfloat16,output=float32 | none
    """
    if isinstance(spec, MixedPrecision):
        return spec
    if isinstance(spec, str):
        return _parse(spec)
    if is_mapping(spec):
        sections = read_sections(spec)
        policy_map = read_policy_map(sections)
        if "loss_scale" not in sections:
            return MixedPrecision(policy_map)
        return MixedPrecision(policy_map, read_loss_scale(sections["loss_scale"], policy_map))
    if isinstance(spec, LossScale):
        raise TypeError(
            f"Expected a policy map and a loss scale, got {spec} alone: write for example "
            f"jmpx.MixedPrecision('c=f16,o=f32', {spec!r})."
        )
    if isinstance(spec, Policy | PolicyMap) or is_dtype(spec):
        return MixedPrecision(spec)
    raise TypeError(
        "Expected the string of a mixed precision, a mapping, a dtype, a jmpx.Policy, a "
        f"jmpx.PolicyMap or a jmpx.MixedPrecision, got {describe(spec)}: write for example "
        f"{_EXAMPLE}."
    )


def _parse(text: str) -> MixedPrecision:
    """Parses the string of a mixed precision."""
    whole = f"of mixed precision {text!r}"
    policy_map, bar, loss_scale = text.partition("|")
    start = len(policy_map) + 1
    if "|" in loss_scale:
        raise ValueError(
            f"Second '|' at position {start + loss_scale.index('|')} {whole}: write one policy map "
            f"and one loss scale, as {_EXAMPLE}."
        )
    first = policy_map.partition(";")[0]
    if first.partition(",")[0].partition("=")[0].strip().lower() in KINDS:
        raise ValueError(
            f"Unexpected loss scale {first.strip()!r} {position(first, 0)} {whole}: write it after "
            f"the policy map, as {_EXAMPLE}."
        )
    if not policy_map.strip():
        raise ValueError(
            f"Empty policy map {position(policy_map, 0)} {whole}: write for example {_EXAMPLE}."
        )
    if bar and not loss_scale.strip():
        raise ValueError(
            f"Empty loss scale {position(loss_scale, start)} {whole}: write for example "
            f"{_EXAMPLE}, or leave the bar out for 'auto'."
        )
    parsed = parse_policy_map(policy_map, repr(text))
    if not bar:
        return MixedPrecision(parsed)
    kind, numbers, places = parse_loss_scale(loss_scale, repr(text), start)
    return MixedPrecision(parsed, build(kind, numbers, places.__getitem__, parsed))
