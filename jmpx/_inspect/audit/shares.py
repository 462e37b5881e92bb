"""The shares of a report: products, saved values and casts by dtype, the largest first."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from jmpx._base.text import bytes_text, flop_text

if TYPE_CHECKING:
    from jmpx._inspect.audit.report import Audit

_WHILE = "In a while loop, operations are counted for one trip: nothing tells how many it makes."


class Share(NamedTuple):
    """A part of something, such as the products of two dtypes.

    Args:
        label: its dtypes.
        part: how much it is.
        whole: how much all parts are.
        amount: the part as people read it.
        times: how many operations it is; empty where they are not counted.
    """

    label: str
    part: int
    whole: int
    amount: str
    times: str


class Shares(NamedTuple):
    """All parts of something.

    Args:
        heading: what they are part of, and how much that is.
        rows: the parts, the largest first.
    """

    heading: str
    rows: list[Share]


def shares(report: "Audit") -> list[Shares]:
    """Returns the tables that a report begins with."""
    products = [(each.dtypes, each.flops, each.count) for each in report.products]
    saved = [(dtype, nbytes, None) for dtype, nbytes in report.saved.items()]
    casts = [(f"{each.source} -> {each.target}", each.nbytes, each.count) for each in report.casts]
    return [
        _table("Matrix products and convolutions", products, flop_text),
        Shares(f"Everything else: {flop_text(report.other_flops)}", []),
        _table("Saved for the backward pass", saved, bytes_text),
        _table("Written by casts", casts, bytes_text),
    ]


def notes(report: "Audit") -> list[str]:
    """Returns sentences about what the tables do not count."""
    found = [_WHILE] if report.has_while else []
    if report.uncounted:
        names = ", ".join(report.uncounted)
        found.append(f"Not counted: {names}, whose FLOPs nothing tells.")
    return found


def _table(
    what: str, parts: Iterable[tuple[str, int, int | None]], text: Callable[[int], str]
) -> Shares:
    parts = sorted(parts, key=lambda part: -part[1])
    whole = sum(part for _, part, _ in parts)
    rows = [
        Share(label, part, whole, text(part), "" if count is None else f"{count:,} x")
        for label, part, count in parts
    ]
    return Shares(f"{what}: {text(whole) if rows else 'nothing'}", rows)
