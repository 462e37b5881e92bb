"""FLOPs of operations, from shapes alone, by the rules of XLA's cost analysis.

A product takes two for each multiplication with its addition, and a convolution multiplies only
what is not padding. Work on elements takes one for each element of the result, of integers,
comparisons and casts too. Two things take none: functions such as exp, tanh, sqrt and erfc, which
XLA counts apart, or writes out, and what only moves data or makes random bits.

Where XLA counts how the CPU's program works around what it cannot do, the operation itself counts
here: a `cumsum` takes one addition for each element, and a `ragged_dot` multiplies no zeros.
"""

import functools
import math
from collections.abc import Callable

from jmpx._autocast.products import PRODUCTS
from jmpx._inspect.graph import Node
from jmpx._jaxprs.core import Equation, operation_name
from jmpx._jaxprs.moves import EXCHANGES, IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES
from jmpx._jaxprs.product_flops import PRODUCT_FLOPS

# FLOPs for each element of the result -> operations.
_BY_FLOPS = {
    0: """
        exp expm1 log log1p tanh sin cos tan atan atan2 pow sqrt rsqrt cbrt erf cosh acos asin
        sinh asinh acosh atanh erfc erf_inv lgamma digamma nextafter bessel_i0e bessel_i1e
        scatter iota bitcast_convert_type empty empty2 create_token reduce_scatter axis_index
        layout_constraint after_all debug_callback debug_print new_ref freeze get swap
        random_bits random_clone random_fold_in random_seed random_split random_wrap random_unwrap
        random_gamma rng_bit_generator rng_uniform threefry2x32
    """,
    1: """
        add add_any sub mul div rem neg sign abs floor ceil round max min clamp square exp2
        and or xor not shift_left shift_right_logical shift_right_arithmetic population_count clz
        eq eq_to ne lt lt_to le le_to gt ge is_finite select_n convert_element_type
        reduce_precision real imag complex conj mulhi log2
        psum psum_invariant pmax pmin addupdate
    """,
    2: "one_minus_square",
    3: "logistic",
}
_MOVES = IDENTITIES | PLACEMENTS | RESHAPES | PICKS | JOINS | EXCHANGES
_PER_ELEMENT = dict.fromkeys(_MOVES, 0) | {
    name: flops for flops, names in _BY_FLOPS.items() for name in names.split()
}


def flops(node: Node) -> int:
    """Returns the FLOPs of all runs of a node: as many as the lengths of the scans around it say.

    In a while loop they are those of one trip, and in a `shard_map` those of one device.
    """
    return 0 if node.is_structure else node.times * flops_of(node.eqn, node.name)


def is_product(node: Node) -> bool:
    """Whether a node is a matrix product or a convolution."""
    return node.name in PRODUCTS


_ALGORITHMS = {"BF16_BF16_": "bfloat16", "F16_F16_": "float16"}  # by how their names start


def multiplied(node: Node) -> list[str]:
    """Returns the names of the dtypes that a product multiplies in."""
    precision = node.eqn.params.get("precision")
    name = getattr(precision, "name", "")
    if not name.endswith(("_X3", "_X6", "_X9")):  # which multiply several parts of each number
        for start, dtype in _ALGORITHMS.items():
            if name.startswith(start):
                return [dtype, dtype]
    return [value.dtype.name for value in node.operands[:2]]


def flops_of(eqn: Equation, name: str = "") -> int:
    """Returns the FLOPs of one run of an equation; 0 if `is_counted` is false.

    Args:
        eqn: the equation.
        name: the name of its operation, if that is known.
    """
    name = name or operation_name(eqn.primitive.name)
    per_element = _PER_ELEMENT.get(name)
    if per_element == 0:
        return 0
    if per_element is None:
        count = _COUNTS.get(name)
        return count(eqn) if count else 0
    return per_element * sum(math.prod(var.aval.shape) for var in eqn.outvars)


def is_counted(name: str) -> bool:
    """Whether the FLOPs of an operation are known, as those of a kernel of Pallas are not."""
    return name in _PER_ELEMENT or name in _COUNTS


def _in(eqn: Equation) -> int:
    return math.prod(eqn.invars[0].aval.shape)


def _out(eqn: Equation) -> int:
    return math.prod(eqn.outvars[0].aval.shape)


# Sums over elements, windows and axes.


def _by_function(eqn: Equation) -> int:
    """Returns the FLOPs of the function that an equation reduces with; 1 if it is an addition."""
    return sum(map(flops_of, eqn.params["jaxpr"].eqns)) if "jaxpr" in eqn.params else 1


def _reduction(eqn: Equation, flops: int | None = None) -> int:
    return (_by_function(eqn) if flops is None else flops) * (_in(eqn) - _out(eqn))


def _window_reduction(eqn: Equation) -> int:
    return _by_function(eqn) * (math.prod(eqn.params["window_dimensions"]) - 1) * _out(eqn)


def _scattered_windows(eqn: Equation) -> int:
    """For each element: comparisons find the place in its window, an addition puts it there."""
    return _in(eqn) * math.prod(eqn.params["window_dimensions"])


def _cumulative(eqn: Equation) -> int:
    length = eqn.invars[0].aval.shape[eqn.params["axis"]]
    return _in(eqn) - _in(eqn) // max(1, length)


def _sort(eqn: Equation) -> int:
    length = eqn.invars[0].aval.shape[eqn.params["dimension"]]
    return _in(eqn) * math.ceil(math.log2(max(1, length)))


def _scatter(eqn: Equation) -> int:
    return math.prod(eqn.invars[2].aval.shape)


def _integer_power(eqn: Equation) -> int:
    """By squaring; a negative power also divides."""
    power = eqn.params["y"]
    multiplications = abs(power).bit_length() + abs(power).bit_count() - 2 if power else 0
    return (multiplications + (power < 0)) * _out(eqn)


def _fft(eqn: Equation) -> int:
    return 8 * _in(eqn) * sum(length.bit_length() - 1 for length in eqn.params["fft_lengths"])


_COUNTS: dict[str, Callable[[Equation], int]] = {
    **PRODUCT_FLOPS,
    **dict.fromkeys(
        ("reduce_" + name for name in ("sum", "prod", "max", "min", "and", "or", "xor")), _reduction
    ),
    "argmax": functools.partial(_reduction, flops=9),
    "argmin": functools.partial(_reduction, flops=9),
    "reduce": _reduction,
    **dict.fromkeys(("reduce_window_" + name for name in ("sum", "max", "min")), _window_reduction),
    "reduce_window": _window_reduction,
    "select_and_scatter_add": _scattered_windows,
    "select_and_scatter": _scattered_windows,
    "select_and_gather_add": _window_reduction,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _cumulative),
    "sort": _sort,
    "top_k": _in,
    **dict.fromkeys(("scatter_" + name for name in ("add", "sub", "mul", "max", "min")), _scatter),
    "polynomial": lambda eqn: 2 * (len(eqn.invars) - 2) * _out(eqn),  # since JAX 0.11
    "integer_pow": _integer_power,
    "fft": _fft,
}
