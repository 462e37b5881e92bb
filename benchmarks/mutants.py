"""Plants mistakes into a copy of jmpx, and counts those that the default tests notice.

    git worktree add --detach /tmp/mutants && cd /tmp/mutants && pip install -e '.[mutants]'
    python benchmarks/mutants.py --mutants 60 --seed 0 > benchmarks/results/mutants.jsonl

Cosmic Ray changes one operator, number, condition, loop, exception or decorator. The mistakes are
drawn among the lines that the default tests run, and spread over the packages of jmpx by their
lines of code. The tests that run the line run against it, those of the package first, until one
fails or they have taken two minutes. Which test runs which line is measured once, by a run of all
in one process, and kept in `.coverage.mutants`. A line of JSON is a package (`room`): how many
mistakes were planted and noticed, and the others; `report.py` writes the table.
"""

import argparse
import ast
import collections
import contextlib
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
PACKAGES = sorted(path.parent.name for path in TREE.glob("jmpx/_*/__init__.py"))
FOLDERS = {"_jaxprs": "autocast", "_migrate": "cli"}  # of packages with the tests of another
LIMIT = 120  # seconds, for all tests of a mistake


def table(found: list[dict[str, Any]]) -> str:
    """Returns a Markdown table: a row for each package, and their sum."""
    rows = [
        [line["planted"], line["noticed"], *map([*line["others"].values()].count, THEN)]
        for line in found
    ]
    names = [*(f"`{line['room']}`" for line in found), "all"]
    rows.append([sum(column) for column in zip(*rows, strict=True)])
    lines = ([name, *map(str, row)] for name, row in zip(names, rows, strict=True))
    return records.table(("package", "planted", "noticed", *THEN), lines)


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
    coverage = Coverage(data, source_pkgs=["jmpx"]) if data else None
    plugin = Plugin(coverage)
    options = ["-q", "-pno:cacheprovider", "--assert=plain", f"--maxfail={0 if data else 1}"]
    with coverage.collect() if coverage else contextlib.nullcontext():
        status = sys.modules["pytest"].main([*options, *tests], [plugin])
    if coverage:
        coverage.save()
    return plugin.failed or ("all" if status else "")


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


def mutants(package: str) -> dict[Any, list[Any]]:
    """Returns the mutants of each place in a package, but for the lines of annotations."""
    from cosmic_ray.commands import init  # pyright: ignore[reportMissingImports]
    from cosmic_ray.work_db import WorkDB  # pyright: ignore[reportMissingImports]

    files = sorted((TREE / "jmpx" / package).rglob("*.py"))
    init(files, database := WorkDB(":memory:", WorkDB.Mode.create), {})
    places: dict[Any, list[Any]] = {}
    for mutant in (mutation for item in database.work_items for mutation in item.mutations):
        places.setdefault((str(mutant.module_path), mutant.start_pos), []).append(mutant)
    types = {str(file): annotations(ast.parse(file.read_text())) for file in files}
    return {place: found for place, found in places.items() if place[1][0] not in types[place[0]]}


def annotations(module: ast.Module) -> set[int]:
    nodes = [getattr(n, name, None) for n in ast.walk(module) for name in ("annotation", "returns")]
    return {line for node in nodes if node for line in range(node.lineno, node.end_lineno + 1)}


def tests_of(package: str, file: str, line: int, data: Any) -> list[str]:
    """Returns the tests that run a line, those of the package first.

    If an import runs it, those that run any line of its file.
    """
    by_line = data.contexts_by_lineno(file)
    tests = {*by_line.get(line, ())}
    if tests == {""}:
        tests = {test for found in by_line.values() for test in found}
    folder = f"tests/{FOLDERS.get(package, package[1:])}/"
    return sorted(tests - {""}, key=lambda test: (not test.startswith(folder), test))


def shares(total: int) -> dict[str, int]:
    """Returns how many of all mistakes each package gets, by its lines, at least one."""
    lines = collections.Counter[str]()  # on which a statement begins
    for package in PACKAGES:
        for file in (TREE / "jmpx" / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(file.read_text()))
            lines[package] += len({node.lineno for node in nodes if isinstance(node, ast.stmt)})
    exact = {package: total * count / lines.total() for package, count in lines.items()}
    found = {package: max(1, int(share)) for package, share in exact.items()}
    for package in sorted(PACKAGES, key=lambda package: found[package] - exact[package]):
        found[package] += sum(found.values()) < total
    return found


def measure(package: str, count: int, seed: int, data: Any) -> dict[str, Any]:
    rng, places, planted, survivors = random.Random(seed), mutants(package), 0, {}
    for path, start in rng.sample(sorted(places, key=str), len(places)):
        mutant, tests = rng.choice(places[path, start]), tests_of(package, path, start[0], data)
        if planted == count or not tests:
            continue
        planted += 1
        if not is_noticed(mutant, tests):
            place = f"{Path(path).relative_to(TREE)}:{start[0]}:{start[1]}"
            survivors[f"{place} {mutant.operator_name} {mutant.occurrence}"] = "not looked at"
    counts = {"planted": planted, "noticed": planted - len(survivors)}
    return {"room": package, "seed": seed, **counts, "others": survivors}


def main() -> None:
    from coverage import CoverageData  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=60, help="of all packages together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.dont_write_bytecode = True
    os.chdir(TREE)
    for name in "pytest hypothesis jax.numpy optax haiku flax.nnx equinox".split():
        __import__(name)  # once; jmpx and its tests anew for each mistake
    if not (file := TREE / ".coverage.mutants").exists():
        failing(["tests"], str(file))
    (data := CoverageData(str(file))).read()
    for package, count in shares(given.mutants).items():
        print(json.dumps(measure(package, count, given.seed, data)), flush=True)


if __name__ == "__main__":
    main()
