"""Measures what `import jmpx` costs over `import jax`, beside JMP and MPX, as JSON lines.

    python benchmarks/import_time.py --runs=21

Each fresh process imports jax, numpy included, and then one library (MPX is
mixed-precision-for-JAX of PyPI). The libraries take turns; the medians of the two times are
reported.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys

LIBRARIES = ["jmpx", "jmp", "mpx"]

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21, help="how many processes")
    runs = parser.parse_args().runs
    for library in LIBRARIES:
        import_times(library)  # writes the bytecode, warms the disk cache
    rounds = [[import_times(library) for library in LIBRARIES] for _ in range(runs)]
    for library, times in zip(LIBRARIES, zip(*rounds, strict=True), strict=True):
        of_jax, of_library = (
            1000 * statistics.median(column) for column in zip(*times, strict=True)
        )
        record = {
            "benchmark": "import_time",
            "library": library,
            "over_jax_ms": round(of_library, 2),
            "jax_ms": round(of_jax, 2),
            "runs": runs,
            "jax": importlib.metadata.version("jax"),
            "python": platform.python_version(),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
