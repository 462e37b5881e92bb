"""The base of all reports: blocks, shown as text and as HTML, and fields, for JSON; pictures."""

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jmpx._base.trees import is_array
from jmpx._inspect.text import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which the color-blind can tell apart.
BLUE, SKY_BLUE, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#D55E00"


def new_figure(width: float, height: float) -> "Figure":
    """Returns a figure of matplotlib, of a size in inches."""
    from matplotlib.figure import Figure  # here, because only pictures need it

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


class Table(NamedTuple):
    """A table of a report, whose first row names the columns.

    Attributes:
        rows: its cells.
        right: the columns that are aligned to the right.
        most: how many rows the text shows; None for all. HTML and data have all.
        left_out: the last line of a text that shows fewer, with `{}` for the number of rows left.
    """

    rows: Sequence[Sequence[str]]
    right: tuple[int, ...] = ()
    most: int | None = 40
    left_out: str = "... and {} more, which to_dict() holds"

    def lines(self) -> list[str]:
        """Returns the lines of the text, the last of which says how many rows it leaves out."""
        number = 0 if self.most is None else max(len(self.rows) - 1 - self.most, 0)
        shown = self.rows[: len(self.rows) - number]
        left_out = [self.left_out.format(number)] if number else []
        return [*columns(shown, right=self.right), *left_out]

    def html(self) -> str:
        """Returns the table as HTML, with all rows."""
        names, *rows = [[html.escape(cell) for cell in row] for row in self.rows]
        table = [f"<tr><th>{'</th><th>'.join(names)}</th></tr>"]
        table += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
        return "\n".join(["<table>", *table, "</table>"])


class Report:
    """A frozen dataclass that is the result of an inspection, shown as blocks.

    A block is a table, or a text whose lines are kept as they are. Text and HTML show blocks;
    dicts and JSON hold the fields.
    """

    _version = 1

    def _blocks(self) -> Iterator[str | Table]:
        """Yields texts and tables in order; empty texts are left out."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Returns the blocks as text, with an empty line between them."""
        return as_text(self._blocks())

    def to_html(self) -> str:
        """Returns the blocks as HTML, with all rows of tables."""
        blocks = filter(None, self._blocks())
        texts = (f"<pre>{html.escape(b)}</pre>" if isinstance(b, str) else b.html() for b in blocks)
        return "\n".join(texts)

    def _repr_html_(self) -> str:
        """Returns the HTML, which notebooks show."""
        return self.to_html()

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them.

        The keys are names of attributes, and `"version"`, which changes when their meaning does.
        """
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return {"version": self._version, **{name: plain(getattr(self, name)) for name in names}}

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict()` as JSON, in one line if `indent` is None."""
        return json.dumps(self.to_dict(), indent=indent)


def as_text(blocks: Iterable[str | Table]) -> str:
    """Returns blocks as text, with an empty line between them."""
    texts = (block if isinstance(block, str) else "\n".join(block.lines()) for block in blocks)
    return "\n\n".join(filter(None, texts))


def plain(value: Any) -> Any:
    """Returns named tuples as dicts, tuples and arrays as lists, infinities and NaNs as text."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return list(map(plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # `json.dumps` takes no numbers of NumPy.
    return np.asarray(value).tolist() if is_array(value) else value
