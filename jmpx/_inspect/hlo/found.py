"""Finds the products and collectives of a program; counts FLOPs, bytes, and how often each runs.

A collective's bytes are those of the whole array, which a gather returns and a reduction reads.
In a ring of n devices, each of them sends

    all-gather, reduce-scatter, all-to-all: (n - 1) / n of the bytes, if ragged at most
    all-reduce: twice that, because it is a reduce-scatter and an all-gather
    collective-permute, collective-broadcast: the bytes

`run` evaluates a module without numbers. For each array it knows the input that it is a copy of,
the products and collectives that it is an elementwise function of, and the integer if it may bound
a loop.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jmpx._inspect.hlo.module import Instruction, Module
from jmpx._jaxprs.equations import Place, taps

COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast".split()
)
PRODUCTS = ("dot", "ragged-dot", "scaled-dot", "convolution")
KERNEL = "kernel"  # written by Pallas or by a compiler
CALLS = {  # products among the custom calls, by the start of their targets
    "__cublas$gemm": "dot",
    "__cublas$lt$": "dot",
    "__cudnn$conv": "convolution",
    "__cudnn$fmha": "attention",
    **dict.fromkeys(("__cudnn$blockScaledDot", "__op$block_scaled_dot"), "scaled-dot"),
    **dict.fromkeys(("tpu_custom_call", "__gpu$xla.gpu.triton", "triton", "mosaic"), KERNEL),
}


class Product(NamedTuple):
    """A matrix product, convolution or fused attention, as `jmpx.inspect.Compiled` describes it."""

    kind: str
    operands: tuple[str, ...]
    result: str
    algorithm: str
    kernel: str
    flops_each: int
    times: int = 1
    parameters: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    is_backward: bool = False
    in_while: bool = False
    in_branch: bool = False
    scope: str = ""
    place: Place | None = None

    @property
    def flops(self) -> int:
        """The FLOPs of all its runs."""
        return self.times * self.flops_each

    @property
    def dtypes(self) -> str:
        """The dtypes of operands and result, and the algorithm if it is not the default."""
        dtypes = f"{' x '.join(self.operands)} -> {self.result}"
        return f"{dtypes}, {self.algorithm}" if self.algorithm else dtypes


class Collective(NamedTuple):
    """A collective of one array, as `jmpx.inspect.Compiled` describes it."""

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
        return self.bytes * 8 <= _bits(self.dtype)


def _bits(dtype: str) -> int:
    """Returns the size of a dtype of HLO, such as `bf16`, `f8e4m3fn` or `pred`."""
    return 8 if dtype == "pred" else int(re.sub(r"^\D*(\d+).*", r"\1", dtype))


Found = Product | Collective
_FUSION = re.compile(r'"kind":"(__\w+)"')


def candidates(module: Module) -> dict[str, list[Found]]:
    """Returns the product of an instruction, or a collective for each of its arrays, by its key.

    The list of an instruction is empty if another one is counted instead.
    """
    fusions = [one for one in module.instructions.values() if one.kind == "fusion"]
    searched = ((one.called[0], _FUSION.search(one.rest)) for one in fusions)
    kernels = {computation: found[1] for computation, found in searched if found}
    result, chains = dict[str, list[Found]](), set[str]()
    for key, one in module.instructions.items():
        if (kind := one.kind.removesuffix("-start")) in COLLECTIVES:
            # The TPU compiler splits a gather that overlaps products over their fusions, which have
            # one `chain_id`.
            chain = one.attributes.get("chain_id", key)
            result[key] = [] if chain in chains else _collectives(kind, one, module.devices)
            chains.add(chain)
        elif kind := kind_of(one):
            arrays = [operand[0] for operand in module.operands(one)[:2] if operand]
            product = Product(
                kind,
                tuple(dtype for dtype, _ in arrays),
                one.arrays[0][0] if one.arrays else "",
                _algorithm(one.rest),
                one.target or kernels.get(one.computation, ""),
                0 if kind == KERNEL else _flops(kind, one, *(shape for _, shape in arrays)),
                scope=one.scope,
            )
            result[key] = [product]
    return result


# --- Collectives ---


def _collectives(kind: str, one: Instruction, devices: int) -> list[Found]:
    arrays, group = one.arrays, _group(one.rest, devices)
    if one.kind == "collective-permute-start":
        arrays = arrays[1:2]  # the operand, the result and, on TPUs, semaphores
    elif one.kind.endswith("-start") and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # the operands, then the results
    parts = group if kind == "reduce-scatter" else 1
    if one.computation.startswith("%all-reduce-scatter"):
        # The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice.
        parts, kind = 1, "reduce-scatter"
    return [
        Collective(kind, dtype, parts * math.prod(shape) * _bits(dtype) // 8, group)
        for dtype, shape in arrays
    ]


# Groups of devices have three forms: lists `{{0,1},{2,3}}`, a range in the shape
# `[groups,devices]<=[...]` and, since JAX 0.10, axes of a mesh.
_LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_RANGE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=@?mesh\[([^]]*)\] ?\{([^}]*)\}")


def _group(rest: str, devices: int) -> int:
    """Returns the size of a collective's groups of devices; without groups, it is all devices."""
    if found := _LISTS.search(rest):
        return found[1].count(",") + 1
    if found := _RANGE.search(rest):
        return int(found[1])
    if found := _MESH.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


