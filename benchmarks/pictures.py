"""Draws the pictures of the README and of the manual.

    python benchmarks/pictures.py                      # all of them, where the pages look for them
    python benchmarks/pictures.py FOLDER               # elsewhere

- layers.png: what a float16 train step compiles to over the number of layers (`compiled_step.py`).
- peak_memory.png: that of train steps on a TPU v5e over the batch size (`tpu_compile.py`).
- gpu_steps.png: memory against estimated time of train steps on an H100 (`gpu_compile.py`).
- growth.png: the time to trace over sizes (`growth.py`), with slopes: 1 is linear.
- storage.png: three columns of the table of `storage.py`, a dot a seed.

Equal lines lie in each other: the earlier one is wider.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_tables
import growth
import matplotlib
import records
import storage
import tpu_tables
from records import Record

matplotlib.use("agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLACK = {"color": "#000000"}
STEPS = {
    "jmp": ("JMP", {"color": "#E69F00", "lw": 5, "marker": "s", "ms": 9}),
    "mpx": ("MPX", {"color": "#A03C00", "lw": 1.8, "marker": "v", "ms": 6}),
    "handwritten": ("by hand, where", {"color": "#000000", "lw": 5, "marker": "o", "ms": 9}),
    "jmpx_where": ("jmpx, where", {"color": "#56B4E9", "lw": 1.8, "marker": "^", "ms": 6}),
    "jmpx": ("jmpx, cond (default)", {"color": "#0072B2", "lw": 1.8, "ls": "--", "marker": "P"}),
}
COUNTS = {
    "instructions": ("Optimized HLO (thousand instructions)", 1000),
    "compile_cpu_s": ("Compile time (CPU seconds)", 1),
}
WAYS = {
    "float32": ("float32", {"color": "#7F7F7F", "lw": 1.6, "marker": "o"}),
    "by hand": ("bfloat16 by hand", {"color": "#000000", "lw": 5, "marker": "s", "ms": 10}),
    "JMP": ("JMP", {"color": "#E69F00", "lw": 3, "marker": "s", "ms": 7}),
    "MPX": ("MPX", {"color": "#D55E00", "lw": 1.6, "marker": "v"}),
    "autocast": ("jmpx.autocast", {"color": "#56B4E9", "lw": 1.6, "marker": "^"}),
    "autocast, save": ('autocast, save="products"', {"color": "#0072B2", "lw": 2.4, "marker": "D"}),
}
MODELS = {
    "vit": "ViT, width 768, 6 layers",
    "language_model": "Language model, 6 layers, 512 tokens",
    "resnet": "Haiku's ResNet-50",
}
GPU_WAYS = {
    "float32": WAYS["float32"],
    "by hand": WAYS["by hand"],
    "autocast": WAYS["autocast"],
    "by hand, marked blocks": ("blocks marked: dots_with_no_batch_dims", BLACK | {"marker": "<"}),
    "by hand, marked blocks, all dots": ("blocks marked: dots_saveable", BLACK | {"marker": ">"}),
    "autocast, save": ("save=products", WAYS["autocast, save"][1]),
    "autocast, save attention": ("save=products+attention", {"color": "#009E73", "marker": "P"}),
}
STORED = {
    "float32": "#000000",
    "bfloat16": "#D55E00",
    "bfloat16, stochastic": "#0072B2",
    "bfloat16, Kahan": "#999999",
    "split master": "#009E73",
}


def panels(count: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    figure, found = plt.subplots(1, count, figsize=size, layout="constrained", **options)
    for axes in found:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def finish(figure: Any, axes: Any, text: str, found: Iterable[Record], ncols: int = 6) -> Any:
    """Adds the title, and below the lines' names if no axes have them."""
    figure.suptitle(f"{text}, JAX {', '.join(sorted({records.version_of(r) for r in found}))}")
    handles, labels = axes.get_legend_handles_labels()
    if labels and axes.get_legend() is None:
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
    return figure


def layers() -> Any:
    found = [r for r in records.read(records.CPU) if r["benchmark"] == "compiled_step"]
    found = [record for record in found if record["dtype"] == "float16"]
    figure, both = panels(2, (9, 4.4))
    for axes, (key, (label, unit)) in zip(both, COUNTS.items(), strict=True):
        for name, (words, look) in STEPS.items():
            ours = [record for record in found if record["implementation"] == name]
            line = sorted((record["layers"], record[key] / unit) for record in ours)
            axes.plot(*zip(*line, strict=True), label=words, **look)
        axes.set_xticks(sorted({record["layers"] for record in found}))
        axes.set(xlabel="Transformer layers", ylabel=label, ylim=0, xlim=0)
    return finish(figure, both[0], "A float16 train step, compiled for a CPU", found)


