"""Runs one operation on cast operands; finds the dtypes in which a jaxpr reads its variables."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._autocast.neighbours import COPIES, ELEMENTWISE, Dtypes
from jmpx._autocast.rules import Cast, Operation, is_float32, lookup, low_dtype, with_algorithms
from jmpx._autocast.value import FLOAT32, LOW, Array, Regions, Value, finite_constant
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name
from jmpx._jaxprs.equations import EXCHANGES, RESHAPES
from jmpx._jaxprs.inner import CALLS, PRODUCTS, all_equations, is_outer
from jmpx._jaxprs.marks import Params

# Results of these on constants are constants, too, as in `1 - EPSILON`.
_FOLDED = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
}
# Results of these hold each number of their operand once, if the sizes are equal. Other identities
# and placements state a fact about one array, which need not be true of its casts.
SHAPES = RESHAPES | {"copy"}
# XLA fuses the cast of a table with the gather of its rows, except on TPUs, where it writes the
# table in 16 bits, at 6 bytes a number. Reading and writing a row costs 4 bytes a number in 16
# bits, and 6 in float32, so the cast pays where a row is gathered this many times.
_ROWS_A_TABLE = 3


def bind(
    operation: Operation, arrays: Sequence[Array], is_weak: bool, **params: object
) -> list[Value]:
    """Runs an operation on operands that are cast already, with changed parameters.

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

    The result holds float32 numbers that are rounded to `dtype`. The backward pass moves float32,
    not rounded, because it sums cotangents: of equal indices, of devices or of turns of a loop.
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
    """Returns the parameter of a gather with the number for indices out of bounds, if any."""
    fill = equation.params.get("fill_value")
    if fill is None or not is_float32(equation.invars[0]):
        return {}
    return {"fill_value": finite_constant(fill, dtype)[()]}


# In which dtypes a jaxpr will read its variables under autocast, before it is evaluated.


_WIDE: Dtypes = frozenset({FLOAT32})  # any dtype other than those of 16 bits
_NOTHING: Dtypes = frozenset()

_MOVES = EXCHANGES | {"gather"}  # a number that is rounded before these moves in 16 bits
_PARTS = _MOVES | {"slice", "dynamic_slice"}


class _Search(NamedTuple):
    """A search for the readers of variables: where it is, and how far it follows a number.

    A cast of an operand also rounds its cotangents, so only products, whose cotangents have 16
    bits, may cause one. A search for numbers, which leaves cotangents alone, follows `_PARTS` and
    loops.
    """

    scope: str
    regions: Regions
    follows: bool = True  # whether through `_PARTS`, casts and the turns of a loop


def product_dtypes(jaxpr: Jaxpr, scope: str, regions: Regions) -> list[np.dtype | None]:
    """Returns for each operand the 16-bit dtype in which products read it, if nothing else does."""
    found = _reads(jaxpr, _Search(scope, regions, follows=False))
    return [_only_dtype(found.get(var, _NOTHING)) for var in jaxpr.invars]


def narrow_dtype(operation: Operation) -> np.dtype | None:
    """Returns the 16-bit dtype in which a float32 result is read, if it is read in no other.

    None for a tangent, whose transpose sums cotangents: these would be rounded.
    """
    is_wide = operation.promoted == FLOAT32 and is_float32(operation.result)
    is_known = operation.read and is_wide and not operation.is_tangent
    return _only_dtype(operation.read[0]) if is_known else None


def _only_dtype(dtypes: Dtypes) -> np.dtype | None:
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes != _WIDE else None


def number_dtypes(
    jaxpr: Jaxpr, scope: str, regions: Regions, results: Sequence[Dtypes]
) -> Mapping[Atom, Dtypes]:
    """Returns the dtypes to which numbers are rounded before anything computes with them.

    `results` are those of the first results. A jaxpr that moves nothing is not searched.
    """
    if not any(operation_name(e.primitive.name) in _MOVES for e in all_equations(jaxpr)):
        return {}
    return _reads(jaxpr, _Search(scope, regions), results)


