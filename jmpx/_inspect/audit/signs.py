"""Which numbers are at most 0, as far as the equations that computed them tell.

The exponential of such a number cannot overflow: so softmax subtracts the maximum.
"""

import numpy as np

from jmpx._inspect.audit.values import number, source
from jmpx._inspect.graph import Node, Value

_DEPTH = 6  # Softmax needs three steps.
_MOST = 32  # values that a search for a maximum looks at
_MAXIMA = frozenset({"max", "reduce_max", "cummax", "pmax"})
_WITHIN = _MAXIMA | {"select_n", "add"}  # between a number and one at least as large


def is_at_most_zero(value: Value) -> bool:
    """Whether all numbers of a value are at most 0, because a maximum of theirs was subtracted."""
    return _sign(value, _DEPTH) < 0


def is_sum_of_exponentials(value: Value) -> bool:
    """Whether a value is an exponential of numbers up to 0, or a sum of such ones."""
    node = source(value).node
    while node is not None and node.name in ("abs", "reduce_sum"):
        node = source(node.operands[0]).node
    return node is not None and node.name == "exp" and is_at_most_zero(node.operands[0])


def _sign(value: Value, depth: int) -> int:
    """Returns 1 for numbers of which none is negative, -1 for such of which none is positive."""
    value = source(value)
    constant = number(value)
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
    if node.name == "select_n":
        return -int(_selects_negative(node))
    return _sign_of_arithmetic(node, depth - 1)


def _sign_of_arithmetic(node: Node, depth: int) -> int:
    if node.name in ("mul", "div"):
        left, right = map(source, node.operands)
        return 1 if left is right else _sign(left, depth) * _sign(right, depth)
    if node.name == "sub":
        return _sign_of_difference(node, depth)
    if node.name in ("neg", "reduce_sum"):
        return _sign(node.operands[0], depth) * (-1 if node.name == "neg" else 1)
    if node.name == "min":
        return -any(_sign(v, depth) < 0 or number(v) == 0 for v in node.operands)
    return 0


def _sign_of_difference(node: Node, depth: int) -> int:
    left, right = node.operands
    if _is_no_smaller(right, source(left)):
        return -1
    return -1 if _sign(left, depth) < 0 and _sign(right, depth) > 0 else 0


def _is_no_smaller(value: Value, other: Value) -> bool:
    """Whether a maximum of some number went into a value."""
    others = [other]
    if other.node is not None and other.node.name == "select_n":  # x where it is finite, say
        others += map(source, other.node.operands[1:])
    constants = {number(each) for each in others} - {None}
    pending, seen = [(source(value), False)], 0
    while pending and seen < _MOST:
        (found, is_maximum), seen = pending.pop(), seen + 1
        if is_maximum and (found in others or number(found) in constants):
            return True
        node = found.node
        if node is not None and node.name in _WITHIN:
            is_maximum |= node.name in _MAXIMA
            pending += [(source(operand), is_maximum) for operand in node.operands]
    return False


def _selects_negative(node: Node) -> bool:
    """Whether a select replaces positive numbers by 0, as `where(x > 0, 0, x)` in `jax.nn.elu`."""
    pred = source(node.operands[0]).node
    if pred is None or pred.name not in ("gt", "ge"):
        return False
    if_false, *if_true = map(source, node.operands[1:])
    compared, zero = map(source, pred.operands)
    constants = [value.constant for value in (*if_true, zero)]
    return if_false is compared and all(c is not None and not np.any(c) for c in constants)
