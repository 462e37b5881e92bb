"""Findings: numbers that float16 cannot hold, and casts that lose digits."""

from collections.abc import Iterator

import numpy as np

from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import (
    AUTOCAST,
    CAST,
    LOW,
    MOVES,
    MOVES_AND_CASTS,
    WIDE,
    before,
    call,
    number as number_of,
    source as unmoved,
)
from jmpx._inspect.graph import Graph, Node, Value

_CONSTANT = Kind("constant-range", Remedies.wider)
_TO_AND_FRO = Kind("cast-to-and-fro", Remedies.wider_makers)
_TWICE = Kind("double-rounding", Remedies.wider_makers)
KINDS = (_CONSTANT, _TO_AND_FRO, _TWICE)

_FLOAT16 = np.dtype(np.float16)
_LARGEST, _SMALLEST = 65504.0, 2.0**-24  # of float16
_MANY = 2**20  # of more numbers, a constant is not looked at
# These hand a constant on among other operands.
_CHOICES = frozenset({"select_n", "pad", "concatenate", "max", "min", "clamp", "neg"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "rem"})


def search(step: Step) -> Iterator[Found]:
    """Yields the findings about constants and casts."""
    for node in step.streams.forward:
        if node.results and node.results[0].dtype == _FLOAT16:
            yield from _constant(step, node)
        if node.name == CAST and id(node) not in step.explained:
            yield from _casts(step, node)


def _found(step: Step, kind: Kind, severity: str, node: Node, text: str, advice: str) -> Found:
    nbytes = node.results[0].nbytes * node.times
    return step.found(kind, severity, node, text, advice, nbytes=nbytes)


# Constants.


def _constant(step: Step, node: Node) -> Iterator[Found]:
    """Yields a finding about a number that is infinite or 0 in float16."""
    is_cast = node.name == CAST and node.operands[0].dtype in WIDE
    number = _beyond(node.operands[0]) if is_cast else _lost_literal(node)
    # What asks whether a number is finite replaces it, as autocast does.
    if number is None or any(each.name == "is_finite" for each in node.results[0].readers):
        return
    what = f"The constant {number:g} is" if is_cast else "A number became"
    is_large = abs(number) > 1
    became, limit = ("inf", "largest is 65504") if is_large else ("0", "smallest is 6e-8")
    text = f"{what} {'-' * (number < -1)}{became} in float16, whose {limit}."
    advice = "use a number that float16 holds: jnp.finfo(x.dtype).min in a mask, an epsilon of 1e-4"
    yield _found(step, _CONSTANT, "high", node, text, advice)


def _beyond(value: Value, depth: int = 8) -> float | None:
    """Returns a number in a constant that is inf or 0 in float16; None if there is none."""
    node = value.node
    if value.kind in ("literal", "const"):
        return _beyond_numbers(value.constant) if value.size <= _MANY else None
    if node is None or depth == 0:
        return None
    operands = node.operands if node.name in _CHOICES else []
    if node.name in MOVES_AND_CASTS:
        operands = node.operands[:1]
    is_product = node.name == "mul"
    if is_product:  # of a mask of ones and a number
        left, right = node.operands
        operands = [one for one, other in ((left, right), (right, left)) if _is_mask(other)]
    found = (_beyond(each, depth - 1) for each in operands if each.dtype in WIDE)
    return next((n for n in found if n is not None and (abs(n) > 1 or not is_product)), None)


def _is_mask(value: Value) -> bool:
    """Whether an array is an argument, of booleans or integers, or 1 minus such a mask."""
    value = unmoved(value)
    node = value.node
    if node is None or value.dtype not in LOW | WIDE:
        return value.kind != "literal"
    return node.name == "sub" and number_of(node.operands[0]) == 1


def _beyond_numbers(constant: object) -> float | None:
    try:
        numbers = np.asarray(constant, np.float64)
    except TypeError:  # an abstract array
        return None
    size = np.abs(numbers)
    # float16 rounds up to its largest and smallest numbers from half a unit beyond.
    beyond = np.isfinite(size) & ((size >= _LARGEST + 16) | ((size > 0) & (size <= _SMALLEST / 2)))
    return float(numbers[beyond].flat[0]) if beyond.any() else None


