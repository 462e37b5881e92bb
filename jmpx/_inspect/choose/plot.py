"""The front of error against memory as a picture."""

import os
from collections.abc import Sequence
from typing import NamedTuple

_COLORS = {False: "#56B4E9", True: "#D55E00"}  # Okabe and Ito's


class Dot(NamedTuple):
    """A policy string as it is drawn."""

    policy: str
    error: float
    memory: int  # bytes
    is_chosen: bool


def plot_front(
    title: str, rows: Sequence[Dot], bound: float, what: str, path: str | os.PathLike[str]
) -> None:
    """Draws a dot and a bar for each string, as `Choice.plot` describes it."""
    from matplotlib.figure import Figure  # here, because only pictures need it

    names, top = [_lines(row) for row in rows], max([bound, *(row.error for row in rows)])
    low = min([bound, *(row.error for row in rows if row.error)]) / 3  # stands for no error
    height = 1.3 + sum(0.3 + 0.16 * len(name.splitlines()) for name in names)
    figure = Figure(figsize=(7.2, height), dpi=150, layout="constrained")
    errors, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes in (errors, memory):
        axes.grid(axis="x", lw=0.3)
        axes.set_axisbelow(True)
    colors, places = [_COLORS[row.is_chosen] for row in rows], range(len(rows))
    errors.scatter([row.error or low for row in rows], places, s=60, c=colors)
    for place, row in enumerate(rows):
        note = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        text = f"{row.error:.2g}" if row.error else "no error"
        errors.annotate(text + ", chosen" * row.is_chosen, (row.error or low, place), **note)
    errors.axvspan(low / 9, bound, color="#009E73", alpha=0.15, lw=0, zorder=0)
    errors.set(xscale="log", xlim=(low / 3, 3 * top), ylim=(len(rows) - 0.4, -0.6))
    errors.set_xlabel(f"error (in the shade: at most {bound:g})")
    errors.set_yticks(places, names, family="monospace", fontsize="small")
    bars = memory.barh(places, [row.memory / 2**20 for row in rows], 0.5, color=colors)
    memory.bar_label(bars, fmt="{:.3g}", padding=3)
    memory.margins(x=0.3)
    memory.set_xlabel(f"{what} (MiB)")
    figure.suptitle(title)
    figure.savefig(path)


def _lines(row: Dot) -> str:
    """Returns a policy string with a line for each of its parts."""
    parts = row.policy.split("; ")
    return "\n".join([*parts[:6], *([f"and {len(parts) - 6} more"] if len(parts) > 6 else [])])
