"""Runs one equation on values: as it was traced, in another dtype, or in float32 and rounded.

Rules are made of these functions.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._autocast.exposed import COPIES, ELEMENTWISE
from jmpx._autocast.products import Params, with_algorithms, without_algorithm
from jmpx._autocast.rules import Context, lookup
from jmpx._autocast.value import FLOAT32, Array, Value, finite_constant, join
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, operation_name
from jmpx._jaxprs.moves import RESHAPES

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


def is_float32(atom: Atom) -> bool:
    """Whether an operand or a result was float32 when traced: all others keep their dtype."""
    return getattr(atom.aval, "dtype", None) == FLOAT32


def is_floating(atom: Atom) -> bool:
    """Whether an operand or a result is an array of floating dtype."""
    return hasattr(atom.aval, "dtype") and jnp.issubdtype(atom.aval.dtype, jnp.floating)


def float32_values(equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Returns the operands that were float32 when traced."""
    pairs = zip(equation.invars, values, strict=True)
    return [value for atom, value in pairs if is_float32(atom)]


def all_weak(equation: Equation, values: Sequence[Value]) -> bool:
    """Whether all floating operands are weak, so that the results are, too."""
    pairs = zip(equation.invars, values, strict=True)
    return all(value.is_weak and is_float32(atom) for atom, value in pairs if is_floating(atom))


def promoted(equation: Equation, values: Sequence[Value]) -> np.dtype:
    """Returns the widest dtype of the operands that were float32 when traced.

    Weak operands count only if all are weak. Without such operands it is float32.
    """
    return join([value.traits for value in float32_values(equation, values)]).dtype


def cast_operands(
    equation: Equation,
    values: Sequence[Value],
    dtype: np.dtype,
    cast: Callable[[Value, np.dtype], Array] = Value.to,
) -> list[Array]:
    """Returns the operands as arrays; the ones that were float32 when traced are in `dtype`."""
    pairs = zip(equation.invars, values, strict=True)
    return [cast(value, dtype) if is_float32(atom) else value.array for atom, value in pairs]


def bind(
    equation: Equation,
    values: Sequence[Value],
    arrays: Sequence[Array],
    is_weak: bool,
    **params: object,
) -> list[Value]:
    """Runs an equation; no result gets wider than it was traced.

    Args:
        equation: the equation.
        values: its operands.
        arrays: the operands in the dtypes in which the equation runs.
        is_weak: whether the results are weak.
        **params: the parameters that differ from the equation's.
    """
    results = bind_arrays(equation, arrays, **params)
    tangent = any(value.tangent for value in values)
    outputs = [Value(result, is_weak, tangent) for result in results]
    name = operation_name(equation.primitive.name)
    if name in COPIES:
        outputs[0].constant, outputs[0].onto_bound = values[0].constant, values[0].onto_bound
    elif name in _FOLDED and all(_is_known_number(value) for value in values):
        with np.errstate(all="ignore"):
            outputs[0].note_constant(_FOLDED[name](*(value.constant for value in values)))
    if name in SHAPES and len(values) == 1:
        _note_source(outputs[0], values[0], equation, params)
    if name in COPIES or name in ELEMENTWISE:
        outputs[0].uniform |= all(value.uniform for value in values)
        wide = [value for value in values if value.dtype == FLOAT32 and not value.is_weak]
        outputs[0].power = bool(wide) and all(value.power for value in wide)
    for output, var in zip(outputs, equation.outvars, strict=True):
        if is_float32(var) and output.dtype.itemsize > 4:
            output.array = output.to(FLOAT32)
    return outputs


def _is_known_number(value: Value) -> bool:
    return value.constant is not None and value.dtype == FLOAT32 and value.array.size == 1


def _note_source(result: Value, source: Value, equation: Equation, params: Params) -> None:
    """Notes that a result is an operand in another shape, so that the two share their casts.

    Only where both are weak, as parameters are: an array that was computed need not be kept.
    """
    if result.is_weak and source.is_weak and result.array.size == source.array.size:
        result.source = source, lambda array: bind_arrays(equation, [array], **params)[0]


