"""The histogram of exponents as a picture, after figure 3 of arXiv 1710.03740."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmpx._base.messages import describe
from jmpx._inspect.ranges.data import Histogram, exponent_of, merged
from jmpx._inspect.ranges.scopes import among
from jmpx._inspect.ranges.text import power, share

if TYPE_CHECKING:
    from jmpx._inspect.ranges.report import Ranges

_ENDINGS = (".png", ".svg", ".pdf")
# Of float16: the exponents of its smallest number, its smallest normal one, and above its largest.
_SMALLEST, _NORMAL, _ABOVE = -24, -14, 16
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = {"activations": "#0072B2", "gradients": "#D55E00"}
_SHADE = "#009E73"


def plot_ranges(
    ranges: "Ranges", path: str | os.PathLike[str], scope: str | None, scale: float
) -> None:
    """Draws the picture of `Ranges.plot`."""
    file, shift = Path(path), exponent_of(scale)
    if file.suffix.lower() not in _ENDINGS:
        raise ValueError(
            f"Expected a file that ends with .png, .svg or .pdf, got {describe(str(path))}: give "
            f"for example {file.stem or 'ranges'}.png."
        )
    histograms = {
        kind: merged(each.histogram for each in among(ranges, kind, scope) if each.histogram)
        for kind in _COLORS
    }
    shown = {kind: each for kind, each in histograms.items() if each.size}
    figure = _figure(len(shown))
    low, high = _limits(list(shown.values()), shift)
    for index, (kind, histogram) in enumerate(shown.items()):
        axes = figure.add_subplot(len(shown), 1, index + 1)
        moved = shift if kind == "gradients" else 0
        _draw(axes, kind, histogram, moved)
        axes.set_xlim(low, high)
        if index == len(shown) - 1:
            axes.set_xlabel("exponent: magnitudes from $2^e$ to below $2^{e+1}$")
    where = "" if scope is None else f" in {scope}"
    figure.suptitle(f"{ranges.title}{where}: magnitudes in float32", fontsize=11)
    figure.savefig(file)


def _figure(panels: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Cannot draw without matplotlib: pip install matplotlib, or print the ranges."
        ) from error
    return Figure(figsize=(8, 1 + 2.6 * max(panels, 1)), dpi=150, layout="constrained")


def _limits(histograms: list[Histogram], shift: int) -> tuple[float, float]:
    exponents = [e for each in histograms for e in each.exponents]
    low = min([*exponents, _SMALLEST, _SMALLEST - shift]) - 2
    return max(low, -80), max([*exponents, _ABOVE]) + 2.5


def _draw(axes: Any, kind: str, histogram: Histogram, shift: int) -> None:
    """Draws one panel.

    Args:
        axes: its axes.
        kind: `activations` or `gradients`.
        histogram: what is drawn.
        shift: the exponent of the loss scale.
    """
    exponents, numbers = histogram.exponents, max(histogram.numbers, 1)
    percents = [100 * count / numbers for count in exponents.values()]
    axes.bar(list(exponents), percents, width=1, align="edge", color=_COLORS[kind], lw=0.3, ec="w")
    axes.set_yscale("log")
    axes.set_ylim(max(min([1e-1, *percents]) / 2, 1e-6), 400)
    ticks = [10.0**e for e in range(-6, 3) if 10.0**e >= axes.get_ylim()[0]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylabel(f"{kind} (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvspan(_NORMAL, _ABOVE, color=_SHADE, alpha=0.18, lw=0, zorder=0)
    axes.axvspan(_SMALLEST, _NORMAL, color=_SHADE, alpha=0.08, lw=0, zorder=0)
    for right, text in ((_ABOVE, "float16"), (_NORMAL, "subnormal")):
        axes.text(right - 0.3, 180, text, ha="right", va="center", fontsize=8)
    lost, subnormal, overflowing = histogram.shares("float16")
    notes = [f"lost {share(lost)}", f"subnormal {share(subnormal)}"]
    notes += [f"overflowing {share(overflowing)}"]
    if histogram.zeros:
        notes.append(f"zero already {share(histogram.zeros / histogram.size)}")
    title = "in float16: " + ", ".join(notes)
    if shift:
        scaled = histogram.shares("float16", 2.0**shift)
        left, right = _NORMAL - shift, _ABOVE - shift
        axes.axvspan(left, right, fc="none", ec=_SHADE, ls="--", lw=1)
        axes.text(left + 0.4, 60, f"float16 at scale {power(2.0**shift)}", fontsize=8, va="center")
        title += f"\nat scale {power(2.0**shift)}: lost {share(scaled.lost)}"
        title += f", subnormal {share(scaled.subnormal)}, overflowing {share(scaled.overflowing)}"
    axes.set_title(title, fontsize=8, loc="left")
