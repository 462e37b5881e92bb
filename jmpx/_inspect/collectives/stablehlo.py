"""Reads a module of StableHLO, which is what JAX writes, as blocks of operations.

It reads the objects that `lowered.compiler_ir("stablehlo")` returns. They hold the collectives that
the function calls itself. Those that shardings need, XLA's partitioner inserts later.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jmpx._inspect.collectives.data import KINDS, Collective, array_bytes, place_of_frames
from jmpx._inspect.collectives.dataflow import Block, Operation, run

Mlir = Any  # JAX does not annotate the objects of MLIR

RETURNS = ("stablehlo.return", "func.return", "sdy.return")
CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
RENAMED = {
    "broadcast-in-dim": "broadcast",
    "case": "conditional",
    "if": "conditional",
    "sharding-constraint": "copy",
}
# Custom calls that return their operand, in another sharding.
SHARDINGS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
AXIS = re.compile(r'"(\w+)"')
MESH_AXES = re.compile(r"mesh_axes<mesh = @(\w+), axes = \[(.*?)\]>")


class Lowered(NamedTuple):
    """The collectives of a module of StableHLO."""

    name: str  # of the program, such as `jit_step`
    devices: int  # how many run it
    collectives: list[Collective]  # those that it holds
    # Whether all that it computes is under `shard_map`, so that XLA's partitioner has nothing to
    # insert.
    is_final: bool


def read_stablehlo(module: Mlir) -> Lowered:
    """Reads what `lowered.compiler_ir("stablehlo")` returns."""
    reader = _Reader(module)
    main = reader.functions["main"]
    (entry,) = main.regions[0].blocks
    inputs = [_name(argument.location) for argument in entry.arguments]
    return Lowered(
        _text(module.operation.attributes, "sym_name"),
        reader.devices,
        run(reader.block(main), inputs, list(_outputs(main))),
        reader.partitions == 1 or all(map(reader.is_final, entry.operations)),
    )


class _Reader:
    """Makes blocks of the functions of a module, each once."""

    def __init__(self, module: Mlir) -> None:
        self.partitions = _integer(module, "mhlo.num_partitions")
        self.devices = self.partitions * _integer(module, "mhlo.num_replicas")
        operations = list(module.body.operations)
        self.functions = {
            _text(each.attributes, "sym_name"): each
            for each in operations
            if each.operation.name == "func.func"
        }
        self._meshes = {
            _text(each.attributes, "sym_name"): _sizes(str(each.attributes["mesh"]))
            for each in operations
            if each.operation.name == "sdy.mesh"
        }
        self._blocks: dict[Mlir, Block] = {}

    def block(self, operation: Mlir, region: int = 0) -> Block:
        """Returns the block of a region of an operation."""
        (given,) = operation.regions[region].blocks
        block = Block(list(given.arguments))
        for each in given.operations:
            if each.operation.name in RETURNS:
                block.results = tuple(each.operands)
            else:
                block.operations.append(self._operation(each))
        return block

    def is_final(self, operation: Mlir) -> bool:
        """Returns whether XLA's partitioner has nothing to do for an operation."""
        if operation.operation.name != "sdy.manual_computation":
            return operation.operation.name in (*RETURNS, "stablehlo.constant")
        manual = AXIS.findall(str(operation.attributes["manual_axes"]))
        return all(
            size == 1 or axis in manual
            for mesh in self._meshes.values()
            for axis, size in mesh.items()
        )

    def _function(self, name: str) -> Block:
        if name not in self._blocks:
            self._blocks[name] = self.block(self.functions[name])
        return self._blocks[name]

    def _operation(self, given: Mlir) -> Operation:
        name: str = given.operation.name
        attributes = given.attributes
        kind = name.partition(".")[2].replace("_", "-")
        operation = Operation(RENAMED.get(kind, kind), tuple(given.results), tuple(given.operands))
        if name == "stablehlo.constant":
            operation.number = _constant(given)
        elif name == "stablehlo.compare":
            operation.compare(str(attributes["comparison_direction"]).split()[-1].strip(">"))
        elif name == "stablehlo.custom_call":
            target = _text(attributes, "call_target_name")
            operation.kind = "copy" if target in SHARDINGS else target.replace("_", "-")
            attributes = attributes["backend_config"] if operation.kind in KINDS else {}
        elif name in CALLS:
            called = str(attributes[CALLS[name]]).removeprefix("@").strip('"')
            operation.blocks = (self._function(called),)
        elif operation.kind not in KINDS and name.startswith(("stablehlo.", "sdy.")):
            operation.blocks = tuple(self.block(given, i) for i in range(len(given.regions)))
        if operation.kind in KINDS:
            operation.arrays = tuple(self._exchanged(given, operation.kind, attributes))
        if operation.arrays or operation.blocks:
            operation.name = _name(given.location)
            operation.place = place_of_frames(_frames(given.location))
        return operation

    def _exchanged(self, given: Mlir, kind: str, attributes: Mlir) -> Iterator[Collective]:
        groups = attributes["replica_groups"] if "replica_groups" in attributes else None
        for array in given.operands if kind == "reduce-scatter" else given.results:
            dtype = _dtype(str(array.type.element_type))
            yield Collective(kind, dtype, array_bytes(dtype, array.type.shape), self._group(groups))

    def _group(self, groups: Mlir) -> int:
        """Returns how many devices are in a group; since JAX 0.12 it may name axes of a mesh."""
        if groups is None:
            return self.devices  # of a collective-permute
        if found := MESH_AXES.search(str(groups)):
            return math.prod(self._meshes[found[1]][axis] for axis in AXIS.findall(found[2]))
        return groups.type.shape[1]


