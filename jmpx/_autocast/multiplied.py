"""What a product reads: the way from an input to a matrix product or a convolution."""

from jmpx._autocast.backward import Flags, Named, Step, find
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, operation_name

CONVOLUTION = "conv_general_dilated"
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", CONVOLUTION})


def is_outer(equation: Equation) -> bool:
    """Whether a matrix product sums nothing, as an outer product does."""
    if operation_name(equation.primitive.name) != "dot_general":
        return False
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return all(shape[axis] == 1 for axis in contracted)


def multiplied(named: Named) -> Step:
    """A search for the variables from which a way leads to a product."""
    del named
    return _operands


def _operands(name: str, equation: Equation, found: set[Atom]) -> Flags:
    is_read = any(var in found for var in equation.outvars)
    if name in PRODUCTS:
        is_read |= not is_outer(equation)
    else:
        jaxprs = core.inner_jaxprs(equation.params)
        is_read |= any(find(multiplied, jaxpr) for jaxpr in jaxprs)
    return (is_read,) * len(equation.invars)
