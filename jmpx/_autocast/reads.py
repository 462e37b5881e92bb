"""In which dtypes a jaxpr will read its operands under autocast, before it is evaluated."""

from collections.abc import Iterable, Sequence

import numpy as np

from jmpx._autocast.binding import RESHAPES
from jmpx._autocast.multiplied import PRODUCTS, is_outer
from jmpx._autocast.products import low_dtype
from jmpx._autocast.regions import Regions
from jmpx._autocast.value import FLOAT32
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name

_Dtypes = frozenset[np.dtype]

# The jaxpr of these reads their operands as they are.
_CALLS = frozenset({"call", "closed_call", "jit", "remat2"})


def product_dtypes(jaxpr: Jaxpr, scope: str, regions: Regions) -> list[np.dtype | None]:
    """Returns for each operand the 16-bit dtype in which products read it, if nothing else does.

    Args:
        jaxpr: the jaxpr, closed or open.
        scope: the scope around it.
        regions: the regions of the evaluation.
    """
    return [
        next(iter(dtypes)) if len(dtypes) == 1 and FLOAT32 not in dtypes else None
        for dtypes in _reads(jaxpr, scope, regions)
    ]


def _reads(jaxpr: Jaxpr, scope: str, regions: Regions) -> list[_Dtypes]:
    """Returns for each operand the dtypes in which it is read: float32 stands for any but 16 bits.

    What only has another shape is read as its result is.
    """
    found: dict[Atom, _Dtypes] = {}

    def note(atoms: Sequence[Atom], dtypes: Iterable[_Dtypes]) -> None:
        for atom, each in zip(atoms, dtypes, strict=True):
            if not core.is_literal(atom):
                found[atom] = found.get(atom, frozenset()) | each

    note(jaxpr.outvars, [frozenset({FLOAT32})] * len(jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        name = operation_name(equation.primitive.name)
        if name in RESHAPES and len(equation.invars) == 1:
            note(equation.invars, [found.get(equation.outvars[0], frozenset())])
            continue
        note(equation.invars, _reads_of(equation, name, scope, regions))
    return [found.get(var, frozenset()) for var in jaxpr.invars]


def _reads_of(equation: Equation, name: str, scope: str, regions: Regions) -> Sequence[_Dtypes]:
    count, inner = len(equation.invars), core.scope_within(scope, equation)
    if name in _CALLS:
        (jaxpr,) = core.inner_jaxprs(equation.params)
        return _reads(jaxpr, inner, regions)
    if name == "scan":  # what it carries, and its constants, it reads in float32
        start = sum(core.scan_counts(equation))
        reads = _reads(equation.params["jaxpr"], inner, regions)
        return [frozenset({FLOAT32})] * start + reads[start:]
    is_low = name in PRODUCTS and not is_outer(equation)
    dtype = _product_dtype(equation, name, inner, regions) if is_low else FLOAT32
    return [frozenset({dtype})] * count


def _product_dtype(equation: Equation, name: str, scope: str, regions: Regions) -> np.dtype:
    region = regions.region(scope)
    override = regions.override(name, region)
    if region.is_fixed:
        return FLOAT32
    if override is not None:
        return override if override.itemsize < 4 else FLOAT32
    return FLOAT32 if region.is_full else low_dtype(equation, region.dtype)
