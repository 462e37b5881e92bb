"""What all benchmarks share: a command line, lines of JSON, and tables in Markdown.

A benchmark has points and a function that measures one. Its script measures the points that its
file has no line of, prints their lines and keeps them in that file:

    python benchmarks/autocast.py --again                     # also points that have a line
    python benchmarks/compiled_step.py --again --only jmpx 12 # the points that have these values
    python benchmarks/storage.py --small                      # small sizes, kept nowhere
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

import jmpx

PyTree = Any  # JAX has no type for pytrees
Record = dict[str, Any]  # what a line of JSON holds
Group = tuple[Any, ...]  # the values of some fields
Benchmarks = dict[str, tuple[list[Record], Callable[..., Any]]]  # by name: the points, and measure

RESULTS = Path(__file__).parent / "results"
CPU = RESULTS / "cpu.jsonl"
PACKAGES = {name: name for name in ("jax", "jaxlib", "optax", "jmp", "libtpu", "jax-cuda12-plugin")}
PACKAGES["mpx"] = "mixed-precision-for-JAX"


def main(
    doc: str | None,
    benchmarks: Benchmarks,
    arguments: list[str] | None = None,
    out: Path = CPU,
    by_version: bool = False,
    prepare: Callable[[list[Record]], Any] = len,
) -> None:
    """Measures the points that have no line yet, and keeps the line of each as soon as it is there.

    `doc` is the help, `out` the default of `--out`. `benchmarks` has for each name the points, and
    the function that takes the values of a point, with `--small` `small=True`, too, and returns the
    figures of its line or lines. `by_version` keeps lines of several versions of JAX. `prepare` is
    called with the points that are to be measured.
    """
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=raw)
    made.add_argument("--only", nargs="+", default=[], metavar="VALUE", help="what a point has")
    made.add_argument("--small", action="store_true", help="small sizes, to try the script")
    made.add_argument("--out", type=Path, default=out, help="the file of the lines")
    made.add_argument("--again", action="store_true", help="measure also what has a line")
    made.add_argument("--list", action="store_true", help="print the points, measure none")
    args = made.parse_args(arguments)
    small = {"small": True} if args.small else {}
    keeps = not args.small or args.out != out
    points = [(name, point | small) for name, (found, _) in benchmarks.items() for point in found]
    points = [
        (name, point) for name, point in points if {*args.only} <= {name, *map(str, point.values())}
    ]
    lines = read(args.out) if keeps and not args.again else []
    lines = [line for line in lines if line.get("status") != "error"]
    left = [each for each in points if not any(is_of(line, *each, by_version) for line in lines)]
    if args.list:
        for each in points:
            print("missing" if each in left else "there  ", *each[1].values(), sep="\t")
        return
    prepare([point for _, point in left])
    for name, point in tqdm(left, unit="point", disable=None):
        found = benchmarks[name][1](**point)
        found = found if isinstance(found, list) else [found]
        new = [{"benchmark": name, **point, **surroundings(), **each} for each in found]
        print(*map(json.dumps, new), sep="\n", flush=True)
        if keeps:
            keep(args.out, new, lambda old: is_of(old, name, point, by_version))  # noqa: B023


def is_of(line: Record, name: str, point: Record, by_version: bool = False) -> bool:
    """Returns whether a line is that of a point, and of this version of JAX if versions count."""
    right = not by_version or version_of(line) == jax.__version__
    return right and line["benchmark"] == name and point.items() <= line.items()


def version_of(line: Record) -> str:
    """Returns the version of JAX with which a line was measured."""
    return line.get("jax") or line["versions"]["jax"]


def read(path: Path) -> list[Record]:
    """Returns the lines of a file; there are none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line]


def keep(path: Path, new: list[Record], replaces: Callable[[Record], bool]) -> None:
    """Writes lines in place of those that they replace, or after the others."""
    lines = read(path)
    place = next((i for i, line in enumerate(lines) if replaces(line)), len(lines))
    lines = [line for line in lines if not replaces(line)]
    lines[place:place] = new
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def surroundings() -> Record:
    """Returns the day, the device and the versions."""
    device = jax.devices()[0]
    cuda = re.search(r"cuda (\d+)", device.client.platform_version)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cores": os.cpu_count(),
        "cuda": int(cuda[1]) if cuda else None,
        "python": platform.python_version(),
        "versions": {**{n: version(p) for n, p in PACKAGES.items()}, "jmpx": jmpx.__version__},
    }


def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def grouped(found: Iterable[Record], keys: Iterable[str]) -> dict[Group, dict[str, Record]]:
    """Returns the lines of each way that have the same values of some fields."""
    groups: dict[Group, dict[str, Record]] = {}
    for line in found:
        groups.setdefault(tuple(line.get(key) for key in keys), {})[line.get("way", "")] = line
    return groups


class Row(NamedTuple):
    """A measure that may be at most `bar`, or at least with `least`."""

    measure: str
    value: float
    bar: float
    least: bool = False

    def cells(self) -> tuple[str, ...]:
        holds = self.value >= self.bar if self.least else self.value <= self.bar
        bar = f"{'≥' if self.least else '≤'} {self.bar:g}"
        return self.measure, f"{self.value:.4g}", bar, "yes" if holds else "**no**"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(header), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table_of_bars(rows: Iterable[Row]) -> str:
    return table(("measure", "measured", "bar", "holds"), (row.cells() for row in rows))
