"""Shares of an error as a picture."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from jmpx._base.text import short_names

_BARS = 20
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = {False: "#0072B2", True: "#D55E00"}
_LABELS = {False: "first order", True: "measured"}


class Bar(NamedTuple):
    """A share as it is drawn."""

    name: str
    share: float
    is_measured: bool


def plot_shares(title: str, bars: Sequence[Bar], path: str | os.PathLike[str]) -> None:
    """Draws a bar for each of the first shares, as `Blame.plot` describes it."""
    from matplotlib.figure import Figure  # here, because only pictures need it

    shown = bars[:_BARS][::-1]
    figure = Figure(figsize=(8, 1.4 + 0.3 * len(shown)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for kind in _COLORS:
        found = [(i, 100 * bar.share) for i, bar in enumerate(shown) if bar.is_measured == kind]
        if found:
            axes.barh(*zip(*found, strict=True), color=_COLORS[kind], label=_LABELS[kind])
    axes.set_yticks(range(len(shown)), [bar.name[-60:] for bar in shown], fontsize=8)
    axes.set_xlabel("share of the squared error (%)")
    axes.set_title(short_names(title), fontsize=10)
    if any(bar.is_measured for bar in shown):
        axes.legend(fontsize=8, loc="lower right")
    axes.grid(axis="x", lw=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path)
