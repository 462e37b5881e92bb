"""Runs an operation: as it was traced, in another dtype, or in float32 and rounded.

Rules are made of these functions.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from jmpx._autocast.exposed import COPIES, ELEMENTWISE
from jmpx._autocast.products import with_algorithms
from jmpx._autocast.rules import Cast, Operation, is_float32, lookup
from jmpx._autocast.value import FLOAT32, Array, Value, finite_constant
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation
from jmpx._jaxprs.moves import RESHAPES
from jmpx._jaxprs.types import Params

# What a program computes of constants while it is traced is a constant, too: `1 - EPSILON`.
_FOLDED = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
}
# Results of these hold each number of their operand once, if the sizes are equal. Other identities
# and placements say something of an array, which its casts need not share.
SHAPES = RESHAPES | {"copy"}
# XLA fuses the cast of a table with the gather of its rows; that for TPUs writes the table in 16
# bits, which takes 6 bytes a number. Rows in 16 bits are read and written in 4 bytes a number, and
# float32 ones in 6, so the cast is worth it where a row is gathered this many times.
_ROWS_A_TABLE = 3


def bind(
    operation: Operation, arrays: Sequence[Array], is_weak: bool, **params: object
) -> list[Value]:
    """Runs an operation on operands in the dtypes in which it runs, with changed parameters.

    No result gets wider than it was traced.
    """
    equation, name, values = operation.equation, operation.name, operation.values
    if operation.is_single:
        results = core.bind(equation, arrays, cached=False, **params)
    else:
        results = bind_arrays(equation, arrays, **params)
    outputs = [Value(result, is_weak, operation.is_tangent) for result in results]
    if name in COPIES:
        outputs[0].onto_bound, outputs[0].held_by = values[0].onto_bound, values[0].held_by
        outputs[0].number = values[0].number
    elif name in _FOLDED and all(value.dtype == FLOAT32 for value in values):
        numbers = [np.frombuffer(each.number, FLOAT32) for each in values if each.number]
        if len(numbers) == len(values):
            with np.errstate(all="ignore"):
                outputs[0].note_constant(_FOLDED[name](*numbers))
    if name in SHAPES and len(values) == 1:
        result, (source,) = outputs[0], values
        # A weak result that is an operand in another shape shares its casts.
        if result.is_weak and source.is_weak and result.array.size == source.array.size:
            result.source = source, lambda array: bind_arrays(equation, [array], **params)[0]
    if name in COPIES or name in ELEMENTWISE:
        outputs[0].uniform |= all(value.uniform for value in values)
        wide = [value for value in values if value.dtype == FLOAT32 and not value.is_weak]
        outputs[0].power = bool(wide) and all(value.power for value in wide)
    for output, var in zip(outputs, equation.outvars, strict=True):
        if is_float32(var) and output.dtype.itemsize > 4:
            output.array = output.to(FLOAT32)
    return outputs


def bind_arrays(equation: Equation, arrays: Sequence[Array], **params: object) -> list[Array]:
    """Runs an equation on arrays; if its primitive is registered as cached, JAX caches it."""
    entry = lookup(equation)
    return core.bind(equation, arrays, cached=entry is not None and entry.cached, **params)


def run_in(
    dtype: np.dtype, operation: Operation, is_weak: bool, cast: Cast = Value.to, **params: object
) -> list[Value]:
    """Runs an operation; operands that were float32 when traced are cast to `dtype`."""
    return bind(operation, operation.arrays(dtype, cast), is_weak, **params)


def run_as_traced(operation: Operation, is_weak: bool) -> list[Value]:
    """Runs an operation as it was traced, and float32 products in the algorithm of the policy."""
    return run_in(FLOAT32, operation, is_weak, **with_algorithms(operation))


def run_overridden(operation: Operation, dtype: np.dtype) -> list[Value]:
    """Runs an operation in the dtype that a policy rule gives to its primitive."""
    equation = operation.equation
    if core.inner_jaxprs(equation.params):  # a function of float32 scalars, as of `lax.reduce`
        return rounded(run_as_traced(operation, is_weak=False), operation, dtype)
    entry = lookup(equation)
    cast = Value.to_finite if entry is not None and entry.keeps_finite else Value.to
    params = result_dtype(equation, dtype) | fill_value(equation, dtype)
    params |= with_algorithms(operation, dtype)
    return run_in(dtype, operation, False, cast, **params)


def run_recomputed(operation: Operation, dtype: np.dtype) -> list[Value]:
    """Runs an operation in float32; the backward pass keeps no float32 arrays of it.

    It keeps the operands, which are all floating, in the dtypes that they have, and casts them
    again. The results are in `dtype`.
    """
    equation = operation.equation

    # JAX caches the function, which must not keep the values alive.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(*arrays: Array) -> list[Array]:
        operands = [lax.convert_element_type(array, FLOAT32) for array in arrays]
        results = bind_arrays(equation, operands)
        return [lax.convert_element_type(result, dtype) for result in results]

    results = run(*(value.array for value in operation.values))
    return [Value(result, operation.is_weak, operation.is_tangent) for result in results]


def run_moved(operation: Operation, dtype: np.dtype) -> list[Value]:
    """Runs an operation that picks or moves numbers of a float32 array, in `dtype`.

    The result is float32, rounded to `dtype`, and so is what the backward pass moves, not rounded:
    there, cotangents are summed, those of equal indices, of devices or of the turns of a loop.
    """
    equation = operation.equation
    is_gather = operation.name == "gather"
    table, rows = equation.invars[0].aval, equation.outvars[0].aval

    def rounded_first(array: Array, *indices: Array) -> Array:
        fill = fill_value(equation, dtype)
        (moved,) = bind_arrays(equation, [lax.convert_element_type(array, dtype), *indices], **fill)
        return lax.convert_element_type(moved, FLOAT32)

    def as_traced(*arrays: Array) -> Array:
        return bind_arrays(equation, arrays)[0]

    @jax.custom_jvp
    def run(*arrays: Array) -> Array:
        tpu = {"tpu": as_traced} if is_gather and rows.size < _ROWS_A_TABLE * table.size else {}
        return lax.platform_dependent(*arrays, **tpu, default=rounded_first)

    @run.defjvp
    def _(arrays: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
        fill = {"fill_value": 0} if is_gather else {}
        (tangent,) = bind_arrays(equation, [tangents[0], *arrays[1:]], **fill)
        return run(*arrays), tangent

    arrays = operation.arrays(FLOAT32)
    return [Value(run(*arrays), operation.is_weak, operation.is_tangent)]


def rounded(results: Sequence[Value], operation: Operation, dtype: np.dtype) -> list[Value]:
    """Returns results of an operation; those that were float32 when traced are cast to `dtype`."""
    pairs = zip(results, operation.equation.outvars, strict=True)
    return [
        Value(result.to(dtype), result.is_weak, result.tangent) if is_float32(var) else result
        for result, var in pairs
    ]


def result_dtype(equation: Equation, dtype: np.dtype) -> Params:
    """Returns the parameter for a product's result dtype, changed from float32 to `dtype`."""
    key = "preferred_element_type"
    return {key: dtype} if equation.params.get(key) == FLOAT32 else {}


def has_fill(equation: Equation, dtype: np.dtype) -> bool:
    """Whether a gather's number for indices out of bounds, if any, is the same in `dtype`."""
    fill = equation.params["fill_value"]
    return fill is None or np.array_equal(np.float32(fill), np.asarray(fill, dtype), equal_nan=True)


def fill_value(equation: Equation, dtype: np.dtype) -> Params:
    """Returns the parameter of a gather that is the number for indices out of bounds, if any."""
    fill = equation.params.get("fill_value")
    if fill is None or not is_float32(equation.invars[0]):
        return {}
    return {"fill_value": finite_constant(fill, dtype)[()]}
