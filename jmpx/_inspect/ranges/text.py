"""Ranges as text."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jmpx._base.leaves import is_int
from jmpx._base.messages import describe
from jmpx._inspect.ranges.advice import not_kept, scale_or_1, scale_text
from jmpx._inspect.ranges.data import Histogram, Range, Shares, merged, overflows
from jmpx._inspect.ranges.formats import FORMATS, as_format

if TYPE_CHECKING:
    from jmpx._inspect.ranges.report import Ranges

_NARROWEST = 72
_IN_FLOAT16 = 2.0**15  # the largest power of two in float16, through which the scale may pass
_ROWS = 24  # how many scopes are shown, unless all are asked for
_GAP = "  "


def ranges_text(ranges: "Ranges", width: int, is_full: bool) -> str:
    """Returns the text of `Ranges.to_text`."""
    if not is_int(width) or width < _NARROWEST:
        raise ValueError(
            f"Expected width= to be a number of columns, {_NARROWEST} or more, got "
            f"{describe(width)}: pass width=80, or nothing for 100."
        )
    largest = max((each.largest for each in ranges.gradients), default=0.0)
    scale = scale_or_1(ranges.gradients, "float16")
    blocks = [
        [_title(ranges)],
        _format_lines(ranges, scale),
        _scope_lines(ranges, scale, width, is_full),
        _advice_lines(ranges, scale, largest),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def power(number: float) -> str:
    """Returns a positive number as the power of two that is not above it."""
    return f"2**{math.frexp(number)[1] - 1}" if number else "0"


def share(part: float) -> str:
    """Returns a share in percent; one that is not zero or one is never shown as such."""
    if part in (0, 1):
        return f"{100 * part:.0f} %"
    return "<0.1 %" if part < 0.001 else f"{min(100 * part, 99.9):.1f} %"


def _title(ranges: "Ranges") -> str:
    scopes = {each.scope for each in (*ranges.activations, *ranges.gradients)}
    what = ranges.title + ("" if ranges.is_step or not ranges.gradients else " and its gradient")
    counts = f"{len(scopes)} scope{'s' if len(scopes) != 1 else ''}"
    if _has_counts(ranges):
        size = merged(_histograms((*ranges.activations, *ranges.gradients))).size
        counts += f", {size:,} numbers"
    return f"Ranges of {what} in float32: {counts}"


def _has_counts(ranges: "Ranges") -> bool:
    return bool(_histograms((*ranges.activations, *ranges.gradients)))


def _histograms(ranges: Sequence[Range]) -> list[Histogram]:
    return [each.histogram for each in ranges if each.histogram is not None]


def _at(scale: float) -> str:
    return "" if scale == 1 else f" x {power(scale)}"


def _format_lines(ranges: "Ranges", scale: float) -> list[str]:
    """Returns a table: what each format loses of all activations and of all gradients."""
    if not _has_counts(ranges):
        return []
    kinds = [("activations", ranges.activations, 1.0)]
    kinds += [("gradients", ranges.gradients, factor) for factor in sorted({1.0, scale})]
    rows = [["", "", *Shares._fields]]
    for kind, found, factor in kinds:
        histogram = merged(_histograms(found))
        for known in FORMATS.values() if histogram.numbers else ():
            cells = map(share, histogram.shares(known.name, factor))
            rows.append([f"{kind}{_at(factor)}", known.name, *cells])
    for row, above in zip(rows[:0:-1], rows[-2::-1], strict=True):
        row[0] = "" if row[0] == above[0] else row[0]
    return _aligned(rows, "<<>>>")


def _scope_lines(ranges: "Ranges", scale: float, width: int, is_full: bool) -> list[str]:
    """Returns a table: the range of each scope, and what float16 does not hold of it."""
    forward = {each.scope: each for each in ranges.activations}
    backward = {each.scope: each for each in ranges.gradients}
    scopes = list(dict.fromkeys([*forward, *backward]))
    shown = scopes if is_full else _worst(scopes, forward, backward, scale)
    head = ["", "activations", "over", "gradients", f"lost{_at(scale)}", "over"]
    rows = [head if _has_counts(ranges) else ["", "activations", "", "gradients", "", ""]]
    for scope in shown:
        a, g = forward.get(scope), backward.get(scope)
        rows.append(
            [
                scope or "(no scope)",
                *_cells(a, 1.0, ("overflowing",)),
                *_cells(g, scale, ("lost", "overflowing")),
            ]
        )
    tables = _aligned([["", *row[1:]] for row in rows], "<<><>>")
    tables = [f"{_GAP}{cells}" for cells in tables]
    room = width - max(map(len, tables))
    lines = ["By scope, the magnitudes and what float16 does not hold:"]
    size = max((len(row[0]) for row in rows if len(row[0]) <= room), default=0)
    for row, cells in zip(rows, tables, strict=True):
        if len(row[0]) > room:  # a path is never broken
            lines.append(row[0])
        lines.append(f"{row[0] if len(row[0]) <= room else '':{size}}{cells}".rstrip())
    left_out = len(scopes) - len(shown)
    if left_out:
        lines.append(f"... and {left_out} more scopes: print(ranges.to_text(all=True))")
    return lines


def _cells(each: Range | None, scale: float, names: Sequence[str]) -> list[str]:
    if each is None or not each.largest:
        return ["", *("" for _ in names)]
    cells = [f"{power(each.smallest)} .. {power(each.largest)}"]
    if each.histogram is None:
        return [*cells, *("" for _ in names)]
    shares = each.histogram.shares("float16", scale)
    return [*cells, *(share(getattr(shares, name)) for name in names)]


def _worst(
    scopes: Sequence[str], forward: dict[str, Range], backward: dict[str, Range], scale: float
) -> list[str]:
    """Returns the scopes of which float16 holds the least, in the order of the program."""

    def badness(scope: str) -> tuple[float, float]:
        over, lost = 0.0, 0.0
        for each, factor in ((forward.get(scope), 1.0), (backward.get(scope), scale)):
            if each is not None:
                over += overflows(each.largest, as_format("float16"), factor)
                if each.histogram is not None:
                    lost = max(lost, each.histogram.shares("float16", factor).lost)
        return -over, -lost

    worst = set(sorted(scopes, key=badness)[:_ROWS])
    return [scope for scope in scopes if scope in worst]


def _advice_lines(ranges: "Ranges", scale: float, largest: float) -> list[str]:
    lines = []
    if largest:
        lines.append(
            f"Loss scale for float16: {scale_text(scale)}  (largest gradient {power(largest)})"
        )
        if scale > _IN_FLOAT16:
            lines.append(
                f"A loss that is itself computed in float16 takes {scale_text(_IN_FLOAT16)}."
            )
    known = as_format("float16")
    rules = ranges.rules("float16", scale)
    left = not_kept(ranges.activations, ranges.gradients, known, scale)
    if ":" in rules:
        lines.append("Policy map for float16, which keeps in float32 what would overflow:")
        lines.append(f"{_GAP}{rules}")
    if left:
        names = ", ".join(scope or "(no scope)" for scope in left[:3])
        names += f" and {len(left) - 3} more" if len(left) > 3 else ""
        lines.append(f"No rule keeps in float32 what overflows in {names}:")
        lines.append(f"{_GAP}cast it in the code, or name it by jax.named_scope for autocast.")
    elif ":" not in rules and ranges.activations:
        lines.append("Nothing overflows in float16.")
    every = merged(_histograms((*ranges.activations, *ranges.gradients)))
    if every.masked:
        masks = ", ".join(f"{mask:.3g}" for mask in ranges.masks)
        lines.append(f"Masks, counted apart: {every.masked:,} numbers such as {masks}.")
    if every.infinite + every.nan:
        lines.append(
            f"Infinite or NaN in float32: {every.infinite + every.nan:,} numbers; "
            "jmpx.inspect.first_nonfinite finds the first."
        )
    return lines


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Returns rows of the same columns, without columns that are empty.

    Args:
        rows: the cells of each row.
        sides: `>` for each column that is aligned to the right, `<` for the others.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "".join(
            f"{cell:{side}{size}}{_GAP}"
            for cell, side, size in zip(row, sides, sizes, strict=True)
            if size
        ).rstrip()
        for row in rows
    ]
