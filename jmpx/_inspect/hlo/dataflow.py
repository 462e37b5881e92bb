"""What of that which is found in a program runs how often, and what its arrays are copies of.

`run` evaluates a program without numbers: a value is an array of which only this is known: the
input that it is a copy of, what is found that it was computed from, and which integer it is if it
bounds a loop.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jmpx._inspect.hlo.module import Instruction, Module


class Number(NamedTuple):
    """An integer: a constant, or the counter of a loop plus an offset."""

    counter: int  # which loop carries it; 0 of constants
    offset: int


class Value(NamedTuple):
    """What is known of an array."""

    source: str | None = ""  # the input that it is a copy of; None of constants
    made_of: frozenset[int] = frozenset()  # what is found that it is an elementwise function of
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


# Custom calls that return their operands, in another sharding; those of Shardy make a tuple.
SHARDINGS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
SHARDY = "xla.sdy."


class Run:
    """One evaluation of a program, in which `candidates` has what is found, by instruction."""

    def __init__(self, module: Module, candidates: dict[str, Sequence[Any]]) -> None:
        self.found: list[Any] = []
        self._module, self._candidates = module, candidates
        self._values: dict[str, Tree] = {}
        self._around: list[Instruction] = []
        self._counters = 0

    def computation(self, name: str, arguments: Sequence[Tree]) -> Tree:
        """Evaluates a computation."""
        result = UNKNOWN
        for one in self._module.computations[name]:
            if one.kind == "parameter":
                index = int(one.operands)
                value = arguments[index] if index < len(arguments) else UNKNOWN
            else:
                value = self._evaluated(one, [self._read(*each) for each in one.inputs])
            self._values[one.key] = value
            result = value if one.is_root else result
        return result

    def _read(self, key: str, path: Sequence[int]) -> Tree:
        """Returns an operand, which since JAX 0.12 may be a part of a tuple, as `%x#1` is."""
        value = self._values.get(key, UNKNOWN)
        for index in path:
            value = value if isinstance(value, Value) else value[index]
        return value

    def _evaluated(self, one: Instruction, operands: list[Tree]) -> Tree:
        if (found := self._candidates.get(one.key)) is not None:
            return self._noted(one, found, operands) if found else operands[0]
        if one.kind == "while":
            return self._looped(one, operands[0])
        if one.kind == "conditional":
            return self._branched(one, operands[1:])
        if one.called:  # other operations, such as a sort, may exchange arrays
            results = [self._called(one, name, operands) for name in one.called]
            return results[0] if one.kind in CALLS else UNKNOWN
        return _computed(one, operands[READ.get(one.kind, slice(None))])

    def _noted(self, one: Instruction, found: Sequence[Any], operands: list[Tree]) -> Tree:
        """Notes what is found in an instruction, and returns the results."""
        around = [one, *reversed(self._around)]
        place = next(filter(None, map(self._module.place, around)), None)
        is_backward = any("transpose(" in each.scope for each in around)
        # What has several arrays has as many operands; other operands are sizes.
        operands += [UNKNOWN] * (len(found) - len(operands))
        sources = [each.source if isinstance(each, Value) else "" for each in operands]
        results = []
        for index, each in enumerate(found):
            made_of = set() if each.is_scalar else {len(self.found)}
            moved = sources[index] if each.kind in MOVES else ""
            results.append(Value(moved, frozenset(made_of)))
            names = [source or "" for source in sources[index:]]
            self.found.append(each.at(names, is_backward, place))
        return results[0] if len(results) == 1 else tuple(results)

    def _called(self, one: Instruction, name: str, operands: Sequence[Tree]) -> Tree:
        self._around.append(one)
        result = self.computation(name, operands)
        self._around.pop()
        return result

    def _branched(self, one: Instruction, operands: list[Tree]) -> Tree:
        """Evaluates all branches, each of which has an operand."""
        before = len(self.found)
        branches = zip(one.called, operands, strict=True)
        results = [self._called(one, name, [operand]) for name, operand in branches]
        self.found[before:] = [each._replace(in_branch=True) for each in self.found[before:]]
        return _joined(results)

    def _looped(self, one: Instruction, initial: Tree) -> Tree:
        """Evaluates a loop until the knowledge of its carry no longer changes."""
        condition, body = one.called
        before, state = len(self.found), initial
        while True:
            returned = self._called(one, body, [state])
            after = _together(self._carried, state, returned)
            if after == state:
                break
            del self.found[before:]
            state = after
        self._called(one, condition, [state])
        trips = one.trips
        if trips is None:
            trips = self._trips(condition, *map(leaves, (initial, state, returned)))
        self.found[before:] = [
            each._replace(
                times=each.times * (1 if trips is None else trips),
                in_while=each.in_while or trips is None,
            )
            for each in self.found[before:]
        ]
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
        condition: str,
        initial: Iterable[Value],
        state: Iterable[Value],
        returned: Iterable[Value],
    ) -> int | None:
        """Returns how often a loop runs that counts up to a constant; None if it does not."""
        root = next(one for one in self._module.computations[condition] if one.is_root)
        direction = root.attributes.get("direction")
        if root.kind != "compare" or direction not in ("LT", "GT"):
            return None
        numbers = [self._read(*each).number for each in root.inputs]
        counter, bound = numbers if direction == "LT" else reversed(numbers)
        if counter is None or bound is None or bound.counter or not counter.counter:
            return None
        for values in zip(initial, state, returned, strict=False):
            start, carried, after = (each.number for each in values)
            if carried == counter and start and after and after.counter == counter.counter:
                to_go, step = bound.offset - start.offset, after.offset
                return max(0, -(-to_go // step)) if step > 0 and not start.counter else None
        return None


def _computed(one: Instruction, operands: list[Tree]) -> Tree:
    """Returns the result of an instruction that calls nothing, and in which nothing is found."""
    kind, number = one.kind, one.number
    if one.target in SHARDINGS or one.target.startswith(SHARDY):
        kind = "tuple" if one.types.startswith("(") else "copy"
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


def run(
    module: Module,
    find: Callable[[Instruction], Sequence[Any] | None],
    outputs: Iterable[str] = (),
) -> tuple[Any, ...]:
    """Returns all that is found in the instructions that run.

    Args:
        module: the program.
        find: returns what is found in an instruction, for each of its arrays: named tuples with
            the fields of `Collective`; None if it is of another kind.
        outputs: the names of the results of the program.
    """
    every = ((one.key, find(one)) for one in module.instructions.values())
    evaluation = Run(module, {key: found for key, found in every if found is not None})
    results = evaluation.computation(module.entry, list(map(Value, module.arguments)))
    found, values, names = evaluation.found, list(leaves(results)), list(outputs)
    if len(names) != len(values):
        names = [f"output {index}" for index in range(len(values))]
    ends: list[list[str]] = [[] for _ in found]
    for name, value in zip(names, values, strict=True):
        for index in value.made_of:
            ends[index].append(name)
    return tuple(one._replace(results=tuple(end)) for one, end in zip(found, ends, strict=True))
