"""What follows from the ranges: a loss scale, and rules of a policy map."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jmpx._base.dtypes import DTypeLike
from jmpx._base.leaves import is_int
from jmpx._base.messages import describe
from jmpx._inspect.ranges.data import Operation, Range, overflows
from jmpx._inspect.ranges.formats import Format, as_format
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.rules import Rule
from jmpx._scales.arguments import HIGHEST_SCALE, LOWEST_SCALE
from jmpx._scales.numbers import format_number

_FULL = "compute=float32"


def scale_for(gradients: Sequence[Range], head_room: int, dtype: DTypeLike) -> float:
    """Returns the loss scale that `Ranges.loss_scale` recommends."""
    known = as_format(dtype)
    if not is_int(head_room) or head_room < 0:
        raise ValueError(
            f"Expected head_room= to be how many powers of two stay free above the largest "
            f"gradient, 0, 1, 2 ..., got {describe(head_room)}: leave it out for 2."
        )
    largest = max((each.largest for each in gradients), default=0.0)
    if not largest:
        raise ValueError(
            "Expected gradients that are not all zero, got none, so that no loss scale follows: "
            "give jmpx.inspect.ranges a loss that depends on its first argument, or a step that "
            "contains its gradient."
        )
    if known.largest > 2.0**126:
        return 1.0  # bfloat16 has the range of float32
    mantissa, exponent = math.frexp(known.largest / largest)
    return min(max(2.0 ** (exponent - 1 - head_room), LOWEST_SCALE), HIGHEST_SCALE)


def scale_or_1(gradients: Sequence[Range], dtype: DTypeLike) -> float:
    """Returns the loss scale that is recommended; 1 without gradients that are not zero."""
    return scale_for(gradients, 2, dtype) if any(each.largest for each in gradients) else 1.0


def scale_text(scale: float) -> str:
    """Returns the string of a dynamic loss scale that begins with this power of two."""
    text = f"2**{math.frexp(scale)[1] - 1}"
    # A dynamic scale never falls below its minimum, which is 1 by default.
    return f"dynamic,init={text}" + (f",min={format_number(scale)}" if scale < 1 else "")


def overflowing(
    activations: Iterable[Range], gradients: Iterable[Range], known: Format, scale: float
) -> Iterator[tuple[Range, tuple[Operation, ...], bool]]:
    """Yields the scopes in which a number overflows.

    Yields:
        The scope, its operations whose results overflow, and whether what enters overflows.
    """
    for ranges, factor in ((activations, 1.0), (gradients, scale)):
        for each in ranges:
            found = tuple(o for o in each.operations if overflows(o.largest, known, factor))
            enters = overflows(each.entering, known, factor)
            if found or enters:
                yield each, found, enters


def policy_text(
    activations: Sequence[Range], gradients: Sequence[Range], dtype: DTypeLike, scale: float
) -> str:
    """Returns the policy map string that `Ranges.rules` gives."""
    known = as_format(dtype)
    if known.name not in ("float16", "bfloat16"):
        raise ValueError(
            f"Expected a dtype to compute in, 'float16' or 'bfloat16', got {describe(dtype)}: "
            f"shares({known.name!r}) says what it would lose."
        )
    kept: dict[str, str] = {}  # selector -> the outermost scope that it stands for
    operations: dict[str, None] = {}
    for each, found, _ in overflowing(activations, gradients, known, scale):
        if each.selector is None:
            operations |= dict.fromkeys(operation.name for operation in found)
        elif each.selector not in kept or len(each.scope) < len(kept[each.selector]):
            kept[each.selector] = each.scope
    rules = {selector: f"{_FULL},output=float32" for selector in kept}
    rules |= _lowered((*activations, *gradients), kept, known)
    # The last rule that matches applies, so those of inner scopes come after those around them.
    ordered = sorted(rules.items(), key=lambda item: item[0].count("/"))
    parts = [f"compute={known.name},output=float32"]
    parts += [f"{selector}: {policy}" for selector, policy in ordered]
    parts += [f"op.{name}?: {_FULL}" for name in operations]
    return "; ".join(parts)


def not_kept(
    activations: Sequence[Range], gradients: Sequence[Range], known: Format, scale: float
) -> list[str]:
    """Returns the scopes whose overflowing numbers no rule of `policy_text` keeps in float32."""
    rules = get_policy_map(policy_text(activations, gradients, known.name, scale)).rules
    names = {rule.selector for rule in rules}
    left = {}
    for each, found, enters in overflowing(activations, gradients, known, scale):
        if each.selector is None:
            is_kept = not enters and {f"op.{operation.name}" for operation in found} <= names
        else:
            # The last rule that matches applies.
            last = [rule for rule in rules if _selects(rule, each)][-1:]
            is_kept = [np.dtype(rule.compute) for rule in last] == [np.float32]
        if not is_kept:
            left[each.scope] = None
    return list(left)


def _selects(rule: Rule, each: Range) -> bool:
    return rule.selector == each.selector or (rule.is_path and rule.matches_scope(each.scope))


def _lowered(ranges: Sequence[Range], kept: dict[str, str], known: Format) -> dict[str, str]:
    """Returns rules for the scopes right inside of those that are kept, and not kept themselves.

    They would inherit float32 from the scope around them.
    """
    others = {
        each.scope: each.selector
        for each in ranges
        if each.selector is not None and each.selector not in kept
    }
    found = {}
    for scope, selector in others.items():
        around = [path for path in (*kept.values(), *others) if scope.startswith(f"{path}/")]
        if around and max(around, key=len) not in others:
            found[selector] = f"compute={known.name}"
    return found
