"""Streams: what becomes of values that are wider than 16 bits, in a step that computes in 16 bits.

A wide value that is computed from 16-bit ones belongs to a stream, which starts where they became
wide: at a cast, at a promotion, where a 16-bit array met a wide one, or at a wide product. A stream
ends where its values are cast back. What it does until then tells an island from a leak: an island
is a norm, a softmax or a loss that is computed in float32. It returns to 16 bits, or ends in the
loss, before a product reads it and before it widens what other modules computed in 16 bits.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jmpx._autocast.rules import is_precise
from jmpx._inspect.audit.flops import flops, is_product
from jmpx._inspect.audit.values import (
    CAST,
    LOW,
    MOVES,
    MOVES_AND_CASTS,
    WIDE,
    before,
    call,
    compute_dtype,
    outermost_dtype,
)
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.where import where

# Operations for whose sake a part of a model is computed in float32, as a norm or a softmax is.
_OF_ISLANDS = frozenset(
    """
    reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum cumprod cummax cumlogsumexp
    reduce_window_sum reduce_window exp exp2 expm1 log log1p pow sqrt rsqrt erf erfc erf_inv lgamma
    digamma psum sort top_k
    """.split()
)


@dataclasses.dataclass(eq=False, slots=True)
class Stream:
    """Wide values that were computed from 16-bit ones."""

    kind: str  # how it starts: `cast`, `promotion` or `product`
    node: Node  # where it starts
    cause: Value | None = None  # the wide value that a 16-bit one met there
    # The products that are wide because of it, its own among them.
    products: list[Node] = dataclasses.field(default_factory=list)
    # Where it widened what another module or function had computed in 16 bits.
    widened: list[Node] = dataclasses.field(default_factory=list)
    nbytes: int = 0  # of its values that are saved for the backward pass
    is_island: bool = False  # whether it computes what an island is made for
    into: "Stream | None" = None  # the stream that it became a part of

    @property
    def whole(self) -> "Stream":
        """The stream that this one is a part of, or itself."""
        stream = self
        while stream.into is not None:
            stream = stream.into
        return stream

    def merge_into(self, other: "Stream") -> None:
        """Makes the stream a part of another one, unless it is a leak of its own."""
        if self is not other and self.kind == "cast":
            self.into = other
            other.is_island |= self.is_island
            other.widened += self.widened


class Streams:
    """The streams of a graph, found in one pass over its forward part."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._streams: list[Stream] = []
        self._of: dict[int, Stream] = {}  # the id of a value -> its stream
        self._casts: dict[int, Node] = {}  # the id of a value -> the cast that it is fresh from
        self.forward = list(_forward(graph))
        # Of products in float32, and of those in 16 bits, or that were so without a leak.
        self._flops = [0, 0]
        for node in self.forward:
            stream = self._visit(node)
            if stream is not None:
                self._of.update((id(v), stream) for v in node.results if v.dtype in WIDE)
        # A step computes in 16 bits if most of its products do, or its outermost policy.
        wide, half = self._flops
        self.is_half = 0 < half >= wide or outermost_dtype(graph) in LOW
        self.saved = sum(map(self._saved, self.forward))  # bytes of floats in all dtypes
        self.found = [stream for stream in self._streams if stream.into is None]

    def _visit(self, node: Node) -> Stream | None:
        """Returns the stream of the wide results of a node; None if there is none."""
        if is_product(node):
            return self._product(node)
        if not any(value.dtype in WIDE for value in node.results):
            return None
        if node.name != CAST:
            return self._combine(node)
        if node.operands[0].dtype not in LOW:
            return self._of.get(id(node.operands[0]))
        self._casts[id(node.results[0])] = node
        return self._start("cast", node)

    def _start(self, kind: str, node: Node, cause: Value | None = None) -> Stream:
        self._streams.append(Stream(kind, node, cause))
        return self._streams[-1]

    def _met(self, operands: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        """Returns the wide values: fresh from casts, other ones of streams, and of no stream."""
        wide = [value for value in operands if value.dtype in WIDE]
        return (
            [value for value in wide if id(value) in self._casts],
            [v for v in wide if id(v) in self._of and id(v) not in self._casts],
            [value for value in wide if id(value) not in self._of],
        )

    def _combine(self, node: Node) -> Stream | None:
        """Follows streams through a node that is neither a cast nor a product."""
        cast, wide, other = self._met(node.first_operands)
        if node.name in MOVES and cast and not wide:
            self._casts.update((id(value), self._casts[id(cast[0])]) for value in node.results)
            return self._of[id(cast[0])]
        if not cast and not wide:
            return None
        stream = self._united(wide or cast)
        if wide:
            for value in cast:
                self._widen(stream, value, node)
        elif other and not self.is_asked(node) and any(self._is_silent(v, node) for v in cast):
            stream.into = self._start("promotion", node, other[0])
            stream = stream.into
        stream.is_island |= node.name in _OF_ISLANDS
        return stream

    def _united(self, values: list[Value]) -> Stream:
        """Returns the stream of values that meet: a leak if one is, else one island of them all."""
        streams = list(dict.fromkeys(self._of[id(value)].whole for value in values))
        first = next((stream for stream in streams if stream.kind != "cast"), streams[0])
        for stream in streams:
            stream.merge_into(first)
        return first

    def _widen(self, stream: Stream, value: Value, node: Node) -> None:
        """Notes that a stream meets a value that was cast up for it."""
        cast, part = self._casts[id(value)], self._of[id(value)].whole
        if part is stream or part.kind != "cast":
            return
        part.merge_into(stream)
        if value.size > 1 and _is_computed(cast.operands[0]) and not self.is_asked(node):
            if self._home(stream.node) != self._home(node):
                stream.widened.append(node)

    def _product(self, node: Node) -> Stream | None:
        cast, wide, other = self._met(node.operands[:2])
        parts = [self._of[id(value)].whole for value in (*cast, *wide)]
        if not parts and not other:
            self._flops[1] += flops(node)
            return self._start("cast", node) if node.results[0].dtype in WIDE else None
        if self.is_asked(node):
            stream = self._united([*cast, *wide]) if parts else None
            for part in parts:
                part.is_island = True
            return stream
        leaks = [self._of[id(value)].whole for value in wide]
        if leaks and not other and all(each.kind != "cast" or each.widened for each in leaks):
            stream = leaks[0]
        else:
            met = [*wide, *other]
            stream = self._start("product", node, met[0] if len(met) == 1 else None)
        is_half = any(value.dtype in LOW for value in node.operands[:2])
        is_half |= stream.node is not node or (bool(cast) and not self.is_written(node))
        self._flops[is_half] += flops(node)
        stream.products.append(node)
        for part in parts:
            if not part.is_island and not part.widened:
                part.merge_into(stream)
        return stream

    def is_of_leak(self, value: Value) -> bool:
        """Whether a value belongs to a stream that a finding is about."""
        stream = self._of[id(value)].whole if id(value) in self._of else None
        return self.is_half and stream is not None and bool(stream.products or stream.widened)

    def origin(self, value: Value | None) -> Node | None:
        """Returns what made the first wide value that a value is computed from, if anything did."""
        node = None if value is None or not _is_computed(value) else value.node
        while node is not None and id(node.results[0]) not in self._of:
            wide = (v.node for v in node.first_operands if v.dtype in WIDE and v.node is not None)
            earlier = next(wide, None)
            if earlier is None:
                return node
            node = earlier
        return None if node is None else self._of[id(node.results[0])].whole.node

    def is_asked(self, node: Node) -> bool:
        """Whether the user asks that a node computes in float32: by a policy, rule or precision.

        A product that sums up all products of two arrays is a norm, say.
        """
        place, program = where(node.scope), self._graph.program
        if place.is_full or (is_product(node) and (is_precise(node.eqn) or _is_inner(node))):
            return True
        policy = self._graph.policy(node)
        if place.module is None or not policy or compute_dtype(policy) not in WIDE:
            return False
        parts = place.module.path.split("/")  # A rule may be for a module around it.
        return any("/".join(parts[: i + 1]) in program.chosen for i in range(len(parts)))

    def _is_silent(self, value: Value, node: Node) -> bool:
        """Whether the cast of a value was not written by the user, but is part of an operation."""
        return call(self._casts[id(value)]) == call(node)

    def is_written(self, node: Node) -> bool:
        """Whether the user's code casts an operand of a node up right before it."""
        cast = [value for value in node.operands if id(value) in self._casts]
        return any(not self._is_silent(value, node) for value in cast)

    def _home(self, node: Node) -> tuple[str, str]:
        """Returns the path of the module of a node; outside of modules, scope and function."""
        found, place = where(node.scope), self._graph.place(node)
        if found.module is not None:
            return found.module.path, ""
        return found.path, place.function if place else ""

    def _saved(self, node: Node) -> int:
        """Returns the bytes of floats that the backward pass reads, which streams count, too."""
        saved = [v for v in node.results if any(reader.is_backward for reader in v.readers)]
        for value in saved:
            if value.dtype in WIDE and id(value) in self._of and not self.is_asked(node):
                own = self._of[id(value)]  # A loss that a leak reaches keeps its own bytes.
                (own if own.is_island else own.whole).nbytes += value.nbytes
        return sum(value.nbytes for value in saved if value.dtype in WIDE | LOW)


def _forward(graph: Graph) -> Iterator[Node]:
    """Yields the nodes that a gradient is computed of: not the backward pass, nor what reads it."""
    after: set[int] = set()
    for node in graph.nodes:
        if node.is_backward or any(id(value) in after for value in node.first_operands):
            after.update(map(id, node.results))
        else:
            yield node


def _is_computed(value: Value) -> bool:
    """Whether arithmetic made a value, and not only moves and casts of an argument."""
    return before(value, MOVES_AND_CASTS | {"carry", "join"}).node is not None


def _is_inner(node: Node) -> bool:
    """Whether a product has neither rows nor columns: a sum of products, such as a norm."""
    if node.name != "dot_general":
        return False
    (contracted, _), (batch, _) = node.eqn.params["dimension_numbers"]
    of_both = [node.operands[0].shape[axis] for axis in (*contracted, *batch)]
    return [value.size for value in node.operands[:2]] == [int(np.prod(of_both))] * 2
