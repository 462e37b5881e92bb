"""Which collectives a program runs, and which inputs and outputs they carry.

`_stablehlo.py` and `_hlo.py` turn programs into `Block`s of `Operation`s, in which an operation has
the name that HLO gives it. `run` evaluates the blocks without numbers: a value is an array of which
only this is known: the input that it is a copy of, and the collectives that it was computed from.

A collective's bytes are those of the whole array, which a gather returns and a reduction reads.
In a ring of n devices, each of them sends

    all-gather, reduce-scatter, all-to-all: (n - 1) / n of the bytes
    all-reduce: twice that, because it is a reduce-scatter and an all-gather
    collective-permute, collective-broadcast: the bytes
"""

import dataclasses
import math
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple


class Place(NamedTuple):
    file: str
    line: int
    function: str


KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


class Collective(NamedTuple):
    """A collective of one array.

    Attributes:
        kind: as HLO spells it, such as `all-gather`.
        dtype: as HLO spells it, such as `bf16`.
        bytes: of the whole array, once.
        group: how many devices take part.
        times: how often it runs, more than once in a loop.
        parameter: the input that it carries, such as `params['w']`; empty if it carries another
            array, or a part of several inputs.
        results: the outputs that its result becomes by elementwise operations, such as
            `result[0]['w']`, for a gradient the parameter that it updates.
        is_backward: whether it belongs to the backward pass.
        in_while: whether a loop runs it of which the number of trips is unknown; `times` then counts
            one trip.
        in_branch: whether it runs in one branch of a conditional.
        place: the user's line that asks for it.
    """

    kind: str
    dtype: str
    bytes: int
    group: int
    times: int = 1
    parameter: str = ""
    results: tuple[str, ...] = ()
    is_backward: bool = False
    in_while: bool = False
    in_branch: bool = False
    place: Place | None = None

    @property
    def sent(self) -> float:
        """The bytes that a device sends."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.times * self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * rounds * self.bytes * (self.group - 1) / self.group

    @property
    def is_scalar(self) -> bool:
        """Whether it exchanges a loss or a flag rather than an array."""
        return self.bytes * 8 <= bits(self.dtype)


def bits(dtype: str) -> int:
    """Returns the size of a dtype of StableHLO or HLO, such as `bf16`, `f8E4M3FN` or `pred`."""
    return 8 if dtype in ("i1", "pred") else int(re.sub(r"^\D*(\d+).*", r"\1", dtype))


def array_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Returns the bytes of an array."""
    return math.prod(shape) * bits(dtype) // 8


# Programs.


@dataclasses.dataclass(slots=True)
class Operation:
    """An operation of a program; a tuple of HLO is one operand or result."""

    kind: str  # as HLO spells it
    results: tuple[Hashable, ...]
    operands: tuple[Hashable, ...] = ()
    blocks: tuple["Block", ...] = ()  # that it calls; of a loop: its condition, then its body
    arrays: tuple[Collective, ...] = ()  # of a collective: what it exchanges
    # Of a constant: its value; of get-tuple-element: the index; of a loop: the trips, if known.
    number: int | None = None
    name: str = ""  # that JAX gave it, such as `transpose(jvp())/dot_general`
    place: Place | None = None


@dataclasses.dataclass(slots=True)
class Block:
    """A function or region: its arguments, what it runs, and what it returns."""

    arguments: list[Hashable] = dataclasses.field(default_factory=list)
    operations: list[Operation] = dataclasses.field(default_factory=list)
    results: tuple[Hashable, ...] = ()


# What is known of a value.


class Value(NamedTuple):
    """What is known of an array."""

    source: str | None = ""  # the input that it is a copy of; None of constants
    made_of: frozenset[int] = frozenset()  # the collectives that it is an elementwise function of
    number: Any = None  # of an integer: `(counter, offset)`, where a constant has no counter


class Comparison(NamedTuple):
    """The number of a comparison `left < right`."""

    left: Any
    right: Any


UNKNOWN, CONSTANT = Value(), Value(None)
Tree = Any  # a Value, or a tuple of trees


def leaves(tree: Tree) -> Iterator[Value]:
    """Yields the values of a tree."""
    if isinstance(tree, Value):
        yield tree
    else:
        for each in tree:
            yield from leaves(each)


def joined(trees: Iterable[Tree]) -> Tree:
    """Returns what is known of a value that is one of several, or is computed from them."""
    first, *others = trees
    for other in others:
        first = _join(first, other)
    return first


