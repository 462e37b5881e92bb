"""What a plan found: frozen data, which prints itself."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jmpx._base.text import bytes_text, columns, flop_text, share_text, short_names
from jmpx._inspect.audit.data import Products
from jmpx._inspect.tables import html_text

_VERSION = 1  # of `to_dict`: it changes when the meaning of a key does

_PARTS = 3  # how many shares are shown


class Planned(NamedTuple):
    """What a policy costs. What is not known is None, or empty.

    The trace tells of the products, other FLOPs and saved bytes of the whole program; the compiler
    of the rest, for one chip.
    """

    policy: str
    chips: int = 1
    peak: int | None = None  # bytes that the chip holds at once, the arguments included
    fits: bool | None = None
    products: tuple[Products, ...] = ()  # by the dtypes of their operands
    other_flops: int = 0
    saved: dict[str, int] = {}  # bytes that are kept for the backward pass, by dtype
    accessed: float | None = None  # bytes of memory; the body of a loop counts once
    sent: dict[str, float] = {}  # bytes, by the kind of collective and its dtype
    seconds: float | None = None  # that the compiler took
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `jmpx.inspect.plan` found: what a step costs under each policy.

    Attributes:
        step: the name of the step.
        chip: the name of the chip; None for the counts of the trace alone.
        memory: the bytes that a program may take on the chip.
        compiler: the versions of JAX and of the compiler.
        rows: one for each policy, in the order in which they were given.
        notes: limits of these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"

    step: str
    chip: str | None
    memory: int | None
    compiler: str
    rows: tuple[Planned, ...]
    notes: tuple[str, ...] = ()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the peak memory of each policy as a bar, and that of the chip as a line.

        It needs matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if nothing was compiled, or matplotlib knows no such format.
        """
        from jmpx._inspect.plan.plot import plot_peaks

        peaks = [(row.policy, row.peak) for row in self.rows]
        if self.memory is None or not any(peak for _, peak in peaks):
            raise ValueError("Expected a plan that was compiled, got none: give plan(chip=).")
        plot_peaks(_title(self), peaks, self.memory, path)

    def __str__(self) -> str:
        """Returns a table with a row for each policy, errors and notes."""
        blocks = [[_title(self)], columns(_cells(self.rows), right=(1, 3)), _ends(self)]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""
        rows = [
            row._asdict() | {"products": [each._asdict() for each in row.products]}
            for row in self.rows
        ]
        fields = {"rows": rows, "notes": list(self.notes)}
        return {"version": _VERSION, **dataclasses.asdict(self), **fields}

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict()` as JSON.

        Args:
            indent: as in `json.dumps`; None puts all into one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        """Returns what `print` shows, as a table of HTML with its head and its end."""
        return html_text([_title(self)], _cells(self.rows), _ends(self))


def _title(found: Plan) -> str:
    chips = max((row.chips for row in found.rows), default=1)
    if found.chip is None:
        return f"Plan of {found.step}: counts of the trace"
    many = f"{chips} x {found.chip}" if chips > 1 else found.chip
    return f"Plan of {found.step} on {many}, {bytes_text(found.memory or 0)} ({found.compiler})"


def _cells(rows: Sequence[Planned]) -> list[list[str]]:
    """Returns the rows of the table, its header first; what no policy has is left out."""
    names = "peak,fits,FLOP,products,saved,accessed,sent,collectives,compiled"
    table = [["", *names.split(",")]]
    for row in rows:
        products = {_dtypes(each.dtypes): each.flops for each in row.products}
        flops = sum(products.values()) + row.other_flops
        table.append(
            [
                row.policy,
                _bytes(row.peak),
                {True: "yes", False: "no", None: ""}[row.fits],
                flop_text(flops) if flops else "",
                _shares(products),
                _bytes(sum(row.saved.values())),
                _bytes(row.accessed),
                _bytes(sum(row.sent.values())),
                _shares(row.sent),
                f"{row.seconds:.0f} s" if row.seconds is not None else "",
            ]
        )
    kept = [not n or any(row[n] for row in table[1:]) for n in range(len(table[0]))]
    return [[cell for cell, keeps in zip(row, kept, strict=True) if keeps] for row in table]


def _bytes(number: float | None) -> str:
    return bytes_text(round(number)) if number else ""


def _shares(parts: Mapping[str, float]) -> str:
    """Returns the largest parts and their shares, such as `bf16 98.2 %, f32 1.8 %`."""
    largest = sorted(parts.items(), key=lambda part: -part[1])[:_PARTS]
    whole = sum(parts.values())
    return ", ".join(f"{name} {share_text(part, whole)}" for name, part in largest)


def _dtypes(dtypes: str) -> str:
    """Returns `bf16` for `bfloat16 x bfloat16`, and `bf16 x f32` for a mixture."""
    return " x ".join(dict.fromkeys(short_names(dtypes).split(" x ")))


def _ends(found: Plan) -> list[str]:
    return [f"{row.policy}: {row.error}" for row in found.rows if row.error] + [*found.notes]
