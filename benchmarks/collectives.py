"""Reads from a program's text which collectives it runs, in which dtypes, and how many bytes.

`read_stablehlo` reads what JAX writes, `read_hlo` what XLA writes between its passes and after
them. Under jit, JAX writes no collectives: XLA's partitioner inserts them, and `partitioned`
returns what it made. A CPU's final program does not tell: XLA:CPU widens 16-bit collectives later.

A collective's bytes are those of the whole array, which a gather returns and a reduction reads.
In a ring of n devices, each of them sends

    all-gather, reduce-scatter, all-to-all: (n - 1) / n of the bytes
    all-reduce: twice that, because it is a reduce-scatter and an all-gather
    collective-permute: the bytes
"""

import collections
import contextlib
import dataclasses
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """A collective of one array."""

    kind: str  # as HLO spells it
    dtype: str
    bytes: int  # of the whole array
    group: int  # how many devices take part
    times: int = 1  # how often it runs, more than once in a loop

    @property
    def wire(self) -> float:
        """The bytes that a device sends."""
        if self.kind == "collective-permute":
            return self.times * self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * rounds * self.bytes * (self.group - 1) / self.group

    @property
    def is_scalar(self) -> bool:
        """Whether it exchanges a loss or a flag rather than an array."""
        return self.bytes * 8 <= bits(self.dtype)


def mib(found: Iterable[Collective]) -> float:
    """Returns the MiB that a device sends."""
    return sum(one.wire for one in found) / 2**20


def table(found: Iterable[Collective]) -> dict[str, float]:
    """Returns the MiB that a device sends by kind and dtype, without those of scalars."""
    groups: dict[str, list[Collective]] = collections.defaultdict(list)
    for one in found:
        if not one.is_scalar:
            groups[f"{one.kind} {one.dtype}"].append(one)
    return {name: mib(groups[name]) for name in sorted(groups)}


def bits(dtype: str) -> int:
    """Returns the size of a dtype of StableHLO or HLO, such as `bf16`, `f8E4M3FN` or `pred`."""
    return 8 if dtype in ("i1", "pred") else int(re.sub(r"^\D*(\d+).*", r"\1", dtype))


def size(dtype: str, shape: str) -> int:
    """Returns the bytes of an array of a shape such as `8,128` or `8x128x`."""
    return math.prod(map(int, re.findall(r"\d+", shape))) * bits(dtype) // 8


@dataclasses.dataclass
class Function:
    """A function of a module: its collectives, and how often it calls which others."""

    collectives: list[Collective] = dataclasses.field(default_factory=list)
    calls: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    largest: int = 0  # of its integer constants: how often a loop runs whose condition it is


def run(functions: dict[str, Function], name: str, times: int = 1) -> Iterator[Collective]:
    """Yields the collectives of a function and of those that it calls.

    Raises:
        ValueError: if it cannot tell how often a loop runs.
    """
    function = functions[name]
    for one in function.collectives:
        if not (total := one.times * times):
            raise ValueError(f"Cannot tell how often the loop around an {one.kind} runs.")
        yield one._replace(times=total)
    for called, repeated in function.calls:
        yield from run(functions, called, times * repeated)


# HLO.

COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) .*\{$")
OPERATION = re.compile(r"^ +(?:ROOT )?%[\w.-]+ = (.*?) ([a-z][a-z0-9-]*)\(")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=(%[\w.-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
CONDITION = re.compile(r"\bcondition=(%[\w.-]+)")
CONSTANT = re.compile(r" = s\d+\[\]\S* constant\((\d+)\)")
CHAIN = re.compile(r'chain_id="(\d+)"')
LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
RANGE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
MESH = re.compile(r"replica_groups=@?mesh\[([^]]*)\] ?\{([^}]*)\}")


def hlo_group(line: str, devices: int) -> int:
    """Returns how many devices are in a group of a collective.

    HLO has three forms for groups: lists `{{0,1},{2,3}}`, a range in the shape
    `[groups,devices]<=[...]` and, since JAX 0.10, axes of a mesh. Without groups, all take part.
    """
    if found := LISTS.search(line):
        return found[1].count(",") + 1
    if found := RANGE.search(line):
        return int(found[1])
    if found := MESH.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def hlo_collectives(line: str, types: str, kind: str, devices: int) -> Iterator[Collective]:
    """Yields the collectives of an operation: one for each array that it exchanges."""
    arrays, group = ARRAY.findall(types), hlo_group(line, devices)
    if kind == "collective-permute-start":
        arrays = arrays[1:2]  # the operand, the result and, on TPUs, semaphores
    elif kind.endswith("-start") and kind != "all-reduce-start":
        arrays = arrays[len(arrays) // 2 :]  # the operands, then the results
    kind = kind.removesuffix("-start")
    for dtype, shape in arrays:
        parts = group if kind == "reduce-scatter" else 1
        yield Collective(kind, dtype, parts * size(dtype, shape), group)


def read_hlo(text: str) -> list[Collective]:
    """Returns the collectives that a module of HLO runs, those of all branches of a conditional.

    The compiler of TPUs writes a gather that runs beside products into the fusion of each of them,
    with one `chain_id`, and a reduce-scatter as a fusion of an all-reduce and a slice.
    """
    partitions = re.search(r"num_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    functions: dict[str, Function] = {}
    loops: list[tuple[Function, str]] = []
    name, entry, chains = "", "", set()
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            name = found[2]
            functions[name] = Function()
            entry = name if found[1] else entry
            continue
        if not (found := OPERATION.match(line)):
            continue
        function, (types, kind) = functions[name], found.groups()
        if constant := CONSTANT.search(line):
            function.largest = max(function.largest, int(constant[1]))
        if kind.removesuffix("-start") in KINDS:
            chain = CHAIN.search(line)
            if chain and chain[1] in chains:
                continue
            chains |= {chain[1]} if chain else set()
            collective = hlo_collectives(line, types, kind, devices)
            if name.startswith("%all-reduce-scatter"):
                collective = (one._replace(kind="reduce-scatter") for one in collective)
            function.collectives += collective
        elif kind == "while":
            loops.append((function, line))
        else:
            names = CALLED.findall(line) + ", ".join(BRANCHES.findall(line)).split(", ")
            function.calls += [(name, 1) for name in names if name]
    for function, line in loops:
        (condition,), bodies = CONDITION.findall(line), CALLED.findall(line)
        function.calls += [(body, functions[condition].largest) for body in bodies]
    return list(run(functions, entry))


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


def partitioned(lowered: Any, **options: Any) -> tuple[str, Any]:
    """Compiles a program; returns the HLO that XLA's partitioner made of it, and the program.

    Args:
        lowered: what `jax.jit(...).lower` returns.
        options: further options of XLA.
    """
    with tempfile.TemporaryDirectory() as folder, compiling():
        options |= {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd"}
        compiled = lowered.compile(compiler_options=options)
        (path,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return path.read_text(), compiled


# StableHLO.

FUNCTION = re.compile(r"^  func\.func \w+ @([\w.]+)\(")
CALL = re.compile(r"\bcall @([\w.]+)\(")
EXCHANGE = re.compile(rf"\"stablehlo\.({'|'.join(KINDS).replace('-', '_')})\"")
TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
BOUND = re.compile(r" = stablehlo\.constant dense<(\d+)> : tensor<u?i\d+>")
MESH_AXES = re.compile(r"mesh_axes<mesh = @(\w+), axes = \[(.*?)\]>")


def stablehlo_group(line: str, meshes: dict[str, dict[str, int]]) -> int:
    """Returns how many devices are in a group; since JAX 0.12 the text names axes of a mesh."""
    if found := MESH_AXES.search(line):
        axes = re.findall(r'name = "(\w+)"', found[2])
        return math.prod(meshes[found[1]][axis] for axis in axes)
    if found := re.search(r"replica_groups = dense<.*?> : tensor<\d+x(\d+)x", line):
        return int(found[1])
    return 1  # of a collective-permute, where it does not count


def read_stablehlo(text: str) -> list[Collective]:
    """Returns the collectives that a module of StableHLO runs, those of all branches of a case."""
    meshes = {
        name: {axis: int(n) for axis, n in re.findall(r'"(\w+)"=(\d+)', axes)}
        for name, axes in re.findall(r"sdy\.mesh @(\w+) = <\[(.*?)\]>", text)
    }
    functions: dict[str, Function] = {}
    function, exchange, bound = Function(), "", 0
    loops: list[tuple[str, int]] = []  # the ends of those around a line, and how often they run
    for line in text.splitlines():
        times = math.prod(count for _, count in loops)
        indent = line[: len(line) - len(line.lstrip())]
        if found := FUNCTION.match(line):
            function = functions[found[1]] = Function()
        elif line == f"{indent}cond {{":
            bound = 0
        elif constant := BOUND.search(line):
            bound = max(bound, int(constant[1]))
        elif line == f"{indent}}} do {{":
            loops.append((f"{indent}}}", bound))
        elif loops and line == loops[-1][0]:
            loops.pop()
        function.calls += [(name, times) for name in CALL.findall(line)]
        if EXCHANGE.search(line):
            exchange = line
        if exchange and " -> " in line:  # the types stand behind the region of a reduction
            (kind,), group = EXCHANGE.findall(exchange), stablehlo_group(exchange, meshes)
            operands, _, results = line.rpartition(" : (")[2].partition(" -> ")
            whole = operands if kind == "reduce_scatter" else results
            for shape, dtype in TENSOR.findall(whole):
                array = size(dtype, shape)
                one = Collective(kind.replace("_", "-"), dtype, array, group, times)
                function.collectives.append(one)
            exchange = ""
    return list(run(functions, "main"))
