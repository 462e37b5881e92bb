"""The front of error against memory as a picture."""

import os
from collections.abc import Sequence
from typing import NamedTuple

_COLORS = {False: "#0072B2", True: "#D55E00"}  # Okabe and Ito's


class Dot(NamedTuple):
    """A policy string as it is drawn."""

    policy: str
    error: float
    memory: int  # bytes
    is_chosen: bool


def plot_front(
    title: str,
    rows: Sequence[Dot],
    bound: float,
    what: str,
    path: str | os.PathLike[str],
) -> None:
    """Draws a point for each string, as `Choice.plot` describes it."""
    from matplotlib.figure import Figure  # here, because only pictures need it

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    errors = [row.error for row in rows if row.error] or [bound]
    at_left = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "va": "bottom"}
    floor = min(*errors, bound) / 10  # where an error of nothing is drawn
    if not all(row.error for row in rows):
        axes.axhline(floor, color="grey", lw=0.8)
        axes.text(0.005, floor, "no error", **at_left)
    for row in rows:
        color = _COLORS[row.is_chosen]
        point = row.memory / 2**20, row.error or floor
        axes.plot(*point, "o", color=color, markersize=9 if row.is_chosen else 6)
        note = {"fontsize": 7, "xytext": (6, 6), "textcoords": "offset points"}
        axes.annotate(_lines(row), point, color=color, **note)
    axes.axhline(bound, color="black", lw=0.8, ls="--")
    axes.text(0.005, bound, "the bound", **at_left)
    axes.set_yscale("log")
    axes.margins(x=0.25, y=0.15)
    axes.set_xlabel(f"{what} (MiB)")
    axes.set_ylabel("error")
    axes.set_title(title, fontsize=10)
    axes.grid(lw=0.3)
    figure.savefig(path)


def _lines(row: Dot) -> str:
    """Returns a policy string with a line for each of its parts."""
    parts = row.policy.split("; ")
    return "\n".join([*parts[:6], *([f"and {len(parts) - 6} more"] if len(parts) > 6 else [])])
