"""Streams: what becomes of values that are wider than 16 bits, in a step that computes in 16 bits.

A wide value that is computed from 16-bit ones belongs to a stream, which starts where they became
wide: at a cast, at a promotion, where a 16-bit array met a wide one, or at a wide product. A stream
ends where its values are cast back. What it does until then tells an island from a leak: an island
is a norm, a softmax or a loss that is computed in float32. It returns to 16 bits, or ends in the
loss, before a product reads it and before it widens what other modules computed in 16 bits.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpx._autocast.products import PRODUCTS, is_precise
from jmpx._inspect.audit.flops import flops
from jmpx._inspect.audit.low_values import LOW, MOVES
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._jaxprs.places import call_of
from jmpx._policies.places import where
from jmpx._policies.strings import get_policy

WIDE = frozenset({np.dtype(jnp.float32), np.dtype(jnp.float64)})
CAST = "convert_element_type"

# Operations for whose sake a part of a model is computed in float32, as a norm or a softmax is.
_OF_ISLANDS = frozenset(
    """
    reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum cumprod cummax cumlogsumexp
    reduce_window_sum reduce_window exp exp2 expm1 log log1p pow sqrt rsqrt erf erfc erf_inv lgamma
    digamma psum sort top_k
    """.split()
)


class Stream:
    """Wide values that were computed from 16-bit ones.

    Attributes:
        kind: how it starts: `cast`, `promotion` or `product`.
        node: where it starts.
        cause: the wide value that the 16-bit one met; of a product, its wide operand.
        products: the products that are wide because of it, its own among them.
        widened: where it widened what another module or function had computed in 16 bits.
        nbytes: the bytes of its values that are saved for the backward pass.
        is_island: whether it computes what an island is made for.
    """

    __slots__ = ("cause", "into", "is_island", "kind", "nbytes", "node", "products", "widened")

    def __init__(self, kind: str, node: Node, cause: Value | None = None) -> None:
        self.kind = kind
        self.node = node
        self.cause = cause
        self.products: list[Node] = []
        self.widened: list[Node] = []
        self.nbytes = 0
        self.is_island = False
        self.into: Stream | None = None  # the stream that this one became a part of

    @property
    def whole(self) -> "Stream":
        """The stream that this one is a part of, or itself."""
        stream = self
        while stream.into is not None:
            stream = stream.into
        return stream


class Meeting(NamedTuple):
    """The operands of a node, by what they are.

    Attributes:
        cast: those that were cast up right before.
        wide: those of a stream.
        other: those that come from wide arguments and constants alone.
        is_half: whether there are 16-bit ones.
    """

    cast: list[Value]
    wide: list[Value]
    other: list[Value]
    is_half: bool


class Streams:
    """The streams of a graph, found in one pass over its forward part.

    Args:
        graph: the graph.

    Attributes:
        found: all streams that are no part of another one.
        forward: the nodes of the forward pass, in the order of the program.
        is_half: whether the step computes in 16 bits: most products have 16-bit operands, or the
            outermost policy says so.
        saved: the bytes that are saved for the backward pass, of floats in all dtypes.
        saved_others: values saved for the backward pass that are wide and belong to no stream.
        half_products: the products with a 16-bit operand, or that would have one without a leak.
        wide_products: the other products, without those that a user asks for.
        asked: the products that a user asks for in float32, and sums of products such as a norm.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._of: dict[int, Stream] = {}  # the id of a value -> its stream
        self._casts: dict[int, Node] = {}  # the id of a value -> the cast that it is fresh from
        self._streams: list[Stream] = []
        self.forward = list(forward(graph))
        self.half_products: list[Node] = []
        self.wide_products: list[Node] = []
        self.asked: list[Node] = []
        self._variable: set[int] = set()  # the ids of values that depend on an argument
        for node in self.forward:
            if any(map(self.is_variable, node.operands)):
                self._variable.update(map(id, node.results))
            self._visit(node)
        self.is_half = self._is_half()
        self.saved = 0
        self.saved_others: list[Value] = []
        self._count_saved()
        self.found = [stream for stream in self._streams if stream.into is None]

    def _is_half(self) -> bool:
        half = sum(map(flops, self.half_products))
        if half and half >= sum(map(flops, self.wide_products)):
            return True
        return outermost_dtype(self._graph) in LOW

    def _visit(self, node: Node) -> None:
        if node.name in PRODUCTS:
            self._product(node)
        elif any(value.dtype in WIDE for value in node.results):
            if node.name == CAST:
                self._cast(node)
            else:
                self._combine(node)

    def _start(self, kind: str, node: Node, cause: Value | None = None) -> Stream:
        stream = Stream(kind, node, cause)
        self._streams.append(stream)
        return stream

    def _give(self, node: Node, stream: Stream) -> None:
        for value in node.results:
            if value.dtype in WIDE:
                self._of[id(value)] = stream

    def _cast(self, node: Node) -> None:
        (source,), (result,) = node.operands, node.results
        if source.dtype in LOW:
            self._casts[id(result)] = node
            self._of[id(result)] = self._start("cast", node)
        elif id(source) in self._of:
            self._of[id(result)] = self._of[id(source)]

    def _meeting(self, operands: list[Value]) -> Meeting:
        wide = [value for value in operands if value.dtype in WIDE]
        cast = [value for value in wide if id(value) in self._casts]
        of_stream = [v for v in wide if id(v) in self._of and id(v) not in self._casts]
        other = [value for value in wide if id(value) not in self._of]
        return Meeting(cast, of_stream, other, any(value.dtype in LOW for value in operands))

    def _combine(self, node: Node) -> None:
        """Follows streams through a node that is neither a cast nor a product."""
        # What the body of a loop returns to its carry is not known yet.
        operands = node.operands[:1] if node.name == "carry" else node.operands
        cast, wide, other, _ = self._meeting(operands)
        if node.name in MOVES and cast and not wide:
            self._casts[id(node.results[0])] = self._casts[id(cast[0])]
            self._give(node, self._of[id(cast[0])])
            return
        if wide:
            stream = self._united(wide)
            for value in cast:
                self._widen(stream, value, node)
        elif cast:
            stream = self._united(cast)
            silent = [value for value in cast if self._is_silent(value, node)]
            if other and silent and not self.is_asked(node):
                stream.into = self._start("promotion", node, other[0])
                stream = stream.into
        else:
            return
        stream.is_island |= node.name in _OF_ISLANDS
        self._give(node, stream)

    def _united(self, values: list[Value]) -> Stream:
        """Returns the stream of values that meet: a leak if one is, else one island of them all."""
        streams = list({id(s): s for s in (self._of[id(v)].whole for v in values)}.values())
        leaks = [stream for stream in streams if stream.kind != "cast"]
        first = (leaks or streams)[0]
        for stream in streams:
            self._merge(stream, first)
        return first

    def _merge(self, part: Stream, whole: Stream) -> None:
        """Makes a stream a part of another one, unless it is a leak of its own."""
        if part is not whole and part.kind == "cast":
            part.into = whole
            whole.is_island |= part.is_island
            whole.widened += part.widened

    def _widen(self, stream: Stream, value: Value, node: Node) -> None:
        """Notes that a stream meets a value that was cast up for it."""
        cast, part = self._casts[id(value)], self._of[id(value)].whole
        if part is stream or part.kind != "cast":
            return
        self._merge(part, stream)
        if value.size > 1 and _is_computed(cast.operands[0]) and not self.is_asked(node):
            if self._home(stream.node) != self._home(node):
                stream.widened.append(node)

    def _product(self, node: Node) -> None:
        meeting = self._meeting(node.operands[:2])
        cast, wide, other, is_half = meeting
        parts = [self._of[id(value)].whole for value in (*cast, *wide)]
        if not parts and not other:
            self.half_products.append(node)
            stream = self._start("cast", node) if node.results[0].dtype in WIDE else None
        elif self.is_asked(node) or _is_inner(node):
            self.asked.append(node)
            stream = self._united([*cast, *wide]) if parts else None
            for part in parts:
                part.is_island = True
        else:
            stream = self._leak(node, meeting)
            is_meant_half = (
                is_half or stream.node is not node or (cast and not self.is_written(node))
            )
            (self.half_products if is_meant_half else self.wide_products).append(node)
            stream.products.append(node)
            for part in parts:
                if not part.is_island and not part.widened:
                    self._merge(part, stream)
        if stream is not None:
            self._give(node, stream)

    def _leak(self, node: Node, meeting: Meeting) -> Stream:
        """Returns the stream because of which a product is wide."""
        leaks = [self._of[id(value)].whole for value in meeting.wide]
        is_cause = all(stream.kind != "cast" or stream.widened for stream in leaks)
        if leaks and is_cause and not meeting.other:
            return leaks[0]
        cause = (meeting.other or meeting.wide or meeting.cast)[0]
        return self._start("product", node, cause)

    def is_variable(self, value: Value) -> bool:
        """Whether a value is an argument, or depends on one."""
        return value.kind == "input" or id(value) in self._variable

    def is_of_leak(self, value: Value) -> bool:
        """Whether a value belongs to a stream that a finding is about."""
        stream = self._of[id(value)].whole if id(value) in self._of else None
        return self.is_half and stream is not None and bool(stream.products or stream.widened)

    def origin(self, value: Value) -> Node | None:
        """Returns what made the first wide value that a wide value is computed from."""
        node = value.node
        while node is not None:
            if id(node.results[0]) in self._of:
                return self._of[id(node.results[0])].whole.node
            operands = node.operands[:1] if node.name == "carry" else node.operands
            before = [each.node for each in operands if each.dtype in WIDE and each.node]
            if not before:
                break
            node = before[0]
        return node

    def is_asked(self, node: Node) -> bool:
        """Whether the user asks that a node computes in float32: by a policy, rule or precision."""
        if where(node.scope).is_full or (node.name in PRODUCTS and is_precise(node.eqn)):
            return True
        module = where(node.scope).module
        return module is not None and self._is_chosen(module.path)

    def _is_chosen(self, path: str) -> bool:
        """Whether a rule or a class policy of a module, or of one around it, asks for float32."""
        program = self._graph.program
        policy = program.policies.get(path, "")
        if not policy or compute_dtype(policy) not in WIDE:
            return False
        parts = path.split("/")
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
        found = where(node.scope)
        if found.module is not None:
            return found.module.path, ""
        place = self._graph.place(node)
        return found.path, place.function if place else ""

    def _count_saved(self) -> None:
        for node in self.forward:
            for value in node.results:
                if value.dtype not in WIDE and value.dtype not in LOW:
                    continue
                if not any(reader.is_backward for reader in value.readers):
                    continue
                self.saved += value.nbytes
                if value.dtype not in WIDE or self.is_asked(node):
                    continue
                if id(value) in self._of:
                    own = self._of[id(value)]  # A loss that a leak reaches keeps its own bytes.
                    (own if own.is_island else own.whole).nbytes += value.nbytes
                elif self.is_variable(value) and _is_computed(value):
                    self.saved_others.append(value)


