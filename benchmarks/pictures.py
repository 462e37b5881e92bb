"""Draws the pictures of the README and of the manual, for light and for dark pages.

    python benchmarks/pictures.py                      # those of committed results, some seconds
    python benchmarks/pictures.py peak_memory layers   # these
    python benchmarks/pictures.py choose               # one that a program draws, in minutes

Programs draw blame, choose, haiku_float16 and reinforce. loss_scales runs a second; the others are
made of the lines in `results/`. Each is drawn twice, as NAME.png in the style of `light.mplstyle`
and as NAME-dark.png.
"""

import argparse
import doctest
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_compile
import growth
import jax
import jax.numpy as jnp
import matplotlib
import records
import storage
import tpu_compile
from records import Record

matplotlib.use("agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
IMAGES = DOCS / "images"
BLUE, RED, GREEN, SKY, ORANGE, _, GREY, INK = (f"C{number}" for number in range(8))
PEAKS = {
    "float32": ("float32", GREY),
    tpu_compile.LOW_SCORES: ("bfloat16 by hand", INK),
    "autocast": ("c=bf16", SKY),
    "autocast, save": ("c=bf16,save=products", BLUE),
}
LINES = {  # the look of a way, its name, and the point of its line that has it
    "jmp": ({"color": ORANGE, "lw": 4, "ms": 6}, "JMP", -1),
    "mpx": ({"color": RED, "ls": ":", "ms": 3}, "MPX", -2),
    "handwritten": ({"color": INK, "lw": 4, "ms": 6}, "by hand", -1),
    "jmpx": ({"color": BLUE, "ls": ":", "ms": 3}, "jmpx", -2),
}
COUNTS = {
    "instructions": ("Size of the program", "thousand HLO instructions", 1000),
    "compile_cpu_s": ("Time to compile", "CPU seconds", 1),
}
TRADES = {  # the look of a way, its label, and where that stands: points to the right and above
    "float32": (GREY, "float32", (-8, -3)),
    "by hand": (INK, "by hand", (8, 7)),
    "autocast": (SKY, "c=bf16", (8, -9)),
    "by hand, marked blocks, all dots": (INK, "jax.checkpoint", (-49, -16)),
    "autocast, save attention": (GREEN, "…,save=products+attention", (8, 1)),
    "by hand, marked blocks": (INK, "", (0, 0)),
    "autocast, save": (BLUE, "…,save=products", (-2, 9)),
}
STORED = {"float32": INK, "bfloat16": RED, "bfloat16, stochastic": BLUE}
STORED |= {"bfloat16, Kahan": GREY, "split master": GREEN}


def panels(
    rows: int, columns: int, height: float, grid: bool = True, **options: Any
) -> tuple[Any, Any]:
    figure, found = plt.subplots(
        rows, columns, figsize=(7.2, height), layout="constrained", squeeze=False, **options
    )
    for axes in found.flatten():
        axes.grid(grid)
    return figure, found.flatten()


def finish(figure: Any, text: str, found: Iterable[Record]) -> Any:
    versions = ", ".join(sorted({records.version_of(record) for record in found}))
    figure.suptitle(f"{text}, JAX {versions}", x=0.01, ha="left")
    return figure


def peak_memory() -> Any:
    tpu, gpu = records.read(tpu_compile.RESULTS), records.read(gpu_compile.RESULTS)
    on_tpu = records.grouped(tpu, tpu_compile.GROUP)
    on_gpu = records.grouped(gpu, gpu_compile.KEY)
    vit = on_tpu[tpu_compile.VIT]
    best = {name.removesuffix(", norm first"): vit[name] for name in tpu_compile.NORM_FIRST}
    shown = {
        "ViT, TPU v5e": vit | best,  # the form in which the steps by hand need the least
        "ViT, H100": on_gpu[gpu_compile.SHOWN["ViT"]],
        "Language model, TPU v5e": on_tpu[tpu_compile.BYTES],
        "Language model, H100": on_gpu[gpu_compile.SHOWN["language model"]],
    }
    figure, each = panels(2, 2, 4.2, grid=False, sharex=True, sharey=True)
    for axes, (title, lines) in zip(each, shown.items(), strict=True):
        sizes = [lines[way]["peak_mib"] for way in PEAKS]
        shares = [100 * size / sizes[0] for size in sizes]
        bars = axes.barh(range(len(PEAKS)), shares, color=[color for _, color in PEAKS.values()])
        cells = zip(shares, sizes, strict=True)
        axes.bar_label(bars, [f"{s:.0f} %  {m / 1024:.1f} GiB" for s, m in cells], padding=4)
        axes.set_yticks(range(len(PEAKS)), [name for name, _ in PEAKS.values()])
        axes.set(title=title, xlim=(0, 165), xticks=(0, 25, 50, 75, 100))
    each[0].invert_yaxis()
    for axes in each[2:]:
        axes.set_xlabel("peak memory, % of float32")
    return finish(figure, "Peak memory of a train step with Adam, as compilers plan it", tpu)


def layers() -> Any:
    found = [r for r in records.read(records.CPU) if r["benchmark"] == "compiled_step"]
    found = [record for record in found if record["dtype"] == "float16"]
    figure, both = panels(1, 2, 3.4)
    for axes, (key, (title, label, unit)) in zip(both, COUNTS.items(), strict=True):
        for way, (look, words, place) in LINES.items():
            ours = [record for record in found if record["implementation"] == way]
            line = sorted((record["layers"], record[key] / unit) for record in ours)
            axes.plot(*zip(*line, strict=True), marker="o", **look)
            at: Any = {"xytext": (-7, 6), "ha": "right"} if place == -1 else {"xytext": (7, -12)}
            at |= {"textcoords": "offset points", "color": look["color"], "weight": "bold"}
            axes.annotate(words, line[place], **at)
        axes.set_xticks(sorted({record["layers"] for record in found}))
        axes.set(xlabel="transformer layers", ylabel=label, title=title, ylim=0, xlim=0)
    return finish(figure, "A float16 train step, compiled for a CPU", found)


def gpu_steps() -> Any:
    """Draws the steps of the GPU's table: to the left is less memory, below is less time."""
    found = records.read(gpu_compile.RESULTS)
    figure, both = panels(1, 2, 3.6, sharey=True)
    for axes, (model, group) in zip(both, gpu_compile.SHOWN.items(), strict=True):
        lines = records.grouped(found, gpu_compile.KEY)[group]
        for way, (color, words, place) in TRADES.items():
            keys = "peak_mib", "estimate_ms"
            point = [lines[way][key] / lines["by hand"][key] for key in keys]
            axes.plot(
                *point, marker="o", color=color, fillstyle="none" if "blocks" in way else "full"
            )
            at = {"textcoords": "offset points", "ha": "right" if place[0] == -8 else "left"}
            axes.annotate(words, point, xytext=place, color=color, weight="bold", **at)
        axes.set(title=model, xlabel="peak memory, by hand = 1", xlim=(0.3, 1.85), ylim=(0.9, 2.1))
    both[0].set_ylabel("estimated time, by hand = 1")
    return finish(figure, "A bfloat16 train step, compiled for an H100", found)


def growing() -> Any:
    found = records.read(growth.RESULTS)
    figure, each = panels(3, 2, 8)
    for axes, axis in zip(each, growth.AXES, strict=False):
        for way in dict.fromkeys(record["way"] for record in found if record["axis"] == axis):
            line = growth.line(found, axis, way)
            look = {"marker": "o", "ms": 3, "ls": ":" if way in growth.OTHERS else "-"}
            axes.plot(*zip(*line, strict=True), label=f"{growth.slope(line):.2f}  {way}", **look)
        axes.set(xscale="log", yscale="log", xlabel=f"number of {axis}", ylabel="CPU ms")
        axes.minorticks_off()
        axes.set_ylim(axes.get_ylim()[0], 90 * axes.get_ylim()[1])  # the legend stands above
        axes.legend(fontsize=8, loc="upper left", title="slope", title_fontsize=8, alignment="left")
    each[-1].axis("off")
    title = "Time to trace (dotted: without jmpx; a slope of 1 is linear)"
    return finish(figure, title, found)


def stored() -> Any:
    """Draws the mean and deviation of what was counted up, and two losses."""
    found, of = records.read(storage.RESULTS), storage.figures
    figure, (counting, regression, more) = panels(1, 3, 2.9, sharey=True)
    for row, (way, color) in enumerate(STORED.items()):
        dots = {"linestyle": "", "marker": "o", "color": color, "alpha": 0.7}
        mean, sd = (of(found, "counting", way, key) for key in ("mean", "sd"))
        counting.errorbar(mean, [row] * len(mean), xerr=sd, fmt="o", color=color, capsize=3)
        for axes, losses in (
            (regression, of(found, "regression", way, "loss")),
            (more, storage.over_float32(found, way)),
        ):
            axes.plot(losses, [row] * len(losses), **dots)
    counting.axvline(1 + 1000 * 2.0**-10, color=GREY, linestyle="--", linewidth=1)
    counting.set(title="1 + 1,000 × 2⁻¹⁰", xlabel="sum (exact: dashed)")
    counting.set_yticks(range(len(STORED)), list(STORED))
    counting.invert_yaxis()
    regression.set(xscale="log", title="Regression, SGD", xlabel="loss")
    more.set_xscale("symlog", linthresh=1e-3, linscale=0.4)
    more.set_xticks([0, 1e-2, 1e-1])
    more.set(xlim=(-3e-3, 1), title="Language model", xlabel="loss over float32's, nats")
    return finish(figure, "What storing parameters in 16 bits loses", found)


# --- The run of docs/logging.md; in the second one, parameters become NaN at a step ---

STEPS, BROKEN = 600, 300


def run(broken: int | None) -> list[Any]:
    """Returns the metrics of all steps of the program on the page."""
    page: Any = {}
    examples = doctest.DocTestParser().get_examples((DOCS / "logging.md").read_text())
    for example in itertools.takewhile(lambda _: "train_step" not in page, examples):
        exec(example.source, page)
    state = page["params"], page["optimizer"].init(page["params"]), page["mp"].loss_scale
    logged = []
    for step in range(STEPS):
        if step == broken:
            state = {"w": jnp.full((3, 1), jnp.nan)}, *state[1:]
        *state, metrics = page["train_step"](*state, *page["batch"](step))
        logged.append(jax.device_get(metrics))
    return logged


def loss_scales() -> Any:
    runs = {"healthy": run(None), f"diverged at step {BROKEN}": run(BROKEN)}
    figure, each = panels(2, 2, 4, sharex=True, sharey="row")
    for number, (title, logged) in enumerate(runs.items()):
        above, below = each[number], each[number + 2]
        above.plot([each["loss_scale"] for each in logged], color=BLUE)
        above.set_yscale("log", base=2)
        above.set_title(title)
        for name, color in (("total_skipped", ORANGE), ("consecutive_skipped", RED)):
            below.plot([each[name] for each in logged], color=color, label=name)
        below.set_yscale("symlog", linthresh=10)
        below.set_yticks([0, 5, 10, 100, 300], ["0", "5", "10", "100", "300"])
        below.set_xlabel("step")
    each[0].set_ylabel("loss_scale")
    each[2].set_ylabel("skipped steps")
    each[2].legend(loc="upper left")
    return figure


DRAWN = {
    records.RESULTS / "peak_memory.png": peak_memory,
    records.RESULTS / "layers.png": layers,
    records.RESULTS / "gpu_steps.png": gpu_steps,
    records.RESULTS / "growth.png": growing,
    IMAGES / "storage.png": stored,
    IMAGES / "loss_scales.png": loss_scales,
}
VIT = "examples/equinox/train_vit.py:make_losses"
BLAME = f"""
import sys, jmpx
from jmpx._cli.commands import load
loss_fn, batches, _ = load("{VIT}", [])
report = jmpx.inspect.blame(loss_fn, "by=operations,c=bf16")(*batches)
report.plot(sys.argv[1].removeprefix("--plot="))
"""
RUNS = {  # commands of the repository that take --plot=FILE
    IMAGES / "blame.png": f"-c {shlex.quote(BLAME)}",
    IMAGES / "choose.png": f"-m jmpx choose {VIT} --error 0.004 --chip v5e",
    IMAGES / "haiku_float16.png": "examples/haiku/plot.py --mp_policy=16-mixed "
    "--mp_loss_scale=dynamic,init=2**24,period=50",
    IMAGES / "reinforce.png": "examples/equinox/reinforce.py",
}


def main(arguments: list[str] | None = None) -> None:
    paths = {path.stem: path for path in [*DRAWN, *RUNS]}
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(paths))
    parser.add_argument("--out", type=Path, help="the folder; without it, where pages look")
    args = parser.parse_args(arguments)
    for path in [paths[name] for name in args.names] or DRAWN:
        for theme, ending in {"light": ".png", "dark": "-dark.png"}.items():
            style, to = FOLDER / f"{theme}.mplstyle", (args.out or path.parent) / path.stem
            to = f"{to}{ending}"
            if path in RUNS:
                command = [sys.executable, *shlex.split(RUNS[path]), f"--plot={to}"]
                env = os.environ | {"MATPLOTLIBRC": str(style), "PYTHONPATH": str(FOLDER.parent)}
                subprocess.run(command, cwd=FOLDER.parent, env=env, check=True)
                continue
            with plt.style.context(style):
                figure = DRAWN[path]()
                figure.savefig(to)
                plt.close(figure)


if __name__ == "__main__":
    main()
