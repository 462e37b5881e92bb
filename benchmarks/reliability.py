"""The results of the scripts that try to make jmpx fail, and their table.

    python benchmarks/reliability.py                       # prints it, and puts it into PAGES

`kills.py`, `soak.py`, `threads.py` and `fuzz_strings.py` append a line of JSON for each case to
`benchmarks/results/reliability.jsonl`. The table has the last line of each case and version of JAX.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import records
from records import Record

FOLDER = Path(__file__).parent
PAGES = FOLDER / "README.md", FOLDER.parent / "docs" / "reliability.md"
RESULTS = FOLDER / "results" / "reliability.jsonl"
MARKS = "<!-- table, by reliability.py -->", "<!-- end of it -->"
HEADER = "| what | how often | outcome | JAX |\n| --- | --- | --- | --- |"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all of these scripts have."""
    made = records.parser(doc)
    made.add_argument("--small", action="store_true", help="seconds instead of minutes, for CI")
    made.add_argument("--seed", type=int, help="of what is drawn; a new one each time if left out")
    made.add_argument("--out", type=Path, default=RESULTS, help="where the lines are kept")
    return made


def keep(out: Path, benchmark: str, case: str, **fields: Any) -> Record:
    """Appends the line of one case, and prints its result and its row.

    Args:
        out: the file.
        benchmark: the script, without its ending.
        case: what the row's first cell says.
        **fields: `times` and `outcome`, the row's next cells, in which `{name}` stands for the
            figure of that name; `figures`; `failures`, a list of sentences; and what else was
            measured.
    """
    record = {"benchmark": benchmark, "case": case, **fields, **records.surroundings()}
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    for failure in record["failures"]:
        print(f"FAILED: {failure}")
    print(f"{benchmark}: {', '.join(cells([record])[:3])}", row([record]), sep="\n", flush=True)
    return record


def cells(group: list[Record]) -> list[str]:
    """Returns the cells of the row of one case; a figure that differs by version is a range."""
    found: dict[str, list[Any]] = {}
    for record in group:
        for name, value in record["figures"].items():
            found.setdefault(name, []).append(value)
    shown = {name: _range(values) for name, values in found.items()}
    failures = sum(len(record["failures"]) for record in group)
    outcome = group[-1]["outcome"].format(**shown)
    versions = ", ".join(sorted({r["versions"]["jax"] for r in group}, key=_order))
    outcome = f"**{failures} failures**: {outcome}" if failures else outcome
    return [group[-1]["case"], group[-1]["times"].format(**shown), outcome, versions]


def row(group: list[Record]) -> str:
    return f"| {' | '.join(cells(group))} |"


def _range(values: list[Any]) -> str:
    low, high = (f"{end(values):,}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def table(found: list[Record]) -> str:
    """Returns a Markdown table, a row a case."""
    last: dict[tuple[str, str], dict[str, Record]] = {}
    for record in found:
        if not record.get("small"):
            versions = last.setdefault((record["benchmark"], record["case"]), {})
            versions[record["versions"]["jax"]] = record
    return "\n".join([HEADER, *(row([*versions.values()]) for versions in last.values())])


def page(found: list[Record], text: str) -> str:
    """Returns the text with the table between its marks."""
    pattern = re.compile(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", re.DOTALL)
    return pattern.sub(lambda _: f"{MARKS[0]}\n\n{table(found)}\n\n{MARKS[1]}", text)


def main(arguments: list[str] | None = None) -> None:
    made = records.parser(__doc__)
    made.add_argument("--out", type=Path, default=RESULTS, help="where the lines are kept")
    found = records.read(made.parse_args(arguments).out)
    for path in PAGES:
        path.write_text(page(found, path.read_text()))
    print(table(found))


if __name__ == "__main__":
    main()
