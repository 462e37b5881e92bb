"""Reads which collectives a program has, in which dtypes and of how many bytes, from its text.

It reads StableHLO, which JAX writes, and HLO, which XLA writes before, between and after its
passes. Under jit, JAX writes no collectives; XLA's partitioner inserts them, so that `partitioned`
returns what it made. XLA:CPU later widens 16-bit collectives, but the partitioner runs before that.

A collective's bytes are those of the whole array: what a gather returns, or a reduction reads.
`wire` says how many of them a device sends in a ring of n devices:

    all-gather, reduce-scatter, all-to-all: (n - 1) / n of the bytes
    all-reduce: twice that, because it is a reduce-scatter and an all-gather
    collective-permute: the bytes
"""

import collections
import dataclasses
import functools
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MIB = 2**20


class Collective(NamedTuple):
    """A collective of one array."""

    kind: str  # as HLO spells it
    dtype: str
    bytes: int  # of the whole array
    group: int  # how many devices exchange
    times: int = 1  # how often it runs: more than once in a loop

    @property
    def wire(self) -> float:
        """Returns the bytes that a device sends."""
        if self.kind == "collective-permute":
            return self.times * self.bytes
        return self.times * (1 + (self.kind == "all-reduce")) * self.bytes * (1 - 1 / self.group)


def dtypes(found: Iterable[Collective], *kinds: str) -> dict[str, float]:
    """Returns the MiB of each dtype that collectives of these kinds send, largest first."""
    sums: collections.Counter[str] = collections.Counter()
    for one in found:
        if one.kind in kinds:
            sums[one.dtype] += one.wire / MIB  # type: ignore
    return dict(sums.most_common())


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {"pred": 8, "i1": 8, "bf16": 16}


def bits(dtype: str) -> int:
    return BITS[dtype] if dtype in BITS else int(re.sub(r"^\D*(\d+).*", r"\1", dtype))


def size(dtype: str, shape: str) -> int:
    """Returns the bytes of an array of a shape such as `8,128` or `8x128x`."""
    return math.prod(map(int, re.findall(r"\d+", shape))) * bits(dtype) // 8


# HLO.

COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) .*\{$")
OPERATION = re.compile(r"^ +(?:ROOT )?%[\w.-]+ = (.*?) ([a-z][a-z0-9-]*)\(")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=(%[\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
CONDITION = re.compile(r"\bcondition=(%[\w.-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
CHAIN = re.compile(r'chain_id="(\d+)"')


def hlo_group(line: str, devices: int) -> int:
    """Returns how many devices a collective's groups have.

    HLO writes them as lists `{{0,1},{2,3}}`, as the shape `[groups,devices]<=[...]` of a range, or,
    since JAX 0.10, as axes of a mesh.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(found[1])
    if found := re.search(r"replica_groups=@?\w*mesh\w*\[(.*?)\] ?\{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


@dataclasses.dataclass
class Computation:
    """A computation of an HLO module: its collectives, and what it calls how often."""

    collectives: list[Collective] = dataclasses.field(default_factory=list)
    calls: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    largest: int = 1  # of its integer constants
    scatters: bool = False  # as the TPU's compiler writes a reduce-scatter


def hlo_collectives(kind: str, types: str, group: int) -> Iterator[Collective]:
    arrays = ARRAY.findall(types)
    if kind.endswith("-start"):
        kind = kind.removesuffix("-start")
        if kind == "collective-permute":
            arrays = arrays[1:2]  # operand, result, and a TPU's semaphores
        elif kind != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # operands, results
    for dtype, shape in arrays:
        whole = group if kind == "reduce-scatter" else 1
        yield Collective(kind, dtype, whole * size(dtype, shape), group)


def read_hlo(text: str) -> list[Collective]:
    """Returns the collectives that a module of HLO runs, those in a loop with how often.

    The compiler of TPUs writes a gather that runs beside products once for each of them: `chain_id`
    names those that are one. It writes a reduce-scatter as a fusion of an all-reduce and a slice.
    """
    partitions = re.search(r"num_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    computations: dict[str, Computation] = {}
    conditions: list[tuple[Computation, str, str, str]] = []
    entry, chains = "", set()
    current = Computation()
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            current = computations[found[2]] = Computation(scatters="all-reduce-scatter" in found[2])
            entry = found[2] if found[1] else entry
            continue
        if not (found := OPERATION.match(line)):
            continue
        types, kind = found.groups()
        if constant := CONSTANT.search(line):
            current.largest = max(current.largest, int(constant[1]))
        if kind.removesuffix("-start") in KINDS:
            chain = CHAIN.search(line)
            if chain is None or chain[1] not in chains:
                current.collectives += hlo_collectives(kind, types, hlo_group(line, devices))
            chains |= {chain[1]} if chain else set()
        elif kind == "while":
            known, condition = TRIPS.search(line), CONDITION.search(line)
            conditions.append((current, line, condition[1], known[1] if known else ""))
        else:
            current.calls += [(name, 1) for name in CALLED.findall(line)]
            for names in BRANCHES.findall(line):
                current.calls += [(name.strip(), 1) for name in names.split(",")]
    for computation, line, condition, known in conditions:
        times = int(known) if known else computations[condition].largest
        computation.calls += [(name, times) for name in CALLED.findall(line)]
    return list(run(computations, entry))


def run(computations: dict[str, Computation], name: str, times: int = 1) -> Iterator[Collective]:
    """Yields the collectives of a computation and of those that it calls."""
    computation = computations[name]
    for one in computation.collectives:
        kind = "reduce-scatter" if computation.scatters else one.kind
        yield one._replace(kind=kind, times=times)
    for called, repeated in computation.calls:
        yield from run(computations, called, times * repeated)


def partitioned(lowered: Any) -> str:
    """Compiles a program and returns the HLO that XLA's partitioner made of it."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd"}
        lowered.compile(compiler_options=options)
        (path,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return path.read_text()
