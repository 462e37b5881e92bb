"""What a plan found: frozen data, which prints itself."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jmpx._inspect.audit.report import Products
from jmpx._inspect.reports import Parts, TableReport
from jmpx._inspect.text import bytes_text, flop_text, share_text, short_names

_PARTS = 3  # how many shares are shown
_COLUMNS = "peak fits FLOP products saved accessed sent collectives compiled".split()
_FITS, _DOES_NOT = "#0072B2", "#D55E00"  # Okabe and Ito's, which the colour-blind can tell apart


class Planned(NamedTuple):
    """What a policy costs: None, or empty, where that is not known.

    Products and saved bytes are those of the whole program, as it was traced; the rest
    is what the compiler says of one chip.
    """

    policy: str
    chips: int = 1
    peak: int | None = None  # bytes that the chip holds at once, with the arguments
    fits: bool | None = None
    products: tuple[Products, ...] = ()  # by the dtypes of their operands
    saved: dict[str, int] = {}  # bytes that are kept for the backward pass, by dtype
    accessed: float | None = None  # bytes; the body of a loop counts once
    sent: dict[str, float] = {}  # bytes, by the kind of collective and its dtype
    seconds: float | None = None  # that the compiler took
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Plan(TableReport):
    """What `jmpx.inspect.plan` found: what a step costs under each policy.

    Attributes:
        step: the name of the step.
        chip: the name of the chip; None if there are only the counts of the trace.
        memory: the bytes that a program may use on the chip.
        compiler: the versions of JAX and of the compiler.
        rows: one for each policy, in the order in which they were given.
        notes: limits of these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"
    _right = (1, 3)

    step: str
    chip: str | None
    memory: int | None
    compiler: str
    rows: tuple[Planned, ...]
    notes: tuple[str, ...] = ()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the peak memory of each policy as a bar, and the chip's as a line, by matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if nothing was compiled, or matplotlib knows no such format.
        """
        from matplotlib.figure import Figure  # here, because only pictures need it

        sizes, most = [(row.peak or 0) / 2**30 for row in self.rows], (self.memory or 0) / 2**30
        if not any(sizes):
            raise ValueError("Expected a plan that was compiled, got none: give plan(chip=...).")
        figure = Figure(figsize=(8, 1.5 + 0.35 * len(sizes)), dpi=150, layout="constrained")
        axes, places = figure.add_subplot(), range(len(sizes))
        bars = axes.barh(places, sizes, color=[_FITS if s <= most else _DOES_NOT for s in sizes])
        labels = [f"{size:.3g}" if size else "not compiled" for size in sizes]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        if max(sizes) > most / 2:  # else the line would make the bars short
            axes.axvline(most, color="0.5", lw=1)
        axes.set_yticks(places, [row.policy[-60:] for row in self.rows], fontsize=8)
        axes.set_xlabel(f"peak memory (GiB); {self.chip} has {most:.4g}")
        axes.set_title(_title(self), fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        figure.savefig(path)

    def _parts(self) -> Parts:
        failed = [f"{row.policy}: {row.error}" for row in self.rows if row.error]
        return Parts(_title(self), _cells(self.rows), [[*failed, *self.notes]])


def _title(found: Plan) -> str:
    if found.chip is None:
        return f"Plan of {found.step}: counts of the trace"
    chips = max(row.chips for row in found.rows)
    many = f"{chips} x {found.chip}" if chips > 1 else found.chip
    return f"Plan of {found.step} on {many}, {bytes_text(found.memory or 0)} ({found.compiler})"


def _cells(rows: Sequence[Planned]) -> list[list[str]]:
    """Returns the rows of the table, its header first, without columns that are empty."""
    table, is_compiled = [["", *_COLUMNS]], any(row.peak for row in rows)
    for row in rows:
        # `bf16` for `bfloat16 x bfloat16`, and `bf16 x f32` for a mixture.
        names = [dict.fromkeys(short_names(each.dtypes).split(" x ")) for each in row.products]
        flops = sum(each.flops for each in row.products)
        products = {" x ".join(n): p.flops for n, p in zip(names, row.products, strict=True)}
        table.append(
            [
                row.policy,
                _bytes(row.peak),
                {True: "yes", False: "no", None: ""}[row.fits],
                flop_text(flops) if flops else "",
                _shares(products),
                "" if is_compiled else _bytes(sum(row.saved.values())),  # as JAX sees it, not XLA
                _bytes(row.accessed),
                _bytes(sum(row.sent.values())),
                _shares(row.sent),
                "" if row.seconds is None else f"{row.seconds:.0f} s",
            ]
        )
    kept = [n for n in range(len(table[0])) if n == 0 or any(row[n] for row in table[1:])]
    return [[row[n] for n in kept] for row in table]


def _bytes(number: float | None) -> str:
    return bytes_text(round(number)) if number else ""


def _shares(parts: Mapping[str, float]) -> str:
    """Returns the largest parts and their shares, such as `bf16 98.2 %, f32 1.8 %`."""
    largest, whole = sorted(parts, key=lambda name: -parts[name])[:_PARTS], sum(parts.values())
    return ", ".join(f"{name} {share_text(parts[name], whole)}" for name in largest)
