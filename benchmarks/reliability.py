"""What the scripts that try to make jmpx fail share: a command line, and the table of results.

`kills.py` and `soak.py` keep a line of JSON for each case and
version of JAX in `benchmarks/results/reliability.jsonl`; `report.py` writes the table.
"""

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import records
from records import Record

RESULTS = records.RESULTS / "reliability.jsonl"
Found = tuple[Record, list[str]]  # figures, and sentences that say what failed


class Case(NamedTuple):
    """What is tried, and its row of the table.

    Attributes:
        name: the first cell.
        times: the second one, in which `{name}` stands for the figure of that name.
        outcome: the third one, likewise.
        run: takes whether the run is small, and a seed.
    """

    name: str
    times: str
    outcome: str
    run: Callable[[bool, int], Found]


def main(
    doc: str | None, benchmark: str, cases: list[Case], arguments: list[str] | None = None
) -> None:
    """Runs the cases whose names contain `--only`, prints and keeps their lines, and exits."""
    made = records.parser(doc, RESULTS)
    made.add_argument("--seed", type=int, help="of what is drawn; a new one each time if left out")
    args = made.parse_args(arguments)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    failed = False
    for name, times, outcome, run in cases:
        if not all(word in name for word in args.only):
            continue
        figures, failures = run(args.small, seed)
        key = {"benchmark": benchmark, "case": name, "small": args.small}
        line = {**key, "times": times, "outcome": outcome, "figures": figures}
        line |= {"failures": failures, "seed": seed, **records.surroundings()}
        if not args.small or args.out != RESULTS:
            records.keep(args.out, [line], lambda old: is_same(old, line))  # noqa: B023
        for failure in failures:
            print(f"FAILED: {failure}")
        print(f"{benchmark}: {row([line])}", flush=True)
        failed |= bool(failures)
    sys.exit(failed)


def is_same(old: Record, new: Record) -> bool:
    same = all(old[key] == new[key] for key in ("benchmark", "case", "small"))
    return same and records.version_of(old) == jax.__version__


def table(found: list[Record]) -> str:
    """Returns a Markdown table: one row per case, of the last line of each version of JAX."""
    last: dict[tuple[str, str], dict[str, Record]] = {}
    for record in found:
        if not record.get("small"):
            versions = last.setdefault((record["benchmark"], record["case"]), {})
            versions[record["versions"]["jax"]] = record
    rows = (cells([*versions.values()]) for versions in last.values())
    return records.table(("what", "how often", "outcome", "JAX"), rows)


def row(group: list[Record]) -> str:
    return " | ".join(cells(group))


def cells(group: list[Record]) -> list[str]:
    """Returns the cells of the row of one case; a figure that differs by version is a range."""
    found: dict[str, list[Any]] = {}
    for record in group:
        for name, value in record["figures"].items():
            found.setdefault(name, []).append(value)
    shown = {name: ends(values) for name, values in found.items()}
    failures = sum(len(record["failures"]) for record in group)
    outcome = group[-1]["outcome"].format(**shown)
    outcome = f"**{failures} failures**: {outcome}" if failures else outcome
    versions = ", ".join(sorted({r["versions"]["jax"] for r in group}, key=order))
    return [group[-1]["case"], group[-1]["times"].format(**shown), outcome, versions]


def ends(values: list[Any]) -> str:
    low, high = (f"{end(values):,}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def order(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
