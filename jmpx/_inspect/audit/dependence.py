"""Which values depend on which, within one trip of a loop or over all of its trips."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jmpx._inspect.audit.flops import is_product
from jmpx._inspect.graph import Graph, Node, Value


class Loop(NamedTuple):
    """A loop.

    Attributes:
        carries: its nodes that tie what the body returns to what it starts with.
        trips: how often its body runs; None for a while loop.
    """

    carries: tuple[Node, ...]
    trips: int | None


def loops_of(graph: Graph) -> Iterator[Loop]:
    """Yields the loops of a graph that carry something."""
    together: list[Node] = []
    for node in (*graph.nodes, None):
        is_carry = node is not None and node.is_structure and node.name == "carry"
        if together and not (is_carry and node is not None and node.eqn is together[0].eqn):
            yield Loop(tuple(together), together[0].eqn.params.get("length"))
            together = []
        if is_carry and node is not None:
            together.append(node)


def reaches_end(node: Node, avoided: frozenset[np.dtype] = frozenset()) -> bool:
    """Whether a result reaches an end of the forward pass, such as a loss, before a product.

    Args:
        node: what computes the result.
        avoided: dtypes that it is not to have on its way.
    """
    pending, seen = [node], {id(node)}
    while pending:
        for value in pending.pop().results:
            if value.dtype in avoided:
                continue
            if value.is_output or (not value.readers and value.shape == ()):
                return True
            readers = [each for each in value.readers if not each.is_backward]
            new = [each for each in readers if id(each) not in seen and not is_product(each)]
            seen.update(map(id, new))
            pending += new
    return False


class Dependence:
    """Which values contribute to which, found in one pass over a graph.

    Args:
        graph: the graph.
        loops: the loops about whose carries it is asked.
        values: further values about which it is asked.
    """

    def __init__(self, graph: Graph, loops: Iterable[Loop], values: Iterable[Value]) -> None:
        self._carries = {id(carry.results[0]): carry for loop in loops for carry in loop.carries}
        asked = [*self._carries, *(id(value) for value in values)]
        self._bits = {key: 1 << i for i, key in enumerate(dict.fromkeys(asked))}
        self._by_bit = {bit: key for key, bit in self._bits.items()}
        # The bits of what contributes to a value.
        self._masks: dict[int, int] = {id(v): self._bits.get(id(v), 0) for v in graph.inputs}
        inner: dict[int, list[Node]] = {}  # a loop's equation -> its carries
        for node in graph.nodes:
            operands = node.operands
            if node.is_structure and node.name == "carry":
                inner.setdefault(id(node.eqn), []).append(node)
                operands = operands[:1]  # What the body returns comes later.
            mask = self._union(operands)
            if node.is_structure and node.name in ("result", "stack"):
                # In later trips, all of a loop's body may depend on all that it carries.
                mask |= self._union(
                    v for each in inner.get(id(node.eqn), ()) for v in each.operands
                )
            for value in node.results:
                self._masks[id(value)] = mask | self._bits.get(id(value), 0)

    def _union(self, values: Iterable[Value]) -> int:
        mask = 0
        for value in values:
            mask |= self._masks.get(id(value), 0)
        return mask

    def in_one_trip(self, value: Value, old: Value) -> bool:
        """Whether an old value contributes to another one before it is computed anew."""
        return bool(self._masks.get(id(value), 0) & self._bits[id(old)])

    def in_any_trip(self, value: Value, old: Value) -> bool:
        """Whether a carry contributes to a value in this trip or in a later one."""
        reached, pending = 0, self._masks.get(id(value), 0)
        while pending:
            bit = pending & -pending
            reached |= bit
            carry = self._carries.get(self._by_bit[bit])
            if carry is not None:
                pending |= self._masks.get(id(carry.operands[-1]), 0)
            pending &= ~reached
        return bool(reached & self._bits[id(old)])
