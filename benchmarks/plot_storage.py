"""Draws what `storage.py` measured, and prints it as tables.

python benchmarks/plot_storage.py                      # docs/storage.png
python benchmarks/plot_storage.py --table              # a table for each version of JAX
python benchmarks/plot_storage.py other.jsonl --out=other.png
"""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
import records
import report
import storage

matplotlib.use("agg")
import matplotlib.pyplot as plt

RESULTS = report.RESULTS.parent / "storage.jsonl"
PICTURE = Path(__file__).parent.parent / "docs" / "storage.png"

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = {
    "float32": "#000000",
    "bfloat16": "#D55E00",
    "bfloat16, stochastic": "#0072B2",
    "bfloat16, Kahan": "#999999",
    "split master": "#009E73",
}


def chosen(found: Iterable[records.Record], part: str, way: str, key: str) -> list[float]:
    """Returns one figure of all seeds."""
    return [r[key] for r in found if (r["part"], r["way"]) == (part, way) and key in r]


def over_float32(found: list[records.Record], way: str) -> list[float]:
    """Returns the transformer's losses less those of float32 with the same seed and JAX."""
    key = lambda r: (r["seed"], r["versions"]["jax"], r["python"])  # noqa: E731
    runs = [r for r in found if r["part"] == "transformer"]
    base = {key(r): r["loss"] for r in runs if r["way"] == "float32"}
    return [r["loss"] - base[key(r)] for r in runs if r["way"] == way and key(r) in base]


# The table.


def cell(values: list[float], spell: Callable[[float], str]) -> str:
    """Returns the mean, and the smallest and largest of several."""
    if not values:
        return ""
    ends = f" ({spell(min(values))} to {spell(max(values))})" if len(values) > 1 else ""
    return spell(statistics.mean(values)) + ends


def table(found: list[records.Record]) -> str:
    """Returns the table of storage: a row a way."""
    small, loss, more = "{:.1e}".format, "{:.4f}".format, "{:+.4f}".format
    rows = []
    for way in storage.WAYS:
        of = lambda part, key, way=way: chosen(found, part, way, key)  # noqa: E731
        mean, sd = of("counting", "mean"), of("counting", "sd")
        spread = f" (sd {sd[0]:.3f})" if sd and sd[0] else ""
        rows.append(
            (
                way,
                cell(of("counting", "bytes")[:1], "{:.3g}".format),
                cell(of("transformer", "bytes")[:1], "{:.3g}".format),
                cell(mean[:1], loss) + spread,
                cell(of("regression", "loss"), small),
                cell(of("transformer", "loss"), loss).partition(" ")[0],
                cell(over_float32(found, way), more) if way != "float32" else "",
            )
        )
    header = ("parameters", "bytes each", "with Adam", "1 + 1000 times 2^-10")
    header += ("regression, SGD", "language model, Adam", "less float32's")
    return report.table(header, rows)


def tables(found: list[records.Record]) -> str:
    """Returns all tables of each version of JAX."""
    parts = []
    for jax in sorted({r["versions"]["jax"] for r in found}):
        of_jax = [r for r in found if r["versions"]["jax"] == jax]
        parts += [f"JAX {jax}", table(of_jax)]
        for part in ("moments", "averages", "rounding"):
            lines = [r for r in of_jax if r["part"] == part]
            parts += [report.table_of(lines)] if lines else []
    return "\n\n".join(parts)


# The picture.


def draw(found: list[records.Record], out: Path) -> None:
    """Draws the three columns of the table, a dot a seed."""
    figure, panels = plt.subplots(
        1, 3, figsize=(10, 2.7), sharey=True, layout="constrained", facecolor="white"
    )
    draw_counting(panels[0], found)
    for row, way in enumerate(COLOURS):
        dots = {"linestyle": "", "marker": "o", "color": COLOURS[way], "alpha": 0.7}
        losses = chosen(found, "regression", way, "loss")
        panels[1].plot(losses, [row] * len(losses), **dots)
        more = over_float32(found, way)
        panels[2].plot(more, [row] * len(more), **dots)
    panels[1].set(xscale="log", xlabel="regression, SGD: loss")
    panels[2].set_xscale("symlog", linthresh=1e-3, linscale=0.4)
    panels[2].set_xticks([0, 1e-3, 1e-2, 1e-1])
    panels[2].set(xlim=(-3e-3, 1), xlabel="language model: loss over float32's")
    panels[0].set_yticks(range(len(COLOURS)), list(COLOURS))
    panels[0].invert_yaxis()
    for axes in panels:
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    versions = sorted({record["versions"]["jax"] for record in found})
    figure.suptitle(f"How parameters are stored: CPU, JAX {', '.join(versions)}")
    figure.savefig(out, dpi=150)
    plt.close(figure)


def draw_counting(axes: Any, found: list[records.Record]) -> None:
    """Draws the mean and the standard deviation of the numbers that were counted up."""
    for row, way in enumerate(COLOURS):
        mean, sd = (chosen(found, "counting", way, key) for key in ("mean", "sd"))
        axes.errorbar(mean, [row] * len(mean), xerr=sd, fmt="o", color=COLOURS[way], capsize=3)
    for exact in {r["exact"] for r in found if r["part"] == "counting"}:
        axes.axvline(exact, color="0.6", linestyle="--", linewidth=1)
    axes.set(xlabel="1 and 1,000 times $2^{-10}$")


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--table", action="store_true", help="print the tables, and draw nothing")
    args = parser.parse_args(arguments)
    found = records.read(args.results)
    if args.table:
        print(tables(found))
    else:
        draw(found, args.out)


if __name__ == "__main__":
    main()
