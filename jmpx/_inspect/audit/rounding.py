"""Findings: numbers that a 16-bit dtype cannot hold, and casts that lose digits or time."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import (
    AUTOCAST,
    CAST,
    LOW,
    MOVES,
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
_ENDS = (-1.0, 0.0, 1.0)  # what bounds keep away from
_MANY = 2**20  # of more numbers, a constant is not looked at
# These hand a constant on among other operands.
_CHOICES = frozenset({"select_n", "pad", "concatenate", "max", "min", "clamp", "neg"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "rem"})


def search(step: Step) -> Iterator[Found]:
    """Yields the findings about constants and casts."""
    for node in step.streams.forward:
        if node.name == CAST:
            yield from _cast_constant(step, node)
            is_told = id(node) in step.explained or step.streams.is_of_leak(node.results[0])
            if not is_told and not _is_of_autocast(step.graph, node):
                yield from _casts(step, node)
        elif node.name in _ARITHMETIC and node.results[0].dtype == _FLOAT16:
            yield from _lost_literal(step, node)


def _found(step: Step, kind: Kind, severity: str, node: Node, text: str, advice: str) -> Found:
    nbytes = node.results[0].nbytes * node.times
    return step.found(kind, severity, node, text, advice, nbytes=nbytes)


# Constants.

_INSTEAD = "use a number that float16 holds, such as jnp.finfo(x.dtype).min for a mask"
_LARGER = "use a larger number, such as 1e-4, or compute this in float32"


def _cast_constant(step: Step, node: Node) -> Iterator[Found]:
    """Yields a finding where a constant is cast to 16 bits, which cannot hold it."""
    source, result = node.operands[0], node.results[0]
    if source.dtype not in WIDE or any(each.name == "is_finite" for each in result.readers):
        return  # What asks whether it is finite replaces it, as autocast does.
    number = _beyond(source) if result.dtype == _FLOAT16 else None
    if number is not None:
        became, advice = ("inf", _INSTEAD) if abs(number) > 1 else ("0", _LARGER)
        sign = "-" if became == "inf" and number < 0 else ""
        text = f"The constant {number:g} is {sign}{became} in float16."
        yield _found(step, _CONSTANT, "high", node, text, advice)
    elif result.dtype in LOW and _is_bound(result):
        yield from _moved_bound(step, node)


def _is_bound(value: Value) -> bool:
    """Whether numbers are kept above or below a value."""
    return any(
        each.name in ("max", "min", "clamp") or each.name in MOVES and _is_bound(each.results[0])
        for each in value.readers
    )


def _moved_bound(step: Step, node: Node) -> Iterator[Found]:
    """Yields a finding where a bound such as 1 - 1e-7 is rounded onto the end of a range."""
    constant, dtype = unmoved(node.operands[0]).constant, node.results[0].dtype
    if constant is None or np.size(constant) > _MANY:
        return
    bounds = np.asarray(constant).ravel()
    with np.errstate(over="ignore"):
        rounded = np.asarray(bounds.astype(dtype), np.float64)
    for bound in bounds[np.isin(rounded, _ENDS) & ~np.isin(bounds, _ENDS)][:1]:
        end = float(np.asarray(bound, dtype))
        text = (
            f"The bound {bound:.8g} is {end:g} in {dtype.name}: it keeps nothing away from there."
        )
        advice = "clip in float32, with x.astype(jnp.float32), up to what reads the result"
        yield _found(step, _CONSTANT, "high", node, text, advice)


def _beyond(value: Value, depth: int = 8) -> float | None:
    """Returns a number in a constant that is inf or 0 in float16; None if there is none."""
    node = value.node
    if value.kind in ("literal", "const"):
        return _beyond_numbers(value.constant) if value.size <= _MANY else None
    if node is None or depth == 0:
        return None
    if node.name in MOVES or (node.name == CAST and node.operands[0].dtype in WIDE):
        return _beyond(node.operands[0], depth - 1)
    if node.name in _CHOICES:
        found = (_beyond(each, depth - 1) for each in node.operands if each.dtype in WIDE)
        return next((number for number in found if number is not None), None)
    return _beyond_mask(*node.operands) if node.name == "mul" else None


def _beyond_mask(left: Value, right: Value) -> float | None:
    """Returns the number beyond float16 that a mask of ones is multiplied by; None without one."""
    for factor, mask in ((left, right), (right, left)):
        number = number_of(factor)
        if number is not None and abs(number) >= _LARGEST + 16 and _has_ones(mask):
            return number
    return None


def _has_ones(value: Value) -> bool:
    """Whether an array is an argument, of booleans or integers, or 1 minus such a mask."""
    value = unmoved(value)
    node = value.node
    if node is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return value.kind != "literal"
    return node.name == "sub" and number_of(node.operands[0]) == 1


def _beyond_numbers(constant: object) -> float | None:
    try:
        numbers = np.asarray(constant, np.float64)
    except TypeError:  # a random key, or an abstract array
        return None
    size = np.abs(numbers)
    # float16 rounds up to its largest and smallest numbers from half a unit beyond.
    beyond = np.isfinite(size) & ((size >= _LARGEST + 16) | ((size > 0) & (size <= _SMALLEST / 2)))
    return float(numbers[beyond].flat[0]) if beyond.any() else None


def _lost_literal(step: Step, node: Node) -> Iterator[Found]:
    """Yields a finding where a Python number met a float16 array, in which it is inf or 0.

    JAX writes such a number into the program in float16. A 0 that is added last was a number too
    small: people do not write `x + 0`, while `sum` writes `0 + x`.
    """
    for index, value in enumerate(node.operands[:2]):
        number = number_of(value) if value.kind == "literal" else None
        if number is not None and np.isinf(number):
            text = f"A number beyond 65504, the largest of float16, became {number:g} in it."
            yield _found(step, _CONSTANT, "high", node, text, _INSTEAD)
        elif number == 0 and index == 1:
            text = "A number below 6e-8, the smallest of float16, became 0 in it."
            yield _found(step, _CONSTANT, "medium", node, text, _LARGER)


# Casts.


def _casts(step: Step, node: Node) -> Iterator[Found]:
    """Yields findings about a cast of what another cast made."""
    (source,), (result,) = node.operands, node.results
    earlier = _cast_before(source)
    first = None if earlier is None else earlier.operands[0]
    if source.dtype in LOW and result.dtype in LOW and source.dtype != result.dtype:
        yield _rounded_twice(step, node, source, first)
    elif earlier is None or first is None:
        return
    elif first.dtype in LOW and source.dtype in WIDE and result.dtype in LOW:
        if first.dtype != result.dtype:
            yield _rounded_twice(step, node, first, None)
        elif len(source.readers) == 1:
            text = f"A {first.dtype.name} value is cast to {source.dtype.name} and back unchanged."
            yield _found(step, _TO_AND_FRO, "low", node, text, "leave out both casts")
    elif first.dtype in WIDE and source.dtype in LOW and result.dtype in WIDE:
        if _is_meant(step.graph, node, earlier):
            return
        names = " to ".join(value.dtype.name for value in (first, source, result))
        text = f"A value is cast from {names}, with nothing between: its digits are lost."
        advice = f"read the {first.dtype.name} value, or leave out the cast back"
        yield _found(step, _TO_AND_FRO, "medium", node, text, advice)


def _is_meant(graph: Graph, node: Node, earlier: Node) -> bool:
    """Whether a float32 value is rounded to 16 bits on purpose before it is cast up again."""
    (first,), (result,) = earlier.operands, node.results
    if _is_of_sum(first) or all(_is_sum(reader) for reader in result.readers):
        return True  # jnp.sum and jnp.mean add 16-bit numbers in float32, and round the result
    if not _is_only_widened(earlier.results[0]):
        return True  # others read it in 16 bits
    return not graph.policy(node) and call(earlier) == call(node)


def _is_of_autocast(graph: Graph, node: Node) -> bool:
    """Whether autocast rounds what a cast returns: as a part of what the user wrote around it."""
    rounding = node if node.results[0].dtype in LOW else _cast_before(node.operands[0])
    if rounding is None or AUTOCAST not in graph.program.takers:
        return False
    own, maker = call(rounding), rounding.operands[0].node
    around = [each for each in (maker, *rounding.results[0].readers) if each is not None]
    return own is not None and any(call(each) == own for each in around)


def _is_only_widened(value: Value) -> bool:
    """Whether all operations of the forward pass that read a 16-bit value read it cast up."""
    return all(
        reader.is_backward
        or (reader.name == CAST and reader.results[0].dtype in WIDE)
        or (reader.name in MOVES and _is_only_widened(reader.results[0]))
        for reader in value.readers
    )


def _is_sum(node: Node | None) -> bool:
    return node is not None and node.name.startswith(("reduce_", "cum"))


def _is_of_sum(value: Value) -> bool:
    """Whether a value is a sum or a mean."""
    node = value.node
    if node is not None and node.name in ("div", "mul"):
        value = node.operands[0]
    return _is_sum(before(value, MOVES).node)


def _rounded_twice(step: Step, node: Node, source: Value, first: Value | None) -> Found:
    """Returns a finding about a value of one 16-bit dtype that is rounded to the other."""
    result, stored = node.results[0], before(source, MOVES)
    if stored.kind == "input":
        name = step.graph.program.names[stored.index]
        text = (
            f"The {source.dtype.name} argument `{name}` is rounded to {result.dtype.name}: it was "
            "rounded when it was stored."
        )
        advice = f"store it in float32, or compute in {source.dtype.name}"
    else:
        was = "" if first is None else f"A {first.dtype.name} value is cast to "
        text = f"{was or 'A value in '}{source.dtype.name}{' and' if was else ' is cast'} to "
        text += f"{result.dtype.name}: it is rounded twice."
        advice = "cast once, from float32, or use one 16-bit dtype"
    return _found(step, _TWICE, "medium", node, text, advice)


def _cast_before(value: Value) -> Node | None:
    """Returns the cast that made a value, which was only moved since."""
    maker = before(value, MOVES).node
    return maker if maker is not None and maker.name == CAST else None
