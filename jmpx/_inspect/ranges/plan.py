"""What is measured of a program, and where the numbers that enter a scope come from."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jmpx._base.leaves import is_floating_dtype
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.ranges.formats import FORMATS
from jmpx._inspect.sites import key_of
from jmpx._jaxprs.moves import EXCHANGES, IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES
from jmpx._jaxprs.watched import Site

# Numbers count where they are computed, not where these move them; in float32, a cast does, too. A
# gather is not among them: embeddings count, and their table, an argument, does not.
_MOVES = IDENTITIES | PLACEMENTS | RESHAPES | (PICKS - {"gather"}) | JOINS | EXCHANGES
_MOVES |= {"convert_element_type"}
_OF_ONE_NUMBER = IDENTITIES | RESHAPES | {"convert_element_type", "neg"}  # up to its sign
_RECOMPUTED = "rematted_computation"  # what JAX calls the recomputed part of a checkpoint


class Row(NamedTuple):
    """A row of the table of counts: a scope, forward or backward."""

    scope: str  # the path of the module, and the named scopes inside of it
    selector: str | None  # a selector of policy rules for it, or None
    is_gradient: bool  # whether it is the backward pass


class Plan:
    """What is measured of a program.

    Args:
        graph: the program.

    Attributes:
        nodes: the nodes that are measured; there are extremes of each.
        table: the rows of the table of counts.
        rows: the position in `table` of each of these nodes.
        masks: the magnitudes beyond float16 that `jnp.where` puts into arrays.
    """

    def __init__(self, graph: Graph) -> None:
        self.masks = _masks(graph)
        self.nodes = [node for node in graph.nodes if _is_measured(graph, node)]
        rows = [Row(graph.path(n), graph.selector(n), is_gradient(n)) for n in self.nodes]
        self.table = list(dict.fromkeys(rows))
        self.rows = list(map(self.table.index, rows))
        self._positions = {key_of(node): i for i, node in enumerate(self.nodes)}

    def position(self, site: Site) -> int | None:
        """Returns the position of an equation in `nodes`; None if it is not measured."""
        return self._positions.get(site.key)


def _is_measured(graph: Graph, node: Node) -> bool:
    """Whether a node computes floating numbers, in a module or scope or more than one.

    Single numbers outside of scopes, such as the loss, a loss scale and the numbers of an
    optimizer, are float32 whatever the policy says.
    """
    if _is_move(node) or not any(is_floating_dtype(value.dtype) for value in node.results):
        return False
    return graph.selector(node) is not None or any(value.shape for value in node.results)


def _is_move(node: Node) -> bool:
    return node.is_structure or node.name in _MOVES


def is_gradient(node: Node) -> bool:
    """Whether a node computes gradients: the backward pass without recomputed activations."""
    return node.is_backward and _RECOMPUTED not in node.scope.split("/")


def _masks(graph: Graph) -> tuple[float, ...]:
    selects = (node for node in graph.nodes if node.name == "select_n")
    found = {_constant(value) for node in selects for value in node.operands[1:]}
    limit = FORMATS["float16"].largest
    return tuple(sorted({abs(c) for c in found if c is not None and limit < abs(c) < math.inf}))


def _constant(value: Value) -> float | None:
    """Returns the number that all elements of a value are; None if that is not known."""
    while value.node is not None and value.node.name in _OF_ONE_NUMBER:
        value = value.node.operands[0]
    if value.constant is None or not is_floating_dtype(value.dtype):
        return None
    numbers = np.asarray(value.constant)
    return float(numbers.item()) if numbers.size == 1 else None


def sources(node: Node) -> Iterator[Value]:
    """Yields the values that a node reads, as they were computed or given before any move."""
    seen: set[int] = set()
    pending = list(node.operands)
    while pending:
        value = pending.pop()
        if id(value) in seen or not is_floating_dtype(value.dtype):
            continue
        seen.add(id(value))
        if value.node is not None and _is_move(value.node):
            pending += value.node.operands
        elif value.kind != "literal":
            yield value
