"""FLOPs of the products of a graph, and the dtypes in which they multiply."""

from jmpx._inspect.graph import Node
from jmpx._jaxprs.equations import FLOPS


def flops(node: Node) -> int:
    """Returns the FLOPs of all runs of a product, and 0 of any other node.

    It runs as often as the lengths of the scans around it say. In a while loop its FLOPs are those
    of one trip, and in a `shard_map` those of one device.
    """
    return node.times * FLOPS[node.name](node.eqn) if is_product(node) else 0


def is_product(node: Node) -> bool:
    """Whether a node is a matrix product or a convolution."""
    return node.name in FLOPS


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
