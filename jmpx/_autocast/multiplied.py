"""Products, and the search for what reaches one: a matrix product or a convolution."""

from collections.abc import Collection

from jmpx._autocast.backward import Flags, Step, find
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name

CONVOLUTION = "conv_general_dilated"
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", CONVOLUTION})


def is_outer(equation: Equation) -> bool:
    """Whether a matrix product sums nothing, as an outer product does."""
    if operation_name(equation.primitive.name) != "dot_general":
        return False
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return all(shape[axis] == 1 for axis in contracted)


def multiplied(jaxpr: Jaxpr) -> Step:
    """A search for the variables that reach a product."""
    del jaxpr
    return _operands


def _operands(equation: Equation, found: Collection[Atom]) -> Flags:
    is_read = any(var in found for var in equation.outvars)
    if operation_name(equation.primitive.name) in PRODUCTS:
        is_read |= not is_outer(equation)
    else:
        is_read |= any(find(multiplied, j) for j in core.inner_jaxprs(equation.params))
    return (is_read,) * len(equation.invars)
