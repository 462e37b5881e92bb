"""Reads a module of HLO, which XLA writes between and after its passes, as blocks of operations.

The compiler of TPUs writes a gather that runs beside products into the fusion of each of them, with
one `chain_id`, and a reduce-scatter as a fusion of an all-reduce and a slice.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jmpx._inspect.collectives.data import KINDS, Collective, Place, array_bytes, place_of_frames
from jmpx._inspect.collectives.dataflow import Block, Operation, run

COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) .*\{$")
OPERATION = re.compile(r"^ +(ROOT )?(%[\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
OPERAND = re.compile(r"(%[\w.-]+)((?:#\d+)*)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
TRUE_AND_FALSE = re.compile(r"\b(?:true|false)_computation=(%[\w.-]+)")
CALLED = re.compile(r"\b(?:calls|to_apply)=(%[\w.-]+)")
LOOP = re.compile(r"\bcondition=(%[\w.-]+), body=(%[\w.-]+)")
CONSTANT = re.compile(r" = [su]\d+\[\]\S* constant\((-?\d+)\)")
INDEX = re.compile(r"\bindex=(\d+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
TARGET = re.compile(r'custom_call_target="(\w+)"')
CHAIN = re.compile(r'chain_id="(\d+)"')
NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
FRAME = re.compile(r"stack_frame_id=(\d+)")
SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
RANGE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
MESH = re.compile(r"replica_groups=@?mesh\[([^]]*)\] ?\{([^}]*)\}")

TARGETS = {
    "AllocateBuffer": "constant",
    "Sharding": "copy",
    "SPMDFullToShardShape": "copy",
    "SPMDShardToFullShape": "copy",
}


class Hlo(NamedTuple):
    """What a module of HLO says of what travels between devices.

    Attributes:
        name: of the program, such as `jit_step`.
        devices: how many run it.
        collectives: those that it holds.
    """

    name: str
    devices: int
    collectives: list[Collective]


def read_hlo(text: str, outputs: Iterable[str] = ()) -> Hlo:
    """Reads the text of a module.

    Args:
        text: what `compiled.as_text()` returns, or a file that XLA dumped.
        outputs: the names of the arrays that it returns; else they have numbers.

    Raises:
        ValueError: if the text is not whole.
    """
    reader = _Reader(text)
    for line in text.splitlines():
        reader.read(line)
    if not reader.entry:
        raise ValueError(f"The text of {reader.name} has no ENTRY computation: pass it as a whole.")
    block = reader.blocks[reader.entry]
    inputs = [reader.inputs.get(str(name), "") for name in block.arguments]
    return Hlo(reader.name, reader.devices, run(block, inputs, outputs))


class _Reader:
    """Makes a block of each computation, line by line."""

    def __init__(self, text: str) -> None:
        header = text.partition("\n")[0]
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.name = re.sub(r"^HloModule ([^,\s]*).*", r"\1", header)
        self.devices = math.prod(map(int, counts))
        self.blocks: dict[str, Block] = {}
        self.inputs: dict[str, str] = {}  # the names that JAX gave to parameters
        self.entry = ""
        self._computation = ""
        self._frames = _StackFrames(text)
        self._chains: set[str] = set()

    def read(self, line: str) -> None:
        """Reads a line, and adds its operation to its computation."""
        if found := COMPUTATION.match(line):
            self._computation = found[2]
            self.entry = found[2] if found[1] else self.entry
            self._block(found[2])
        elif found := OPERATION.match(line):
            root, name, types, kind = found.groups()
            operands, rest = _operands(line, found.end())
            block = self.blocks[self._computation]
            if root:
                block.results = (self._key(name),)
            if kind == "parameter":
                self._parameter(block, int(operands), self._key(name), rest)
            else:
                names = tuple(self._read(block, each) for each in OPERAND.findall(operands))
                block.operations.append(self._operation(line, rest, types, kind, name, names))

    def _block(self, name: str) -> Block:
        return self.blocks.setdefault(name, Block())

    def _key(self, name: str) -> str:
        """Returns a name that is the only one: two computations may use the same."""
        return self._computation + name

    def _parameter(self, block: Block, index: int, key: str, rest: str) -> None:
        block.arguments += [""] * (index + 1 - len(block.arguments))
        block.arguments[index] = key
        if found := NAME.search(rest):
            self.inputs[key] = found[1].replace("\\", "")

    def _read(self, block: Block, operand: tuple[str, str]) -> str:
        """Returns the name of an operand; since JAX 0.12, `%x#1` is a part of the tuple `%x`."""
        name, parts = self._key(operand[0]), operand[1]
        for index in parts.split("#")[1:]:
            part = f"{name}#{index}"
            block.operations.append(
                Operation("get-tuple-element", (part,), (name,), number=int(index))
            )
            name = part
        return name

    def _operation(
        self, line: str, rest: str, types: str, kind: str, name: str, operands: tuple[str, ...]
    ) -> Operation:
        operation = Operation(kind, (self._key(name),), operands)
        if kind.removesuffix("-start") in KINDS:
            operation.kind = "copy"  # if it was read already
            operation.arrays = tuple(self._exchanged(rest, types, kind))
        elif kind == "while":
            operation.blocks = tuple(
                self._block(name) for pair in LOOP.findall(rest) for name in pair
            )
            operation.number = _integer(TRIPS, rest)
        elif kind == "conditional":
            names = ", ".join(BRANCHES.findall(rest)).split(", ") + TRUE_AND_FALSE.findall(rest)
            operation.blocks = tuple(self._block(each) for each in names if each)
        elif kind == "constant":
            operation.number = _integer(CONSTANT, line)
        elif kind == "get-tuple-element":
            operation.number = _integer(INDEX, rest)
        elif kind == "compare":
            _compare(operation, rest)
        elif kind == "custom-call":
            found = TARGET.search(rest)
            operation.kind = TARGETS.get(found[1], kind) if found else kind
        elif not kind.endswith(("-done", "-update")):  # which name what `async-start` called
            operation.blocks = tuple(map(self._block, CALLED.findall(rest)))
        if operation.arrays or operation.blocks:
            found = NAME.search(rest)
            operation.name = found[1] if found else ""
            operation.place = self._frames.place(rest)
        return operation

    def _exchanged(self, rest: str, types: str, kind: str) -> Iterator[Collective]:
        """Yields the collectives of an operation: one for each array that it exchanges."""
        if chain := CHAIN.search(rest):
            if chain[1] in self._chains:
                return
            self._chains.add(chain[1])
        arrays, group = ARRAY.findall(types), _group(rest, self.devices)
        if kind == "collective-permute-start":
            arrays = arrays[1:2]  # the operand, the result and, on TPUs, semaphores
        elif kind.endswith("-start") and kind != "all-reduce-start":
            arrays = arrays[len(arrays) // 2 :]  # the operands, then the results
        kind = kind.removesuffix("-start")
        if self._computation.startswith("%all-reduce-scatter"):
            parts, kind = 1, "reduce-scatter"
        else:
            parts = group if kind == "reduce-scatter" else 1
        for dtype, shape in arrays:
            sizes = map(int, re.findall(r"\d+", shape))
            yield Collective(kind, dtype, parts * array_bytes(dtype, sizes), group)


def _operands(line: str, start: int) -> tuple[str, str]:
    """Returns what stands in the parentheses that open before `start`, and what follows them."""
    depth, end = 1, start
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    return line[start : end - 1], line[end:]


def _compare(operation: Operation, rest: str) -> None:
    """Marks a comparison of the kinds that bound a loop."""
    if "direction=LT" in rest:
        operation.kind = "compare-lt"
    elif "direction=GT" in rest:
        operation.kind, operation.operands = "compare-lt", operation.operands[::-1]


def _integer(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None


def _group(line: str, devices: int) -> int:
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


class _StackFrames:
    """The tables at the top of a module, which say what `stack_frame_id` means.

    Until JAX 0.8, each operation says its file and line itself.
    """

    def __init__(self, text: str) -> None:
        self._tables: dict[str, dict[int, str]] = {}
        names = "FileNames|FunctionNames|FileLocations|StackFrames"
        for name, rows in re.findall(rf"^({names})\n((?:\d+ .*\n)*)", text, re.MULTILINE):
            split = (row.partition(" ") for row in rows.splitlines())
            self._tables[name] = {int(number): row for number, _, row in split}

    def place(self, rest: str) -> Place | None:
        """Returns the user's line of an operation."""
        if found := FRAME.search(rest):
            return place_of_frames(self._calls(int(found[1])))
        if found := SOURCE.search(rest):
            return place_of_frames([(found[1], int(found[2]), "")])
        return None

    def _calls(self, frame: int) -> Iterator[tuple[str, int, str]]:
        """Yields the files, lines and functions of a stack, the innermost first."""
        while frame in self._tables.get("StackFrames", {}):
            location, parent = _numbers(self._tables["StackFrames"][frame])
            file, function, line, *_ = _numbers(self._tables["FileLocations"][location])
            names = self._tables["FileNames"][file], self._tables["FunctionNames"][function]
            yield names[0].strip('"'), line, names[1].strip('"')
            frame = parent - 1  # counted from one, and one is none


def _numbers(row: str) -> list[int]:
    return [int(each) for each in re.findall(r"=(\d+)", row)]
