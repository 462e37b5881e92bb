"""Which rules of a policy map may mend a finding, the most precise first."""

from collections.abc import Iterator

import numpy as np

from jmpx._inspect.audit.flops import is_product, multiplied
from jmpx._inspect.audit.values import AUTOCAST, LOW, MOVES_AND_CASTS, WIDE, before, half_dtype
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.text import short_names
from jmpx._inspect.where import modules_of, selector, where
from jmpx._policies.maps import Rule
from jmpx._policies.strings import get_policy


def is_half_product(node: Node) -> bool:
    """Whether a node is a product that is multiplied in 16 bits."""
    return is_product(node) and all(np.dtype(name) in LOW for name in multiplied(node))


class Remedies:
    """The rules that may mend findings in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._is_autocast = AUTOCAST in graph.program.takers
        self._outermost = graph.outermost()
        halves = {node.scope for node in graph.nodes if is_half_product(node)}
        self._multiplying = {module for scope in halves for module in modules_of(scope)}

    def is_of_all(self, rule: Rule) -> bool:
        """Whether a rule selects an outermost module, whose policy is that of the whole model."""
        return any(rule.matches(*module) for module in self._outermost)

    def lowers_share(self, rule: Rule) -> bool:
        """Whether a rule certainly has products in 16 bits run in float32."""
        if rule.compute is None or rule.matmul or np.dtype(rule.compute) not in WIDE:
            return False
        return any(rule.matches(*module) for module in self._multiplying)

    def none(self, nodes: list[Node]) -> Iterator[str]:
        """Yields nothing: for findings that no rule mends but their own."""
        yield from ()

    def narrower(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules for what should be in 16 bits: where it was made, and of loops."""
        short = short_names(half_dtype(self._graph))
        for scope in _makers(nodes):
            for select, compute, output in self._selectors(scope):
                if compute in WIDE and output in WIDE:
                    yield f"{select}: c=f32,o={short}"
        if self._is_autocast:
            loops = (node.eqn.primitive.name for node in nodes if node.is_structure)
            yield from (f"op.{name}: {short}" for name in loops if name in ("scan", "while"))

    def wider(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules for what should be in float32: of modules and scopes."""
        for scope in dict.fromkeys(node.scope for node in nodes):
            yield from self._widened(scope)

    def wider_operations(self, nodes: list[Node]) -> Iterator[str]:
        """Yields the rules of `wider`, and under autocast those of operations."""
        yield from self.wider(nodes)
        if self._is_autocast:
            yield from (f"op.{name}: f32" for name in dict.fromkeys(node.name for node in nodes))

    def wider_makers(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules for what should be returned in float32: of the modules that made it."""
        for scope in (makers := list(_makers(nodes))):
            for select, compute, output in self._selectors(scope):
                if compute is not None and compute != output:
                    short = short_names(compute.name)
                    yield f"{select}: c={short},o={short}"
        for scope in makers:
            yield from self._widened(scope)
        yield from self.wider(nodes)

    def _widened(self, scope: str) -> Iterator[str]:
        for select, compute, output in self._selectors(scope):
            if compute not in WIDE:
                yield f"{select}: full"
            if not self._is_autocast and not (compute in WIDE and output in WIDE):
                yield f"{select}: c=f32,o=f32"

    def _selectors(self, scope: str) -> Iterator[tuple[str, np.dtype | None, np.dtype | None]]:
        """Yields the selectors of a module, or under autocast of a scope, the most precise first.

        With each come the dtypes in which the module computes and returns, if an adapter ran it.
        """
        module, select = where(scope).module, selector(scope)
        if module is None and not self._is_autocast:
            return
        text = "" if module is None else self._graph.program.policies.get(module.path, "")
        policy = get_policy(text) if text else None
        compute = None if policy is None else np.dtype(policy.compute_dtype)
        output = None if policy is None else np.dtype(policy.output_dtype)
        if select is not None:
            yield select, compute, output
        if module is not None and module.cls.__name__ != select:
            yield module.cls.__name__, compute, output


def _makers(nodes: list[Node]) -> Iterator[str]:
    """Yields the scopes of what computed the operands of nodes, before moves and casts."""
    for node in nodes:
        for value in node.operands:
            maker = before(value, MOVES_AND_CASTS).node
            if maker is not None and not maker.is_structure:
                yield maker.scope
