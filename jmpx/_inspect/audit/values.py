"""Facts about nodes and values: products, origins of numbers, and their signs."""

import itertools

import numpy as np

from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.graph import LOW, Graph, Node, Value
from jmpx._jaxprs.equations import IDENTITIES, PICKS, PLACEMENTS, RESHAPES

CAST = "convert_element_type"

# Primitives that only move numbers of their first operand. Those that join several operands, or
# parts of several devices, are not among them.
MOVES = IDENTITIES | PLACEMENTS | RESHAPES | PICKS | {"stack", "result", "shard", "unshard"}
MOVES_AND_CASTS = MOVES | {CAST}


# --- Products ---


_ALGORITHMS = {"BF16_BF16_": "bfloat16", "F16_F16_": "float16"}  # the beginnings of their names


def multiplied(node: Node) -> list[str]:
    """Returns the names of the dtypes that a product multiplies in.

    Operands that were rounded to 8 bits, widened and scaled are multiplied in 8 bits.
    """
    name = getattr(node.eqn.params.get("precision"), "name", "")
    if not name.endswith(("_X3", "_X6", "_X9")):  # these multiply several parts of each number
        for start, dtype in _ALGORITHMS.items():
            if name.startswith(start):
                return [dtype, dtype]
    operands = node.operands[:2]
    dtypes = [_stored(value) for value in operands]
    is_eight_bits = all(dtype.itemsize == 1 and is_floating_dtype(dtype) for dtype in dtypes)
    return [dtype.name for dtype in (dtypes if is_eight_bits else [v.dtype for v in operands])]


def is_half_product(node: Node) -> bool:
    """Whether a node is a product that multiplies in 16 bits."""
    return node.is_product and all(np.dtype(name) in LOW for name in multiplied(node))


def _stored(value: Value) -> np.dtype:
    """Returns the dtype that a value had before moves, casts and scales; or one of 8 bits."""
    while value.dtype.itemsize > 1 and value.node is not None:
        if value.node.name not in MOVES_AND_CASTS | {"mul"}:
            break
        value = value.node.operands[0]
    return value.dtype


# --- Origins ---


def reaches_end(node: Node, avoided: frozenset[np.dtype] = frozenset()) -> bool:
    """Whether a result reaches the end of the forward pass without products or avoided dtypes."""

    def kept(node: Node) -> list[Value]:
        return [value for value in node.results if value.dtype not in avoided]

    def through(node: Node) -> list[Value]:
        return [] if node.is_backward or node.is_product else kept(node)

    readers = Graph.forward(kept(node), through)
    values = itertools.chain(kept(node), *map(through, readers))
    return any(v.is_output or (not v.readers and v.shape == ()) for v in values)


# --- Signs ---

# The exponential of a number that is at most 0 cannot overflow: so softmax subtracts the maximum.
_DEPTH = 6  # how many operations are followed for a sign; softmax needs three
_MOST = 64  # nodes that are searched for a maximum
_MAXIMA = frozenset({"max", "reduce_max", "cummax", "pmax"})
_WITHIN = _MAXIMA | {"select_n", "add"}  # between a number and one at least as large


def is_at_most_zero(value: Value) -> bool:
    """Whether all numbers of a value are known to be at most 0, as `x - max(x)` is."""
    return _sign(value, _DEPTH) < 0


def is_sum_of_exponentials(value: Value) -> bool:
    """Whether a value is an exponential of numbers that are at most 0, or a sum of such."""
    node = value.unmoved.node
    while node is not None and node.name in ("abs", "reduce_sum"):
        node = node.operands[0].unmoved.node
    return node is not None and node.name == "exp" and is_at_most_zero(node.operands[0])


def _sign(value: Value, depth: int) -> int:
    """Returns 1 if no number of a value is negative, -1 if none is positive, and 0 if unknown."""
    value = value.unmoved
    constant = value.number
    if constant is not None:
        return (constant > 0) - (constant < 0)
    node = value.node
    if node is None or depth == 0 or node.is_structure:
        return 0
    if node.name in ("abs", "square", "exp", "exp2", "logistic"):
        return 1
    if node.name == "integer_pow":
        return int(node.eqn.params["y"] % 2 == 0)
    if node.name == "log":
        return int(is_sum_of_exponentials(node.operands[0]))
    if node.name in ("neg", "reduce_sum"):
        return _sign(node.operands[0], depth - 1) * (-1 if node.name == "neg" else 1)
    return _sign_of_two(node, depth - 1) if node.name in ("mul", "div", "sub") else 0


def _sign_of_two(node: Node, depth: int) -> int:
    left, right = (value.unmoved for value in node.operands)
    if node.name != "sub":
        return 1 if left is right else _sign(left, depth) * _sign(right, depth)
    is_less = _sign(left, depth) < 0 and _sign(right, depth) > 0
    return -int(is_less or _is_no_smaller(right, left))


def _is_no_smaller(value: Value, other: Value) -> bool:
    """Whether a value is at least another one, because a maximum with it went into the value."""
    others = [other]
    if other.node is not None and other.node.name == "select_n":  # x where it is finite, say
        others += [each.unmoved for each in other.node.operands[1:]]
    constants = {each.number for each in others} - {None}

    def through(node: Node) -> list[Value]:
        return node.operands if node.name in _WITHIN else node.operands[: node.is_view]

    def behind(values: list[Value]) -> list[Node]:
        return list(Graph.back(values, through, _MOST))

    joined = [v for node in behind([value]) if node.name in _MAXIMA for v in node.operands]
    found = [*joined, *(v for node in behind(joined) for v in through(node))]
    return any(each.unmoved in others or each.number in constants for each in found)
