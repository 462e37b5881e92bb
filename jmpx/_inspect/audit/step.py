"""What all searches for findings share: the program, how a finding is made, and rules for it."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from jmpx._inspect.audit.report import Finding
from jmpx._inspect.audit.streams import Streams
from jmpx._inspect.audit.values import (
    AUTOCAST,
    LOW,
    MOVES_AND_CASTS,
    WIDE,
    before,
    half_dtype,
    is_product,
    multiplied,
)
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.text import short_names
from jmpx._inspect.where import modules_of, selector, where
from jmpx._jaxprs.places import Place
from jmpx._policies.rules import Rule
from jmpx._policies.strings import get_policy

Key: TypeAlias = tuple[str, Place | None]


def is_half_product(node: Node) -> bool:
    """Whether a node is a product that is multiplied in 16 bits."""
    return is_product(node) and all(np.dtype(name) in LOW for name in multiplied(node))


class Remedies:
    """The rules of policy maps that may mend findings in a graph, the most precise first."""

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
        """Whether a rule surely makes some of the 16-bit products run in float32."""
        if rule.compute is None or rule.matmul or np.dtype(rule.compute) not in WIDE:
            return False
        return any(rule.matches(*module) for module in self._multiplying)

    def narrower(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules that narrow: of the modules that made the operands, and of loops."""
        short = short_names(half_dtype(self._graph))
        for scope in _makers(nodes):
            for select, compute, output in self._selectors(scope):
                if compute in WIDE and output in WIDE:
                    yield f"{select}: c=f32,o={short}"
        if self._is_autocast:
            loops = (node.eqn.primitive.name for node in nodes if node.is_structure)
            yield from (f"op.{name}: {short}" for name in loops if name in ("scan", "while"))

    def wider(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules that compute in float32: of modules and scopes."""
        for scope in dict.fromkeys(node.scope for node in nodes):
            yield from self._widened(scope)

    def wider_operations(self, nodes: list[Node]) -> Iterator[str]:
        """Yields the rules of `wider`, and under autocast those of operations."""
        yield from self.wider(nodes)
        if self._is_autocast:
            yield from (f"op.{name}: f32" for name in dict.fromkeys(node.name for node in nodes))

    def wider_makers(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules by which modules return the operands in float32, then those of `wider`."""
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

        Each comes with the dtypes in which the module computes and returns, None if no adapter ran
        it.
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
    """Yields the scopes of the nodes that computed the operands, before moves and casts."""
    for node in nodes:
        for value in node.operands:
            maker = before(value, MOVES_AND_CASTS).node
            if maker is not None and not maker.is_structure:
                yield maker.scope


class FindingKind(NamedTuple):
    """A kind of finding; the table of `docs/audit.md` says what each is."""

    name: str  # which is public: `report.check(allow=...)` and the JSON have it
    # Returns rules of policy maps that may mend a finding about these nodes, beside its own.
    rules: Callable[[Remedies, list[Node]], Iterable[str]] = lambda *_: ()


class UntriedFinding(NamedTuple):
    """A finding with advice, before rules for it are tried."""

    kind: FindingKind
    finding: Finding
    nodes: list[Node]  # the operations that it is about
    rules: tuple[str, ...]  # to be tried before those of the kind


class AuditedStep:
    """A program that is searched for findings, and its streams of float32.

    `platform` is the hardware that multiplies; None if it is unknown. `explained` has nodes that a
    finding is about: later searches skip them.
    """

    def __init__(self, graph: Graph, platform: str | None) -> None:
        self.graph, self.platform, self.streams = graph, platform, Streams(graph)
        self.explained: set[Node] = set()

    def key(self, node: Node) -> Key:
        """Returns where a product is, which is the same forward and backward."""
        return self.graph.path(node), self.graph.place(node)

    def found(
        self, kind: FindingKind, severity: str, node: Node, message: str, advice: str, *rules: str,
        **sizes: int,
    ) -> UntriedFinding:  # fmt: skip
        """Returns a finding about an operation.

        Args:
            kind: its kind.
            severity: one of `SEVERITIES`.
            node: the operation.
            message: one sentence: what happens, and why it matters.
            advice: what to write in the code.
            *rules: rules to try before those of the kind.
            **sizes: `flops`, `nbytes`, and `count` where that is not how often the node runs.
        """
        path, place = self.key(node)
        sizes = {"count": node.times, **sizes}
        finding = Finding(kind.name, severity, message, place, path, "", advice, **sizes)
        return UntriedFinding(kind, finding, [node], rules)
