"""Which numbers are at most 0, as far as the equations that computed them tell.

The exponential of such a number cannot overflow: so softmax subtracts the maximum.
"""

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
    if node.name in ("neg", "reduce_sum"):
        return _sign(node.operands[0], depth - 1) * (-1 if node.name == "neg" else 1)
    return _sign_of_two(node, depth - 1) if node.name in ("mul", "div", "sub") else 0


def _sign_of_two(node: Node, depth: int) -> int:
    left, right = map(source, node.operands)
    if node.name != "sub":
        return 1 if left is right else _sign(left, depth) * _sign(right, depth)
    is_less = _sign(left, depth) < 0 and _sign(right, depth) > 0
    return -int(is_less or _is_no_smaller(right, left))


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
