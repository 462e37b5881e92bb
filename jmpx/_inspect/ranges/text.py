"""Ranges as text."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jmpx._base.leaves import is_int
from jmpx._base.messages import describe
from jmpx._base.text import columns, count_text, share_text
from jmpx._inspect.ranges.advice import not_kept, policy_text, scale_or_1, scale_text
from jmpx._inspect.ranges.data import Histogram, Range, Shares, merged, overflows
from jmpx._inspect.ranges.formats import FORMATS, as_format

_NARROWEST = 72
_IN_FLOAT16 = 2.0**15  # the largest power of two in float16, through which the scale may pass
_ROWS = 24  # how many scopes are shown, unless all are asked for


class Found(NamedTuple):
    """What the text shows: `Ranges` describes it."""

    title: str
    activations: Sequence[Range]
    gradients: Sequence[Range]
    masks: Sequence[float]

    def merged(self) -> Histogram:
        """Returns the histogram of all numbers."""
        return merged(each.histogram for each in (*self.activations, *self.gradients))


def found_text(found: Found, width: int, is_full: bool) -> str:
    """Returns the text of `Ranges.to_text`."""
    if not is_int(width) or width < _NARROWEST:
        raise ValueError(
            f"Expected width= to be a number of columns, {_NARROWEST} or more, got "
            f"{describe(width)}: pass width=80, or nothing for 100."
        )
    scale = scale_or_1(found.gradients, "float16")
    scopes = {each.scope for each in (*found.activations, *found.gradients)}
    counts = f"{count_text(len(scopes), 'scope')}, {found.merged().size:,} numbers"
    blocks = [
        [f"Ranges of {found.title} in float32: {counts}"],
        _format_lines(found, scale),
        _scope_lines(found, scale, width, is_full),
        _advice_lines(found, scale),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def power(number: float) -> str:
    """Returns a positive number as the power of two that is not above it."""
    return f"2**{math.frexp(number)[1] - 1}" if number else "0"


def share(part: float) -> str:
    """Returns a share in percent; nothing is `0 %` and all is `100 %`."""
    return f"{100 * part:.0f} %" if part in (0, 1) else share_text(part, 1)


def _at(scale: float) -> str:
    return "" if scale == 1 else f" x {power(scale)}"


def _format_lines(found: Found, scale: float) -> list[str]:
    """Returns a table: what each format loses of all activations and of all gradients."""
    kinds = [("activations", found.activations, 1.0)]
    kinds += [("gradients", found.gradients, factor) for factor in sorted({1.0, scale})]
    rows = [["", "", *Shares._fields]]
    for kind, ranges, factor in kinds:
        histogram, name = merged(each.histogram for each in ranges), f"{kind}{_at(factor)}"
        for known in FORMATS.values() if histogram.numbers else ():
            rows.append([name, known.name, *map(share, histogram.shares(known.name, factor))])
            name = ""
    return columns(rows, right=(2, 3, 4)) if len(rows) > 1 else []


def _scope_lines(found: Found, scale: float, width: int, is_full: bool) -> list[str]:
    """Returns a table: the range of each scope, and what float16 does not hold of it."""
    forward = {each.scope: each for each in found.activations}
    backward = {each.scope: each for each in found.gradients}
    scopes = list(dict.fromkeys([*forward, *backward]))
    shown = scopes if is_full else _worst(scopes, forward, backward, scale)
    table = [["activations", "over", "gradients", f"lost{_at(scale)}", "over"]]
    for scope in shown:
        magnitudes, _, over = _cells(forward.get(scope), 1.0)
        table.append([magnitudes, over, *_cells(backward.get(scope), scale)])
    cells = [f"  {line}" for line in columns(table, right=(1, 3, 4))]
    names = ["", *(scope or "(no scope)" for scope in shown)]
    room = width - max(map(len, cells))
    size = max((len(name) for name in names if len(name) <= room), default=0)
    lines = ["By scope, the magnitudes and what float16 does not hold:"]
    for name, line in zip(names, cells, strict=True):
        if len(name) > room:  # a path is never broken
            lines.append(name)
        lines.append(f"{name if len(name) <= room else '':{size}}{line}".rstrip())
    left_out = len(scopes) - len(shown)
    if left_out:
        lines.append(f"... and {left_out} more scopes: print(ranges.to_text(all=True))")
    return lines


def _cells(each: Range | None, scale: float) -> list[str]:
    """Returns the magnitudes, and which shares are lost and overflow."""
    if each is None or not each.largest:
        return ["", "", ""]
    shares = each.histogram.shares("float16", scale)
    magnitudes = f"{power(each.smallest)} .. {power(each.largest)}"
    return [magnitudes, share(shares.lost), share(shares.overflowing)]


def _worst(
    scopes: Sequence[str], forward: dict[str, Range], backward: dict[str, Range], scale: float
) -> list[str]:
    """Returns the scopes of which float16 holds the least, in the order of the program."""

    def badness(scope: str) -> tuple[float, float]:
        over, lost = 0.0, 0.0
        for each, factor in ((forward.get(scope), 1.0), (backward.get(scope), scale)):
            if each is not None:
                over += overflows(each.largest, as_format("float16"), factor)
                lost = max(lost, each.histogram.shares("float16", factor).lost)
        return -over, -lost

    worst = set(sorted(scopes, key=badness)[:_ROWS])
    return [scope for scope in scopes if scope in worst]


def _advice_lines(found: Found, scale: float) -> list[str]:
    lines = []
    largest = max((each.largest for each in found.gradients), default=0.0)
    if largest:
        lines.append(
            f"Loss scale for float16: {scale_text(scale)}  (largest gradient {power(largest)})"
        )
        if scale > _IN_FLOAT16:
            lines.append(
                f"A loss that is itself computed in float16 takes {scale_text(_IN_FLOAT16)}."
            )
    rules = policy_text(found.activations, found.gradients, "float16", scale)
    left = not_kept(found.activations, found.gradients, as_format("float16"), scale)
    if ":" in rules:
        lines.append("Policy map for float16, which keeps in float32 what would overflow:")
        lines.append(f"  {rules}")
    if left:
        names = ", ".join(scope or "(no scope)" for scope in left[:3])
        names += f" and {len(left) - 3} more" if len(left) > 3 else ""
        lines.append(f"No rule keeps in float32 what overflows in {names}:")
        lines.append("  cast it in the code, or name it by jax.named_scope for autocast.")
    elif ":" not in rules and found.activations:
        lines.append("Nothing overflows in float16.")
    every = found.merged()
    if every.masked:
        masks = ", ".join(f"{mask:.3g}" for mask in found.masks)
        lines.append(f"Masks, counted apart: {every.masked:,} numbers such as {masks}.")
    if every.infinite + every.nan:
        lines.append(
            f"Infinite or NaN in float32: {every.infinite + every.nan:,} numbers; "
            "jmpx.inspect.first_nonfinite finds the first."
        )
    return lines
