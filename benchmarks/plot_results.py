"""Draws the results of `gpu_vit.py`, or prints them as a table in Markdown.

    python benchmarks/plot_results.py results.jsonl --out=results.png
    python benchmarks/plot_results.py results.jsonl --table

Step time and memory stand against the batch size, on logarithmic axes. Colours are
implementations, line styles are dtypes; markers are open and of different sizes, so that equal
points lie in each other and all are seen. Memory is the device's peak, or XLA's own count where no
device reported a peak. The table's factors compare with the hand-written float32 step of the same
batch size: how many times faster, and how many times less memory. `≤` marks a peak that was
reached while compiling. One picture or table holds one model: the last one, or `--model`.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import records
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from models import MODELS
from steps import Point

matplotlib.use("agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which the colour-blind can tell apart; two of them with a second marker.
STYLES = {
    "handwritten": ("#000000", "o"),
    "handwritten_cond": ("#000000", "D"),
    "jmp": ("#E69F00", "s"),
    "mpx": ("#D55E00", "v"),
    "jmpx": ("#0072B2", "^"),
    "jmpx_where": ("#56B4E9", "<"),
    "autocast": ("#009E73", "X"),
    "autocast_saved": ("#CC79A7", "d"),
}
LINES = {"float32_highest": ":", "float32": "--", "bfloat16": "-", "float16": "-."}
BASE = Point("handwritten", "float32")


class Cell(NamedTuple):
    """A value, or None if the step ran out of memory."""

    value: float | None
    bounded: bool = False  # the peak was reached while compiling


Cells = dict[tuple[int, Point], Cell]  # by batch size


def load(path: Path, model: str | None) -> list[records.Record]:
    """Returns the results of one model."""
    found = [r for r in records.read(path) if r["status"] in ("ok", "oom")]
    return [r for r in found if r["model"] == (model or found[-1]["model"])]


def collect(found: list[records.Record], measures: tuple[str, ...], key: str, unit: int) -> Cells:
    """Returns a field of the records; of the same point, the later record counts."""
    cells: Cells = {}
    for record in found:
        value = record.get(key)
        if record["measure"] in measures and (value is not None or record["status"] == "oom"):
            point = Point(record["implementation"], record["dtype"])
            bounded = record.get("peak_is_upper_bound", False)
            cell = Cell(None if value is None else value / unit, bounded)
            cells[record["batch"], point] = cell
    return cells


def step_times(found: list[records.Record]) -> Cells:
    return collect(found, ("time",), "step_ms", 1)


def memory(found: list[records.Record]) -> tuple[Cells, str]:
    """Returns MiB and what they are."""
    if any(record.get("peak_bytes") for record in found):
        return collect(found, ("memory",), "peak_bytes", 2**20), "Peak memory"
    return collect(found, ("time", "memory"), "compiled_bytes", 2**20), "Planned memory"


def points_of(*tables: Cells) -> list[Point]:
    """Returns the points in the order of the legend."""
    found = {point for cells in tables for _, point in cells}
    return [p for p in (Point(n, d) for d in LINES for n in STYLES) if p in found]


# The picture.


def draw(found: list[records.Record], out: Path) -> None:
    times, (mib, kind) = step_times(found), memory(found)
    points = points_of(times, mib)
    names = list(dict.fromkeys(point.implementation for point in points))
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    draw_panel(panels[0], times, points, names, "Step time (ms)")
    draw_panel(panels[1], mib, points, names, f"{kind} (MiB)")
    last = found[-1]
    figure.suptitle(f"ViT {last['model']}, {last['device_kind']}, JAX {last['versions']['jax']}")
    handles = [Line2D([], [], ls="", label=name, **marker(name, names)) for name in names]
    handles.append(Line2D([], [], ls="", label=" "))
    for dtype in dict.fromkeys(point.dtype for point in points):
        handles.append(Line2D([], [], color="0.3", ls=LINES[dtype], label=dtype))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def draw_panel(axes: Any, cells: Cells, points: list[Point], names: list[str], label: str) -> None:
    batches = sorted({batch for batch, _ in cells})
    for point in points:
        found = [(batch, cells.get((batch, point), Cell(None)).value) for batch in batches]
        drawn = [(batch, value) for batch, value in found if value is not None]
        if drawn:
            look = marker(point.implementation, names)
            axes.plot(*zip(*drawn, strict=True), LINES[point.dtype], lw=1, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set(xlabel="Batch size", ylabel=label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def marker(name: str, names: list[str]) -> dict[str, Any]:
    """Returns the look of an implementation: a ring, the first one the widest."""
    color, shape = STYLES[name]
    size = 11 - 7 * names.index(name) / len(names)
    return {"color": color, "marker": shape, "mfc": "none", "mew": 1.3, "ms": size}


# The table.


def markdown(found: list[records.Record]) -> str:
    times, (mib, kind) = step_times(found), memory(found)
    rows = [
        ["batch", "dtype", "implementation", "step ms", "times faster", "MiB", "times less"],
        ["---:", "---", "---", "---:", "---:", "---:", "---:"],
    ]
    for batch in sorted({batch for batch, _ in (*times, *mib)}):
        for point in points_of(times, mib):
            cells = [text for table in (times, mib) for text in pair(table, batch, point)]
            if any(cells):
                rows.append([str(batch), point.dtype, point.implementation, *cells])
    last = found[-1]
    versions = ", ".join(f"{k} {v}" for k, v in last["versions"].items() if v)
    caption = f"ViT {last['model']} on {last['device_kind']}: {versions}. MiB: {kind.lower()}."
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", caption])


def pair(cells: Cells, batch: int, point: Point) -> tuple[str, str]:
    """Returns a value and how many times larger the base is, as text."""
    if (batch, point) not in cells:
        return "", ""
    value, bounded = cells[batch, point]
    if value is None:
        return "out of memory", ""
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    base = cells.get((batch, BASE), Cell(None)).value
    return "≤ " * bounded + text, "" if base is None else f"{base / value:.2f}"


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results.png"))
    parser.add_argument("--table", action="store_true", help="print a table, draw nothing")
    parser.add_argument("--model", choices=MODELS)
    args = parser.parse_args(arguments)
    found = load(args.results, args.model)
    if not found:
        sys.exit(f"{args.results} holds no results of this model: run gpu_vit.py first")
    if args.table:
        print(markdown(found))
    else:
        draw(found, args.out)


if __name__ == "__main__":
    main()