def bind_arrays(equation: Equation, arrays: Sequence[Array], **params: object) -> list[Array]:
    """Runs an equation on arrays; if its primitive is registered as cached, JAX caches it."""
    entry = lookup(equation)
    return core.bind(equation, arrays, cached=entry is not None and entry.cached, **params)


def run_in(
    dtype: np.dtype,
    equation: Equation,
    values: Sequence[Value],
    is_weak: bool,
    cast: Callable[[Value, np.dtype], Array] = Value.to,
    **params: object,
) -> list[Value]:
    """Runs an equation; operands that were float32 when traced are cast to `dtype`."""
    return bind(equation, values, cast_operands(equation, values, dtype, cast), is_weak, **params)


def run_promoted(
    equation: Equation,
    values: Sequence[Value],
    cast: Callable[[Value, np.dtype], Array] = Value.to,
    **params: object,
) -> list[Value]:
    """Runs an equation in the widest dtype of its operands; see `promoted`."""
    dtype, is_weak = promoted(equation, values), all_weak(equation, values)
    return run_in(dtype, equation, values, is_weak, cast, **params)


def run_as_traced(
    context: Context, equation: Equation, values: Sequence[Value], is_weak: bool
) -> list[Value]:
    """Runs an equation as it was traced, and float32 products in the algorithm of the policy."""
    return run_in(FLOAT32, equation, values, is_weak, **with_algorithms(context, equation))


def run_overridden(context: Context, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Runs an equation in the dtype that a policy rule gives to its primitive."""
    dtype = np.dtype(context.override)
    if core.holds_jaxpr(equation.params):  # a function of float32 scalars, as of `lax.reduce`
        return rounded(run_as_traced(context, equation, values, is_weak=False), equation, dtype)
    entry = lookup(equation)
    cast = Value.to_finite if entry is not None and entry.keeps_finite else Value.to
    params = result_dtype(equation, dtype) | fill_value(equation, dtype)
    algorithm_of = with_algorithms if dtype == FLOAT32 else without_algorithm
    params |= algorithm_of(context, equation)
    return run_in(dtype, equation, values, False, cast, **params)


def run_recomputed(dtype: np.dtype, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Runs an equation in float32; the backward pass keeps no float32 arrays of it.

    It keeps the operands, which are all floating, in the dtypes that they have, and casts them
    again. The results are in `dtype`.
    """

    # JAX caches the function, which must not keep the values alive.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(*arrays: Array) -> list[Array]:
        operands = [lax.convert_element_type(array, FLOAT32) for array in arrays]
        results = bind_arrays(equation, operands)
        return [lax.convert_element_type(result, dtype) for result in results]

    results = run(*(value.array for value in values))
    is_weak, tangent = all_weak(equation, values), any(value.tangent for value in values)
    return [Value(result, is_weak, tangent) for result in results]


def rounded(results: Sequence[Value], equation: Equation, dtype: np.dtype) -> list[Value]:
    """Returns results of an equation; those that were float32 when traced are cast to `dtype`."""
    pairs = zip(results, equation.outvars, strict=True)
    return [
        Value(result.to(dtype), result.is_weak, result.tangent) if is_float32(var) else result
        for result, var in pairs
    ]


def result_dtype(equation: Equation, dtype: np.dtype) -> Params:
    """Returns the parameter for a product's result dtype, changed from float32 to `dtype`."""
    key = "preferred_element_type"
    return {key: dtype} if equation.params.get(key) == FLOAT32 else {}


def fill_value(equation: Equation, dtype: np.dtype) -> Params:
    """Returns the parameter of a gather that is the number for indices out of bounds, if any."""
    fill = equation.params.get("fill_value")
    if fill is None or not is_float32(equation.invars[0]):
        return {}
    return {"fill_value": finite_constant(fill, dtype)[()]}