def _lost_literal(node: Node) -> float | None:
    """Returns what a Python number became in a float16 array: infinity, or 0 for an epsilon.

    JAX writes such a number into the program in float16. A first 0 is of a `sum`.
    """
    for index, value in enumerate(node.operands[:2] if node.name in _ARITHMETIC else ()):
        number = number_of(value) if value.kind == "literal" else None
        is_added = number == 0 and index == 1 and node.name == "add"
        is_epsilon = is_added and _is_kept_from_zero(node.results[0])
        if number is not None and (np.isinf(number) or is_epsilon):
            return number
    return None


def _is_kept_from_zero(value: Value) -> bool:
    """Whether a value is read as a divisor is, which an epsilon keeps away from 0."""
    return any(
        reader.name in ("log", "rsqrt", "sqrt")
        or (reader.name == "div" and value is reader.operands[1])
        or (reader.name in MOVES and _is_kept_from_zero(reader.results[0]))
        for reader in value.readers
    )


# Casts.


def _casts(step: Step, node: Node) -> Iterator[Found]:
    """Yields a finding about a cast of what another cast made."""
    (source,), (result,) = node.operands, node.results
    maker = before(source, MOVES).node
    earlier = maker if maker is not None and maker.name == CAST else None
    first = source if earlier is None else earlier.operands[0]
    stored = source if source.dtype in LOW else first
    if result.dtype in LOW and stored.dtype in LOW and stored.dtype != result.dtype:
        origin = before(stored, MOVES)
        is_argument = origin.kind == "input"
        name = f"argument `{step.graph.program.names[origin.index]}`" if is_argument else "value"
        text = f"A {stored.dtype.name} {name} is cast to {result.dtype.name}: it is rounded twice."
        advice = "cast once, from float32, or use one 16-bit dtype"
        yield _found(step, _TWICE, "medium", node, text, advice)
    elif (
        earlier is not None
        and first.dtype in WIDE
        and source.dtype in LOW
        and result.dtype in WIDE
        and not step.streams.is_of_leak(result)
        and not _is_meant(step.graph, node, earlier)
    ):
        names = " to ".join(value.dtype.name for value in (first, source, result))
        text = f"A value is cast from {names}, with nothing between: its digits are lost."
        advice = f"read the {first.dtype.name} value, or leave out the cast back"
        yield _found(step, _TO_AND_FRO, "medium", node, text, advice)


def _is_meant(graph: Graph, node: Node, earlier: Node) -> bool:
    """Whether a float32 value is rounded to 16 bits on purpose before it is cast up again."""
    summed = earlier.operands[0]
    if summed.node is not None and summed.node.name in ("div", "mul"):  # a mean
        summed = summed.node.operands[0]
    sums = ("reduce_", "cum")
    maker, readers = before(summed, MOVES).node, node.results[0].readers
    if maker is not None and maker.name.startswith(sums):
        return True  # jnp.sum and jnp.mean add 16-bit numbers in float32, and round the result
    if all(reader.name.startswith(sums) for reader in readers):
        return True
    if readers and all(_is_rounded_lookup(reader) for reader in readers):
        return True  # a gather whose gradients jmpx sums in float32
    if AUTOCAST in graph.program.takers or not _is_only_widened(earlier.results[0]):
        return True  # operations of 16 bits are around it
    return not graph.policy(node) and call(earlier) == call(node)


def _is_rounded_lookup(node: Node) -> bool:
    """Whether a node picks rows that are rounded to 16 bits before anything else reads them."""
    if node.name not in ("gather", "dynamic_slice"):
        return False
    readers = [reader for reader in node.results[0].readers if not reader.is_backward]
    return all(reader.name == CAST and reader.results[0].dtype in LOW for reader in readers)


def _is_only_widened(value: Value) -> bool:
    """Whether all operations of the forward pass that read a 16-bit value read it cast up."""
    return all(
        reader.is_backward
        or (reader.name == CAST and reader.results[0].dtype in WIDE)
        or (reader.name in MOVES and _is_only_widened(reader.results[0]))
        for reader in value.readers
    )
