"""Draws the peak memory of train steps on a TPU v5e over the batch size.

    python benchmarks/plot_tpu.py --out=benchmarks/results/peak_memory.png

It reads the lines of `tpu_compile.py`. Ways whose points are all equal share a line.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import records
import tpu_tables
from records import Record

matplotlib.use("agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which the colour-blind can tell apart.
LOOKS = {
    "float32": ("float32", "#7F7F7F", "o"),
    "MPX": ("MPX", "#D55E00", "v"),
    "JMP": ("JMP", "#E69F00", "s"),
    "by hand": ("bfloat16 by hand", "#000000", "s"),
    "autocast": ("jmpx.autocast", "#56B4E9", "^"),
    "autocast, save": ('autocast,\nsave="products"', "#0072B2", "D"),
}
TITLES = {
    "vit": "ViT, width 768, 6 layers",
    "language_model": "Language model, 6 layers, 512 tokens",
    "resnet": "Haiku's ResNet-50",
}
Line = list[tuple[int, float]]  # batch sizes and GiB


def lines(found: Iterable[Record], model: str) -> dict[str, Line]:
    """Returns the points of each way, on one chip, of the depth with most batch sizes."""
    by_way: dict[str, Line] = {}
    for (name, layers, batch, scanned, chips), ways in tpu_tables.groups(found).items():
        if (name, chips) == (model, "one") and not scanned and layers in (6, 50):
            for way, record in ways.items():
                if way in LOOKS and record["status"] == "ok":
                    by_way.setdefault(way, []).append((batch, record["peak_mib"] / 1024))
    return {way: sorted(by_way[way]) for way in LOOKS if way in by_way}


def together(by_way: dict[str, Line]) -> dict[tuple[str, ...], Line]:
    """Returns the lines, each with all ways whose points lie on it within half a percent."""
    merged: dict[tuple[str, ...], Line] = {}
    for way in sorted(by_way, key=lambda way: -len(by_way[way])):
        for ways, line in merged.items():
            there = dict(line)
            if all(abs(gib / there.get(batch, 0.01) - 1) < 0.005 for batch, gib in by_way[way]):
                merged[(*ways, way)] = merged.pop(ways)
                break
        else:
            merged[(way,)] = by_way[way]
    return merged


def apart(heights: list[float], least: float) -> list[float]:
    """Returns heights that are at least so far apart, from low to high, near those given."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + least) if placed else height)
    excess = placed[-1] - heights[-1]
    for index in reversed(range(len(placed))):
        upper = placed[index + 1] - least if index + 1 < len(placed) else placed[-1] - excess / 2
        placed[index] = min(placed[index], upper)
    return placed


def draw_panel(axes: Any, found: list[Record], model: str) -> None:
    merged = sorted(together(lines(found, model)).items(), key=lambda item: item[1][-1][1])
    top = max((line[-1][1] for _, line in merged), default=1)
    # Labels of two lines need twice the room of the others.
    heights = apart([line[-1][1] for _, line in merged], 0.085 * top)
    for (ways, line), height in zip(merged, heights, strict=True):
        shown = "by hand" if "by hand" in ways else ways[0]
        _, color, marker = LOOKS[shown]
        name = " = ".join(LOOKS[way][0] for way in LOOKS if way in ways)
        thick = 2.4 if "save" in shown else 1.6
        axes.plot(*zip(*line, strict=True), color=color, marker=marker, lw=thick, ms=5)
        x, y = line[-1]
        axes.annotate(
            *(name, (x, y), (x * 1.12, height)),
            **{"color": color, "va": "center", "fontsize": 9, "annotation_clip": False},
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkA": 0, "shrinkB": 4},
        )
    sizes = sorted({batch for _, line in merged for batch, _ in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(title=TITLES[model], xlabel="batch size", ylim=(0, top * 1.08))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(found: list[Record], out: Path) -> None:
    models = [model for model in TITLES if lines(found, model)]
    size = (4.6 * len(models), 3.9)
    figure, panels = plt.subplots(1, len(models), figsize=size, layout="constrained", squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        draw_panel(axes, found, model)
    panels[0][0].set_ylabel("peak memory (GiB)")
    versions = sorted({f"JAX {r['versions']['jax']}" for r in found})
    figure.suptitle(f"A train step with Adam, compiled for a TPU v5e, {', '.join(versions)}")
    figure.savefig(out, dpi=130, facecolor="white")
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--out", type=Path, default=tpu_tables.RESULTS.parent / "peak_memory.png")
    draw(records.read(tpu_tables.RESULTS), parser.parse_args(arguments).out)


if __name__ == "__main__":
    main()
