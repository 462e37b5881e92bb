"""Draws the results of `gpu_vit.py`, or prints them as a table in Markdown.

    python benchmarks/plot_results.py results.jsonl --out=results.png
    python benchmarks/plot_results.py results.jsonl --dtypes float32 bfloat16
    python benchmarks/plot_results.py --table results.jsonl

Step time and memory stand against the batch size, on logarithmic axes. Colours are
implementations, line styles are dtypes; markers are open and of different sizes, so that equal
points lie in each other and all are seen. Memory is the device's peak, or XLA's own count where no
device reported a peak. In the table, the factors compare with the hand-written step in the same
batch size and float32: how many times faster, and how many times less memory. A peak with a sign
before it was reached while compiling; the step's own is at most that. One picture or table holds
one model.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

# Okabe and Ito's colours, which the colour-blind can tell apart; two of them with a second marker.
STYLES = {
    "handwritten": ("#000000", "o"),
    "handwritten_cond": ("#000000", "D"),
    "jmp": ("#E69F00", "s"),
    "mpx": ("#D55E00", "v"),
    "jmpx": ("#0072B2", "^"),
    "jmpx_where": ("#56B4E9", "<"),
    "jmpx_cond": ("#0072B2", "P"),
    "autocast": ("#009E73", "X"),
    "autocast_saved": ("#CC79A7", "d"),
}
LINES = {"float32_highest": ":", "float32": "--", "bfloat16": "-", "float16": "-."}
BASE = "handwritten", "float32"
Table = dict[int, dict[tuple[str, str], Any]]  # batch -> (implementation, dtype) -> value


def load(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file; of the same point, the later one counts."""
    records = map(json.loads, filter(None, path.read_text().splitlines()))
    return [record for record in records if record["status"] in ("ok", "oom")]


def collect(
    records: list[dict[str, Any]], measures: str, value: Callable[[dict[str, Any]], Any]
) -> Table:
    """Returns what `value` finds in the records of some measures; an `oom` stays the word."""
    table: Table = {}
    for record in records:
        if record["measure"] in measures.split():
            point = record["implementation"], record["dtype"]
            found = "oom" if record["status"] == "oom" else value(record)
            table.setdefault(record["batch"], {})[point] = found
    return table


def step_times(records: list[dict[str, Any]]) -> Table:
    return collect(records, "time", lambda record: record["step_ms"])


def memory(records: list[dict[str, Any]]) -> tuple[Table, str]:
    """Returns MiB and what they are: peaks of the device if there is one, else XLA's count."""
    peaks = collect(records, "memory", lambda record: record["peak_bytes"])
    if any(value is not None for row in peaks.values() for value in row.values()):
        return to_mib(peaks), "Peak memory"
    planned = collect(records, "time memory", lambda record: record["compiled_bytes"])
    return to_mib(planned), "Planned memory"


def to_mib(table: Table) -> Table:
    def mib(value: Any) -> Any:
        return value / 2**20 if isinstance(value, int) else value

    return {batch: {p: mib(v) for p, v in row.items()} for batch, row in table.items()}


def points_of(*tables: Table) -> list[tuple[str, str]]:
    """Returns the pairs of implementation and dtype, in the order of the legend."""
    found = {point for table in tables for row in table.values() for point in row}
    order = [(name, dtype) for dtype in LINES for name in STYLES]
    return [point for point in order if point in found]


def names_of(points: list[tuple[str, str]]) -> list[str]:
    found = {name for name, _ in points}
    return [name for name in STYLES if name in found]


# The picture.


