"""FLOPs of products, from shapes alone: two for each multiplication with its addition.

A convolution multiplies only what is not padding.
"""

import functools
import math
from collections.abc import Callable

import numpy as np

from jmpx._inspect.graph import Node
from jmpx._jaxprs.types import Equation


def flops(node: Node) -> int:
    """Returns the FLOPs of all runs of a product, and 0 of any other node.

    It runs as often as the lengths of the scans around it say. In a while loop its FLOPs are those
    of one trip, and in a `shard_map` those of one device.
    """
    return node.times * _FLOPS[node.name](node.eqn) if is_product(node) else 0


def is_product(node: Node) -> bool:
    """Whether a node is a matrix product or a convolution."""
    return node.name in _FLOPS


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


_FLOPS: dict[str, Callable[[Equation], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
