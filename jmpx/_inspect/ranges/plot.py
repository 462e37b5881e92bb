"""Histograms of exponents as a picture, after figure 3 of arXiv 1710.03740."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jmpx._inspect.ranges.data import Histogram, exponent_of
from jmpx._inspect.text import share_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of float16: the exponents of its smallest number, its smallest normal one, and above its largest.
_SMALLEST, _NORMAL, _ABOVE = -24, -14, 16
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = {"activations": "#0072B2", "gradients": "#D55E00"}
_SHADE = "#009E73"


def plot_histograms(
    title: str, histograms: Mapping[str, Histogram], path: str | os.PathLike[str], scale: float
) -> None:
    """Draws a panel for each kind of numbers, as `Ranges.plot` describes it."""
    from matplotlib.figure import Figure  # here, because only pictures need it

    shift = exponent_of(scale)
    shown = {kind: each for kind, each in histograms.items() if each.size}
    size = (8, 1 + 2.6 * max(len(shown), 1))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    exponents = [e for each in shown.values() for e in each.exponents]
    low = max(min([*exponents, _SMALLEST, _SMALLEST - shift]) - 2, -80)
    for index, (kind, histogram) in enumerate(shown.items()):
        axes = figure.add_subplot(len(shown), 1, index + 1)
        _draw(axes, kind, histogram, shift if kind == "gradients" else 0)
        axes.set_xlim(low, max([*exponents, _ABOVE]) + 2.5)
        axes.set_xlabel("exponent: magnitudes from $2^e$ to below $2^{e+1}$")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _draw(axes: "Axes", kind: str, histogram: Histogram, shift: int) -> None:
    """Draws one panel; `shift` is the exponent of the loss scale."""
    exponents, numbers = histogram.exponents, max(histogram.numbers, 1)
    percents = [100 * count / numbers for count in exponents.values()]
    axes.bar(list(exponents), percents, width=1, align="edge", color=_COLORS[kind], lw=0.3, ec="w")
    axes.set_yscale("log")
    axes.set_ylim(max(min([1e-1, *percents]) / 2, 1e-6), 400)
    axes.set_ylabel(f"{kind} (%)")
    axes.axvspan(_NORMAL, _ABOVE, color=_SHADE, alpha=0.18, lw=0, zorder=0)
    axes.axvspan(_SMALLEST, _NORMAL, color=_SHADE, alpha=0.08, lw=0, zorder=0)
    for right, text in ((_ABOVE, "float16"), (_NORMAL, "subnormal")):
        axes.text(right - 0.3, 180, text, ha="right", va="center", fontsize=8)
    title = f"in float16: {_shares_text(histogram, 1)}"
    if shift:
        axes.axvspan(_NORMAL - shift, _ABOVE - shift, fc="none", ec=_SHADE, ls="--", lw=1)
        text = f"float16 at scale 2**{shift}"
        axes.text(_NORMAL - shift + 0.4, 60, text, fontsize=8, va="center")
        title += f"\nat scale 2**{shift}: {_shares_text(histogram, 2.0**shift)}"
    axes.set_title(title, fontsize=8, loc="left")


def _shares_text(histogram: Histogram, scale: float) -> str:
    shares = histogram.shares("float16", scale)
    return ", ".join(f"{name} {share_text(part, 1)}" for name, part in shares._asdict().items())
