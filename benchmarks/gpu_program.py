"""Reads programs that were compiled for NVIDIA GPUs: kernels, products and estimated times.

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
import re
from collections.abc import Iterator
from typing import NamedTuple

import gpu
from compiled_step import COMPUTATION, FREE, LINE, OPERAND, sizes

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
UNTIMED = FREE | {"call", "after-all", "partition-id", "replica-id"}
DTYPE = re.compile(r"\b([a-z]+\d*\w*)\[")
TARGET = re.compile(r'custom_call_target="(__cu[^"]+)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CALLED = re.compile(r"(?:calls|body|to_apply|(?:true|false)_computation)=(%[\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
PRECISION = re.compile(r'operand_precision(?:":\["|=\{)(\w+)')
MEASURED = {("bf16",) * 3, ("f32",) * 3}  # operands and result
BYTES = {"f16": 2, "f32": 4, "f64": 8}


class Instruction(NamedTuple):
    """A line of HLO."""

    name: str
    types: str
    kind: str
    operands: list[str]
    line: str

    @property
    def called(self) -> list[str]:
        branches = BRANCHES.search(self.line)
        return CALLED.findall(self.line) + (OPERAND.findall(branches[1]) if branches else [])

    @property
    def dtype(self) -> str:
        return DTYPE.findall(self.types)[0]


class Program:
    """An optimized program for a GPU, given as text."""

    def __init__(self, hlo: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, lines = "", []
        for line in hlo.splitlines():
            if head := COMPUTATION.match(line):
                lines = self.computations.setdefault(head[1], [])
                self.entry = head[1] if line.startswith("ENTRY") else self.entry
            elif found := LINE.match(line):
                name, types, kind, operands = found.groups()
                lines.append(Instruction(name, types, kind, OPERAND.findall(operands), line))
        each = (one for lines in self.computations.values() for one in lines)
        self.types = {one.name: one.types for one in each}

    def run(self, name: str = "", times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yields what runs and how often; of a conditional, its longest branch: the update."""
        for one in self.computations[name or self.entry]:
            yield one, times
            if one.kind == "conditional":
                yield from self.run(
                    max(one.called, key=lambda name: len(self.computations[name])), times
                )
            elif one.kind in ("call", "async-start", "while"):
                trips = TRIPS.search(one.line)
                for called in one.called:
                    yield from self.run(called, times * (int(trips[1]) if trips else 1))

    def kernels(self) -> list[tuple[Instruction, int]]:
        """Returns what runs by itself."""
        timed = lambda kind: kind not in UNTIMED and not kind.endswith("-done")  # noqa: E731
        return [(one, times) for one, times in self.run() if timed(one.kind)]

    def products(self) -> dict[str, int]:
        """Counts the products by the dtypes of operands and result, and by their precision."""
        found: collections.Counter[str] = collections.Counter()
        for one, times in self.kernels():
            inside = self.computations[one.called[0]] if one.kind == "fusion" else [one]
            for product in filter(is_product, inside):
                precision = PRECISION.search(product.line)
                word = precision[1].lower() if precision else "default"
                name = " x ".join(self._operands(product)) + f" -> {product.dtype}"
                name = f"{target_of(product)} {name}" if "__cudnn" in product.line else name
                found[name if word == "default" else f"{name}, {word}"] += times
        return dict(sorted(found.items()))

    def _operands(self, product: Instruction) -> list[str]:
        return [DTYPE.findall(self.types[name])[0] for name in product.operands[:2]]

    def estimate(self) -> tuple[float, dict[str, int]]:
        """Returns the milliseconds that a step takes, and what is not in them."""
        total, untimed = 0.0, collections.Counter[str]()
        for one, times in self.kernels():
            spent = self._microseconds(one)
            total += times * (spent or 0)
            if spent is None:
                untimed[target_of(one) or one.kind] += times
        return total / 1e3, dict(untimed)

    def _microseconds(self, one: Instruction) -> float | None:
        _, _, text = one.line.partition("backend_config=")
        config = json.JSONDecoder().raw_decode(text)[0] if text.startswith("{") else {}
        costs = {cost["name"]: cost["exec_time_us"] for cost in config.get("reification_cost", ())}
        sol = costs.get("sol")
        if is_product(one):
            measured = (*self._operands(one), one.dtype) in MEASURED
            return sol and (sol if measured else sol / BYTES.get(one.dtype, 1) ** 3)
        if one.kind.removesuffix("-start") in COLLECTIVES:
            return None
        triton = config.get("fusion_backend_config", {}).get("kind") == "__triton"
        if sol is not None and not triton and not one.kind.startswith("copy"):
            return sol
        read = (self.types.get(name, "") for name in one.operands)
        return sum(sizes(" ".join((one.types, *read)))) / gpu.BANDWIDTH * 1e6


def is_product(one: Instruction) -> bool:
    return one.kind in ("dot", "convolution") or target_of(one) != ""


def target_of(one: Instruction) -> str:
    """Returns what of cuBLAS or cuDNN an instruction calls."""
    found = TARGET.search(one.line)
    return found[1] if found else ""
