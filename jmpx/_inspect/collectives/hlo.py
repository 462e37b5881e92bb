"""Reads a module of HLO, in which XLA writes programs before, between and after its passes.

The compiler of TPUs writes a gather that runs beside products into the fusion of each of them, with
one `chain_id`, and a reduce-scatter as a fusion of an all-reduce and a slice.
"""

import math
import re
from collections.abc import Iterable, Iterator

from jmpx._inspect.collectives.data import KINDS, Collective, bits
from jmpx._inspect.collectives.dataflow import Block, Operation, run
from jmpx._jaxprs.places import Place, is_of_library

COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) .*\{$")
OPERATION = re.compile(r"^ +(ROOT )?(%[\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
OPERAND = re.compile(r"(%[\w.-]+)((?:#\d+)*)")
# After its operands, an operation has attributes. Those in braces, as in `metadata={op_name="f"}`,
# are read as its own; the others have a string, a list such as `{%a, %b}`, or a word.
ATTRIBUTE = re.compile(r"""\b(\w+)=("(?:[^"\\]|\\.)*"|\{[^{}"=]*\}|[^\s,{}"]+)""")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Groups of devices have three forms: lists `{{0,1},{2,3}}`, a range in the shape
# `[groups,devices]<=[...]` and, since JAX 0.10, axes of a mesh.
LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
RANGE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
MESH = re.compile(r"replica_groups=@?mesh\[([^]]*)\] ?\{([^}]*)\}")

# Custom calls that return their operands, in another sharding; those of Shardy make a tuple.
SHARDINGS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
SHARDY = "xla.sdy."


def read_hlo(
    text: str, outputs: Iterable[str] = (), devices: int | None = None
) -> tuple[str, int, tuple[Collective, ...]]:
    """Returns the name of a module, how many devices run it, and its collectives.

    Only after XLA's partitioner does the text say how many devices run it.
    """
    reader = _Reader(text, devices)
    for line in text.splitlines():
        reader.read(line)
    if not reader.entry:
        raise ValueError(
            "jmpx.inspect.collectives reads whole texts of HLO, and this one has no `ENTRY`: pass "
            "the lowered or compiled step."
        )
    block = reader.blocks[reader.entry]
    inputs = [reader.inputs.get(str(name), "") for name in block.arguments]
    return reader.name, reader.devices, tuple(run(block, inputs, outputs))


class _Reader:
    """Makes a block of each computation, line by line."""

    def __init__(self, text: str, devices: int | None) -> None:
        header = text.partition("\n")[0]
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.name = re.sub(r"^HloModule ([^,\s]*).*", r"\1", header)
        self.devices = devices or math.prod(map(int, counts))
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
            self.blocks.setdefault(found[2], Block())
        elif found := OPERATION.match(line):
            root, name, types, kind = found.groups()
            operands, rest = _operands(line, found.end())
            block, attributes = self.blocks[self._computation], _attributes(rest)
            if root:
                block.result = self._key(name)
            if kind == "parameter":
                block.arguments += [""] * (int(operands) + 1 - len(block.arguments))
                block.arguments[int(operands)] = self._key(name)
                self.inputs[self._key(name)] = attributes.get("op_name", "").replace("\\", "")
                return
            names = tuple(self._read(block, each) for each in OPERAND.findall(operands))
            operation = Operation(kind, self._key(name), names)
            block.operations.append(operation)
            if kind == "constant":
                is_integer = re.match(r"[su]\d+\[\]", types)
                operation.number = int(operands) if is_integer else None
            elif kind.removesuffix("-start") in KINDS:
                operation.kind = "copy"  # if it was read already
                operation.arrays = tuple(self._exchanged(kind, types, rest, attributes))
            else:
                self._complete(operation, types, rest, attributes)
            if operation.arrays or operation.blocks:
                operation.name = attributes.get("op_name", "")
                operation.place = self._frames.place(attributes)

    def _key(self, name: str) -> str:
        """Returns a name that is the only one: two computations may use the same."""
        return self._computation + name

    def _read(self, block: Block, operand: tuple[str, str]) -> str:
        """Returns the name of an operand; since JAX 0.12, `%x#1` is a part of the tuple `%x`."""
        name, parts = self._key(operand[0]), operand[1]
        for index in parts.split("#")[1:]:
            part = f"{name}#{index}"
            block.operations.append(
                Operation("get-tuple-element", part, (name,), number=int(index))
            )
            name = part
        return name

    def _complete(
        self, operation: Operation, types: str, rest: str, attributes: dict[str, str]
    ) -> None:
        """Completes an operation by its attributes: its blocks, index, trips or comparison."""
        kind, called = operation.kind, ("calls", "to_apply")
        if kind == "while":
            called, trips = ("condition", "body"), TRIPS.search(rest)
            operation.number = int(trips[1]) if trips else None
        elif kind == "conditional":
            called = ("branch_computations", "true_computation", "false_computation")
        elif kind == "get-tuple-element":
            operation.number = int(attributes["index"])
        elif kind == "compare" and attributes["direction"] in ("LT", "GT"):  # they bound loops
            operation.kind = "compare-lt"
            operation.operands = operation.operands[:: 1 if attributes["direction"] == "LT" else -1]
        elif kind == "custom-call":
            target = attributes["custom_call_target"]
            if target in SHARDINGS or target.startswith(SHARDY):
                operation.kind = "tuple" if types.startswith("(") else "copy"
        elif kind.endswith(("-done", "-update")):  # which name what `async-start` called
            return
        names = " ".join(attributes.get(key, "") for key in called)
        operation.blocks = tuple(
            self.blocks.setdefault(name, Block()) for name, _ in OPERAND.findall(names)
        )

    def _exchanged(
        self, kind: str, types: str, rest: str, attributes: dict[str, str]
    ) -> Iterator[Collective]:
        """Yields the collectives of an operation: one for each array that it exchanges."""
        if chain := attributes.get("chain_id"):
            if chain in self._chains:
                return
            self._chains.add(chain)
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
            size = math.prod(map(int, re.findall(r"\d+", shape)))
            yield Collective(kind, dtype, parts * size * bits(dtype) // 8, group)


def _operands(line: str, start: int) -> tuple[str, str]:
    """Returns what stands in the parentheses that open before `start`, and what follows them."""
    depth, end = 1, start
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    return line[start : end - 1], line[end:]


def _attributes(rest: str) -> dict[str, str]:
    """Returns the attributes of an operation, strings without their quotes."""
    found = ATTRIBUTE.findall(rest)
    return {name: value[1:-1] if value.startswith('"') else value for name, value in found}


def _group(line: str, devices: int) -> int:
    """Returns how many devices are in a group of a collective; without groups, all take part."""
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

    def place(self, attributes: dict[str, str]) -> Place | None:
        """Returns the innermost line of the user's code that an operation names."""
        calls = self._calls(int(attributes.get("stack_frame_id", 0)))
        if "source_file" in attributes:
            calls = iter([(attributes["source_file"], int(attributes["source_line"]), "")])
        return next((Place(*each) for each in calls if not is_of_library(each[0])), None)

    def _calls(self, frame: int) -> Iterator[tuple[str, int, str]]:
        """Yields the files, lines and functions of a stack, the innermost first."""
        while frame in self._tables.get("StackFrames", {}):
            location, parent = _numbers(self._tables["StackFrames"][frame])
            file, function, line, *_ = _numbers(self._tables["FileLocations"][location])
            names = self._tables["FileNames"][file], self._tables["FunctionNames"][function]
            yield names[0].strip('"'), line, names[1].strip('"').rpartition(".")[2]
            frame = parent - 1  # counted from one, and one is none


def _numbers(row: str) -> list[int]:
    return [int(each) for each in re.findall(r"=(\d+)", row)]
