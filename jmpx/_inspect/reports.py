"""What the reports of this room share: their data, for JSON; and a table, as text and as HTML."""

import dataclasses
import html
import json
import math
from typing import Any, ClassVar, NamedTuple

from jmpx._base.leaves import is_int
from jmpx._base.text import columns


class Report:
    """A frozen dataclass that is the result of an inspection."""

    _version = 1

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them.

        The keys are names of attributes, and `"version"`, which changes when their meaning does.
        """
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return {"version": self._version, **{name: plain(getattr(self, name)) for name in names}}

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict()` as JSON, in one line if `indent` is None."""
        return json.dumps(self.to_dict(), indent=indent)


def plain(value: Any) -> Any:
    """Returns named tuples as dicts, tuples as lists, what JSON has no number for as text."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return list(map(plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return int(value) if is_int(value) else value  # `json.dumps` takes no numbers of NumPy


class Parts(NamedTuple):
    """What a report shows."""

    head: str
    cells: list[list[str]]  # of its table, whose first row names the columns
    ends: list[list[str]]  # blocks of lines behind the table; empty ones are left out


class TableReport(Report):
    """A report that shows one table."""

    _right: ClassVar[tuple[int, ...]] = (1,)  # the columns that are aligned to the right
    _most: ClassVar[int] = 40  # rows that its text shows

    def _parts(self) -> Parts:
        raise NotImplementedError

    def __str__(self) -> str:
        """Returns its head, its table and what follows from it."""
        head, cells, ends = self._parts()
        table = columns(cells[: self._most + 1], right=self._right)
        left_out = len(cells) - 1 - self._most
        table += [f"... and {left_out} more, which to_dict() holds"] if left_out > 0 else []
        return "\n\n".join("\n".join(lines) for lines in ([head], table, *ends) if lines)

    def to_html(self) -> str:
        """Returns what `print` shows, with all rows of the table, as HTML."""
        head, cells, ends = self._parts()
        names, *rows = [[html.escape(cell) for cell in row] for row in cells]
        table = [f"<tr><th>{'</th><th>'.join(names)}</th></tr>"]
        table += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
        first, *others = (
            f"<pre>{html.escape(chr(10).join(lines))}</pre>" for lines in ([head], *ends) if lines
        )
        return "\n".join([first, "<table>", *table, "</table>", *others])
