"""Measures what `import jmpx` costs over `import jax`, in fresh processes, as one JSON line.

    python benchmarks/import_time.py --runs=21

The two kinds of process alternate, so that a change in the machine's speed meets both. What is
reported is the time inside the process, from before `import jax` to after the last import.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys

TIMED = "import time; t = time.perf_counter(); import jax{}; print(time.perf_counter() - t)"


def seconds(extra: str) -> float:
    """Returns the seconds that the imports take in a fresh process."""
    command = [sys.executable, "-c", TIMED.format(extra)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21, help="processes of each kind")
    runs = parser.parse_args().runs
    seconds(", jmpx")  # warms the disk cache
    pairs = [(seconds(""), seconds(", jmpx")) for _ in range(runs)]
    record = {
        "benchmark": "import_time",
        "jax_ms": 1000 * statistics.median(jax for jax, _ in pairs),
        "jmpx_over_jax_ms": 1000 * statistics.median(both - jax for jax, both in pairs),
        "runs": runs,
        "jax": importlib.metadata.version("jax"),
        "python": platform.python_version(),
    }
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in record.items()}))


if __name__ == "__main__":
    main()
