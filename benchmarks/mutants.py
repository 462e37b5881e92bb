"""Plants mistakes into a copy of jmpx, and counts those that the default tests notice.

    git worktree add --detach /tmp/mutants && cd /tmp/mutants && pip install -e '.[mutants]'
    python benchmarks/mutants.py --mutants 60 --seed 0 > benchmarks/results/mutants.jsonl

Cosmic Ray changes one operator, number, condition, loop, exception or decorator. The mistakes are
drawn among the lines that the default tests run, and spread over the rooms by their lines of code.
The tests that run the line run against it, those of the room first, until one fails or they have
taken two minutes. Which test runs which line is measured once, by a run of all in one process, and
kept in `.coverage.mutants`. A line of JSON is a room: how many mistakes were planted and noticed,
and the others; `report.py` writes the table.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import records

TREE = Path(__file__).parents[1]
RESULTS = TREE / "benchmarks" / "results" / "mutants.jsonl"
# What became of a mistake that was not noticed: written into the results by hand, after a look.
THEN = ("noticed by other tests", "led to a test", "change nothing", "left")
ROOMS = sorted(path.parent.name for path in TREE.glob("jmpx/_*/__init__.py"))
FOLDERS = {"_jaxprs": "autocast", "_migrate": "cli"}  # of rooms with the tests of another
LIMIT = 120  # seconds, for all tests of a mistake


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

    operator, end, tests = get_operator(mutant.operator_name)(), time.time() + LIMIT, [*tests]
    while tests and time.time() < end:
        some = tests[:50]  # most mistakes are noticed by one of the first
        with use_mutation(Path(mutant.module_path), operator, mutant.occurrence):
            test = failing(some)
        if test and (test not in some or not failing([test])):
            return True
        tests = [each for each in tests if each != test] if test else tests[50:]
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


def tests_of(room: str, file: str, line: int, data: Any) -> list[str]:
    """Returns the tests that run a line, those of the room first.

    If an import runs it, those that run any line of its file.
    """
    by_line = data.contexts_by_lineno(file)
    tests = {*by_line.get(line, ())}
    if tests == {""}:
        tests = {test for found in by_line.values() for test in found}
    folder = f"tests/{FOLDERS.get(room, room[1:])}/"
    return sorted(tests - {""}, key=lambda test: (not test.startswith(folder), test))


def code_lines(room: str) -> int:
    """Returns the number of lines of a room on which a statement begins."""
    trees = [ast.parse(file.read_text()) for file in (TREE / "jmpx" / room).rglob("*.py")]
    nodes = [[n for n in ast.walk(tree) if isinstance(n, ast.stmt)] for tree in trees]
    return sum(len({node.lineno for node in found}) for found in nodes)


def shares(total: int) -> dict[str, int]:
    """Returns how many of all mistakes each room gets, by its lines, at least one."""
    lines = {room: code_lines(room) for room in ROOMS}
    exact = {room: total * count / sum(lines.values()) for room, count in lines.items()}
    found = {room: max(1, int(share)) for room, share in exact.items()}
    for room in sorted(ROOMS, key=lambda room: found[room] - exact[room]):
        found[room] += sum(found.values()) < total
    return found


def measure(room: str, count: int, seed: int, data: Any) -> dict[str, Any]:
    rng, places, planted, survivors = random.Random(seed), mutants(room), 0, {}
    for path, start in rng.sample(sorted(places, key=str), len(places)):
        mutant, tests = rng.choice(places[path, start]), tests_of(room, path, start[0], data)
        if planted == count or not tests:
            continue
        planted += 1
        if not is_noticed(mutant, tests):
            place = f"{Path(path).relative_to(TREE)}:{start[0]}:{start[1]}"
            survivors[f"{place} {mutant.operator_name} {mutant.occurrence}"] = "not looked at"
    noticed = planted - len(survivors)
    return {"room": room, "seed": seed, "planted": planted, "noticed": noticed, "others": survivors}


def main() -> None:
    from coverage import CoverageData  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--mutants", type=int, default=60, help="of all rooms together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.dont_write_bytecode = True
    os.chdir(TREE)
    for name in "pytest hypothesis jax.numpy optax haiku flax.nnx equinox".split():
        __import__(name)  # once; jmpx and its tests anew for each mistake
    if not (file := TREE / ".coverage.mutants").exists():
        failing(["tests"], str(file))
    (data := CoverageData(str(file))).read()
    for room, count in shares(given.mutants).items():
        if room in given.rooms:
            print(json.dumps(measure(room, count, given.seed, data)), flush=True)


if __name__ == "__main__":
    main()
