"""In which dtypes a jaxpr will read its variables under autocast, before it is evaluated."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpx._autocast.backward import PRODUCTS, is_outer
from jmpx._autocast.binding import SHAPES
from jmpx._autocast.neighbours import Dtypes
from jmpx._autocast.products import low_dtype
from jmpx._autocast.regions import Regions
from jmpx._autocast.rules import Operation, is_float32
from jmpx._autocast.value import FLOAT32
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name
from jmpx._jaxprs.inner import all_equations
from jmpx._jaxprs.moves import EXCHANGES

_WIDE: Dtypes = frozenset({FLOAT32})  # stands for any dtype but those of 16 bits
_NOTHING: Dtypes = frozenset()

# The jaxpr of these reads their operands as they are.
_CALLS = frozenset({"call", "closed_call", "jit", "remat2"})
# Of these, too, a result is the operand, rounded, if what it is made of was rounded: see `Numbers`.
_MOVED = EXCHANGES | {"gather"}
_PARTS = _MOVED | {"slice", "dynamic_slice"}


class _Place(NamedTuple):
    """Where a jaxpr is read, and how far a number is followed.

    A cast of an operand moves its cotangents to 16 bits, so they must be in 16 bits already: that
    is what products alone tell. If only the number is rounded, and cotangents stay as they are, it
    is followed from device to device, into parts of arrays and through the turns of a loop.
    """

    scope: str
    regions: Regions
    follows: bool


def product_dtypes(jaxpr: Jaxpr, scope: str, regions: Regions) -> list[np.dtype | None]:
    """Returns for each operand the 16-bit dtype in which products read it, if nothing else does."""
    found = _reads(jaxpr, _Place(scope, regions, follows=False))
    return [_only_dtype(found.get(var, _NOTHING)) for var in jaxpr.invars]


def narrow_dtype(operation: Operation) -> np.dtype | None:
    """Returns the 16-bit dtype in which a float32 result is read, if it is read in no other."""
    is_wide = operation.promoted == FLOAT32 and is_float32(operation.result)
    return _only_dtype(operation.read[0]) if operation.read and is_wide else None


def _only_dtype(dtypes: Dtypes) -> np.dtype | None:
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes != _WIDE else None


def number_dtypes(
    jaxpr: Jaxpr, scope: str, regions: Regions, results: Sequence[Dtypes]
) -> Mapping[Atom, Dtypes]:
    """Returns the dtypes that numbers are rounded to before anything computes with them.

    Nothing is found where no array moves from device to device, and nothing is gathered.

    Args:
        jaxpr: the jaxpr.
        scope: the scope around it.
        regions: the regions of the policy map.
        results: the dtypes in which its first results are read outside; float32 for the others.
    """
    if not any(operation_name(e.primitive.name) in _MOVED for e in all_equations(jaxpr)):
        return {}
    return _reads(jaxpr, _Place(scope, regions, follows=True), results)


def result_dtypes(
    equation: Equation, found: Mapping[Atom, Dtypes], scope: str, regions: Regions
) -> Sequence[Dtypes]:
    """Returns in which dtypes results are read, of an equation and of the jaxpr that it holds.

    They are those of `number_dtypes`, given what that found around the equation; nothing is known
    of what a while loop carries.
    """
    name = operation_name(equation.primitive.name)
    if not found or name == "while":
        return ()
    results = [found.get(var, _NOTHING) for var in equation.outvars]
    if name != "scan":
        return results
    return _turns(equation, results, _Place(scope, regions, follows=True))


def _reads(jaxpr: Jaxpr, place: _Place, results: Sequence[Dtypes] = ()) -> dict[Atom, Dtypes]:
    """Returns the dtypes in which each variable is read; a reshape is read as its result."""
    found: dict[Atom, Dtypes] = {}

    def note(atoms: Sequence[Atom], dtypes: Iterable[Dtypes]) -> None:
        for atom, each in zip(atoms, dtypes, strict=True):
            if not core.is_literal(atom):
                found[atom] = found.get(atom, _NOTHING) | each

    note(jaxpr.outvars, [*results, *[_WIDE] * (len(jaxpr.outvars) - len(results))])
    for equation in reversed(jaxpr.eqns):
        name = operation_name(equation.primitive.name)
        inner = place._replace(scope=core.scope_within(place.scope, equation))
        is_part = place.follows and name in _PARTS
        if is_part or (name in SHAPES and len(equation.invars) == 1):
            read = found.get(equation.outvars[0], _NOTHING)
            note(equation.invars, [read, *[_WIDE] * (len(equation.invars) - 1)])
        else:
            note(equation.invars, _reads_of(equation, name, inner, found))
    return found


def _reads_of(
    equation: Equation, name: str, place: _Place, found: Mapping[Atom, Dtypes]
) -> Sequence[Dtypes]:
    """Returns the dtypes in which an equation reads its operands, given those of its results."""
    if name in _CALLS or name == "scan":
        (jaxpr,) = core.inner_jaxprs(equation.params)
        results: Sequence[Dtypes] = ()
        if place.follows:
            results = result_dtypes(equation, found, place.scope, place.regions)
        inner = _reads(jaxpr, place, results)
        reads = [inner.get(var, _NOTHING) for var in jaxpr.invars]
        return reads if name != "scan" else _reads_of_scan(equation, reads, results)
    dtype = FLOAT32
    if name in PRODUCTS and not is_outer(equation):
        dtype = _product_dtype(equation, name, place.scope, place.regions)
    elif place.follows and name == "convert_element_type":
        dtype = equation.params["new_dtype"]
    return [frozenset({dtype if dtype.itemsize == 2 else FLOAT32})] * len(equation.invars)


def _reads_of_scan(
    equation: Equation, reads: Sequence[Dtypes], results: Sequence[Dtypes]
) -> Sequence[Dtypes]:
    """Returns the dtypes in which a scan reads its operands; constants it casts in its body."""
    num_consts, num_carry = core.scan_counts(equation)
    carry = results[:num_carry] or [_WIDE] * num_carry
    return [*[_WIDE] * num_consts, *carry, *reads[num_consts + num_carry :]]


def _turns(equation: Equation, results: Sequence[Dtypes], place: _Place) -> Sequence[Dtypes]:
    """Returns in which dtypes the results of a scan's body are read, in its next turn or outside."""
    jaxpr, (num_consts, num_carry) = equation.params["jaxpr"], core.scan_counts(equation)
    override = place.regions.override("scan", place.regions.region(place.scope))
    if override == jnp.bfloat16:  # the loop casts what it carries
        return [*[frozenset({override})] * num_carry, *results[num_carry:]]
    carried = jaxpr.invars[num_consts : num_consts + num_carry]
    while True:
        found = _reads(jaxpr, place, results)
        read = [found.get(var, _NOTHING) for var in carried]
        pairs = zip(results[:num_carry], read, strict=True)
        new = [*(a | b for a, b in pairs), *results[num_carry:]]
        if new == list(results):
            return new
        results = new


def _product_dtype(equation: Equation, name: str, scope: str, regions: Regions) -> np.dtype:
    region = regions.region(scope)
    override = regions.override(name, region)
    if region.is_fixed:
        return FLOAT32
    if override is not None:
        return override if override.itemsize < 4 else FLOAT32
    return FLOAT32 if region.is_full else low_dtype(equation, region.dtype)
