"""Shares of an error as a picture."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from jmpx._inspect.text import short_names

_BARS = 15
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

    shown, rest = bars[:_BARS], bars[_BARS:]
    more = f"; {len(rest)} more have {sum(100 * bar.share for bar in rest):.1f} %" if rest else ""
    figure = Figure(figsize=(7.2, 1.2 + 0.26 * len(shown)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for kind in _COLORS:
        found = [(i, 100 * bar.share) for i, bar in enumerate(shown) if bar.is_measured == kind]
        if found:
            drawn = axes.barh(*zip(*found, strict=True), color=_COLORS[kind], label=_LABELS[kind])
            axes.bar_label(drawn, fmt="{:.1f} %", padding=3)
    axes.set_yticks(range(len(shown)), [bar.name[-60:] for bar in shown], family="monospace")
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.set_xlabel(f"share of the squared error (%){more}")
    figure.suptitle(short_names(title))
    if any(bar.is_measured for bar in shown):
        axes.legend(loc="lower right")
    figure.savefig(path)
