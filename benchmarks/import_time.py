"""Measures what `import jmpx` costs over `import jax`, beside JMP and MPX, as lines of JSON.

    python benchmarks/import_time.py --runs=21

Each fresh process imports jax, NumPy included, and then one library (MPX is mixed-precision-for-JAX
of PyPI). The libraries take turns; a line holds the medians of the two times.
"""

import os
import statistics
import subprocess
import sys

import records
from tqdm import tqdm

TIMED = """
from time import perf_counter
start = perf_counter()
import jax
between = perf_counter()
import {library}
print(between - start, perf_counter() - between)
"""


def import_times(library: str) -> tuple[float, float]:
    """Returns the seconds that jax and then the library take in a fresh process."""
    # Installed packages have their bytecode: without it, each run would compile jmpx again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", TIMED.format(library=library)]
    run = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    of_jax, of_library = map(float, run.stdout.split())
    return of_jax, of_library


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--runs", type=int, default=21, help="processes for each library")
    runs = parser.parse_args(arguments).runs
    times: dict[str, list[tuple[float, float]]] = {"jmpx": [], "jmp": [], "mpx": []}
    for _ in tqdm(range(runs + 1)):  # the first run writes bytecode and warms the disk's cache
        for library, found in times.items():
            found.append(import_times(library))
    for library, found in times.items():
        jax_ms, library_ms = (
            round(1000 * statistics.median(column), 2) for column in zip(*found[1:], strict=True)
        )
        records.emit(
            "import_time", library=library, over_jax_ms=library_ms, jax_ms=jax_ms, runs=runs
        )


if __name__ == "__main__":
    main()
