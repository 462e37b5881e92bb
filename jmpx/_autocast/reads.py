"""In which dtypes a jaxpr will read its operands under autocast, before it is evaluated."""

from collections.abc import Iterable, Sequence

import numpy as np

from jmpx._autocast.backward import PRODUCTS, is_outer
from jmpx._autocast.binding import SHAPES
from jmpx._autocast.products import low_dtype
from jmpx._autocast.regions import Regions
from jmpx._autocast.value import FLOAT32
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name

_Dtypes = frozenset[np.dtype]
_WIDE = frozenset({FLOAT32})  # stands for any dtype but those of 16 bits

# The jaxpr of these reads their operands as they are.
_CALLS = frozenset({"call", "closed_call", "jit", "remat2"})


def product_dtypes(jaxpr: Jaxpr, scope: str, regions: Regions) -> list[np.dtype | None]:
    """Returns for each operand the 16-bit dtype in which products read it, if nothing else does."""
    reads = _reads(jaxpr, scope, regions)
    return [next(iter(d)) if len(d) == 1 and d != _WIDE else None for d in reads]


def _reads(jaxpr: Jaxpr, scope: str, regions: Regions) -> list[_Dtypes]:
    """Returns the dtypes in which each operand is read; a reshape is read as its result."""
    found: dict[Atom, _Dtypes] = {}

    def note(atoms: Sequence[Atom], dtypes: Iterable[_Dtypes]) -> None:
        for atom, each in zip(atoms, dtypes, strict=True):
            if not core.is_literal(atom):
                found[atom] = found.get(atom, frozenset()) | each

    note(jaxpr.outvars, [_WIDE] * len(jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        name = operation_name(equation.primitive.name)
        if name in SHAPES and len(equation.invars) == 1:
            note(equation.invars, [found.get(equation.outvars[0], frozenset())])
        else:
            note(equation.invars, _reads_of(equation, name, scope, regions))
    return [found.get(var, frozenset()) for var in jaxpr.invars]


def _reads_of(equation: Equation, name: str, scope: str, regions: Regions) -> Sequence[_Dtypes]:
    scope = core.scope_within(scope, equation)
    if name in _CALLS:
        (jaxpr,) = core.inner_jaxprs(equation.params)
        return _reads(jaxpr, scope, regions)
    if name == "scan":  # what it carries, and its constants, it reads in float32
        start = sum(core.scan_counts(equation))
        return [_WIDE] * start + _reads(equation.params["jaxpr"], scope, regions)[start:]
    dtype = FLOAT32
    if name in PRODUCTS and not is_outer(equation):
        dtype = _product_dtype(equation, name, scope, regions)
    return [frozenset({dtype})] * len(equation.invars)


def _product_dtype(equation: Equation, name: str, scope: str, regions: Regions) -> np.dtype:
    region = regions.region(scope)
    override = regions.override(name, region)
    if region.is_fixed:
        return FLOAT32
    if override is not None:
        return override if override.itemsize < 4 else FLOAT32
    return FLOAT32 if region.is_full else low_dtype(equation, region.dtype)
