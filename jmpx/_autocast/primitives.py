"""Primitives that no kind fits as it is: each has a rule of its own."""

import jax.numpy as jnp

from jmpx._autocast.binding import (
    all_yield,
    bind,
    fill_value,
    float32_values,
    is_float32,
    promoted,
    run_as_traced,
    run_in,
)
from jmpx._autocast.kinds import (
    compare,
    full,
    is_precise,
    low,
    power,
    promote,
    promote_finite,
    scale_checking,
)
from jmpx._autocast.rules import Context, register
from jmpx._autocast.value import FLOAT32, Value
from jmpx._jaxpr import Equation
from jmpx._scopes import RESTORE


@register("dot_general", cached=True)
def dot_general(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `low`; an outer product, as of positions and frequencies, sums nothing."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    if all(shape[axis] == 1 for axis in contracted) and not is_precise(equation):
        return promote(context, equation, values)
    return low(context, equation, values)


@register("mul", cached=True)
def mul(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `scale`, but arrays of parameters are not checked.

    They are factors: in float32 they would cost the backward pass memory.
    """
    result = equation.outvars[0]
    if result in context.neighbours.statistics:
        return full(context, equation, values)
    if result in context.neighbours.slopes:
        return power(context, equation, values)
    operands = float32_values(equation, values)
    checked = [value for value in operands if value.uniform or value.constant is not None]
    return scale_checking(checked, context, equation, values)


@register("sub", cached=True, keeps_finite=True)
def sub(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `promote_finite`, but in float32 as part of a softmax."""
    if equation.outvars[0] in context.neighbours.statistics:
        return full(context, equation, values)
    return promote_finite(context, equation, values)


@register("eq", cached=True)
def eq(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `compare`, but a number that a maximum may have chosen is rounded as that was."""
    if equation.outvars[0] in context.neighbours.choices:
        return promote(context, equation, values)
    return compare(context, equation, values)


@register("gather", cached=True, keeps_finite=True)
def gather(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `promote_finite`; so does the number that stands for places out of bounds."""
    if not float32_values(equation, values):
        return full(context, equation, values)
    dtype, yields = promoted(equation, values), all_yield(equation, values)
    filled = fill_value(equation, dtype)
    return run_in(dtype, equation, values, yields, Value.to_finite, **filled)


@register("get", "swap")
def access(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Reads or writes a reference in float32; as it may hold a sum, the result does not yield."""
    return run_as_traced(equation, values, yields=False)


@register("convert_element_type", everywhere=True)
def convert_element_type(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Obeys a cast that the user wrote, as far as it left a trace.

    A cast from float32 to float32 leaves none. A cast back to float32 that an inner autocast wrote
    around its results is none of the user's.
    """
    (value,), (atom,) = values, equation.invars
    if equation.params["new_dtype"] != FLOAT32:
        return bind(equation, values, [value.array], value.yields)
    is_restored = context.scope.endswith(RESTORE) and not context.region.is_full
    if is_float32(atom) or is_restored:
        return [value]
    is_float = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    return bind(equation, values, [value.array], yields=not is_float)
