"""Which collectives a program runs, and which inputs and outputs they carry.

`hlo.py` turns a program into `Block`s of `Operation`s. `run` evaluates the blocks without numbers:
a value is an array of which only this is known: the input that it is a copy of, the collectives
that it was computed from, and which integer it is if it bounds a loop.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jmpx._inspect.collectives.data import Collective, Place


@dataclasses.dataclass(slots=True)
class Operation:
    """An operation of a program; a tuple is one operand or result."""

    kind: str  # as HLO spells it
    result: str
    operands: tuple[str, ...] = ()
    blocks: tuple["Block", ...] = ()  # that it calls; of a loop: its condition, then its body
    arrays: tuple[Collective, ...] = ()  # of a collective: the arrays that it exchanges
    # Of a constant: its value; of get-tuple-element: the index; of a loop: the trips, if known.
    number: int | None = None
    name: str = ""  # that JAX gave it, such as `transpose(jvp())/dot_general`
    place: Place | None = None


@dataclasses.dataclass(slots=True)
class Block:
    """A computation: the names of its arguments and of its result, and its operations."""

    arguments: list[str] = dataclasses.field(default_factory=list)
    operations: list[Operation] = dataclasses.field(default_factory=list)
    result: str = ""


class Number(NamedTuple):
    """An integer: a constant, or the counter of a loop plus an offset."""

    counter: int  # which loop carries it; 0 of constants
    offset: int


class Value(NamedTuple):
    """What is known of an array."""

    source: str | None = ""  # the input that it is a copy of; None of constants
    made_of: frozenset[int] = frozenset()  # the collectives that it is an elementwise function of
    number: Number | None = None


UNKNOWN, CONSTANT = Value(), Value(None)
Tree = Any  # a Value, or a tuple of trees


def leaves(tree: Tree) -> Iterator[Value]:
    """Yields the values of a tree."""
    if isinstance(tree, Value):
        yield tree
    else:
        for each in tree:
            yield from leaves(each)


def _together(join: Callable[[Value, Value], Value], a: Tree, b: Tree) -> Tree:
    """Joins the values of two trees; nothing is known of a tuple that was not followed."""
    if isinstance(a, Value) and isinstance(b, Value):
        return join(a, b)
    if isinstance(a, Value) or isinstance(b, Value) or len(a) != len(b):
        return UNKNOWN
    return tuple(_together(join, *pair) for pair in zip(a, b, strict=True))


def _join(a: Value, b: Value) -> Value:
    """Returns the knowledge of a value that is one of two, or is computed from them."""
    source = a.source if b.source in (None, a.source) else b.source if a.source is None else ""
    return Value(source, a.made_of | b.made_of, a.number if a.number == b.number else None)


def _joined(trees: Iterable[Tree]) -> Tree:
    return functools.reduce(lambda a, b: _together(_join, a, b), trees)


MOVES = frozenset(
    "all-gather all-to-all bitcast bitcast-convert broadcast collective-broadcast "
    "collective-permute convert copy copy-done copy-start dynamic-reshape dynamic-slice "
    "opt-barrier real reduce-precision reshape reverse slice transpose".split()
)
ASSEMBLES = frozenset({"clamp", "concatenate", "dynamic-update-slice", "pad", "select"})
COMBINES = ASSEMBLES | {"add", "divide", "maximum", "minimum", "multiply", "power", "subtract"}
UNARY = frozenset(
    "abs cbrt cosine exponential exponential-minus-one log log-plus-one logistic negate "
    "round-nearest-even rsqrt sign sine sqrt square tanh".split()
)
CALLS = frozenset({"async-start", "call", "fusion"})
CONSTANTS = frozenset({"constant", "iota", "partition-id", "replica-id"})
READ = {"select": slice(1, None), "dynamic-update-slice": slice(2), "dynamic-slice": slice(1)}


class Run:
    """One evaluation of a program."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self._values: dict[str, Tree] = {}
        self._around: list[Operation] = []
        self._counters = 0

    def block(self, block: Block, arguments: Iterable[Tree]) -> Tree:
        """Evaluates a block."""
        self._values.update(zip(block.arguments, arguments, strict=False))
        for operation in block.operations:
            operands = [self._values.get(name, UNKNOWN) for name in operation.operands]
            self._values[operation.result] = self._evaluated(operation, operands)
        return self._values.get(block.result, UNKNOWN)

    def _evaluated(self, operation: Operation, operands: list[Tree]) -> Tree:
        if operation.arrays:
            return self._exchanged(operation, operands)
        if operation.kind == "while":
            return self._looped(operation, operands[0])
        if operation.kind == "conditional":
            return self._branched(operation, operands[1:])
        if operation.blocks:  # other operations, such as a sort, may exchange arrays
            found = [self._called(operation, block, operands) for block in operation.blocks]
            return found[0] if operation.kind in CALLS else UNKNOWN
        return _computed(operation, operands[READ.get(operation.kind, slice(None))])

    def _exchanged(self, operation: Operation, operands: list[Tree]) -> Tree:
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
        return results[0] if len(results) == 1 else tuple(results)

    def _called(self, operation: Operation, block: Block, operands: Iterable[Tree]) -> Tree:
        self._around.append(operation)
        result = self.block(block, operands)
        self._around.pop()
        return result

    def _branched(self, operation: Operation, operands: list[Tree]) -> Tree:
        """Evaluates all branches, each of which has an operand."""
        before = len(self.collectives)
        results = [
            self._called(operation, block, [operand])
            for block, operand in zip(operation.blocks, operands, strict=True)
        ]
        for index in range(before, len(self.collectives)):
            self.collectives[index] = self.collectives[index]._replace(in_branch=True)
        return _joined(results)

    def _looped(self, operation: Operation, initial: Tree) -> Tree:
        """Evaluates a loop until the knowledge of its carry no longer changes."""
        condition, body = operation.blocks
        before, state = len(self.collectives), initial
        while True:
            returned = self._called(operation, body, [state])
            after = _together(self._carried, state, returned)
            if after == state:
                break
            del self.collectives[before:]
            state = after
        self._called(operation, condition, [state])
        trips = operation.number
        if trips is None:
            trips = self._trips(condition, *map(leaves, (initial, state, returned)))
        for index in range(before, len(self.collectives)):
            one = self.collectives[index]
            self.collectives[index] = one._replace(
                times=one.times * (1 if trips is None else trips),
                in_while=one.in_while or trips is None,
            )
        return state

    def _carried(self, before: Value, after: Value) -> Value:
        """Joins the carry before and after a trip; a number that changes is a counter."""
        number = before.number
        if number and number != after.number and not number.counter:
            self._counters += 1
            number = Number(self._counters, 0)
        return _join(before, after)._replace(number=number)

    def _trips(
        self,
        condition: Block,
        initial: Iterable[Value],
        state: Iterable[Value],
        returned: Iterable[Value],
    ) -> int | None:
        """Returns how often a loop runs that counts up to a constant; None if it does not."""
        compared = [each for each in condition.operations if each.result == condition.result]
        if [each.kind for each in compared] != ["compare-lt"]:
            return None
        counter, bound = (self._values[name].number for name in compared[0].operands)
        if counter is None or bound is None or bound.counter or not counter.counter:
            return None
        for values in zip(initial, state, returned, strict=False):
            start, carried, after = (each.number for each in values)
            if carried == counter and start and after and after.counter == counter.counter:
                to_go, step = bound.offset - start.offset, after.offset
                return max(0, -(-to_go // step)) if step > 0 and not start.counter else None
        return None


def _computed(operation: Operation, operands: list[Tree]) -> Tree:
    """Returns the result of an operation that calls and exchanges nothing."""
    kind, number = operation.kind, operation.number
    if kind in CONSTANTS:
        return CONSTANT if number is None else CONSTANT._replace(number=Number(0, number))
    if kind == "tuple":
        return tuple(operands)
    if kind in MOVES or kind.endswith(("-done", "-update")):
        return operands[0]
    if kind == "get-tuple-element":
        (whole,) = operands
        return whole if isinstance(whole, Value) else whole[number or 0]
    if kind in COMBINES:
        return _combined(kind, operands)
    return Value(made_of=operands[0].made_of) if kind in UNARY else UNKNOWN


def _combined(kind: str, operands: list[Value]) -> Value:
    """Returns the result of an operation on several arrays; of two inputs, it is neither."""
    value = _joined(operands)._replace(number=None)
    if kind == "add":
        value = value._replace(number=_sum(operands[0].number, operands[1].number))
    copies = kind in ASSEMBLES or sum(each.source is not None for each in operands) < 2
    return value if copies else value._replace(source="")


def _sum(left: Number | None, right: Number | None) -> Number | None:
    if left is None or right is None or (left.counter and right.counter):
        return None
    return Number(left.counter or right.counter, left.offset + right.offset)


def run(main: Block, inputs: Iterable[str], outputs: Iterable[str]) -> list[Collective]:
    """Returns the collectives of a program, given the names of its arguments and results."""
    evaluation = Run()
    results = evaluation.block(main, [Value(name) for name in inputs])
    found, values, names = evaluation.collectives, list(leaves(results)), list(outputs)
    if len(names) != len(values):
        names = [f"output {index}" for index in range(len(values))]
    ends: list[list[str]] = [[] for _ in found]
    for name, value in zip(names, values, strict=True):
        for index in value.made_of:
            ends[index].append(name)
    return [one._replace(results=tuple(end)) for one, end in zip(found, ends, strict=True)]
