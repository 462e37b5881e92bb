"""FLOPs of products, from shapes alone: two for each multiplication with its addition.

A convolution multiplies only what is not padding.
"""

import functools
import math
from collections.abc import Callable, Collection

import numpy as np

from jmpx._jaxprs.core import inner_jaxprs, operation_name
from jmpx._jaxprs.types import Equation, Jaxpr


def flops_of(jaxpr: Jaxpr, chosen: Collection[Equation]) -> tuple[int, int]:
    """Returns the FLOPs of the products of a jaxpr, and of those in some of its equations.

    Those of a loop are of all trips that are known, those of a kernel of its whole grid, and those
    of a conditional of the branch with most in these equations.
    """
    total = part = 0
    for eqn in jaxpr.eqns:
        name = operation_name(eqn.primitive.name)
        if name in FLOPS:
            own, inside = FLOPS[name](eqn), 0
        else:
            each = [flops_of(inner, chosen) for inner in inner_jaxprs(eqn.params)]
            if name == "cond":
                each = [max(each, key=lambda pair: pair[::-1])]
            own, inside = (_trips(eqn) * sum(column) for column in zip((0, 0), *each, strict=True))
        total += own
        part += own if eqn in chosen else inside
    return total, part


def _trips(eqn: Equation) -> int:
    """Returns how often an equation runs the jaxprs that it holds, as far as it is known."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    sizes = (eqn.params.get("length", 1), *grid)
    return math.prod(size for size in sizes if isinstance(size, int))


def _dot(eqn: Equation) -> int:
    lhs, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    contracted = eqn.params["dimension_numbers"][0][0]
    return 2 * math.prod(result) * math.prod(lhs[axis] for axis in contracted)


def _ragged_dot(eqn: Equation) -> int:
    """Each row of the left operand meets the columns of one group alone."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    lhs, rhs = (var.aval.shape for var in eqn.invars[:2])
    columns = math.prod(size for axis, size in enumerate(rhs) if axis not in others)
    return 2 * math.prod(lhs) * columns


def _convolution(eqn: Equation) -> int:
    lhs, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    rhs, params = eqn.invars[1].aval.shape, eqn.params
    lhs_axes, rhs_axes, out_axes = params["dimension_numbers"]
    # Groups need no look: the kernel has the inputs of one group, the result the batch of one.
    count = result[out_axes[0]] * result[out_axes[1]] * rhs[rhs_axes[1]]
    steps = (params["window_strides"], params["lhs_dilation"], params["rhs_dilation"])
    sizes = zip(lhs_axes[2:], rhs_axes[2:], out_axes[2:], params["padding"], *steps, strict=True)
    for lhs_axis, rhs_axis, out_axis, padding, stride, lhs_dilation, rhs_dilation in sizes:
        count *= taps(
            (lhs[lhs_axis], lhs_dilation),
            (rhs[rhs_axis], rhs_dilation),
            (result[out_axis], stride),
            padding[0],
        )
    return 2 * count


@functools.lru_cache(maxsize=4096)
def taps(
    inputs: tuple[int, int], kernel: tuple[int, int], outputs: tuple[int, int], padding: int
) -> int:
    """Returns how often one axis of a kernel meets a number of an input, not padding or a hole.

    Each axis has a size and the distance of its elements. The padding may be negative.
    """
    dilation, last = inputs[1], (inputs[0] - 1) * inputs[1]
    (few, far), (many, step) = sorted((kernel, outputs))
    # Output o and tap k meet input place o * stride + k * distance - padding.
    places = step * np.arange(many) - padding
    each = (places + far * tap for tap in range(few))
    is_met = ((at >= 0) & (at <= last) & (at % dilation == 0) for at in each)
    return int(sum(map(np.count_nonzero, is_met)))


FLOPS: dict[str, Callable[[Equation], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}  # by the names of products, of their equations