def _join(a: Tree, b: Tree) -> Tree:
    if a is b:
        return a
    if not isinstance(a, Value) and not isinstance(b, Value) and len(a) == len(b):
        return tuple(map(_join, a, b))
    if not (isinstance(a, Value) and isinstance(b, Value)):  # a tuple that was not followed
        return UNKNOWN
    source = a.source if b.source in (None, a.source) else b.source if a.source is None else ""
    return Value(source, a.made_of | b.made_of, a.number if a.number == b.number else None)


# What operations do to it.

MOVES = frozenset(
    {
        "bitcast", "bitcast-convert", "broadcast", "collective-broadcast", "collective-permute",
        "convert", "copy", "copy-done", "copy-start", "dynamic-reshape", "dynamic-slice",
        "optimization-barrier", "real", "reduce-precision", "reshape", "reverse", "slice",
        "transpose", "all-gather", "all-to-all",
    }
)  # fmt: skip
PLACES = frozenset({"clamp", "concatenate", "dynamic-update-slice", "pad", "select"})
COMBINES = PLACES | {"add", "divide", "maximum", "minimum", "multiply", "power", "subtract"}
UNARY = frozenset(
    {
        "abs", "cbrt", "cosine", "exponential", "exponential-minus-one", "log", "log-plus-one",
        "logistic", "negate", "round-nearest-even", "rsqrt", "sign", "sine", "sqrt", "tanh",
    }
)  # fmt: skip
CONSTANTS = frozenset({"constant", "iota", "partition-id", "replica-id"})
READ = {"select": slice(1, None), "dynamic-update-slice": slice(2), "dynamic-slice": slice(1)}


