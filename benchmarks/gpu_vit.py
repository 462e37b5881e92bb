"""Measures step time or memory of one train step of MPX's vision transformers, as a line of JSON.

    python benchmarks/gpu_vit.py --model=base --batch=64 --implementation=jmpx --dtype=float16
    python benchmarks/gpu_vit.py --model=tiny --platform=cpu         # tries it on any machine
    benchmarks/gpu_vit.sh results.jsonl base                         # the grid, a process a point
    python benchmarks/plot_results.py results.jsonl --out=results.png

The models are the two of arXiv 2507.03312 and a tiny one, whose machine code is not optimized: its
times mean nothing. Data are random, the optimizer is AdamW, the state is donated. The steps are
those of `steps.py`. float32_highest is float32 with `jax_default_matmul_precision="highest"`;
float32 is JAX's default, which multiplies in TF32 on NVIDIA's GPUs.

`--measure=time` times turns of `steps_a_turn` steps. `--measure=memory` runs two steps and reads
the device's peak (`peak_bytes`, null where a device reports none), which needs a process of its
own. Where it finds the step in JAX's compilation cache, XLA allocates nothing to choose kernels;
else `peak_is_upper_bound` says that the peak was reached before the step ran. `compiled_bytes` is
XLA's own count of arguments, results and temporaries. A step that runs out of memory is a line, too
(status `oom`), and so is one that ends its process. `--missing FILE` measures nothing: it prints
the arguments of the points of the grid that the file lacks.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import records
import steps
from models import MODELS
from steps import Point

ADAMW = optax.adamw(1e-4)
SLICE_S = 0.02  # a turn takes at least so long
QUICK = {"xla_backend_optimization_level": 0}  # the tiny model compiles in half the time
BATCHES = {"base": (16, 32, 64, 128, 256), "desktop": (32, 64, 128, 256, 512), "tiny": (8,)}
IMPLEMENTATIONS = (
    *("handwritten", "handwritten_cond", "jmp", "mpx"),
    *("jmpx", "jmpx_where", "autocast", "autocast_saved"),
)


def measure(measure: str, model: str, batch: int, point: Point, rounds: int) -> records.Record:
    """Returns what was found; a step that fails is a result, too."""
    try:
        start = time.perf_counter()
        traced = steps.trace(point, MODELS[model], batch, ADAMW)
        compiling = time.perf_counter()
        program = steps.Program(traced, QUICK if model == "tiny" else None)
        seconds = {"trace_s": compiling - start, "compile_s": time.perf_counter() - compiling}
        del traced  # the first state, which the step takes
        found = timing(program, batch, rounds) if measure == "time" else memory(program)
    except Exception as error:
        status = "oom" if "RESOURCE_EXHAUSTED" in str(error) else "error"
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"status": status, "message": message}
    return {"status": "ok", **seconds, **compiled_bytes(program.compiled), **found}


def timing(program: steps.Program, batch: int, rounds: int) -> records.Record:
    program.run(1)
    count = math.ceil(SLICE_S / min(SLICE_S, program.run(1)))
    times = [program.run(count) for _ in range(rounds)]
    step = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if rounds > 1 else times * 3
    loss = float(program.loss)  # equal losses say that steps train alike
    return {
        "step_ms": 1000 * step,
        "step_ms_quartiles": [1000 * low, 1000 * high],
        "step_ms_rounds": [round(1000 * seconds, 4) for seconds in times],
        "images_per_s": batch / step,
        "steps_a_turn": count,
        "loss": loss if math.isfinite(loss) else None,
    }


def memory(program: steps.Program) -> records.Record:
    before = device_memory().get("peak_bytes_in_use")
    program.run(2)
    peak = device_memory().get("peak_bytes_in_use")
    return {
        "peak_bytes": peak,
        "peak_is_upper_bound": peak is not None and before == peak,
        "device_bytes": device_memory().get("bytes_limit"),
    }


def device_memory() -> dict[str, Any]:
    return jax.devices()[0].memory_stats() or {}  # None on CPUs


def compiled_bytes(compiled: Any) -> dict[str, Any]:
    """Returns what XLA plans to hold; a donated argument and its result are the same bytes."""
    analysis = compiled.memory_analysis()
    kinds = ("temp", "argument", "output", "alias")
    found = {f"compiled_{k}_bytes": getattr(analysis, f"{k}_size_in_bytes") for k in kinds}
    temp, argument, output, alias = found.values()
    return {"compiled_bytes": temp + argument + output - alias, **found}


def missing(model: str, batches: Iterable[int], found: list[records.Record]) -> Iterator[str]:
    """Yields the arguments of the points that have no line, or one that failed."""
    keys = ("measure", "model", "batch", "implementation", "dtype")
    done = {tuple(r[k] for k in keys) for r in found if r["status"] != "error"}
    for batch in batches:
        for point in steps.points(IMPLEMENTATIONS, steps.DTYPES):
            for measure in ("time", "memory"):  # the first one fills the compilation cache
                values = (measure, model, batch, *point)
                if values not in done:
                    yield " ".join(f"--{k}={v}" for k, v in zip(keys, values, strict=True))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--batch", type=int, action="append", help="images; of --missing, several")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="jmpx")
    parser.add_argument("--dtype", choices=steps.DTYPES, default="float16")
    parser.add_argument("--measure", choices=["time", "memory"], default="time")
    parser.add_argument("--rounds", type=int, default=20, help="turns that a step is timed for")
    parser.add_argument("--platform", default="gpu", help="what the device has to be")
    parser.add_argument("--died", type=int, metavar="STATUS", help="say how the process ended")
    parser.add_argument("--missing", type=Path, metavar="FILE", help="print the points to measure")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    batches = args.batch or BATCHES[args.model]
    if args.missing:
        print(*missing(args.model, batches, records.read(args.missing)), sep="\n")
        return
    if jax.default_backend() != args.platform:
        print(f"JAX finds no {args.platform} but a {jax.default_backend()}", file=sys.stderr)
        sys.exit(255)  # which ends xargs, too
    point = Point(args.implementation, args.dtype)
    where = {"measure": args.measure, "model": args.model, "batch": batches[0]}
    if args.died is None:
        found = measure(**where, point=point, rounds=args.rounds)
    else:
        found = {"status": "error", "message": f"the process ended with status {args.died}"}
    records.emit("gpu_vit", **where, **point._asdict(), **found)


if __name__ == "__main__":
    main()
