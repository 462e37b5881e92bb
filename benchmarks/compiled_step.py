"""Counts what a train step compiles to.

    python benchmarks/compiled_step.py --again --only jmpx float16 12
    python benchmarks/compiled_step.py --again --only tpu_overhead    # for a TPU v5e, without one

The model is a vision transformer (`models.py`), the optimizer Adam, the step one of `steps.py`; the
state is donated. A line counts the instructions of the optimized HLO; the operations of its entry
computation (`entry_ops`); fusions and other operations that run one by one (`kernels`); copies and
converts; the bytes that XLA says it accesses, and those that it holds besides arguments and results
(`temp_bytes`). All of these are the same on every machine with one backend, one version of JAX and
one number of cores. Times are those of the processor (`time.process_time`), over all threads: of
tracing, and of compiling in XLA.

`tpu_overhead` is what scaling, checking and skipping add: the same in bfloat16, in which a v5e
computes, with the dynamic loss scale that float16 needs. `plain` does none of the three.

The other benchmarks read their programs with the functions of this file.

Counts of instructions say little: XLA repeats a product with `1 / scale` in every fusion that reads
it, but not a division.
"""

import collections
import contextlib
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import records
import steps
import tpu
from jax.experimental.compilation_cache import compilation_cache
from models import ViT
from records import Record
from steps import Point

import jmpx
from jmpx._inspect.hlo.found import kind_of
from jmpx._inspect.hlo.module import Instruction, Module

# --- What programs hold ---

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
ARRAY = re.compile(r"[a-z]+(\d*)\w*\[([\d,]*)\]((?:\{[^}]*\})?)")


def unfused(module: Module) -> list[Instruction]:
    """Returns what is no part of a fusion: the instructions that run one by one."""
    every = module.instructions.values()
    fusions = (one for one in every if one.kind not in ("while", "conditional"))
    fused = {name for one in fusions for name in one.called}
    return [one for one in every if one.computation not in fused]


def count(hlo: str) -> dict[str, int]:
    """Counts the instructions of an HLO module, given as text."""
    module = Module(hlo)
    kinds = collections.Counter(one.kind for one in module.instructions.values())
    return {
        "instructions": kinds.total(),
        "entry_ops": len(module.computations[module.entry]),
        "kernels": sum(one.kind not in FREE for one in unfused(module)),
        "fusions": kinds["fusion"],
        "conditionals": kinds["conditional"],
        "copies": kinds["copy"],
        "converts": kinds["convert"],
    }


def sizes(kinds: str, hbm: bool = False) -> list[float]:
    """Returns the bytes of the arrays of types of HLO: of all, or of those in a TPU's HBM."""
    found = (array for array in ARRAY.findall(kinds) if not (hbm and "S(" in array[2]))
    return [int(b or 8) / 8 * math.prod(map(int, re.findall(r"\d+", n))) for b, n, _ in found]


def clocked(make: Callable[[], Any], platform: str, **options: Any) -> tuple[Any, Record]:
    """Compiles what a function traces for a platform; returns also how long it took."""
    jax.clear_caches()  # which keep the steps that were traced before
    start = time.process_time()
    lowered = make().lower(lowering_platforms=(platform,))
    traced, clock = time.process_time(), time.perf_counter()
    program = lowered.compile(compiler_options=options)
    return program, {
        "trace_cpu_s": round(traced - start, 2),
        "compile_cpu_s": round(time.process_time() - traced, 2),
        "compile_s": round(time.perf_counter() - clock, 1),
    }


def planned(make: Callable[[], Any], platform: str, **options: Any) -> tuple[Any, Record]:
    """Compiles what a function traces for chips that are not there; returns also what it needs."""
    program, spent = clocked(make, platform, **options)
    hlo = program.as_text()
    return program, {
        "status": "ok",
        "peak_mib": program.memory_analysis().peak_memory_in_bytes / 2**20,
        "instructions": len(Module(hlo).instructions),
        "products": jmpx.inspect.compiled(hlo).counts(),
        "collectives": mib_by_kind(sends(hlo)),
        **spent,
    }


