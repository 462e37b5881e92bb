"""Norms end their float32 island: a result is rounded where the first reader outside of them is.

A norm runs in float32, because its statistics do: the array less the mean, times the inverse root
and a scale, plus a bias. What it returns is *pending*. Where it is read by an activation, a sum, a
slice or another operation that would run in 16 bits on an array of 16 bits, it is rounded, once for
all of these, so that all that follows up to the next product does not run in float32. Steps of the
norm itself, and what runs in float32 anyway, read it as it is: rounded before its scale, a norm
would have worse gradients.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jmpx._autocast.kinds import full, keep, low, saturating
from jmpx._autocast.neighbours import SUMS
from jmpx._autocast.rules import Operation, is_float32, lookup
from jmpx._autocast.value import BFLOAT16, FLOAT32, LOW, Value
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, operation_name
from jmpx._jaxprs.inner import any_holds
from jmpx._jaxprs.moves import IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES

_SCALING = frozenset("sub mul div".split())
_AFFINE = frozenset("add sub mul div neg add_any".split())
# Results of statistics that are statistics. Logarithms are not among them: a softmax subtracts one
# that is not to be rounded.
_OF_STATISTICS = frozenset(
    """
    add sub mul div neg add_any max min clamp abs sqrt rsqrt square integer_pow pow select_n
    psum psum_invariant convert_element_type
    """.split()
)
_OF_STATISTICS |= RESHAPES | PICKS | JOINS | IDENTITIES | PLACEMENTS
_KNOWN = _AFFINE | SUMS | _OF_STATISTICS
# These hold each number of an array in its order, if they hold all.
_SHAPES = (RESHAPES | PICKS) - {"transpose", "rev"}
# These run in float32 on a pending operand: roots, and what chooses the largest numbers.
_WIDE = frozenset(
    "dot_general get swap sqrt cbrt reduce_max reduce_min top_k approx_top_k sort".split()
)


def read_pending(operation: Operation) -> Operation:
    """Returns an operation that reads pending operands as it should: in float32 or rounded."""
    operation = _with_running_statistics(operation)
    if not any(value.pending for value in operation.values):
        return operation
    return operation._replace(
        values=[
            Value(value.to(value.pending), is_weak=False, tangent=value.tangent)
            if value.pending and not _reads_float32(operation, i)
            else value
            for i, value in enumerate(operation.values)
        ]
    )


def note_pending(operation: Operation, results: Sequence[Value]) -> None:
    """Notes which results of an operation are pending, and which are statistics."""
    name, values = operation.name, operation.values
    if name not in _KNOWN or not _is_default(operation):
        return
    first = results[0]
    if first.dtype != FLOAT32 or first.is_weak:
        return
    dtype = values[0].pending if _keeps_all(operation) else _affine_dtype(operation)
    if dtype is not None:
        first.pending = dtype
    elif name in SUMS and first.array.size < values[0].array.size:
        first.statistic = first.array.size
    elif name in _OF_STATISTICS:
        floats = operation.float32_values
        if all(value.statistic or value.is_weak for value in floats):
            for result in results:
                result.statistic = max((value.statistic for value in floats), default=0)


def _is_default(operation: Operation) -> bool:
    """Whether no policy rule gives the operation float32, or its primitive any dtype."""
    return not operation.region.is_full and operation.override is None


def _keeps_all(operation: Operation) -> bool:
    """Whether the result holds all numbers of its operand, in their order."""
    if operation.name not in _SHAPES:
        return False
    return operation.result.aval.size == operation.values[0].array.size


def _affine_dtype(operation: Operation) -> np.dtype | None:
    """Returns the dtype in which the result of a step of a norm is pending, None for another.

    One operand is the array that is normalized, in 16 bits or pending itself. The others are
    weak, or statistics.
    """
    name, values, neighbours = operation.name, operation.values, operation.neighbours
    if name not in _AFFINE or not all(map(is_float32, operation.equation.invars)):
        return None
    if neighbours.multiplied is None or operation.result not in neighbours.multiplied:
        return None
    dtypes = [value.pending or (None if value.is_weak else value.dtype) for value in values]
    active = [i for i, dtype in enumerate(dtypes) if dtype == BFLOAT16]
    if len(active) != 1 or (name == "div" and active != [0]):
        return None
    (array,), size = (values[i] for i in active), operation.result.aval.size
    others = [value for value in values if value is not array]
    if not all(value.is_weak or 0 < value.statistic < size for value in others):
        return None
    is_step = array.pending or any(not value.is_weak for value in others)
    return BFLOAT16 if is_step else None


def _reads_float32(operation: Operation, i: int) -> bool:
    """Whether an operation reads a pending operand as float32."""
    name, equation, neighbours = operation.name, operation.equation, operation.neighbours
    entry = lookup(equation)
    if name == "custom_jvp_call":
        return any_holds(equation.params["call_jaxpr"], _begins_in_float32)
    if name == "scan" and i >= sum(core.scan_counts(equation)):
        return equation.params["length"] == 1
    if entry is None or entry.everywhere:
        return True
    if not _is_default(operation) or entry.rule in (full, keep, low) or name in _WIDE:
        return True
    is_wide = any(
        value.dtype == FLOAT32 and not value.is_weak and not value.pending
        for value in operation.float32_values
    )
    if is_wide or operation.result in neighbours.choices:  # rounded if the maximum was
        return is_wide
    return (
        not any(var in (neighbours.multiplied or ()) for var in equation.outvars)
        or not is_float32(operation.result)
        or _keeps_all(operation)
        or _affine_dtype(operation) is not None
        or operation.result in neighbours.statistics
        or (name == "mul" and operation.result in neighbours.summed)
        or (name == "div" and i == 1)
        or (entry.rule is saturating and operation.is_exposed)
    )


def _begins_in_float32(equation: Equation) -> bool:
    """Whether a function with this equation may read a pending operand in float32."""
    entry = lookup(equation)
    is_wide = entry is None or entry.rule in (full, keep)
    return is_wide or operation_name(equation.primitive.name) in _AFFINE


def _with_running_statistics(operation: Operation) -> Operation:
    """Returns a step of a norm whose weak statistics are not weak: those of a batch are not.

    Running means are inputs, which are weak: they would be rounded to the dtype of the array.
    """
    normalized, equation = operation.neighbours.normalized, operation.equation
    if not normalized or operation.name not in _SCALING or not _is_default(operation):
        return operation
    # Of `(x - mean) * root`, and of `x * scale * root`.
    atoms = equation.outvars if operation.name == "sub" else (*equation.invars, *equation.outvars)
    if not any(not core.is_literal(atom) and atom in normalized for atom in atoms):
        return operation
    if not any(value.dtype in LOW or value.pending for value in operation.values):
        return operation
    return operation._replace(
        values=[
            dataclasses.replace(value, is_weak=False, data=False, source=None, statistic=1)
            if value.dtype == FLOAT32 and value.is_weak and value.array.size > 1
            else value
            for value in operation.values
        ]
    )
