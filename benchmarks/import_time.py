"""Measures what `import jmpx` costs over `import jax`, beside JMP and MPX.

    python benchmarks/import_time.py --again

Each fresh process imports jax, NumPy included, and then one library (MPX is mixed-precision-for-JAX
of PyPI). A line holds the medians of the two times, in milliseconds of the processor. Most of
jmpx's are those of `jax.extend`, which it has to import before the first trace: see
`jmpx/_jaxprs/extend.py`.
"""

import os
import statistics
import subprocess
import sys

import records

RUNS = 21  # processes
TIMED = """
from time import process_time
start = process_time()
import jax
between = process_time()
import {library}
print(between - start, process_time() - between)
"""


def measure(library: str, small: bool = False) -> records.Record:
    # Installed packages have their bytecode: without it, each run would compile jmpx again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", TIMED.format(library=library)]
    runs = 1 if small else RUNS
    times: list[list[float]] = []
    for _ in range(runs + 1):  # the first run writes bytecode and warms the disk's cache
        run = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
        times.append([float(word) for word in run.stdout.split()])
    medians = map(statistics.median, zip(*times[1:], strict=True))
    jax_ms, library_ms = (round(1000 * seconds, 2) for seconds in medians)
    return {"over_jax_ms": library_ms, "jax_ms": jax_ms, "runs": runs}


POINTS = [{"library": library} for library in ("jmpx", "jmp", "mpx")]

if __name__ == "__main__":
    records.main(__doc__, {"import_time": (POINTS, measure)})
