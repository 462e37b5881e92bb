"""Reads programs that were compiled for NVIDIA GPUs: kernels and estimated times.

The estimates are XLA's for an H100 (`sol`, speed of light), which come from products that were
measured on one. They are good for ratios of programs at most:

- float32 was measured as TF32, for every precision. Of dtypes that were not measured, XLA takes
  bfloat16's time and multiplies it by the cube of the bytes of a result, which is undone here, so
  float16 counts as bfloat16 by construction. Figures of float8 are beyond the hardware.
- Copies have no estimate, and fusions by Triton next to none: these count the bytes that they read
  and write, at the bandwidth of the memory. Collectives and calls of cuDNN are not counted.
"""

import collections
import json
from collections.abc import Iterator

import gpu
from compiled_step import FREE, sizes

from jmpx._inspect.hlo.found import kind_of
from jmpx._inspect.hlo.module import Instruction, Module

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
        return sum(sizes(" ".join((one.types, *read)))) / gpu.BANDWIDTH * 1e6
