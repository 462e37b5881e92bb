"""What a choice found: frozen data, which prints itself."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmpx._inspect.reports import Parts, TableReport
from jmpx._inspect.text import bytes_text, share_text


class Tried(NamedTuple):
    """A policy string, the error that was measured under it, and what it costs."""

    policy: str
    error: float
    memory: int  # bytes: the peak on the chip, or what the trace keeps for the backward pass
    low: float  # the share of the FLOPs of matrix products that run in 16 bits
    fits: bool | None = None  # on the chip; None where it was not compiled


def front(rows: Sequence[Tried]) -> tuple[Tried, ...]:
    """Returns the rows that no other one beats in both memory and error, the smallest first."""
    kept = list[Tried]()
    for row in sorted(rows, key=lambda row: (row.memory, row.error, len(row.policy))):
        if all(row.error < each.error for each in kept):
            kept.append(row)
    return tuple(kept)


@dataclasses.dataclass(frozen=True)
class Choice(TableReport):
    """What `jmpx.inspect.choose` found: policy strings on the front of error against memory.

    Attributes:
        title: whose error it is.
        bound: the bound on the error.
        batches: over how many batches the error was measured.
        chip: the chip whose peak memory was planned; empty for the bytes that the trace keeps for
            the backward pass.
        rows: the strings, the one with the least memory first, and float32 as the last one. Each
            has a smaller error than all before it.
        notes: strings that were left out, and why, and limits of these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"
    _right = (1, 2, 3)

    title: str
    bound: float
    batches: int
    chip: str
    rows: tuple[Tried, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Tried | None:
        """The first row that holds the bound and fits: float32 if no other does, None if none."""
        rows = (row for row in self.rows if row.error <= self.bound and row.fits is not False)
        return next(rows, None)

    @property
    def policy(self) -> str:
        """The policy string of the chosen row.

        Raises:
            ValueError: if no string holds the bound on this chip.
        """
        if self.chosen is None:
            raise ValueError(
                f"Expected a policy that holds an error of {self.bound:g} and fits on "
                f"{self.chip}, found none: allow a larger error, or make the step smaller."
            )
        return self.chosen.policy

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the error of each string and the memory that it needs. It needs matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if matplotlib knows no such format.
        """
        from jmpx._inspect.choose.plot import Dot, plot_front

        dots = [Dot(row.policy, row.error, row.memory, row is self.chosen) for row in self.rows]
        plot_front(f"Error of {self.title}", dots, self.bound, _what(self), path)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as `json.dumps` takes it, with the policy of the chosen row."""
        return {**super().to_dict(), "policy": self.chosen and self.chosen.policy}

    def _parts(self) -> Parts:
        head = f"Error of {self.title}, over {self.batches} batches, at most {self.bound:g}"
        return Parts(head, _cells(self), [_ends(self)])


def _what(found: Choice) -> str:
    return f"peak on {found.chip}" if found.chip else "saved for the backward pass"


def _cells(found: Choice) -> list[list[str]]:
    """Returns the rows of the table, its header first; the policy last, as it may be long."""
    cells = [["", "error", _what(found), "products in 16 bits", "policy"]]
    for row in found.rows:
        mark = "chosen" if row is found.chosen else "does not fit" if row.fits is False else ""
        error = "0" if row.error == 0 else f"{row.error:.1e}"
        numbers = [error, bytes_text(row.memory), share_text(row.low, 1)]
        cells.append([mark, *numbers, row.policy])
    return cells


def _ends(found: Choice) -> list[str]:
    chosen = found.chosen
    if chosen is None:
        return ["No string holds the bound and fits.", *found.notes]
    return [f"--mp_policy={shlex.quote(chosen.policy)}", *found.notes]
