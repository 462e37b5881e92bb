"""A plan as a picture."""

import os
from collections.abc import Sequence

# Okabe and Ito's colours, which the colour-blind can tell apart.
_FITS, _DOES_NOT = "#0072B2", "#D55E00"


def plot_peaks(
    title: str,
    peaks: Sequence[tuple[str, int | None]],
    memory: int,
    path: str | os.PathLike[str],
) -> None:
    """Draws a bar for each policy, as `Plan.plot` describes it."""
    from matplotlib.figure import Figure  # here, because only pictures need it

    shown = peaks[::-1]
    sizes = [(peak or 0) / 2**30 for _, peak in shown]
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(shown)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    colors = [_FITS if size <= memory / 2**30 else _DOES_NOT for size in sizes]
    bars = axes.barh(range(len(shown)), sizes, color=colors)
    labels = [f"{size:.3g}" if size else "not compiled" for size in sizes]
    axes.bar_label(bars, labels, padding=3, fontsize=8, bbox={"color": "white", "pad": 1})
    if max(sizes) > memory / 2**31:  # else it would make the bars short
        axes.axvline(memory / 2**30, color="black", lw=1)
    axes.set_yticks(range(len(shown)), [name[-60:] for name, _ in shown], fontsize=8)
    axes.set_xlabel(f"peak memory (GiB); the chip has {memory / 2**30:.4g}")
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.12)
    axes.grid(axis="x", lw=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path)