def counts(compiled: Any) -> dict[str, int]:
    """Returns all that is counted of a compiled step."""
    return {
        **count(compiled.as_text()),
        "bytes_accessed": int(compiled.cost_analysis()["bytes accessed"]),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


# --- What they send ---


def mib(found: Iterable[Any]) -> float:
    """Returns the MiB that a device sends."""
    return sum(one.sent for one in found) / 2**20


def mib_by_kind(found: Iterable[Any]) -> dict[str, float]:
    """Returns the MiB that a device sends by kind and dtype, without those of scalars."""
    arrays = [one for one in found if not one.is_scalar]
    names = sorted({f"{one.kind} {one.dtype}" for one in arrays})
    return {n: mib(one for one in arrays if f"{one.kind} {one.dtype}" == n) for n in names}


def sends(program: Any) -> tuple[Any, ...]:
    """Returns the collectives of a lowered program, or of the text of a module of HLO.

    Raises:
        ValueError: if it cannot tell how often a loop runs.
    """
    found = jmpx.inspect.compiled(program).collectives
    for one in found:
        if one.in_while:
            raise ValueError(f"Cannot tell how often the loop around an {one.kind} runs.")
    return found


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Makes JAX compile rather than load from its cache, which holds what no pass has written."""
    config: Any = jax.config  # Any, because JAX does not annotate its settings
    cached = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", cached)
        compilation_cache.reset_cache()


def partitioned(lowered: Any) -> tuple[str, Any]:
    """Compiles a program; returns the HLO that XLA's partitioner made of it, and the program."""
    with tempfile.TemporaryDirectory() as folder, compiling():
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd"}
        compiled = lowered.compile(compiler_options=options)
        (path,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return path.read_text(), compiled


# --- What runs, and for how long ---

# XLA's estimates for an H100 (`sol`, speed of light) come from products that were measured on one,
# and are good for ratios of programs at most:
#
# - float32 was measured as TF32, for every precision. Of dtypes that were not measured, XLA takes
#   bfloat16's time and multiplies it by the cube of the bytes of a result, which is undone here, so
#   float16 counts as bfloat16 by construction. Figures of float8 are beyond the hardware.
# - Copies have no estimate, and fusions by Triton next to none: these count the bytes that they
#   read and write, at the bandwidth of the memory. Collectives and calls of cuDNN are not counted.

BANDWIDTH = 3.352e12  # bytes a second, of an H100
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
UNTIMED = FREE | {"call", "after-all", "partition-id", "replica-id"}
MEASURED = {("bf16",) * 3, ("f32",) * 3}  # operands and result
BYTES = {"f16": 2, "f32": 4, "f64": 8}


class Program(Module):
    """An optimized program for a GPU, given as text."""

    def run(self, name: str = "", times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yields what runs and how often; of a conditional, its longest branch: the update."""
        for one in self.computations[name or self.entry]:
            yield one, times
            if one.kind == "conditional":
                longest = max(one.called, key=lambda name: len(self.computations[name]))
                yield from self.run(longest, times)
            elif one.kind in ("call", "async-start", "while"):
                yield from self.run(one.called[-1], times * (one.trips or 1))

    def kernels(self) -> list[tuple[Instruction, int]]:
        """Returns what runs by itself."""
        timed = lambda kind: kind not in UNTIMED and not kind.endswith("-done")  # noqa: E731
        return [(one, times) for one, times in self.run() if timed(one.kind)]

    def estimate(self) -> tuple[float, dict[str, int]]:
        """Returns the milliseconds that a step takes, and what is not in them."""
        total, untimed = 0.0, collections.Counter[str]()
        for one, times in self.kernels():
            spent = self._microseconds(one)
            total += times * (spent or 0)
            if spent is None:
                untimed[one.target or one.kind] += times
        return total / 1e3, dict(untimed)

    def _microseconds(self, one: Instruction) -> float | None:
        _, _, text = one.rest.partition("backend_config=")
        config = json.JSONDecoder().raw_decode(text)[0] if text.startswith("{") else {}
        costs = {cost["name"]: cost["exec_time_us"] for cost in config.get("reification_cost", ())}
        sol = costs.get("sol")
        if kind_of(one):
            arrays = [*(operand[0] for operand in self.operands(one)[:2]), one.arrays[0]]
            *operands, result = (dtype for dtype, _ in arrays)
            measured = (*operands, result) in MEASURED
            return sol and (sol if measured else sol / BYTES.get(result, 1) ** 3)
        if one.kind.removesuffix("-start") in COLLECTIVES:
            return None
        triton = config.get("fusion_backend_config", {}).get("kind") == "__triton"
        if sol is not None and not triton and not one.kind.startswith("copy"):
            return sol
        read = (self.instructions[key].types for key, _ in one.inputs)
        return sum(sizes(" ".join((one.types, *read)))) / BANDWIDTH * 1e6


# --- The steps ---


def measure(
    implementation: str, dtype: str, layers: int, batch: int, small: bool = False
) -> Record:
    """Compiles one step and returns its counts and times."""
    model = ViT(1, 16, 2, 32, image=8) if small else ViT(layers)
    point = Point(implementation, dtype)
    compiled, spent = clocked(lambda: steps.trace(point, model, batch), "cpu")
    return counts(compiled) | spent


def measure_overhead(way: str, layers: int, batch: int, **_: Any) -> Record:
    """Compiles one step for a TPU, and returns its counts and its peak of memory."""
    chips = tpu.devices()[:1]
    compiled, _ = clocked(lambda: steps.trace(OVERHEAD[way], ViT(layers), batch, chips), "tpu")
    return {**counts(compiled), "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes}


SCALED = "bfloat16_scaled"
OVERHEAD = {
    "plain": Point("handwritten", "bfloat16"),
    "handwritten where": Point("handwritten", SCALED),
    "handwritten cond": Point("handwritten_cond", SCALED),
    "jmpx": Point("jmpx", SCALED),
    "jmpx where": Point("jmpx_where", SCALED),
    "jmpx cond": Point("jmpx_cond", SCALED),
    "jmp": Point("jmp", SCALED),
    "mpx": Point("mpx", SCALED),
}
DIVIDE = {name: f"{name}_divide" for name in ("handwritten", "handwritten_cond")}
DRAWN = ("handwritten", "jmpx", "mpx", "jmp")  # over the number of layers
CHOSEN = [
    *((name, "float16", layers) for layers in (2, 4, 6, 8, 12) for name in DRAWN),
    *((name, "float16", 12) for name in ("jmpx_where", "handwritten_cond", *DIVIDE.values())),
    *((name, "bfloat16", 12) for name in ("handwritten", "jmpx")),
]
POINTS = [{"implementation": i, "dtype": d, "layers": n, "batch": 8} for i, d, n in CHOSEN]
WIDE = [{"way": way, "dtype": "bfloat16", "layers": 12, "batch": 64} for way in OVERHEAD]
BENCHMARKS: records.Benchmarks = {
    "compiled_step": (POINTS, measure),
    "tpu_overhead": (WIDE, measure_overhead),
}

if __name__ == "__main__":
    records.main(__doc__, BENCHMARKS)
