"""Draws what a float16 train step compiles to over the number of layers.

    python benchmarks/plot_layers.py --out=benchmarks/results/layers.png

It reads the lines of `compiled_step.py` in `benchmarks/results/cpu.jsonl`.
"""

from pathlib import Path
from typing import Any

import matplotlib
import records
import report

matplotlib.use("agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which the colour-blind can tell apart. Equal lines lie in each other:
# the earlier one is wider.
LOOKS = {
    "jmp": ("JMP", {"color": "#E69F00", "lw": 5, "marker": "s", "ms": 9}),
    "mpx": ("MPX", {"color": "#A03C00", "lw": 1.8, "marker": "v", "ms": 6}),
    "handwritten": ("by hand, where", {"color": "#000000", "lw": 5, "marker": "o", "ms": 9}),
    "jmpx_where": ("jmpx, where", {"color": "#56B4E9", "lw": 1.8, "marker": "^", "ms": 6}),
    "jmpx": ("jmpx, cond (default)", {"color": "#0072B2", "lw": 1.8, "ls": "--", "marker": "P"}),
}
PANELS = {
    "instructions": ("Optimized HLO (thousand instructions)", 1000),
    "compile_cpu_s": ("Compile time (CPU seconds)", 1),
}


def draw(found: list[records.Record], out: Path) -> None:
    steps = [r for r in found if r["benchmark"] == "compiled_step" and r["dtype"] == "float16"]
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained", facecolor="white")
    for axes, (key, (label, unit)) in zip(panels, PANELS.items(), strict=True):
        draw_panel(axes, steps, key, unit)
        axes.set(xlabel="Transformer layers", ylabel=label, ylim=0, xlim=0)
    versions = {record["versions"]["jax"] for record in steps}
    figure.suptitle(f"A float16 train step, compiled for a CPU, JAX {', '.join(versions)}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def draw_panel(axes: Any, steps: list[records.Record], key: str, unit: float) -> None:
    for name, (label, look) in LOOKS.items():
        line = sorted((r["layers"], r[key] / unit) for r in steps if r["implementation"] == name)
        axes.plot(*zip(*line, strict=True), label=label, **look)
    axes.set_xticks(sorted({record["layers"] for record in steps}))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS.parent / "layers.png")
    draw(records.read(report.RESULTS), parser.parse_args(arguments).out)


if __name__ == "__main__":
    main()
