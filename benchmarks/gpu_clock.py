"""Measures steps of a ViT and of a language model on a GPU: milliseconds and memory.

    python benchmarks/gpu_clock.py                     # what has no line yet, and the table
    python benchmarks/gpu_clock.py --profile FOLDER    # where the language model spends its time
    python benchmarks/gpu_clock.py --small             # tries it, also without a GPU

Both models have 12 layers of width 768. The ViT reads 64 images of 224 x 224, the language model
8 x 1,024 bytes. The optimizer is Adam; the state is donated; float16 has a dynamic loss scale. XLA
compiles eight programs at once, which takes most of the time; all of it should stay under five
minutes on an H100 or H200. A script that was stopped goes on where it was.

A line has the median and the quartiles of ROUNDS turns, in milliseconds a step, `peak_mib`, what
XLA plans to hold at most, and the loss, which is alike for steps that train alike. A step that
fails is a line, too: `oom` if it ran out of memory, else `error`, which is measured again next
time.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import model_steps
import models
import numpy as np
import records
import steps
from models import LanguageModel, Transformer
from records import Record
from steps import Step

from jmpx._inspect.hlo.module import Module

RESULTS = records.RESULTS / "gpu_clock.jsonl"
SLICE_S, ROUNDS = 0.1, 10  # how long a turn takes at least, and how many there are
THREADS = 8  # compile at once
STEPS, LONGEST = 3, 12  # of a profile: how many steps it has, and how many kernels are shown
WIDE: Any = {"width": 768, "heads": 12, "hidden": 3072, "scaled_low": True}
TINY: Any = {"layers": 1, "width": 16, "heads": 2, "hidden": 32}
# The batch, the model, and a tiny one to try the script with.
MODELS: dict[str, tuple[int, Transformer, Transformer]] = {
    "ViT": (64, dataclasses.replace(models.MODELS["base"], scaled_low=True), models.MODELS["tiny"]),
    "language model": (
        *(8, LanguageModel(12, **WIDE, classes=256, length=1024)),
        LanguageModel(**TINY, classes=16, length=8),
    ),
}


class Way(NamedTuple):
    """How a step is written."""

    make: Callable[..., Step]
    dtype: str = "bfloat16"
    form: dict[str, Any] = {}  # fields of the model


def by_policy(policy: str, dtype: str = "bfloat16") -> Way:
    return Way(functools.partial(steps.jmpx_style, policy=policy), dtype)


BOTH = {
    "float32": Way(steps.handwritten, "float32"),
    "by hand": Way(steps.handwritten),
    "c=bf16": by_policy("c=bf16"),
    "c=bf16,save=products": by_policy("c=bf16,save=products"),
    "by hand, blocks marked": Way(steps.handwritten, form=model_steps.MARKED),
    "by=arguments,c=bf16": by_policy("by=arguments,c=bf16"),
}
FLOAT16 = {
    "float16 by hand": Way(steps.handwritten, "float16"),
    "float16, JMP": Way(steps.jmp_style, "float16"),
    "float16, MPX": Way(steps.mpx_style, "float16"),
    "c=f16": by_policy("c=f16", "float16"),
    "by=arguments,c=f16": by_policy("by=arguments,c=f16", "float16"),
}
SUMS_WIDE = "by hand, embedding summed in float32"
EMBEDDING = {SUMS_WIDE: Way(steps.handwritten, form={"sums_wide": True})}
WAYS = {"ViT": BOTH | FLOAT16, "language model": BOTH | EMBEDDING}
POINTS = [{"model": model, "way": way} for model, ways in WAYS.items() for way in ways]
PROFILED = ("by hand", SUMS_WIDE, "c=bf16")


# --- One step ---


class Program(NamedTuple):
    """A step that is lowered, and what it begins with."""

    lowered: Any
    step: Step
    model: str
    small: bool

    def start(self) -> tuple[list[jax.Array], Any]:
        """Returns the leaves of a new state, and a batch."""
        params, batch = jax.device_put(drawn(self.model, self.small))
        state = params, self.step.optimizer.init(params), self.step.scaling
        return [jnp.array(leaf) for leaf in jax.tree.leaves(state)], batch


@functools.cache
def drawn(model: str, small: bool) -> tuple[Any, Any]:
    """Draws parameters and a batch, which stay on the host."""
    (size, *networks), rng = MODELS[model], np.random.default_rng(0)
    return jax.device_get((networks[small].init(rng), networks[small].batch(rng, size)))


def lower(model: str, way: str, small: bool = False) -> Program:
    (size, *networks), (make, dtype, form) = MODELS[model], WAYS[model][way]
    network = dataclasses.replace(networks[small], **form)
    step = make(network, dtype, scales=dtype == "float16")
    traced = steps.traced(step, *model_steps.abstract(step, network, size), None).step
    return Program(traced.lower(), step, model, small)


compiling: dict[tuple[Any, ...], tuple[Program, Future[Any]]] = {}


def prepare(points: list[Record]) -> None:
    """Begins to compile points, if there is a GPU."""
    platform = jax.default_backend()
    if platform != "gpu" and not all(point.get("small") for point in points):
        print(f"JAX finds no gpu but a {platform}", file=sys.stderr)
        sys.exit(2)
    pool = ThreadPoolExecutor(THREADS)
    for point in points:
        with contextlib.suppress(Exception):  # which `measure` meets again
            program = lower(**point)
            compiling[tuple(point.values())] = program, pool.submit(program.lowered.compile)


def measure(**point: Any) -> Record:
    """Returns what was found; a step that fails is a result, too."""
    try:
        program, compiled = compiling.pop(tuple(point.values()), None) or (lower(**point), None)
        return timing(program, compiled.result() if compiled else program.lowered.compile())
    except Exception as error:
        status = "oom" if "RESOURCE_EXHAUSTED" in str(error) else "error"
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"status": status, "message": message}


def timing(program: Program, compiled: Any) -> Record:
    leaves, batch = program.start()
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
        program = lower("language model", way, small)
        compiled = program.lowered.compile(options)
        every = Module(compiled.as_text()).instructions.values()
        scopes = {one.name.removeprefix("%"): one.scope for one in every}
        leaves, batch = program.start()
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
    """Returns a row for each way."""
    lines = {(line["way"], line["model"]): line for line in found}
    rows = []
    for way in dict.fromkeys(way for ways in WAYS.values() for way in ways):
        ours = [lines.get((way, model), {}) for model in MODELS]
        rows.append([way, *(cell for line in ours for cell in cells(line))])
    header = [f"{model}, {unit}" for model in MODELS for unit in ("ms", "MiB")]
    return records.table(("a step on a GPU", *header), (row for row in rows if any(row[1:])))


def cells(line: Record) -> tuple[str, str]:
    if "step_ms" not in line:
        return line.get("status", ""), ""
    return f"{line['step_ms']:.1f}", f"{line['peak_mib']:,.0f}"


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--profile"]:
        print(profile(Path(words[1]), "--small" in words))
        return
    if words[:1] != ["--table"]:
        benchmarks: records.Benchmarks = {"gpu_clock": (POINTS, measure)}
        records.main(__doc__, benchmarks, words, RESULTS, prepare=prepare)
    if not {"--list", "--small"} & {*words}:
        print(table(records.read(RESULTS)))


if __name__ == "__main__":
    main()
