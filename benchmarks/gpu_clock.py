"""Measures steps of a ViT and of a language model on a GPU: milliseconds and memory.

    python benchmarks/gpu_clock.py                     # what has no line yet, and the table
    python benchmarks/gpu_clock.py --profile FOLDER    # where the language model spends its time
    python benchmarks/gpu_clock.py --small             # tries it, also without a GPU

The steps are those of `gpu_compile.py`, with 12 layers. The ViT reads 64 images of 224 x 224, the
language model 8 x 1,024 bytes. float16 has a dynamic loss scale. XLA compiles eight programs at
once, which takes most of the time; all of it should stay under five minutes on an H100 or H200. A
script that was stopped goes on where it was.

A line has the median and the quartiles of ROUNDS turns, in milliseconds a step, `peak_mib`, the
most memory that XLA plans to hold, and the loss, which is alike for steps that train alike. A step
that fails is a line, too: `oom` if it ran out of memory, else `error`, which is measured again next
time.
"""

import collections
import contextlib
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model_steps
import numpy as np
import records
import steps
from gpu_compile import MODELS, NAMES
from model_steps import LOW, Point
from records import Record

from jmpx._inspect.hlo.module import Module

RESULTS = records.RESULTS / "gpu_clock.jsonl"
SLICE_S, ROUNDS = 0.1, 10  # how long a turn takes at least, and how many there are
POOL = ThreadPoolExecutor(8)  # compiles that many programs at once
STEPS, LONGEST = 3, 12  # of a profile: how many steps it has, and how many kernels are shown
SIZES = {"vit": 64, "long_byte_model": 8}  # the batch of each model
BOTH = ("float32", "by hand", "autocast", "autocast, save", "by hand, marked blocks")
BOTH += ("gradient functions",)
FLOAT16 = ("by hand", "JMP", "MPX", "autocast", "gradient functions")
PROFILED = ("by hand", "by hand, embedding summed in float32", "autocast")
CHOSEN = [
    *((model, way, LOW) for model in SIZES for way in BOTH),
    *(("vit", way, "float16") for way in FLOAT16),
    ("long_byte_model", PROFILED[1], LOW),
]
POINTS = [{"model": model, "way": way, "dtype": dtype} for model, way, dtype in CHOSEN]


# --- One step ---


@functools.cache
def drawn(model: str, size: int, small: bool) -> tuple[Any, Any]:
    """Draws parameters and a batch, which stay on the host."""
    rng = np.random.default_rng(0)
    network = model_steps.transformer(Point(model, "by hand", 1 if small else 12, size), small)
    return jax.device_get((network.init(rng), network.batch(rng, size)))


Begin = Callable[[], tuple[list[jax.Array], Any]]


def lower(model: str, way: str, dtype: str, small: bool = False) -> tuple[Any, Begin]:
    """Lowers a step; returns it, and a function that makes the leaves of a state, and a batch."""
    size = 2 if small else SIZES[model]
    point = Point(model, way, 1 if small else 12, size, dtype=dtype)
    step, state, batch = model_steps.make(point, size, small)

    def begin() -> tuple[list[jax.Array], Any]:
        params, batch = jax.device_put(drawn(model, size, small))
        state = params, step.optimizer.init(params), step.scaling
        return [jnp.array(leaf) for leaf in jax.tree.leaves(state)], batch

    return steps.traced(step, state, batch).lower(), begin


compiling: dict[tuple[Any, ...], tuple[Future[Any], Begin]] = {}


def prepare(points: list[Record]) -> None:
    """Begins to compile points, if there is a GPU."""
    platform = jax.default_backend()
    if platform != "gpu" and not all(point.get("small") for point in points):
        print(f"JAX finds no gpu but a {platform}", file=sys.stderr)
        sys.exit(2)
    for point in points:
        with contextlib.suppress(Exception):  # which `measure` meets again
            compiling[tuple(point.values())] = submit(**point)


def submit(**point: Any) -> tuple[Future[Any], Begin]:
    lowered, begin = lower(**point)
    return POOL.submit(lowered.compile), begin


