"""What of a program's graph is counted, and where the numbers that enter a scope come from."""

import math
from collections.abc import Iterator

import numpy as np

from jmpx._base.leaves import is_floating_dtype
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.ranges.formats import FORMATS

# Their results hold numbers of their operands alone, which were counted where they were computed.
_MOVES = frozenset(
    """
    broadcast_in_dim reshape transpose squeeze rev slice dynamic_slice tile copy
    concatenate stack unstack split pad dynamic_update_slice name stop_gradient
    convert_element_type sharding_constraint reshard pvary pbroadcast device_put
    optimization_barrier all_gather all_gather_invariant all_gather_reduced all_to_all ppermute
    carry stack slice result join shard unshard
    """.split()
)
_COPIES = frozenset("broadcast_in_dim convert_element_type reshape squeeze neg copy".split())
_RECOMPUTED = "rematted_computation"  # what JAX calls the recomputed part of a checkpoint


def is_counted(node: Node) -> bool:
    """Whether the numbers of a node are counted: it computes floating numbers."""
    return not _moves(node) and any(is_floating_dtype(value.dtype) for value in node.results)


def _moves(node: Node) -> bool:
    return node.is_structure or node.name in _MOVES


def is_gradient(node: Node) -> bool:
    """Whether a node computes gradients: the backward pass, without what it computes again."""
    return node.is_backward and _RECOMPUTED not in node.scope.split("/")


def masks(graph: Graph) -> tuple[float, ...]:
    """Returns the magnitudes beyond float16 that `jnp.where` puts into arrays."""
    found = set()
    for node in graph.nodes:
        if node.name == "select_n":
            found.update(map(_constant, node.operands[1:]))
    limit = FORMATS["float16"].largest
    return tuple(sorted(abs(c) for c in found if c is not None and limit < abs(c) < math.inf))


def _constant(value: Value) -> float | None:
    """Returns the number that all elements of a value are; None if that is not known."""
    while value.node is not None and value.node.name in _COPIES:
        value = value.node.operands[0]
    if value.constant is None or not is_floating_dtype(value.dtype) or np.size(value.constant) != 1:
        return None
    return float(np.asarray(value.constant).reshape(()))


def sources(node: Node) -> Iterator[Value]:
    """Yields where the operands of a node come from: results of counted nodes, and arguments.

    Numbers that are only moved on their way are followed to where they were computed.
    """
    seen: set[int] = set()
    pending = list(node.operands)
    while pending:
        value = pending.pop()
        if id(value) in seen or not is_floating_dtype(value.dtype):
            continue
        seen.add(id(value))
        if value.node is not None and _moves(value.node):
            pending += value.node.operands
        elif value.kind != "literal":
            yield value
