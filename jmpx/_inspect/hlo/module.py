"""Reads the text of a module of HLO, as XLA writes it before, between and after its passes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from jmpx._jaxprs.equations import Place, library_of

_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(ROOT )?(%[\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"(%[\w.-]+)((?:#\d+)*)")
# The attributes of an instruction: strings, lists such as `{%a, %b}`, or words. Those in braces, as
# in `metadata={op_name="f"}`, are read like the others.
_ATTRIBUTE = re.compile(r"""\b(\w+)=("(?:[^"\\]|\\.)*"|\{[^{}"=]*\}|[^\s,{}"]+)""")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = (
    "condition body branch_computations true_computation false_computation calls to_apply".split()
)
Array = tuple[str, tuple[int, ...]]  # its dtype and its shape


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO."""

    computation: str
    name: str
    types: str  # of its results
    kind: str  # the operation, such as `dot`
    operands: str  # the text in its parentheses
    rest: str  # the text after them
    is_root: bool  # whether it is the result of its computation

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
        if self.kind.endswith(("-done", "-update")):  # these repeat the call of their `-start`
            return []
        names = " ".join(self.attributes.get(key, "") for key in _CALLED)
        return [name for name, _ in _OPERAND.findall(names)]

    @property
    def key(self) -> str:
        """Its name in the module, where two computations may use one name."""
        return self.computation + self.name

    @property
    def trips(self) -> int | None:
        """How often it runs the body of a loop, if the compiler knows."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """The function that a custom call names."""
        return self.attributes["custom_call_target"] if self.kind == "custom-call" else ""

    @property
    def scope(self) -> str:
        """The name that JAX gave it, such as `transpose(jvp())/dot_general`."""
        return self.attributes.get("op_name", "").replace("\\", "")


class Module:
    """A program, such as `jit_step`: the instructions of its computations, and all by their keys.

    Before XLA's partitioner, a text does not say how many devices run it: pass `devices`.
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
        self._tables = _tables(text)

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
        found = one.attributes
        if "source_file" in found:  # until JAX 0.8
            calls = iter([(found["source_file"], int(found["source_line"]), "")])
        else:
            calls = self._calls(int(found.get("stack_frame_id", 0)))
        return next((Place(*each) for each in calls if not library_of(each[0])), None)

    def _calls(self, frame: int) -> Iterator[tuple[str, int, str]]:
        """Yields the files, lines and functions of a stack, the innermost first."""
        while frame in self._tables.get("StackFrames", {}):
            location, parent = _numbers(self._tables["StackFrames"][frame])
            file, function, line, *_ = _numbers(self._tables["FileLocations"][location])
            names = self._tables["FileNames"][file], self._tables["FunctionNames"][function]
            yield names[0].strip('"'), line, names[1].strip('"').rpartition(".")[2]
            frame = parent - 1  # parents are counted from one, and one is none


def _operands(line: str, start: int) -> tuple[str, str]:
    """Returns the text in the parentheses that open before `start`, and the text after them."""
    depth, end = 1, start
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    return line[start : end - 1], line[end:]


def _tables(text: str) -> dict[str, dict[int, str]]:
    """Reads the tables at the top of a module, to which `stack_frame_id` refers."""
    names, tables = "FileNames|FunctionNames|FileLocations|StackFrames", {}
    for name, rows in re.findall(rf"^({names})\n((?:\d+ .*\n)*)", text, re.MULTILINE):
        split = (row.partition(" ") for row in rows.splitlines())
        tables[name] = {int(number): row for number, _, row in split}
    return tables


def _numbers(row: str) -> list[int]:
    return [int(each) for each in re.findall(r"=(\d+)", row)]
