"""Rules of single primitives: they run as a kind of `kinds.py` does, with an exception."""

import jax.numpy as jnp

from jmpx._autocast.binding import (
    bind,
    fill_value,
    has_fill,
    result_dtype,
    rounded,
    run_as_traced,
    run_moved,
)
from jmpx._autocast.kinds import (
    compare,
    full,
    low,
    power,
    promote,
    promote_finite,
    scale_checking,
    update,
)
from jmpx._autocast.products import is_precise, with_algorithms
from jmpx._autocast.reads import narrow_dtype
from jmpx._autocast.rules import Operation, is_float32, register
from jmpx._autocast.value import FLOAT32, Value
from jmpx._jaxprs.backward import is_outer
from jmpx._jaxprs.scopes import RESTORE


@register("dot_general", cached=True)
def dot_general(operation: Operation) -> list[Value]:
    """Runs as `low`; an outer product runs as `promote`, because it sums nothing.

    The angles of a rotary embedding are one: positions times frequencies.
    """
    if is_outer(operation.equation) and not is_precise(operation.equation):
        dtype = operation.promoted
        params = with_algorithms(operation, dtype) | result_dtype(operation.equation, dtype)
        return promote(operation, **params)
    return low(operation)


@register("mul", cached=True)
def mul(operation: Operation) -> list[Value]:
    """Runs as `scale`, but does not examine factors that are arrays of parameters.

    They are in every layer, and their products in float32 would cost memory.
    """
    if operation.result in operation.neighbours.statistics:
        return full(operation)
    if operation.result in operation.neighbours.slopes:
        return power(operation)
    checked = [v for v in operation.float32_values if v.uniform or v.held_by is not None]
    return scale_checking(checked, operation)


@register("sub", cached=True, keeps_finite=True)
def sub(operation: Operation) -> list[Value]:
    """Runs as `promote_finite`; in float32 if an exponential reads it, as in a softmax."""
    is_shift = operation.result in operation.neighbours.statistics
    return (full if is_shift else promote_finite)(operation)


@register("eq", cached=True)
def eq(operation: Operation) -> list[Value]:
    """Runs as `compare`; next to a maximum it rounds both sides, as the maximum was rounded."""
    is_choice = operation.result in operation.neighbours.choices
    return (promote if is_choice else compare)(operation)


@register("gather", cached=True, keeps_finite=True)
def gather(operation: Operation) -> list[Value]:
    """Runs as `promote_finite`; the number for indices out of bounds stays finite, too.

    Rows of a table that only 16-bit operations read are gathered in 16 bits.
    """
    dtype = narrow_dtype(operation) if operation.is_weak else None
    if dtype is not None and has_fill(operation.equation, dtype):
        return run_moved(operation, dtype)
    params = fill_value(operation.equation, operation.promoted)
    return promote(operation, Value.to_finite, **params)


@register("scatter_add", "scatter_sub", cached=True, keeps_finite=True)
def scatter_sum(operation: Operation) -> list[Value]:
    """Runs in float32, as sums do; rounds the result where each number gets one term, as `add`."""
    return (update if operation.equation.params["unique_indices"] else full)(operation)


@register("scatter_mul", cached=True)
def scatter_mul(operation: Operation) -> list[Value]:
    """Runs in float32; rounds the result where each number gets one factor, as `mul`."""
    results = full(operation)
    is_once = operation.equation.params["unique_indices"]
    return rounded(results, operation, operation.promoted) if is_once else results


@register("get", "swap")
def access(operation: Operation) -> list[Value]:
    """Runs in float32; the result is not weak, as the reference may hold a sum."""
    return run_as_traced(operation, is_weak=False)


@register("custom_vjp_call", everywhere=True)
def custom_vjp_call(operation: Operation) -> list[Value]:
    """Runs a function in float32, as its backward pass is for the dtypes that were traced."""
    return run_as_traced(operation, is_weak=not operation.region.is_fixed)


@register("convert_element_type", everywhere=True)
def convert_element_type(operation: Operation) -> list[Value]:
    """Runs a cast that the user wrote.

    A cast from float32 to float32 does not count: JAX writes one where only the weak type changes.
    Neither does that of an inner autocast, which gives its results their float32 back.
    """
    (value,), (atom,) = operation.values, operation.equation.invars
    if operation.equation.params["new_dtype"] != FLOAT32:
        return bind(operation, [value.array], value.is_weak)
    is_restored = operation.scope.endswith(RESTORE) and not operation.region.is_full
    if is_float32(atom) or is_restored:
        return [value]
    is_float = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    return bind(operation, [value.array], is_weak=not is_float)
