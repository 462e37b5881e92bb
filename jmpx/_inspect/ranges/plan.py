"""Which equations of a program count, and for which scope."""

import math

import numpy as np

from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.running import key_of
from jmpx._jaxprs.equations import EXCHANGES, IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES
from jmpx._scales.scaling import LARGEST_FLOAT16

# Numbers count where they are computed, not where these move them; in float32, a cast does, too. A
# gather is not among them: embeddings count, and their table, an argument, does not.
_MOVES = IDENTITIES | PLACEMENTS | RESHAPES | (PICKS - {"gather"}) | JOINS | EXCHANGES
_MOVES |= {"convert_element_type"}
_OF_ONE_NUMBER = IDENTITIES | RESHAPES | {"convert_element_type", "neg"}  # up to its sign
_RECOMPUTED = "rematted_computation"  # what JAX calls the recomputed part of a checkpoint


class Plan:
    """What is counted of a program."""

    def __init__(self, graph: Graph) -> None:
        self.masks = _masks(graph)  # magnitudes beyond float16 that `jnp.where` puts into arrays
        rows = {
            key_of(n): (graph.path(n), n.is_backward and _RECOMPUTED not in n.scope.split("/"))
            for n in graph.nodes
            if _counts(graph, n)
        }
        # The rows of the table of counts: scopes, and whether they are of the backward pass.
        self.table = list(dict.fromkeys(rows.values()))
        self.rows = {key: self.table.index(row) for key, row in rows.items()}


def _counts(graph: Graph, node: Node) -> bool:
    if node.is_structure or node.name in _MOVES:
        return False
    if not any(is_floating_dtype(value.dtype) for value in node.results):
        return False
    # Single numbers outside of modules and scopes, such as the loss, a loss scale and the numbers
    # of an optimizer, are float32 whatever the policy says.
    return graph.selector(node) is not None or any(value.shape for value in node.results)


def _masks(graph: Graph) -> tuple[float, ...]:
    selects = (node for node in graph.nodes if node.name == "select_n")
    found = {abs(_constant(value)) for node in selects for value in node.operands[1:]}
    return tuple(sorted(c for c in found if LARGEST_FLOAT16 < c < math.inf))


def _constant(value: Value) -> float:
    """Returns the number that all elements of a value are; 0 if that is not known."""
    while value.node is not None and value.node.name in _OF_ONE_NUMBER:
        value = value.node.operands[0]
    if value.constant is None or not is_floating_dtype(value.dtype):
        return 0.0
    numbers = np.asarray(value.constant)
    return float(numbers.item()) if numbers.size == 1 else 0.0
