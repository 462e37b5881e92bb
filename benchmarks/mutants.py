"""Plants mistakes into the rooms of a copy of jmpx, and counts those that a test notices.

    git worktree add --detach /tmp/mutants && cd /tmp/mutants && pip install -e '.[mutants]'
    python benchmarks/mutants.py > benchmarks/results/mutants.jsonl    # hours of a CPU core

Cosmic Ray changes one operator, number, condition, loop, exception or decorator, at places that are
drawn from those that a test of the room runs. The room's tests that run the line run against it,
those of the default run. A line of JSON is a room: how many mistakes were planted and noticed, and
the others; `report.py` writes the table.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import sys
from pathlib import Path
from typing import Any

import records

TREE = Path(__file__).parents[1]
RESULTS = TREE / "benchmarks" / "results" / "mutants.jsonl"
# What became of a mistake that was not noticed: written into the results by hand, after a look.
THEN = ("noticed by other tests", "led to a test", "change nothing", "left")
ROOMS = sorted(path.parent.name for path in TREE.glob("jmpx/_*/__init__.py"))
FOLDERS = {"_jaxprs": "autocast"}  # of rooms whose tests are those of another


def table(rooms: list[dict[str, Any]]) -> str:
    """Returns a Markdown table: a row a room, and their sum."""
    rows = [
        [room["planted"], room["noticed"], *map([*room["others"].values()].count, THEN)]
        for room in rooms
    ]
    names = [*(f"`{room['room']}`" for room in rooms), "all"]
    rows.append([sum(column) for column in zip(*rows, strict=True)])
    lines = ([name, *map(str, row)] for name, row in zip(names, rows, strict=True))
    return records.table(("room", "planted", "noticed", *THEN), lines)


class Plugin:
    """Tells coverage which test begins, and keeps the name of the first one that fails."""

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.failed = coverage, ""

    def pytest_runtest_setup(self, item: Any) -> None:
        if self.coverage:
            self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def run(tests: list[str], data: str | None) -> str:
    """Runs tests, and returns the first that fails, or "". With a file for data all of them run."""
    from coverage import Coverage  # pyright: ignore[reportMissingImports]

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    plugin = Plugin(Coverage(data, source_pkgs=["jmpx"]) if data else None)
    options = ["-q", "-pno:cacheprovider", "--assert=plain", f"--maxfail={0 if data else 1}"]
    if not plugin.coverage:
        status = sys.modules["pytest"].main([*options, *tests], [plugin])
        return plugin.failed or ("all" if status else "")
    with plugin.coverage.collect():
        sys.modules["pytest"].main([*options, *tests], [plugin])
    plugin.coverage.save()
    return plugin.failed


def failing(tests: list[str], data: str | None = None) -> str:
    """Runs tests in a process in which jmpx is not imported yet; an endless test fails, too."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(run, (tests, data)).get(timeout=7200 if data else 900)
        except multiprocessing.TimeoutError:
            return "all"


def is_noticed(mutant: Any, tests: list[str]) -> bool:
    """Whether a test fails for a mutant, but not without it."""
    from cosmic_ray.mutating import use_mutation  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

    while tests:
        operator = get_operator(mutant.operator_name)()
        with use_mutation(Path(mutant.module_path), operator, mutant.occurrence):
            test = failing(tests)
        if test not in tests or not failing([test]):
            return bool(test)
        tests.remove(test)
    return False


def mutants(room: str) -> dict[Any, list[Any]]:
    """Returns the mutants of each place in a room, but for the lines of annotations."""
    from cosmic_ray.commands import init  # pyright: ignore[reportMissingImports]
    from cosmic_ray.work_db import WorkDB  # pyright: ignore[reportMissingImports]

    files = sorted((TREE / "jmpx" / room).rglob("*.py"))
    init(files, database := WorkDB(":memory:", WorkDB.Mode.create), {})
    places: dict[Any, list[Any]] = {}
    for mutant in (mutation for item in database.work_items for mutation in item.mutations):
        places.setdefault((str(mutant.module_path), mutant.start_pos), []).append(mutant)
    types = {str(file): annotations(ast.parse(file.read_text())) for file in files}
    return {place: found for place, found in places.items() if place[1][0] not in types[place[0]]}


def annotations(module: ast.Module) -> set[int]:
    nodes = [getattr(n, name, None) for n in ast.walk(module) for name in ("annotation", "returns")]
    return {line for node in nodes if node for line in range(node.lineno, node.end_lineno + 1)}


def tests_of(file: str, line: int, data: Any) -> list[str]:
    """Returns the tests that run a line; if an import runs it, those that run any of its file."""
    by_line = data.contexts_by_lineno(file)
    tests = {*by_line.get(line, ())}
    if tests == {""}:
        tests = {test for found in by_line.values() for test in found}
    return sorted(tests - {""})


def measure(room: str, count: int, seed: int) -> dict[str, Any]:
    from coverage import CoverageData  # pyright: ignore[reportMissingImports]

    file = str(TREE / f".coverage.{room}")
    failing([f"tests/{FOLDERS.get(room, room[1:])}"], file)
    (data := CoverageData(file)).read()
    rng, places, planted, survivors = random.Random(seed), mutants(room), 0, {}
    for path, start in rng.sample(sorted(places, key=str), len(places)):
        mutant, tests = rng.choice(places[path, start]), tests_of(path, start[0], data)
        if planted == count or not tests:
            continue
        planted += 1
        rng.shuffle(tests)
        if not is_noticed(mutant, tests):
            place = f"{Path(path).relative_to(TREE)}:{start[0]}:{start[1]}"
            survivors[f"{place} {mutant.operator_name} {mutant.occurrence}"] = "not looked at"
    noticed = planted - len(survivors)
    return {"room": room, "seed": seed, "planted": planted, "noticed": noticed, "others": survivors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--mutants", type=int, default=20, help="of each room")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.dont_write_bytecode = True
    os.chdir(TREE)
    for name in "pytest hypothesis jax.numpy optax haiku flax.nnx equinox".split():
        __import__(name)  # once; jmpx and its tests anew for each mistake
    for room in given.rooms:
        print(json.dumps(measure(room, given.mutants, given.seed)), flush=True)


if __name__ == "__main__":
    main()