def draw(records: list[dict[str, Any]], out: Path) -> None:
    times, (mib, kind) = step_times(records), memory(records)
    points = points_of(times, mib)
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    draw_panel(panels[0], times, points, "Step time (ms)")
    draw_panel(panels[1], mib, points, f"{kind} (MiB)")
    first = records[-1]
    figure.suptitle(f"ViT {first['model']}, {first['device_kind']}, JAX {first['versions']['jax']}")
    handles = legend_handles(points)
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def draw_panel(axes: Any, table: Table, points: list[tuple[str, str]], label: str) -> None:
    batches = sorted(table)
    names = names_of(points)
    for point in points:
        values = [table[batch].get(point) for batch in batches]
        drawn = [(b, v) for b, v in zip(batches, values, strict=True) if isinstance(v, float)]
        if drawn:
            style = {**marker(names.index(point[0]), len(names), point[0]), "lw": 1}
            axes.plot(*zip(*drawn, strict=True), LINES[point[1]], **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set(xlabel="Batch size", ylabel=label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def marker(number: int, count: int, name: str) -> dict[str, Any]:
    """Returns the look of an implementation: a ring, the first one the widest."""
    color, shape = STYLES[name]
    return {
        "color": color,
        "marker": shape,
        "mfc": "none",
        "mew": 1.3,
        "ms": 11 - 7 * number / count,
    }


def legend_handles(points: list[tuple[str, str]]) -> list[Any]:
    names = names_of(points)
    dtypes = dict.fromkeys(dtype for _, dtype in points)
    looks = [marker(number, len(names), name) for number, name in enumerate(names)]
    shapes = [Line2D([], [], ls="", label=n, **look) for n, look in zip(names, looks, strict=True)]
    styles = [Line2D([], [], color="0.3", ls=LINES[d], label=d) for d in LINES if d in dtypes]
    return [*shapes, Line2D([], [], ls="", label=" "), *styles]


# The table.


def markdown(records: list[dict[str, Any]]) -> str:
    times, (mib, kind) = step_times(records), memory(records)
    bounds = {
        (r["batch"], (r["implementation"], r["dtype"]))
        for r in records
        if r.get("peak_is_upper_bound")
    }
    rows = [
        ["batch", "dtype", "implementation", "step ms", "times faster", "MiB", "times less"],
        ["---:", "---", "---", "---:", "---:", "---:", "---:"],
    ]
    for batch in sorted({*times, *mib}):
        for name, dtype in points_of(times, mib):
            point = name, dtype
            cells = [*pair(times.get(batch, {}), point), *pair(mib.get(batch, {}), point)]
            cells[2] = "≤ " + cells[2] if (batch, point) in bounds else cells[2]
            if any(cells):
                rows.append([str(batch), dtype, name, *cells])
    last = records[-1]
    versions = ", ".join(f"{k} {v}" for k, v in last["versions"].items() if v)
    caption = f"ViT {last['model']} on {last['device_kind']}: {versions}. MiB: {kind.lower()}."
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", caption])


def pair(row: dict[tuple[str, str], Any], point: tuple[str, str]) -> tuple[str, str]:
    """Returns a value and how many times larger the base is, as text."""
    value, base = row.get(point), row.get(BASE)
    if not isinstance(value, float):
        return ("out of memory" if value == "oom" else ""), ""
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return text, f"{base / value:.2f}" if isinstance(base, float) else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results.png"))
    parser.add_argument("--table", action="store_true", help="print a table, draw nothing")
    parser.add_argument("--model", help="default: the one of the last line")
    parser.add_argument("--implementations", nargs="+", choices=list(STYLES), default=list(STYLES))
    parser.add_argument("--dtypes", nargs="+", choices=list(LINES), default=list(LINES))
    args = parser.parse_args(arguments)
    records = load(args.results)
    if not records:
        sys.exit(f"{args.results} holds no results: run gpu_vit.py with --out={args.results} first")
    chosen = [
        r
        for r in records
        if r["model"] == (args.model or records[-1]["model"])
        and r["implementation"] in args.implementations
        and r["dtype"] in args.dtypes
    ]
    if not chosen:
        sys.exit(f"{args.results} holds none of these results: choose other flags")
    if args.table:
        print(markdown(chosen))
    else:
        draw(chosen, args.out)


if __name__ == "__main__":
    main()
