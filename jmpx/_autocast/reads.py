"""In which dtypes a jaxpr will read its variables under autocast, before it is evaluated."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpx._autocast.binding import SHAPES
from jmpx._autocast.neighbours import Dtypes
from jmpx._autocast.products import low_dtype
from jmpx._autocast.regions import Regions
from jmpx._autocast.rules import Operation, is_float32
from jmpx._autocast.value import FLOAT32, LOW
from jmpx._jaxprs import core
from jmpx._jaxprs.backward import PRODUCTS, is_outer
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name
from jmpx._jaxprs.inner import CALLS, all_equations
from jmpx._jaxprs.moves import EXCHANGES

_WIDE: Dtypes = frozenset({FLOAT32})  # stands for any dtype but those of 16 bits
_NOTHING: Dtypes = frozenset()

_MOVES = EXCHANGES | {"gather"}  # what is rounded before them need not be sent as float32
_PARTS = _MOVES | {"slice", "dynamic_slice"}


class _Place(NamedTuple):
    """Where a jaxpr is read, and how far a number is followed.

    Whoever casts an operand rounds its cotangents, too, so that they must be in 16 bits: products
    alone tell. If numbers alone are rounded, `_PARTS` and the turns of a loop lead on.
    """

    scope: str
    regions: Regions
    follows: bool = True


def product_dtypes(jaxpr: Jaxpr, scope: str, regions: Regions) -> list[np.dtype | None]:
    """Returns for each operand the 16-bit dtype in which products read it, if nothing else does."""
    found = _reads(jaxpr, _Place(scope, regions, follows=False))
    return [_only_dtype(found.get(var, _NOTHING)) for var in jaxpr.invars]


def narrow_dtype(operation: Operation) -> np.dtype | None:
    """Returns the 16-bit dtype in which a float32 result is read, if it is read in no other.

    Of a tangent there is none: cotangents, which its transpose sums, would be rounded.
    """
    is_wide = operation.promoted == FLOAT32 and is_float32(operation.result)
    is_known = operation.read and is_wide and not operation.is_tangent
    return _only_dtype(operation.read[0]) if is_known else None


def _only_dtype(dtypes: Dtypes) -> np.dtype | None:
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes != _WIDE else None


def number_dtypes(
    jaxpr: Jaxpr, scope: str, regions: Regions, results: Sequence[Dtypes]
) -> Mapping[Atom, Dtypes]:
    """Returns the dtypes that numbers are rounded to before anything computes with them.

    `results` are those of its first results. Where nothing moves, nothing is searched.
    """
    if not any(operation_name(e.primitive.name) in _MOVES for e in all_equations(jaxpr)):
        return {}
    return _reads(jaxpr, _Place(scope, regions), results)


def result_dtypes(
    equation: Equation, found: Mapping[Atom, Dtypes], scope: str, regions: Regions
) -> Sequence[Dtypes]:
    """Returns what `number_dtypes` found of results: of an equation, and of the jaxpr in it."""
    name = operation_name(equation.primitive.name)
    if not found or name == "while":
        return ()
    results = [found.get(var, _NOTHING) for var in equation.outvars]
    return _turns(equation, results, _Place(scope, regions)) if name == "scan" else results


def _turns(equation: Equation, results: list[Dtypes], place: _Place) -> list[Dtypes]:
    """Returns the dtypes in which a scan's results are read, in its next turn or outside of it."""
    jaxpr, (num_consts, num_carry) = equation.params["jaxpr"], core.scan_counts(equation)
    override = place.regions.override("scan", place.regions.region(place.scope))
    if override is not None and override == jnp.bfloat16:  # the loop casts what it carries
        return [*[frozenset({override})] * num_carry, *results[num_carry:]]
    before = None
    while results != before:
        before, found = results, _reads(jaxpr, place, results)
        read = [found.get(var, _NOTHING) for var in jaxpr.invars[num_consts:]]
        carry = [a | b for a, b in zip(results[:num_carry], read, strict=False)]
        results = [*carry, *results[num_carry:]]
    return results


def _reads(jaxpr: Jaxpr, place: _Place, results: Sequence[Dtypes] = ()) -> dict[Atom, Dtypes]:
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
        if is_shape or (place.follows and name in _PARTS):
            note(equation.invars, [found.get(equation.outvars[0], _NOTHING)])
        else:
            inner = place._replace(scope=core.scope_within(place.scope, equation))
            note(equation.invars, _reads_of(equation, name, inner, found))
    return found


def _reads_of(
    equation: Equation, name: str, place: _Place, found: Mapping[Atom, Dtypes]
) -> Sequence[Dtypes]:
    """Returns the dtypes in which the first operands are read; the others are in float32."""
    if name in CALLS or name == "scan":
        (jaxpr,) = core.inner_jaxprs(equation.params)
        results = result_dtypes(equation, found, *place[:2]) if place.follows else ()
        inner = _reads(jaxpr, place, results)
        reads = [inner.get(var, _NOTHING) for var in jaxpr.invars]
        if name == "scan":  # its constants, and what it carries, it reads in float32
            num_consts, num_carry = core.scan_counts(equation)
            carry = results[:num_carry] or [_WIDE] * num_carry
            reads[: num_consts + num_carry] = [*[_WIDE] * num_consts, *carry]
        return reads
    dtype = FLOAT32
    if name in PRODUCTS and not is_outer(equation):
        dtype = _product_dtype(equation, name, place.scope, place.regions)
    elif place.follows and name == "convert_element_type":
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