def measure(**point: Any) -> Record:
    """Returns what was found; a step that fails is a result, too."""
    try:
        compiled, begin = compiling.pop(tuple(point.values()), None) or submit(**point)
        return timing(compiled.result(), begin)
    except Exception as error:
        status = "oom" if "RESOURCE_EXHAUSTED" in str(error) else "error"
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"status": status, "message": message}


def timing(compiled: Any, begin: Begin) -> Record:
    leaves, batch = begin()
    count, times, loss = 1, [], math.nan
    for _ in range(2 + ROUNDS):  # the first two say how many steps a turn has
        start = time.perf_counter()
        for _ in range(count):
            leaves, loss = compiled(leaves, *batch)
        jax.block_until_ready((leaves, loss))
        times.append((time.perf_counter() - start) / count)
        count = math.ceil(SLICE_S / min(SLICE_S, times[1])) if len(times) > 1 else 1
    low, median, high = (1000 * seconds for seconds in statistics.quantiles(times[2:], n=4))
    figures = {"step_ms": median, "step_ms_quartiles": [low, high]}
    peak = compiled.memory_analysis().peak_memory_in_bytes / 2**20
    return {"status": "ok", **figures, "peak_mib": peak, "loss": float(loss)}


# --- Where a step spends its time, and the tables ---


def profile(folder: Path, small: bool = False) -> str:
    """Returns what takes longest in the language model; the folder keeps JAX's profiles.

    On a CPU, the reader of profiles of JAX 0.12 aborts.
    """
    rows: list[tuple[str, ...]] = []
    # XLA makes graphs of kernels, in which these have no names.
    options = {} if small else {"xla_gpu_enable_command_buffer": ""}
    for way in PROFILED:
        lowered, begin = lower("long_byte_model", way, LOW, small)
        compiled = lowered.compile(options)
        every = Module(compiled.as_text()).instructions.values()
        scopes = {one.name.removeprefix("%"): one.scope for one in every}
        leaves, batch = begin()
        leaves, _ = jax.block_until_ready(compiled(leaves, *batch))
        with jax.profiler.trace(folder / way):
            for _ in range(STEPS):
                leaves, _ = compiled(leaves, *batch)
            jax.block_until_ready(leaves)
        spent = milliseconds(max((folder / way).rglob("*.xplane.pb"), key=os.path.getmtime))
        rows += (
            (way, f"{spent[name] / STEPS:.3f}", name, scopes[name])
            for name in sorted(spent.keys() & scopes, key=lambda name: -spent[name])[:LONGEST]
        )
    return records.table(("language model", "ms a step", "kernel", "scope"), rows)


def milliseconds(file: Path) -> dict[str, float]:
    """Returns the time of each instruction in a profile."""
    spent = collections.defaultdict[str, float](float)
    data = jax.profiler.ProfileData.from_file(str(file))  # the planes do not keep it
    planes = list(data.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or planes:
        for event in (event for line in plane.lines for event in line.events):
            spent[dict(event.stats).get("hlo_op", "")] += event.duration_ns / 1e6
    return spent


def table(found: list[Record]) -> str:
    """Returns a row for each way and dtype."""
    lines = {(line["way"], line["dtype"], line["model"]): line for line in found}
    rows = []
    for way, dtype in dict.fromkeys((way, dtype) for _, way, dtype in CHOSEN):
        ours = [lines.get((way, dtype, model), {}) for model in SIZES]
        rows.append([NAMES.get(way, way), dtype, *(cell for line in ours for cell in cells(line))])
    header = [f"{MODELS[model]}, {unit}" for model in SIZES for unit in ("ms", "MiB")]
    return records.table(("a step on a GPU", "", *header), (row for row in rows if any(row[2:])))


def cells(line: Record) -> tuple[str, str]:
    if "step_ms" not in line:
        return line.get("status", ""), ""
    return f"{line['step_ms']:.1f}", f"{line['peak_mib']:,.0f}"


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--profile"]:
        print(profile(Path(words[1]), "--small" in words))
        return
    records.main(__doc__, {"gpu_clock": (POINTS, measure)}, words, RESULTS, prepare=prepare)
    if not {"--list", "--small"} & {*words}:
        print(table(records.read(RESULTS)))


if __name__ == "__main__":
    main()
