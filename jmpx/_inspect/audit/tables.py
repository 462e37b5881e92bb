"""The tables of a report, as cells: shares of products, saved values and casts, and scopes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jmpx._base.text import bytes_text, flop_text, short_names
from jmpx._inspect.audit.alike import common, pattern
from jmpx._inspect.audit.data import AuditData, Scope


class Share(NamedTuple):
    """A part of something, such as the products of two dtypes.

    Attributes:
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
    """All parts of something, the largest first, below a heading that says how much it is."""

    heading: str
    rows: list[Share]


def shares(report: AuditData) -> list[Shares]:
    """Returns the tables that a report begins with."""
    products = [(each.dtypes, each.flops, each.count) for each in report.products]
    saved = [(dtype, nbytes, None) for dtype, nbytes in report.saved.items()]
    casts = [(f"{each.source} -> {each.target}", each.nbytes, each.count) for each in report.casts]
    return [
        _shares("Matrix products and convolutions", products, flop_text),
        Shares(f"Everything else: {flop_text(report.other_flops)}", []),
        _shares("Saved for the backward pass", saved, bytes_text),
        _shares("Written by casts", casts, bytes_text),
    ]


def _shares(
    what: str, parts: Iterable[tuple[str, int, int | None]], text: Callable[[int], str]
) -> Shares:
    parts = sorted(parts, key=lambda part: -part[1])
    whole = sum(part for _, part, _ in parts)
    rows = [
        Share(label, part, whole, text(part), "" if count is None else f"{count:,} x")
        for label, part, count in parts
    ]
    return Shares(f"{what}: {text(whole) if rows else 'nothing'}", rows)


def notes(report: AuditData) -> list[str]:
    """Returns sentences about what the tables do not count."""
    found = []
    if report.has_while:
        found.append(
            "In a while loop, operations are counted for one trip: nothing tells how many it makes."
        )
    if report.uncounted:
        names = ", ".join(report.uncounted)
        found.append(f"Not counted: {names}, whose FLOPs nothing tells.")
    return found


SCOPE_HEADER = ("scope", "", "policy", "dtypes", "operations", "products")
SCOPE_RIGHT = (1, 4, 5)  # the columns of numbers


def scope_rows(scopes: Iterable[Scope], is_full: bool) -> list[tuple[str, ...]]:
    """Returns the cells below `SCOPE_HEADER`, those with the most FLOPs first.

    Args:
        scopes: the scopes.
        is_full: whether each scope has a row; else one row is for all layers that are alike.
    """
    groups: dict[object, list[Scope]] = {}
    for scope in scopes:
        like = scope._replace(path=scope.path if is_full else pattern(scope.path))
        groups.setdefault(like, []).append(scope)
    totals = [
        (len(group) * group[0].flops, len(group) * group[0].operations, group)
        for group in groups.values()
    ]
    return [_cells(*total) for total in sorted(totals, key=lambda total: (-total[0], -total[1]))]


def _cells(flops: int, operations: int, group: list[Scope]) -> tuple[str, ...]:
    first = group[0]
    path = common([scope.path for scope in group]) or "(outside of all)"
    return (
        f"{path} ({first.module})" if first.module not in ("", path) else path,
        f"{len(group):,} x" if len(group) > 1 else "",
        short_names(first.policy),
        short_names(first.dtypes),
        f"{operations:,}",
        flop_text(flops) if flops else "",
    )
