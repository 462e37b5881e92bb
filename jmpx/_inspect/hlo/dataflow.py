"""Counts how often each product and collective runs, and follows arrays from and to them.

`run` evaluates a module without numbers. For each array it knows the input that it is a copy of,
the products and collectives that it is an elementwise function of, and the integer if it may bound
a loop.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jmpx._inspect.hlo.found import Found, Product, candidates
from jmpx._inspect.hlo.module import Instruction, Module


class Number(NamedTuple):
    """An integer: a constant, or the counter of a loop plus an offset."""

    counter: int  # the number of the loop that carries it; 0 for constants
    offset: int


class Known(NamedTuple):
    """The facts that are known about an array."""

    source: str | None = ""  # the input that it is a copy of; None for constants
    made_of: frozenset[int] = frozenset()  # the numbers of products and collectives behind it
    number: Number | None = None


UNKNOWN = Known()
Tree = Any  # a `Known`, or a tuple of trees


def _leaves(tree: Tree) -> list[Known]:
    return jax.tree.leaves(tree, is_leaf=lambda each: isinstance(each, Known))


def _together(join: Callable[[Known, Known], Known], a: Tree, b: Tree) -> Tree:
    """Joins the values of two trees; where their structures differ, nothing is known."""
    if isinstance(a, Known) and isinstance(b, Known):
        return join(a, b)
    if isinstance(a, Known) or isinstance(b, Known) or len(a) != len(b):
        return UNKNOWN
    return tuple(_together(join, *pair) for pair in zip(a, b, strict=True))


def _join(a: Known, b: Known) -> Known:
    """Returns the facts that hold for either of two arrays, and for one computed from both."""
    source = a.source if b.source in (None, a.source) else b.source if a.source is None else ""
    return Known(source, a.made_of | b.made_of, a.number if a.number == b.number else None)


def _joined(trees: Iterable[Tree]) -> Tree:
    return functools.reduce(lambda a, b: _together(_join, a, b), trees)


# The result is a copy of the first operand: of all or a part of it, in any dtype, shape or place.
MOVES = frozenset(
    "all-gather all-to-all bitcast bitcast-convert broadcast collective-broadcast "
    "collective-permute convert copy copy-done copy-start dynamic-reshape dynamic-slice "
    "opt-barrier real reduce-precision reshape reverse slice transpose".split()
)
# The result of these is a copy of an input if all operands are copies of it, or constants. For the
# others in `COMBINES`, one operand must be a copy, and the rest constants.
ASSEMBLES = frozenset({"clamp", "concatenate", "dynamic-update-slice", "pad", "select"})
COMBINES = ASSEMBLES | {"add", "divide", "maximum", "minimum", "multiply", "power", "subtract"}
UNARY = frozenset(
    "abs cbrt cosine exponential exponential-minus-one log log-plus-one logistic negate "
    "round-nearest-even rsqrt sign sine sqrt square tanh".split()
)
CALLS = frozenset({"async-start", "call", "fusion"})
CONSTANTS = frozenset({"constant", "iota", "partition-id", "replica-id"})
# The operands that reach the result; the others are indices or predicates.
READ = {"select": slice(1, None), "dynamic-update-slice": slice(2), "dynamic-slice": slice(1)}
# Custom calls that return their operands, in another sharding; those of Shardy make a tuple.
SHARDINGS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
SHARDY = "xla.sdy."


# How often a loop runs, if the compiler knows.
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class _Run:
    """One evaluation of a module."""

    def __init__(self, module: Module) -> None:
        self.found: list[Found] = []
        self._module, self._candidates = module, candidates(module)
        self._values: dict[str, Tree] = {}
        self._around: list[Instruction] = []
        self._counters = itertools.count(1)

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
            value = value if isinstance(value, Known) else value[index]
        return value

    def _evaluated(self, one: Instruction, operands: list[Tree]) -> Tree:
        found = self._candidates.get(one.key)
        if found is not None:  # it is empty if another instruction is counted instead of this one
            return self._noted(one, found, operands) if found else operands[0]
        if one.kind == "while":
            return self._looped(one, operands[0])
        if one.kind == "conditional":
            return self._branched(one, operands[1:])
        if one.called:  # other operations, such as a sort, may exchange arrays
            results = [self._called(one, name, operands) for name in one.called]
            return results[0] if one.kind in CALLS else UNKNOWN
        return _computed(one, operands[READ.get(one.kind, slice(None))])

    def _noted(self, one: Instruction, found: Sequence[Found], operands: list[Tree]) -> Tree:
        """Notes a product, or the collectives of an instruction, and returns the results."""
        around = [one, *reversed(self._around)]
        place = next(filter(None, map(self._module.place, around)), None)
        is_backward = any("transpose(" in each.scope for each in around)
        # A collective has an operand for each array; further operands of products are sizes.
        inputs = [each if isinstance(each, Known) else UNKNOWN for each in operands]
        inputs += [UNKNOWN] * (len(found) - len(inputs))
        results = []
        for value, each in zip(inputs, found, strict=False):
            moves, made_of = each.kind in MOVES, frozenset({len(self.found)})
            if isinstance(each, Product):
                names = (each.source for each in inputs[: len(each.operands)])
                each = each._replace(parameters=tuple(filter(None, names)))
            else:
                made_of = frozenset() if each.is_scalar else made_of
                each = each._replace(parameter=value.source or "")
            result = value._replace(number=None) if moves else UNKNOWN
            results.append(result._replace(made_of=result.made_of | made_of))
            self.found.append(each._replace(is_backward=is_backward, place=place))
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
        """Evaluates a loop until the facts about its carry no longer change."""
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
        if known := _TRIPS.search(one.rest):
            trips = int(known[1])
        else:
            trips = self._trips(condition, initial, state, returned)
        for index, each in enumerate(self.found[before:], before):
            each = each._replace(in_while=True) if trips is None else each
            times = each.times if trips is None else each.times * trips
            self.found[index] = each._replace(times=times)
        return state

    def _carried(self, before: Known, after: Known) -> Known:
        """Joins the carry before and after a trip; a number that changes is a counter."""
        number = before.number
        if number and number != after.number and not number.counter:
            number = Number(next(self._counters), 0)
        return _join(before, after)._replace(number=number)

    def _trips(self, condition: str, *carries: Tree) -> int | None:
        """Returns how often a loop that counts up to a constant runs; None for other loops."""
        root = next(one for one in self._module.computations[condition] if one.is_root)
        direction = root.attributes.get("direction")
        if root.kind != "compare" or direction not in ("LT", "GT"):
            return None
        numbers = [self._read(*each).number for each in root.inputs]
        counter, bound = numbers if direction == "LT" else reversed(numbers)
        if counter is None or bound is None or bound.counter or not counter.counter:
            return None
        for values in zip(*map(_leaves, carries), strict=False):
            start, carried, after = (each.number for each in values)
            if carried == counter and start and after and after.counter == counter.counter:
                to_go, step = bound.offset - start.offset, after.offset
                return max(0, -(-to_go // step)) if step > 0 and not start.counter else None
        return None


def _computed(one: Instruction, operands: list[Tree]) -> Tree:
    """Returns the result of an instruction that calls nothing, and is not a candidate."""
    kind = one.kind
    if one.target in SHARDINGS or one.target.startswith(SHARDY):
        kind = "tuple" if one.types.startswith("(") else "copy"
    if kind in CONSTANTS:
        is_integer = kind == "constant" and re.match(r"[su]\d+\[\]", one.types)
        return Known(None, number=Number(0, int(one.operands)) if is_integer else None)
    if kind == "tuple":
        return tuple(operands)
    if kind in MOVES or kind.endswith(("-done", "-update")):
        return operands[0]
    if kind == "get-tuple-element":
        (whole,) = operands
        return whole if isinstance(whole, Known) else whole[int(one.attributes["index"])]
    if kind in COMBINES:
        return _combined(kind, operands)
    return Known(made_of=operands[0].made_of) if kind in UNARY else UNKNOWN


def _combined(kind: str, operands: list[Known]) -> Known:
    """Returns the result of an operation on several arrays; of two inputs, it copies neither."""
    value = _joined(operands)._replace(number=None)
    if kind == "add":
        value = value._replace(number=_sum(operands[0].number, operands[1].number))
    copies = kind in ASSEMBLES or sum(each.source is not None for each in operands) < 2
    return value if copies else value._replace(source="")


def _sum(left: Number | None, right: Number | None) -> Number | None:
    if left is None or right is None or (left.counter and right.counter):
        return None
    return Number(left.counter or right.counter, left.offset + right.offset)


def run(module: Module, outputs: Sequence[str] = ()) -> list[Found]:
    """Returns the products and collectives that run; `outputs` names the results of the program."""
    evaluation = _Run(module)
    results = evaluation.computation(module.entry, list(map(Known, module.arguments)))
    values = _leaves(results)
    if len(outputs) != len(values):
        outputs = [f"output {index}" for index in range(len(values))]
    both = list(zip(outputs, values, strict=True))
    return [
        one._replace(results=tuple(name for name, value in both if index in value.made_of))
        for index, one in enumerate(evaluation.found)
    ]
