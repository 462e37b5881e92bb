"""What a blame found: frozen data, which prints itself."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from jmpx._inspect.reports import Parts, TableReport
from jmpx._inspect.text import columns, share_text
from jmpx._jaxprs.equations import Place

_ROWS = 20  # how many are shown
_EXPLAINED = (0.5, 2.0)  # where the shares of all groups are less or more, they do not add up


class Blamed(NamedTuple):
    """A module, a scope or a line, and what its roundings cost.

    `share` is its part of the squared error, and `error` what it alone would make, relative to the
    norm of the results. A group whose roundings cancel those of others may have more than all.
    """

    name: str
    share: float
    error: float
    operation: str  # in which most of it arises
    place: Place | None  # the line of that operation
    size: int  # how many numbers it rounds
    is_measured: bool  # by two runs: it alone rounds, it alone does not; else of first order
    rule: str  # of a policy map: it puts the module or the scope into float32; empty without one


@dataclasses.dataclass(frozen=True)
class Blame(TableReport):
    """What `jmpx.inspect.blame` found: which roundings cause the error of a function.

    Attributes:
        title: what is off, and under which policy.
        error: the root mean square over batches of the relative error: the norm of the difference
            to float32, over the norm of the results in float32.
        batches: over how many batches.
        rows: modules, scopes or lines, the one with the largest share first.
        is_scalar: whether the error is of one number, near whose optimum it is not first order.
        reason: why all rows, or the first ones, were measured, one by one; empty if they are of
            first order.
    """

    __module__ = "jmpx.inspect"
    _right = (1, 2)
    _most = _ROWS

    title: str
    error: float
    batches: int
    rows: tuple[Blamed, ...]
    is_scalar: bool = False
    reason: str = ""

    @property
    def explained(self) -> float:
        """The sum of the shares: near 1 where roundings are independent, and of first order."""
        return sum(row.share for row in self.rows)

    def check(self, at_most: float) -> Self:
        """Raises if the relative error is larger: for tests.

        Args:
            at_most: the largest relative error.

        Returns:
            The blame itself.

        Raises:
            AssertionError: if the check fails, also under `python -O`: it names what has the
                largest share.
        """
        if self.error <= at_most:
            return self
        first = self.rows[0]
        raise AssertionError(
            f"Expected {self.title} to be off by at most {at_most:g}, got {_text(self.error)}, of "
            f"which {first.name} makes {share_text(first.share, 1)}.\n\n{self}"
        )

    def diff(self, before: "Blame | Mapping[str, Any]") -> str:
        """Returns what has changed since another blame, as a table, the largest change first.

        Args:
            before: the other one, or its `to_dict()`, such as `json.load` of what another commit
                wrote.
        """
        old = before.to_dict() if isinstance(before, Blame) else before
        errors = {row["name"]: row["error"] for row in old["rows"]}
        new = {row.name: row.error for row in self.rows}
        names = [*new, *(name for name in errors if name not in new)]
        changes = {name: new.get(name, 0.0) ** 2 - errors.get(name, 0.0) ** 2 for name in names}
        names.sort(key=lambda name: -abs(changes[name]))
        head = f"Error of {self.title}: {_text(old['error'])} before, {_text(self.error)} now"
        cells = [["", "before", "now"]]
        for name in names[:_ROWS]:
            cells.append([name, *(_text(each.get(name, 0.0)) for each in (errors, new))])
        return "\n".join([head, "", *columns(cells, right=(1, 2))])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the shares as bars. It needs matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if matplotlib knows no such format.
        """
        from jmpx._inspect.blame.plot import Bar, plot_shares

        bars = [Bar(row.name, row.share, row.is_measured) for row in self.rows]
        plot_shares(f"Error of {self.title}: {_text(self.error)}", bars, path)

    def _parts(self) -> Parts:
        over = "" if self.batches == 1 else f", over {self.batches} batches"
        head = f"Error of {self.title}: {_text(self.error)}{over}"
        return Parts(head, _cells(self.rows), [_notes(self)])


def _cells(rows: Sequence[Blamed]) -> list[list[str]]:
    """Returns the rows of the table, its header first."""
    cells = [["", "share", "error", "most of it", "line"]]
    for row in rows:
        share = f"{share_text(row.share, math.inf if row.share > 1 else 1)}"
        share = f"{100 * row.share:.0f} %" if row.share > 1 else share
        mark = "*" if row.is_measured else ""
        line = str(row.place or "")
        cells.append([row.name, share + mark, _text(row.error), row.operation, line])
    return cells


def _notes(found: Blame) -> list[str]:
    low, high = _EXPLAINED
    if not found.error:
        return ["The results are those of float32."]
    lines = [f"The shares explain {100 * found.explained:.0f} % of the squared error."]
    if not low <= found.explained <= high:
        lines.append(
            "They do not add up, because roundings depend on each other: trust the order of the "
            "rows, not their numbers."
        )
    if found.is_scalar:
        lines.append(
            "One number near its optimum is not first order: blame the gradients, or a vector."
        )
    if any(row.is_measured for row in found.rows):
        why = f" ({found.reason})" if found.reason else ""
        lines.append(f"* measured by two runs: it alone rounds, and it alone does not{why}")
    return lines


def _text(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}"