def peak_memory() -> Any:
    found = records.read(tpu_tables.RESULTS)
    figure, each = panels(len(MODELS), (12, 4.4))
    for axes, (model, title) in zip(each, MODELS.items(), strict=True):
        ours = [r for r in found if (r["model"], r["chips"], r["scanned"]) == (model, "one", False)]
        ours = [r for r in ours if r["layers"] in (6, 50) and r["status"] == "ok"]
        for way, (words, look) in WAYS.items():
            line = sorted((r["batch"], r["peak_mib"] / 1024) for r in ours if r["way"] == way)
            if line:
                axes.plot(*zip(*line, strict=True), label=words, **look)
        sizes = sorted({record["batch"] for record in ours})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set(title=title, xlabel="batch size", ylim=0)
    each[0].set_ylabel("peak memory (GiB)")
    return finish(figure, each[0], "A train step with Adam, compiled for a TPU v5e", found)


def gpu_steps() -> Any:
    """Draws the steps of the GPU's table: to the left is less memory, below is less time."""
    found = [r for r in records.read(gpu_tables.RESULTS) if r["benchmark"] == "gpu_compile"]
    figure, both = panels(len(gpu_tables.SHOWN), (9, 4.6))
    for axes, (model, group) in zip(both, gpu_tables.SHOWN.items(), strict=True):
        lines = {r["way"]: r for r in found if gpu_tables.group(r) == group}
        for way, (words, look) in GPU_WAYS.items():
            keys = "peak_mib", "estimate_ms"
            ratios = [lines[way][key] / lines["by hand"][key] for key in keys]
            axes.plot(*ratios, label=words, linestyle="", **look | {"ms": 8})
        axes.set(title=model, xlabel="peak memory, over by hand", xlim=0, ylim=0.9)
    both[0].set_ylabel("XLA's estimate of time, over by hand")
    return finish(figure, both[0], "A train step in bfloat16, compiled for an H100", found, ncols=3)


def growing() -> Any:
    found = records.read(growth.RESULTS)
    figure, each = panels(len(growth.AXES), (20, 4.6))
    for axes, axis in zip(each, growth.AXES, strict=True):
        for way in dict.fromkeys(record["way"] for record in found if record["axis"] == axis):
            line = growth.line(found, axis, way)
            look = {"marker": "o", "ms": 3, "ls": ":" if way in growth.OTHERS else "-"}
            axes.plot(*zip(*line, strict=True), label=f"{way}: {growth.slope(line):.2f}", **look)
        axes.set(xscale="log", yscale="log", xlabel=axis)
        axes.minorticks_off()
        axes.set_ylim(axes.get_ylim()[0], 8 * axes.get_ylim()[1])  # the legend stands above
        axes.legend(fontsize=8, frameon=False)
    each[0].set_ylabel("processor milliseconds to trace")
    title = "Time to trace, and its slope at the three largest sizes (1 is linear)"
    return finish(figure, each[0], title, found)


def stored() -> Any:
    """Draws the mean and deviation of what was counted up, and two losses."""
    found, of = records.read(storage.RESULTS), storage.figures
    figure, (counting, regression, more) = panels(3, (10, 2.7), sharey=True)
    for row, (way, color) in enumerate(STORED.items()):
        dots = {"linestyle": "", "marker": "o", "color": color, "alpha": 0.7}
        mean, sd = (of(found, "counting", way, key) for key in ("mean", "sd"))
        counting.errorbar(mean, [row] * len(mean), xerr=sd, fmt="o", color=color, capsize=3)
        for axes, losses in (
            (regression, of(found, "regression", way, "loss")),
            (more, storage.over_float32(found, way)),
        ):
            axes.plot(losses, [row] * len(losses), **dots)
    counting.axvline(1 + 1000 * 2.0**-10, color="0.6", linestyle="--", linewidth=1)
    counting.set(xlabel="1 and 1,000 times $2^{-10}$")
    counting.set_yticks(range(len(STORED)), list(STORED))
    counting.invert_yaxis()
    regression.set(xscale="log", xlabel="regression, SGD: loss")
    more.set_xscale("symlog", linthresh=1e-3, linscale=0.4)
    more.set_xticks([0, 1e-3, 1e-2, 1e-1])
    more.set(xlim=(-3e-3, 1), xlabel="language model: loss over float32's")
    return finish(figure, counting, "How parameters are stored: CPU", found)


PICTURES = {
    records.RESULTS / "layers.png": layers,
    records.RESULTS / "peak_memory.png": peak_memory,
    records.RESULTS / "gpu_steps.png": gpu_steps,
    records.RESULTS / "growth.png": growing,
    records.RESULTS.parents[1] / "docs" / "storage.png": stored,
}


def main(arguments: list[str]) -> None:
    for path, draw in PICTURES.items():
        figure = draw()
        figure.savefig(Path(*arguments, path.name) if arguments else path, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
