"""What every search for findings shares: the program, and how a finding is made."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from jmpx._inspect.audit.data import Finding
from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.streams import Streams
from jmpx._inspect.graph import Graph, Node
from jmpx._jaxprs.equations import Place

Key: TypeAlias = tuple[str, Place | None]


class Kind(NamedTuple):
    """A kind of finding; the table of `docs/audit.md` says what each is."""

    name: str  # which is public: `report.check(allow=...)` and the JSON have it
    # Which rules of policy maps may mend such a finding, beside its own.
    rules: Callable[[Remedies, list[Node]], Iterator[str]] = Remedies.none


class Found(NamedTuple):
    """A finding, and what its remedy is chosen by."""

    kind: Kind
    finding: Finding  # its `rule` is what to write in the code
    nodes: list[Node]  # the operations that it is about
    rules: tuple[str, ...]  # of a policy map, which are tried first


class Step:
    """A program, its streams of float32, and what all searches ask of it.

    Products are judged as the `platform` multiplies, and not for None. What a finding has
    `explained`, by the ids of nodes, later searches skip.
    """

    def __init__(self, graph: Graph, platform: str | None) -> None:
        self.graph, self.platform, self.streams = graph, platform, Streams(graph)
        self.explained: set[int] = set()

    def key(self, node: Node) -> Key:
        """Returns where a product is, which is the same forward and backward."""
        return self.graph.path(node), self.graph.place(node)

    def found(
        self, kind: Kind, severity: str, node: Node, message: str, advice: str, *rules: str,
        **sizes: int,
    ) -> Found:  # fmt: skip
        """Returns a finding about an operation.

        The message is one sentence, the advice what to write in the code; before the rules of its
        kind, `rules` are tried. Its sizes are FLOPs and bytes, and a count if that is not how often
        the node runs.
        """
        path, place = self.key(node)
        sizes = {"count": node.times, **sizes}
        return Found(
            kind, Finding(kind.name, severity, message, place, path, advice, **sizes), [node], rules
        )