# --- Products ---

Shape = tuple[int, ...]
_PRECISION = re.compile(r'operand_precision(?:":\[|=\{)([\w",]+)')
_ALGORITHM = re.compile(r'\balgorithm(?:":"ALG_(?:DOT_)?|=dot_)(\w+)')
# In attributes, such as `rhs_batch_dims={0}`, and in the configuration of cuBLAS.
_JOINED = re.compile(r'rhs_(?:contracting|batch|group)_dim(?:ension)?s"?[=:] *[\[{]([^]}]*)')
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions": *\[([^]]*)')
# The fields of a window for each axis, and their defaults.
_WINDOW = {"lhs_dilate": 9 * "1x", "rhs_dilate": 9 * "1x", "stride": 9 * "1x", "pad": 9 * "0_0x"}


def kind_of(one: Instruction) -> str:
    """Returns the kind of product that an instruction is; "" if it is none."""
    if one.kind in PRODUCTS:
        return one.kind
    return next((kind for start, kind in CALLS.items() if one.target.startswith(start)), "")


def _algorithm(rest: str) -> str:
    """Returns the algorithm or precision that a product asks for; "" if it is the default."""
    if (found := _ALGORITHM.search(rest)) and found[1] != "UNSET":
        return found[1].lower()
    found = _PRECISION.search(rest)
    words = {*re.findall(r"\w+", found[1].lower())} if found else set()
    return "" if words <= {"default"} else ", ".join(sorted(words))


def _flops(kind: str, one: Instruction, lhs: Shape, rhs: Shape) -> int:
    """Returns the FLOPs of one run: two for each multiplication with its addition."""
    result = one.arrays[0][1]
    if kind == "convolution":
        if "BackwardInput" in one.target:
            return _convolution(one, result, rhs, lhs)
        swaps = "BackwardFilter" in one.target
        return _convolution(one, lhs, result, rhs) if swaps else _convolution(one, lhs, rhs, result)
    if kind == "attention":  # masked scores count; the backward pass makes one product again
        keys = _integers((_SCORES.findall(one.rest) or ["0"])[0])[-1]
        return (5 if "Backward" in one.target else 2) * 2 * math.prod(lhs) * keys
    if kind == "scaled-dot" and one.target:  # of the rows and summed axes of both, maybe batched
        return 2 * math.prod(lhs) * rhs[-2]
    joined = {axis for axes in _JOINED.findall(one.rest) for axis in _integers(axes)}
    columns = math.prod(size for axis, size in enumerate(rhs) if axis not in joined)
    return 2 * math.prod(lhs) * columns


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", text)]


def _convolution(one: Instruction, inputs: Shape, kernel: Shape, outputs: Shape) -> int:
    """Counts FLOPs without padding. A grouped kernel has the inputs of one group only."""
    of_inputs, of_kernel, of_outputs = re.split("_|->", one.attributes["dim_labels"])
    count = outputs[of_outputs.index("b")] * outputs[of_outputs.index("f")]
    count *= kernel[of_kernel.index("i")]
    for index, axis in enumerate(sorted(filter(str.isdigit, of_outputs))):
        lhs, rhs, stride, pad = (
            _integers(one.attributes.get(name, default).split("x")[index])[0]
            for name, default in _WINDOW.items()
        )
        count *= taps(
            (inputs[of_inputs.index(axis)], lhs),
            (kernel[of_kernel.index(axis)], rhs),
            (outputs[of_outputs.index(axis)], stride),
            pad,
        )
    return 2 * count


# --- How often each runs, and which inputs and outputs it is of ---


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
CALLING = frozenset({"async-start", "call", "fusion"})
CONSTANTS = frozenset({"constant", "iota", "partition-id", "replica-id"})
# The operands that reach the result; the others are indices or predicates.
READ = {"select": slice(1, None), "dynamic-update-slice": slice(2), "dynamic-slice": slice(1)}
# Custom calls that return their operands, in another sharding; those of Shardy make a tuple.
SHARDINGS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
SHARDY = "xla.sdy."


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
            return results[0] if one.kind in CALLING else UNKNOWN
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
        trips = one.trips
        if trips is None:
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