def _constant(given: Mlir) -> int | None:
    """Returns the value of a constant that is one integer.

    Of no other dtype is the value asked for: JAX cannot return that of complex numbers, and until
    JAX 0.8 it ended the process.
    """
    if not re.fullmatch(r"tensor<u?i\d+>", str(given.results[0].type)):
        return None
    found = re.match(r"dense<(-?\d+)>", str(given.attributes["value"]))
    return int(found[1]) if found else None


def _dtype(name: str) -> str:
    """Returns the name that HLO gives a dtype of StableHLO."""
    names = {"i1": "pred", "complex<f32>": "c64", "complex<f64>": "c128"}
    signed = re.sub(r"^i(?=\d)", "s", re.sub(r"^ui", "u", name))
    return names.get(name, signed.lower())


def _sizes(mesh: str) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh such as `#sdy.mesh<["data"=4, "model"=2]>`."""
    return {axis: int(size) for axis, size in re.findall(r'"(\w+)"=(\d+)', mesh)}


def _text(attributes: Mlir, name: str) -> str:
    return str(attributes[name]).strip('"') if name in attributes else ""


def _integer(module: Mlir, name: str) -> int:
    attributes = module.operation.attributes
    return int(str(attributes[name]).partition(" ")[0]) if name in attributes else 1


def _outputs(main: Mlir) -> Iterator[str]:
    """Yields the names that JAX gave the results of a function."""
    for each in main.attributes["res_attrs"] if "res_attrs" in main.attributes else ():
        yield _text(each, "jax.result_info")


# Where the user asked for it. The text of a location is the same in all versions of JAX, its Python
# class is not: `loc("jvp()/mul"(callsite("loss"("a.py":3:4 to :9) at "step"("a.py":8:2 to :6))))`.

NAME = re.compile(r'loc\("([^"]*)"(?!:)')
FRAME = re.compile(r'"([^"]*)"\("([^"]*)":(\d+):')  # innermost first


def _name(location: Mlir) -> str:
    found = NAME.match(str(location))
    return found[1] if found else ""


def _frames(location: Mlir) -> Iterator[tuple[str, int, str]]:
    """Yields the files, lines and functions that a location names, the innermost first."""
    for function, file, line in FRAME.findall(str(location)):
        yield file, int(line), function
