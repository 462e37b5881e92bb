"""Measures what `import jmpx` costs over `import jax`, in fresh processes, as one JSON line.

    python benchmarks/import_time.py --runs=21

Each process imports jax, numpy included, and then jmpx; the medians of the two times are reported.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys

TIMED = """
from time import perf_counter
start = perf_counter()
import jax
between = perf_counter()
import jmpx
print(between - start, perf_counter() - between)
"""


def import_times() -> tuple[float, float]:
    """Returns the seconds that jax and then jmpx take in a fresh process."""
    # Installed packages have their bytecode: without it, each run would compile jmpx again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", TIMED]
    run = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    jax, jmpx = map(float, run.stdout.split())
    return jax, jmpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21, help="how many processes")
    runs = parser.parse_args().runs
    import_times()  # writes the bytecode, warms the disk cache
    pairs = [import_times() for _ in range(runs)]
    record = {
        "benchmark": "import_time",
        "jax_ms": 1000 * statistics.median(jax for jax, _ in pairs),
        "jmpx_over_jax_ms": 1000 * statistics.median(jmpx for _, jmpx in pairs),
        "runs": runs,
        "jax": importlib.metadata.version("jax"),
        "python": platform.python_version(),
    }
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in record.items()}))


if __name__ == "__main__":
    main()
