"""Tables in Markdown, and rows of what has to hold."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A measure that may be at most `bar`, or at least with `least`."""

    measure: str
    value: float
    bar: float
    least: bool = False

    def cells(self) -> tuple[str, ...]:
        holds = self.value >= self.bar if self.least else self.value <= self.bar
        bar = f"{'≥' if self.least else '≤'} {self.bar:g}"
        return self.measure, f"{self.value:.4g}", bar, "yes" if holds else "**no**"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(header), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table_of_bars(rows: Iterable[Row]) -> str:
    return table(("measure", "measured", "bar", "holds"), (row.cells() for row in rows))


def plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(v)}" for key, v in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
