"""What every search for findings shares: the program, and how a finding is made."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jmpx._inspect.audit.data import Finding
from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.streams import Streams
from jmpx._inspect.graph import Graph, Node


class Kind(NamedTuple):
    """A kind of finding; the table of `docs/audit.md` says what each is.

    Attributes:
        name: its name, which is public: `report.check(allow=...)` and the JSON have it.
        rules: which rules of policy maps may mend such a finding, beside its own.
    """

    name: str
    rules: Callable[[Remedies, list[Node]], Iterator[str]] = Remedies.none


class Found(NamedTuple):
    """A finding, and what its remedy is chosen by.

    Attributes:
        kind: its kind.
        finding: the finding; its `rule` is what to write in the code.
        nodes: the operations that it is about.
        rules: the rules of a policy map that are tried first.
    """

    kind: Kind
    finding: Finding
    nodes: list[Node]
    rules: tuple[str, ...]


class Step:
    """A program, and what all searches ask of it.

    Attributes:
        graph: its graph.
        platform: the hardware whose products are judged, such as "tpu"; None judges none.
        streams: its streams of float32.
        explained: the ids of nodes that a finding explains, so that later searches skip them.
    """

    def __init__(self, graph: Graph, platform: str | None) -> None:
        self.graph, self.platform, self.streams = graph, platform, Streams(graph)
        self.explained: set[int] = set()

    def found(
        self, kind: Kind, severity: str, node: Node, message: str, advice: str, *rules: str,
        **sizes: int,
    ) -> Found:  # fmt: skip
        """Returns a finding about an operation.

        Args:
            kind: its kind.
            severity: one of `SEVERITIES`.
            node: the operation.
            message: one sentence: what happens, and why it matters.
            advice: what to write in the code.
            *rules: rules of policy maps to try before those of the kind.
            **sizes: its FLOPs and bytes, and its count if that is not how often the node runs.
        """
        place, path = self.graph.place(node), self.graph.path(node)
        sizes = {"count": node.times, **sizes}
        return Found(
            kind, Finding(kind.name, severity, message, place, path, advice, **sizes), [node], rules
        )
