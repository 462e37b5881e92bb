"""Which rules of a policy map may mend a finding, the most precise first."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from jmpx._inspect.audit.data import Finding
from jmpx._inspect.audit.flops import is_product, multiplied
from jmpx._inspect.audit.low_values import LOW, is_low
from jmpx._inspect.audit.streams import CAST, MOVES, WIDE
from jmpx._inspect.graph import Graph, Node
from jmpx._jaxprs.core import Place
from jmpx._policies.map_strings import parse_rule
from jmpx._policies.places import modules_of, selector, where
from jmpx._policies.rules import Rule
from jmpx._policies.strings import get_policy

# What is wider than it should be; other findings are about what is not wide enough.
LEAKS = frozenset({"float32-product", "mixed-product", "promotion", "saved-float32"})
_OF_RESULTS = frozenset({"cast-to-and-fro", "double-rounding"})  # made elsewhere
_OF_FINDER = frozenset({"low-collective", "platform-product"})  # no other rule mends these
_SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_LOOPS = ("scan", "while")
_AUTOCAST = "jmpx.autocast"


def as_rule(text: str) -> Rule | None:
    """Returns the rule of a policy map that a text is; None if it is a sentence or code."""
    try:
        return parse_rule(text) if ": " in text else None
    except (TypeError, ValueError):
        return None


def is_half_product(node: Node) -> bool:
    """Whether a node is a product that is multiplied in 16 bits."""
    return is_product(node) and all(np.dtype(name) in LOW for name in multiplied(node))


class Candidates:
    """The rules that may mend the findings in a graph.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._is_autocast = _AUTOCAST in graph.program.takers
        self._nodes: dict[str, list[Node]] = {}
        for node in graph.nodes:
            self._nodes.setdefault(graph.path(node), []).append(node)
        self._by_place: dict[str, dict[Place | None, list[Node]]] = {}
        self._outermost = graph.outermost()
        halves = {node.scope for node in graph.nodes if is_half_product(node)}
        self._multiplying = {module for scope in halves for module in modules_of(scope)}

    def of(self, finding: Finding) -> list[str]:
        """Returns rules that may mend a finding.

        None is for the outermost module, whose policy is that of the whole model.
        """
        rules = {text: as_rule(text) for text in (finding.rule, *self._of_nodes(finding))}
        return [text for text, rule in rules.items() if rule and not self._is_of_all(rule)]

    def lowers_share(self, rule: Rule) -> bool:
        """Whether a rule certainly has products in 16 bits run in float32."""
        if rule.compute is None or rule.matmul or np.dtype(rule.compute) not in WIDE:
            return False
        return any(rule.matches(*module) for module in self._multiplying)

    def _is_of_all(self, rule: Rule) -> bool:
        return any(rule.matches(*module) for module in self._outermost)

    def _of_nodes(self, finding: Finding) -> Iterator[str]:
        nodes = self._nodes_of(finding)
        if finding.name in LEAKS:
            yield from self._narrowing(finding, nodes)
        elif finding.name not in _OF_FINDER:
            yield from self._widening(finding, nodes)

    def _nodes_of(self, finding: Finding) -> list[Node]:
        """Returns the nodes in the scope of a finding that are on its line."""
        if finding.scope not in self._by_place:
            places = self._by_place.setdefault(finding.scope, {})
            for node in self._nodes.get(finding.scope, ()):
                places.setdefault(self._graph.place(node), []).append(node)
        return self._by_place[finding.scope].get(finding.place, [])

    def _narrowing(self, finding: Finding, nodes: list[Node]) -> Iterator[str]:
        """Yields rules for what should be in 16 bits: where it was made, and of loops."""
        short = self._half()
        for scope in _scopes_of_makers(nodes):
            for select, compute, output in self._selectors(scope):
                if compute in WIDE and output in WIDE:
                    yield f"{select}: c=f32,o={short}"
                elif as_rule(finding.rule) and compute not in WIDE:
                    yield f"{select}: c={short},o={short}"
        if self._is_autocast:
            loops = (node.eqn.primitive.name for node in nodes if node.is_structure)
            yield from (f"op.{name}: {short}" for name in loops if name in _LOOPS)

    def _half(self) -> str:
        """Returns the 16-bit dtype of most values, as rules spell it."""
        values = (v.dtype.name for node in self._graph.nodes for v in node.results if is_low(v))
        return _SHORT[(Counter(values).most_common(1) or [("bfloat16", 0)])[0][0]]

    def _widening(self, finding: Finding, nodes: list[Node]) -> Iterator[str]:
        """Yields rules for what should be in float32: of modules, scopes and operations."""
        makers = list(_scopes_of_makers(nodes)) if finding.name in _OF_RESULTS else []
        for scope in makers:
            yield from self._returned(scope)
        for scope in dict.fromkeys((*makers, *(node.scope for node in nodes))):
            yield from self._widened(scope)
        if self._is_autocast:
            names = dict.fromkeys(node.name for node in nodes)
            yield from (f"op.{name}: f32" for name in names if name in finding.message.split())

    def _returned(self, scope: str) -> Iterator[str]:
        """Yields rules that have a module return what it computes, in the same dtype."""
        for select, compute, output in self._selectors(scope):
            if compute is not None and compute != output:
                short = _SHORT[compute.name]
                yield f"{select}: c={short},o={short}"

    def _widened(self, scope: str) -> Iterator[str]:
        for select, compute, output in self._selectors(scope):
            if compute not in WIDE:
                yield f"{select}: full"
            is_whole = compute in WIDE and output in WIDE
            if not is_whole and not self._is_autocast:
                yield f"{select}: c=f32,o=f32"

    def _selectors(self, scope: str) -> Iterator[tuple[str, np.dtype | None, np.dtype | None]]:
        """Yields the selectors of a module, or under autocast of a scope, the most precise first.

        Yields:
            The selector, and the dtypes in which the module computes and returns, if an adapter
            ran it.
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


def _scopes_of_makers(nodes: list[Node]) -> Iterator[str]:
    """Yields the scopes of what computed the operands of nodes, before moves and casts."""
    for node in nodes:
        for value in node.operands:
            while value.node is not None and value.node.name in (*MOVES, CAST):
                value = value.node.operands[0]
            if value.node is not None and not value.node.is_structure:
                yield value.node.scope
