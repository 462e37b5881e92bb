"""Which results must not be rounded onto a bound, because of what reads them later.

In bfloat16 a sigmoid is exactly 1 from a logit of 6 on: `log(1 - p)` is infinite then, and its
gradient NaN, where float32 trains. A result is *exposed* if its number, or one that lies as near to
a bound, reaches a function that is infinite at the bound, or leaves autocast, as a probability does
whose loss is computed outside. A product of two arrays ends the path: a gate stays in 16 bits.
"""

import functools
from collections.abc import Collection

from jmpx._jaxprs import core
from jmpx._jaxprs.backward import Flags, Step
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name
from jmpx._jaxprs.moves import EXCHANGES, IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES

# Primitives whose only result holds only numbers of their only array. Moves of several arrays, and
# those whose other operands are indices, are not among them.
COPIES = {"convert_element_type", "slice", "tile"} | RESHAPES | PLACEMENTS | IDENTITIES
COPIES = frozenset(COPIES - {"optimization_barrier", "device_put"})

# If each operand of these is uniform, the result is: all its elements are one number.
ELEMENTWISE = frozenset(
    """
    add sub mul div rem max min clamp neg abs sqrt rsqrt square integer_pow pow exp exp2 log
    """.split()
)

# These, or their slopes, are infinite at a bound of their operand, as a division is at that of its
# denominator.
_SINGULAR = frozenset(
    """
    log log1p log2 rsqrt sqrt cbrt pow erf_inv acos asin acosh atanh lgamma digamma polygamma
    """.split()
)

# Results of these are as near to a bound as their operands: sums, clamps, selections and powers.
_PATHS = frozenset(
    """
    add sub add_any neg abs max min clamp square integer_pow one_minus_square
    reduce_sum reduce_max reduce_min reduce_prod reduce_window_sum reduce_window_max
    reduce_window_min cumsum cumprod cummax cummin sort top_k select_n reduce reduce_window
    scatter scatter_add scatter_sub scatter_max scatter_min select_and_gather_add
    psum psum_invariant pmax pmin reduce_scatter
    """.split()
)
_PATHS |= COPIES | IDENTITIES | PICKS | JOINS | EXCHANGES


def exposed(jaxpr: Jaxpr) -> Step:
    """A search for the variables of a jaxpr that must not be rounded onto a bound."""
    return functools.partial(_operands, _uniform(jaxpr))


def _operands(uniform: set[Atom], equation: Equation, found: Collection[Atom]) -> Flags:
    """Returns which operands of an equation are exposed, given which of its results are."""
    name, count = operation_name(equation.primitive.name), len(equation.invars)
    is_exposed = any(var in found for var in equation.outvars)
    if name in _SINGULAR or (name == "integer_pow" and equation.params["y"] < 0):
        return (True,) * count
    if name in ("div", "rem"):
        return is_exposed and _is_uniform(equation.invars[1], uniform), True
    if name == "mul":
        left, right = equation.invars
        is_square = left is right
        return tuple(
            is_exposed and (is_square or _is_uniform(other, uniform)) for other in (right, left)
        )
    if name not in _PATHS:
        return (False,) * count
    if len(equation.outvars) == count:
        return tuple(var in found for var in equation.outvars)
    return (is_exposed,) * count


def _uniform(jaxpr: Jaxpr) -> set[Atom]:
    """Returns results all of whose elements are one number."""
    found: set[Atom] = set()
    for equation in jaxpr.eqns:
        name = operation_name(equation.primitive.name)
        if name in COPIES or name in ELEMENTWISE:
            if all(_is_uniform(atom, found) for atom in equation.invars):
                found.update(equation.outvars)
    return found


def _is_uniform(atom: Atom, uniform: set[Atom]) -> bool:
    return core.is_literal(atom) or atom in uniform or getattr(atom.aval, "size", 0) == 1