@functools.lru_cache(maxsize=1024)
def compute_dtype(policy: str) -> np.dtype:
    """Returns the dtype in which a policy computes."""
    return np.dtype(get_policy(policy).compute_dtype)


def outermost_dtype(graph: Graph) -> np.dtype | None:
    """Returns the dtype in which the outermost policy computes; None if there is no policy."""
    return next(map(compute_dtype, filter(None, graph.program.policies.values())), None)


def forward(graph: Graph) -> Iterator[Node]:
    """Yields the nodes that a gradient is computed of: not the backward pass, nor what reads it."""
    after: set[int] = set()
    for node in graph.nodes:
        operands = node.operands[:1] if node.name == "carry" else node.operands
        if node.is_backward or any(id(value) in after for value in operands):
            after.update(map(id, node.results))
        else:
            yield node


def call(node: Node) -> object:
    """Returns the user's call that an operation is a part of."""
    each: Node | None = node
    while each is not None:
        found = call_of(each.eqn)
        if found is not None:
            return found
        each = each.around
    return None


def _is_computed(value: Value) -> bool:
    """Whether arithmetic made a value, and not only moves and casts of an argument."""
    node = value.node
    while node is not None and (node.is_structure or node.name in MOVES or node.name == CAST):
        node = node.operands[0].node
    return node is not None


def _is_inner(node: Node) -> bool:
    """Whether a product has neither rows nor columns: a sum of products, such as a norm."""
    if node.name != "dot_general":
        return False
    (contracted, _), (batch, _) = node.eqn.params["dimension_numbers"]
    of_both = [node.operands[0].shape[axis] for axis in (*contracted, *batch)]
    sizes = [value.size for value in node.operands[:2]]
    return sizes == [int(np.prod(of_both))] * 2
