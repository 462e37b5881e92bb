"""Rules of single primitives: they run as a kind of `kinds.py` does, with an exception."""

import jax.numpy as jnp

from jmpx._autocast.binding import (
    bind,
    fill_value,
    float32_values,
    is_float32,
    promoted,
    run_as_traced,
    run_promoted,
)
from jmpx._autocast.kinds import (
    compare,
    full,
    low,
    power,
    promote,
    promote_finite,
    scale_checking,
)
from jmpx._autocast.multiplied import is_outer
from jmpx._autocast.products import is_precise, with_algorithms
from jmpx._autocast.rules import Context, register
from jmpx._autocast.value import FLOAT32, Value
from jmpx._jaxprs.core import Equation
from jmpx._jaxprs.scopes import RESTORE


@register("dot_general", cached=True)
def dot_general(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `low`; an outer product runs as `promote`, because it sums nothing.

    The angles of a rotary embedding are one: positions times frequencies.
    """
    if is_outer(equation) and not is_precise(equation):
        params = with_algorithms(context, equation, promoted(equation, values))
        return run_promoted(equation, values, **params)
    return low(context, equation, values)


@register("mul", cached=True)
def mul(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `scale`, but does not examine factors that are arrays of parameters.

    They are in every layer, and their products in float32 would cost memory.
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
    """Runs as `promote_finite`; in float32 if an exponential reads it, as in a softmax."""
    if equation.outvars[0] in context.neighbours.statistics:
        return full(context, equation, values)
    return promote_finite(context, equation, values)


@register("eq", cached=True)
def eq(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `compare`; next to a maximum it rounds both sides, as the maximum was rounded."""
    if equation.outvars[0] in context.neighbours.choices:
        return promote(context, equation, values)
    return compare(context, equation, values)


@register("gather", cached=True, keeps_finite=True)
def gather(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs as `promote_finite`; the number for indices out of bounds stays finite, too."""
    params = fill_value(equation, promoted(equation, values))
    return run_promoted(equation, values, Value.to_finite, **params)


@register("get", "swap")
def access(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs in float32; the result is not weak, as the reference may hold a sum."""
    return run_as_traced(context, equation, values, is_weak=False)


@register("convert_element_type", everywhere=True)
def convert_element_type(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs a cast that the user wrote.

    A cast from float32 to float32 does not count: JAX writes one where only the weak type changes.
    Neither does that of an inner autocast, which gives its results their float32 back.
    """
    (value,), (atom,) = values, equation.invars
    if equation.params["new_dtype"] != FLOAT32:
        return bind(equation, values, [value.array], value.is_weak)
    is_restored = context.scope.endswith(RESTORE) and not context.region.is_full
    if is_float32(atom) or is_restored:
        return [value]
    is_float = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    return bind(equation, values, [value.array], is_weak=not is_float)
