"""Measures step time and memory of train steps of MPX's vision transformers on a GPU.

    benchmarks/gpu_vit.sh results.jsonl base           # the grid of one model, a process a point
    python benchmarks/gpu_vit.py --out=results.jsonl --only base jmpx float16 64    # one point
    python benchmarks/gpu_vit.py --table results.jsonl

The models are the two of arXiv 2507.03312 and a tiny one, whose machine code is not optimized: its
times mean nothing. Data are random, the optimizer is AdamW, the state is donated. The steps are
those of `steps.py`. float32_highest is float32 with `jax_default_matmul_precision="highest"`;
float32 is JAX's default, which multiplies in TF32 on NVIDIA's GPUs.

A line has the median and the quartiles of ROUNDS turns, in milliseconds a step, and
`compiled_bytes`, what XLA plans to hold. A step that runs out of memory is a line, too (status
`oom`), and so is one that fails, which is measured again next time.
"""

import math
import os
import statistics
import sys
import time
from pathlib import Path

import jax
import optax
import records
import steps
from models import MODELS
from records import Record
from steps import Point

ADAMW = optax.adamw(1e-4)
SLICE_S, ROUNDS = 0.02, 20  # how long a turn takes at least, and how many there are
QUICK = {"xla_backend_optimization_level": 0}  # the tiny model compiles in half the time
BATCHES = {"base": (16, 32, 64, 128, 256), "desktop": (32, 64, 128, 256, 512), "tiny": (8,)}
IMPLEMENTATIONS = (
    *("handwritten", "handwritten_cond", "jmp", "mpx"),
    *("jmpx", "jmpx_where", "autocast", "autocast_saved"),
)


def measure(model: str, batch: int, implementation: str, dtype: str, small: bool = False) -> Record:
    """Returns what was found; a step that fails is a result, too."""
    if jax.default_backend() != (platform := os.environ.get("PLATFORM", "gpu")):
        print(f"JAX finds no {platform} but a {jax.default_backend()}", file=sys.stderr)
        sys.exit(2)
    try:
        return timing(model, 2 if small else batch, Point(implementation, dtype))
    except Exception as error:
        status = "oom" if "RESOURCE_EXHAUSTED" in str(error) else "error"
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"status": status, "message": message}


def timing(model: str, batch: int, point: Point) -> Record:
    step, leaves, _, data = steps.trace(point, MODELS[model], batch, ADAMW)
    compiled = step.lower().compile(QUICK if model == "tiny" else None)
    count, times, loss = 1, [], math.nan
    for _ in range(2 + ROUNDS):  # the first two say how many steps a turn has
        start = time.perf_counter()
        for _ in range(count):
            leaves, loss = compiled(leaves, *data)
        jax.block_until_ready((leaves, loss))
        times.append((time.perf_counter() - start) / count)
        count = math.ceil(SLICE_S / min(SLICE_S, times[1])) if len(times) > 1 else 1
    planned = compiled.memory_analysis()
    sizes = planned.temp_size_in_bytes + planned.argument_size_in_bytes
    sizes += planned.output_size_in_bytes - planned.alias_size_in_bytes  # donated: the same bytes
    low, median, high = (1000 * seconds for seconds in statistics.quantiles(times[2:], n=4))
    figures = {"step_ms": median, "step_ms_quartiles": [low, high], "compiled_bytes": sizes}
    # Equal losses say that steps train alike.
    return {"status": "ok", **figures, "loss": float(loss) if math.isfinite(loss) else None}


POINTS = [
    {"model": model, "batch": batch, **point._asdict()}
    for model, batches in BATCHES.items()
    for batch in batches
    for point in steps.points(IMPLEMENTATIONS, steps.DTYPES)
]


def table(found: list[Record]) -> str:
    """Returns one row per step: its time and memory, and the ratio of float32 by hand to each."""
    by_hand = [r for r in found if (r["implementation"], r["dtype"]) == ("handwritten", "float32")]
    base = {record["batch"]: record for record in by_hand}
    rows = []
    for record in sorted(found, key=lambda record: record["batch"]):
        rows.append([str(record["batch"]), record["dtype"], record["implementation"]])
        for key, unit in (("step_ms", 1), ("compiled_bytes", 2**20)):
            value, of_base = record.get(key), base.get(record["batch"], {}).get(key)
            rows[-1].append(f"{value / unit:,.4g}" if value else record["status"])
            rows[-1].append(f"{of_base / value:.2f}" if value and of_base else "")
    header = ("batch", "dtype", "implementation", "step ms", "times faster", "MiB", "times less")
    return records.table(header, rows)


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--table"]:
        print(table(records.read(Path(words[1]))))
    else:
        records.main(__doc__, {"gpu_vit": (POINTS, measure)}, words, Path("gpu_vit.jsonl"))


if __name__ == "__main__":
    main()