class Run:
    """One evaluation of a program."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self._values: dict[Hashable, Tree] = {}
        self._around: list[Operation] = []
        self._counters = 0

    def block(self, block: Block, arguments: Iterable[Tree] | None = None) -> tuple[Tree, ...]:
        """Evaluates a block; regions without arguments read the values around them."""
        self._values.update(zip(block.arguments, arguments or (), strict=False))
        for operation in block.operations:
            operands = [self._values.get(name, UNKNOWN) for name in operation.operands]
            found = self._evaluated(operation, operands)
            self._values.update(zip(operation.results, found, strict=False))
        return tuple(self._values.get(name, UNKNOWN) for name in block.results)

    def _evaluated(self, operation: Operation, operands: list[Tree]) -> tuple[Tree, ...]:
        """Returns the results of an operation."""
        kind, number = operation.kind, operation.number
        if operation.arrays:
            return self._exchanged(operation, operands)
        if kind == "while":
            return self._looped(operation, operands)
        if kind == "conditional":
            return self._branched(operation, operands)
        if operation.blocks:
            return self._called(operation, operation.blocks[0], operands)
        if kind in CONSTANTS:
            return (CONSTANT if number is None else CONSTANT._replace(number=(0, number)),)
        if kind == "get-tuple-element":
            (whole,) = operands
            return (whole if isinstance(whole, Value) else whole[number or 0],)
        if kind == "tuple":
            return (tuple(operands),)
        operands = operands[READ.get(kind, slice(None))]
        if kind in MOVES or kind.endswith(("-done", "-update")):
            return tuple(operands)
        if kind == "compare-lt":
            left, right = operands
            return (Value("", frozenset(), Comparison(left.number, right.number)),)
        if kind in COMBINES:
            return (_combined(kind, operands),)
        if kind in UNARY and isinstance(operands[0], Value):
            return (Value("", operands[0].made_of),)
        return (UNKNOWN,) * len(operation.results)

    def _exchanged(self, operation: Operation, operands: list[Tree]) -> tuple[Tree, ...]:
        """Notes the collectives of an operation, and returns their results."""
        around = [*self._around, operation]
        places = [one.place for one in reversed(around) if one.place]
        results = []
        # A collective of several arrays has as many operands; other operands are sizes.
        operands += [UNKNOWN] * (len(operation.arrays) - len(operands))
        for one, operand in zip(operation.arrays, operands, strict=False):
            made_of = set() if one.is_scalar else {len(self.collectives)}
            source = operand.source if isinstance(operand, Value) else ""
            self.collectives.append(
                one._replace(
                    parameter=source or "",
                    is_backward=any("transpose(" in each.name for each in around),
                    place=places[0] if places else None,
                )
            )
            moved = source if one.kind in MOVES else ""
            results.append(Value(moved, frozenset(made_of)))
        # Of several arrays, HLO makes one tuple.
        return tuple(results) if len(results) == len(operation.results) else (tuple(results),)

    def _called(self, operation: Operation, block: Block, operands: Any) -> tuple[Tree, ...]:
        self._around.append(operation)
        results = self.block(block, operands)
        self._around.pop()
        return results

    def _branched(self, operation: Operation, operands: list[Tree]) -> tuple[Tree, ...]:
        """Evaluates all branches; those of HLO have an operand each, those of StableHLO none."""
        before, results = len(self.collectives), []
        for index, block in enumerate(operation.blocks):
            results.append(self._called(operation, block, operands[1 + index : 2 + index]))
        for index in range(before, len(self.collectives)):
            self.collectives[index] = self.collectives[index]._replace(in_branch=True)
        return joined(results)

    def _looped(self, operation: Operation, initial: list[Tree]) -> tuple[Tree, ...]:
        """Evaluates a loop until nothing more is learned of what it carries."""
        condition, body = operation.blocks
        before, state = len(self.collectives), tuple(initial)
        while True:
            returned = self._called(operation, body, state)
            after = self._carried(state, returned)
            if after == state:
                break
            del self.collectives[before:]
            state = after
        (holds,) = self._called(operation, condition, state)
        trips = operation.number
        if trips is None:
            values = (list(leaves(each)) for each in (initial, state, returned))
            trips = _trips(holds.number, *values)
        for index in range(before, len(self.collectives)):
            one = self.collectives[index]
            self.collectives[index] = one._replace(
                times=one.times * (1 if trips is None else trips),
                in_while=one.in_while or trips is None,
            )
        return state

    def _carried(self, before: Tree, after: Tree) -> Tree:
        """Joins what a loop carries into a trip and out of it; a number that changes counts."""
        if not (isinstance(before, Value) and isinstance(after, Value)):
            if isinstance(before, Value) or isinstance(after, Value) or len(before) != len(after):
                return UNKNOWN
            return tuple(map(self._carried, before, after))
        number = None if isinstance(before.number, Comparison) else before.number
        if number and number != after.number and not number[0]:
            self._counters += 1
            number = (self._counters, 0)
        return _join(before, after)._replace(number=number)


def _combined(kind: str, operands: list[Value]) -> Value:
    """Returns the result of an operation on several arrays; two inputs together are none of them."""
    value = joined(operands)._replace(number=_calculated(kind, operands))
    copies = kind in PLACES or sum(each.source is not None for each in operands) < 2
    return value if copies else value._replace(source="")


def _calculated(kind: str, operands: list[Value]) -> Any:
    """Returns the number that an operation on integers returns, if it is known."""
    numbers = [each.number for each in operands]
    if kind not in ("add", "subtract") or None in numbers:
        return None
    (counter, offset), (other, step) = numbers
    if kind == "subtract":
        return None if other else (counter, offset - step)
    return None if counter and other else (counter or other, offset + step)


def _trips(
    holds: Any, initial: list[Value], state: list[Value], returned: list[Value]
) -> int | None:
    """Returns how often a loop runs that counts up to a constant; None if it does not."""
    if not isinstance(holds, Comparison) or holds.left is None or holds.right is None:
        return None
    (counter, offset), (other, bound) = holds
    for start, carried, after in zip(initial, state, returned, strict=True):
        if counter and not other and carried.number == (counter, 0) and start.number:
            step = after.number[1] if after.number and after.number[0] == counter else 0
            if not start.number[0] and step > 0:
                return max(0, -((start.number[1] + offset - bound) // step))
    return None


def run(main: Block, inputs: Iterable[str], outputs: Iterable[str] = ()) -> list[Collective]:
    """Returns the collectives that a program runs, those of all branches of a conditional.

    Args:
        main: the program.
        inputs: the names of its arguments.
        outputs: the names of the arrays that it returns.
    """
    evaluation = Run()
    results = evaluation.block(main, [Value(name) for name in inputs])
    found, values = evaluation.collectives, list(leaves(results))
    ends: list[list[str]] = [[] for _ in found]
    for name, value in zip(outputs, values, strict=False):
        for index in value.made_of:
            ends[index].append(name)
    return [one._replace(results=tuple(names)) for one, names in zip(found, ends, strict=True)]


def place_of_frames(frames: Iterable[tuple[str, int, str]]) -> Place | None:
    """Returns the innermost place that is no library's, of files, lines and functions."""
    for file, line, function in frames:
        if "site-packages" not in file and "/jmpx/" not in file:
            return Place(file, line, function)
    return None
