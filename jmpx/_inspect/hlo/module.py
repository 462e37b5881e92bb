"""Reads a module of HLO, in which XLA writes programs before, between and after its passes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from jmpx._jaxprs.equations import Place, is_of_library

_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(ROOT )?(%[\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"(%[\w.-]+)((?:#\d+)*)")
# After its operands, an instruction has attributes. Those in braces, as `metadata={op_name="f"}`,
# are read as its own; the others have a string, a list such as `{%a, %b}`, or a word.
_ATTRIBUTE = re.compile(r"""\b(\w+)=("(?:[^"\\]|\\.)*"|\{[^{}"=]*\}|[^\s,{}"]+)""")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = {
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}
Array = tuple[str, tuple[int, ...]]  # its dtype and its shape


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO."""

    computation: str
    name: str
    types: str  # what it returns
    kind: str  # what it does, such as `dot`
    operands: str  # what stands in its parentheses
    rest: str  # what follows them
    is_root: bool  # whether its computation returns what it returns

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Its attributes, strings without their quotes."""
        found = _ATTRIBUTE.findall(self.rest)
        return {name: value[1:-1] if value.startswith('"') else value for name, value in found}

    @functools.cached_property
    def inputs(self) -> list[tuple[str, list[int]]]:
        """The keys of its operands; since JAX 0.12, `%x#1` is a part of the tuple `%x`."""
        return [
            (self.computation + name, [int(index) for index in parts.split("#")[1:]])
            for name, parts in _OPERAND.findall(self.operands)
        ]

    @property
    def arrays(self) -> list[Array]:
        """The arrays that it returns."""
        found = _ARRAY.findall(self.types)
        return [(dtype, tuple(map(int, re.findall(r"\d+", sizes)))) for dtype, sizes in found]

    @functools.cached_property
    def called(self) -> list[str]:
        """The computations that it calls; of a loop: its condition, then its body."""
        if self.kind.endswith(("-done", "-update")):  # which name what `async-start` called
            return []
        keys = _CALLED.get(self.kind, ("calls", "to_apply"))
        names = " ".join(self.attributes.get(key, "") for key in keys)
        return [name for name, _ in _OPERAND.findall(names)]

    @property
    def key(self) -> str:
        """A name that is the only one: two computations may use the same."""
        return self.computation + self.name

    @property
    def number(self) -> int | None:
        """The value of a constant integer, or which part of a tuple is taken."""
        if self.kind == "get-tuple-element":
            return int(self.attributes["index"])
        is_integer = self.kind == "constant" and re.match(r"[su]\d+\[\]", self.types)
        return int(self.operands) if is_integer else None

    @property
    def trips(self) -> int | None:
        """How often it runs the body of a loop, if the compiler says it."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.attributes["custom_call_target"] if self.kind == "custom-call" else ""

    @property
    def scope(self) -> str:
        """The name that JAX gave it, such as `transpose(jvp())/dot_general`."""
        return self.attributes.get("op_name", "").replace("\\", "")


class Module:
    """A program, such as `jit_step`, as the instructions of its computations.

    `instructions` has all of them by their keys. Only after XLA's partitioner does the text say how
    many `devices` run it.
    """

    def __init__(self, text: str, devices: int | None = None) -> None:
        header = text.partition("\n")[0]
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.name = re.sub(r"^HloModule ([^,\s]*).*", r"\1", header)
        self.devices = devices or math.prod(map(int, counts))
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = computation = ""
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                computation = found[2]
                self.entry = computation if found[1] else self.entry
                self.computations[computation] = []
            elif found := _INSTRUCTION.match(line):
                root, name, types, kind = found.groups()
                operands, rest = _operands(line, found.end())
                one = Instruction(computation, name, types, kind, operands, rest, bool(root))
                self.computations[computation].append(one)
        if not self.entry:
            raise ValueError(
                "jmpx.inspect reads whole texts of HLO, and this one has no `ENTRY`: pass the "
                "lowered or compiled step."
            )
        every = (one for found in self.computations.values() for one in found)
        self.instructions = {one.key: one for one in every}
        self._frames = _StackFrames(text)

    @property
    def arguments(self) -> list[str]:
        """The names that JAX gave to the inputs of the program."""
        found = (one for one in self.computations[self.entry] if one.kind == "parameter")
        return [one.scope for one in sorted(found, key=lambda one: int(one.operands))]

    def operands(self, one: Instruction) -> list[list[Array]]:
        """Returns the arrays of each operand."""
        found = ((self.instructions[key].arrays, path) for key, path in one.inputs)
        return [arrays[path[0] :][:1] if path else arrays for arrays, path in found]

    def place(self, one: Instruction) -> Place | None:
        """Returns the innermost line of the user's code that an instruction names."""
        return self._frames.place(one.attributes)


def _operands(line: str, start: int) -> tuple[str, str]:
    """Returns what stands in the parentheses that open before `start`, and what follows them."""
    depth, end = 1, start
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    return line[start : end - 1], line[end:]


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