def result_dtypes(
    equation: Equation, found: Mapping[Atom, Dtypes], scope: str, regions: Regions
) -> Sequence[Dtypes]:
    """Returns the dtypes in `found` of the results of an equation, and of the jaxpr in it."""
    name = operation_name(equation.primitive.name)
    if not found or name == "while":
        return ()
    results = [found.get(var, _NOTHING) for var in equation.outvars]
    return _turns(equation, results, _Search(scope, regions)) if name == "scan" else results


def _turns(equation: Equation, results: list[Dtypes], search: _Search) -> list[Dtypes]:
    """Returns the dtypes in which a scan's results are read, in its next turn or outside of it."""
    jaxpr, (num_consts, num_carry) = equation.params["jaxpr"], core.scan_counts(equation)
    override = search.regions.override("scan", search.regions.region(search.scope))
    if override is not None and override == jnp.bfloat16:  # the loop casts its carry
        return [*[frozenset({override})] * num_carry, *results[num_carry:]]
    before = None
    while results != before:
        before, found = results, _reads(jaxpr, search, results)
        read = [found.get(var, _NOTHING) for var in jaxpr.invars[num_consts:]]
        carry = [a | b for a, b in zip(results[:num_carry], read, strict=False)]
        results = [*carry, *results[num_carry:]]
    return results


def _reads(jaxpr: Jaxpr, search: _Search, results: Sequence[Dtypes] = ()) -> dict[Atom, Dtypes]:
    """Returns the dtypes in which each variable is read; a reshape is read as its result."""
    found: dict[Atom, Dtypes] = {}

    def note(atoms: Sequence[Atom], dtypes: Sequence[Dtypes]) -> None:
        dtypes = [*dtypes, *[_WIDE] * (len(atoms) - len(dtypes))]
        for atom, each in zip(atoms, dtypes, strict=True):
            if not core.is_literal(atom):
                found[atom] = found.get(atom, _NOTHING) | each

    note(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        name = operation_name(equation.primitive.name)
        is_shape = name in SHAPES and len(equation.invars) == 1
        if is_shape or (search.follows and name in _PARTS):
            note(equation.invars, [found.get(equation.outvars[0], _NOTHING)])
        else:
            inner = search._replace(scope=core.scope_within(search.scope, equation))
            note(equation.invars, _reads_of(equation, name, inner, found))
    return found


def _reads_of(
    equation: Equation, name: str, search: _Search, found: Mapping[Atom, Dtypes]
) -> Sequence[Dtypes]:
    """Returns the dtypes in which the first operands are read; the others are in float32."""
    if name in CALLS or name == "scan":
        (jaxpr,) = core.inner_jaxprs(equation.params)
        results = result_dtypes(equation, found, *search[:2]) if search.follows else ()
        inner = _reads(jaxpr, search, results)
        reads = [inner.get(var, _NOTHING) for var in jaxpr.invars]
        if name == "scan":  # it reads its constants and, unless followed, its carry in float32
            num_consts, num_carry = core.scan_counts(equation)
            carry = results[:num_carry] or [_WIDE] * num_carry
            reads[: num_consts + num_carry] = [*[_WIDE] * num_consts, *carry]
        return reads
    dtype = FLOAT32
    if name in PRODUCTS and not is_outer(equation):
        dtype = _product_dtype(equation, name, search.scope, search.regions)
    elif search.follows and name == "convert_element_type":
        dtype = equation.params["new_dtype"]
    return [frozenset({dtype}) if dtype in LOW else _WIDE] * len(equation.invars)


def _product_dtype(equation: Equation, name: str, scope: str, regions: Regions) -> np.dtype:
    region = regions.region(scope)
    override = regions.override(name, region)
    if region.is_fixed:
        return FLOAT32
    if override is not None:
        return override if override.itemsize < 4 else FLOAT32
    return FLOAT32 if region.is_full else low_dtype(equation, region.dtype)
