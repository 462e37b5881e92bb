"""Reads collectives from instructions of HLO.

The compiler of TPUs writes a gather that runs beside products into the fusion of each of them, with
one `chain_id`, and a reduce-scatter as a fusion of an all-reduce and a slice.
"""

import math
import re

from jmpx._inspect.collectives.data import KINDS, Collective, bits
from jmpx._inspect.hlo.module import Instruction

# Groups of devices have three forms: lists `{{0,1},{2,3}}`, a range in the shape
# `[groups,devices]<=[...]` and, since JAX 0.10, axes of a mesh.
_LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_RANGE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=@?mesh\[([^]]*)\] ?\{([^}]*)\}")


class Finder:
    """Finds the collectives of a program that some devices run."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._chains: set[str] = set()

    def __call__(self, one: Instruction) -> list[Collective] | None:
        """Returns the collectives of an instruction, one for each array that it exchanges."""
        kind = one.kind.removesuffix("-start")
        if kind not in KINDS:
            return None
        if chain := one.attributes.get("chain_id"):
            if chain in self._chains:
                return []
            self._chains.add(chain)
        arrays, group = one.arrays, _group(one.rest, self._devices)
        if one.kind == "collective-permute-start":
            arrays = arrays[1:2]  # the operand, the result and, on TPUs, semaphores
        elif one.kind.endswith("-start") and kind != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # the operands, then the results
        if one.computation.startswith("%all-reduce-scatter"):
            parts, kind = 1, "reduce-scatter"
        else:
            parts = group if kind == "reduce-scatter" else 1
        return [
            Collective(kind, dtype, parts * math.prod(shape) * bits(dtype) // 8, group)
            for dtype, shape in arrays
        ]


def _group(rest: str, devices: int) -> int:
    """Returns how many devices are in a group of a collective; without groups, all take part."""
    if found := _LISTS.search(rest):
        return found[1].count(",") + 1
    if found := _RANGE.search(rest):
        return int(found[1])
    if found := _MESH.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices
