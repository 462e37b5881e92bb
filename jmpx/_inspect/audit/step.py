"""Shared by the searches for findings: the step, its float32 streams, and rules that may fix it."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jmpx._autocast.rules import is_precise
from jmpx._inspect.audit.report import Finding
from jmpx._inspect.audit.values import CAST, MOVES, MOVES_AND_CASTS
from jmpx._inspect.graph import LOW, WIDE, Graph, Node, Value, before, selector, to_products, where
from jmpx._inspect.text import short_names
from jmpx._jaxprs.equations import DECOMPOSITIONS, FRAMEWORKS, Place, writer_of
from jmpx._jaxprs.inner import is_outer
from jmpx._policies.strings import get_policy

Key: TypeAlias = tuple[str, Place | None]  # where a product is: its path and its line


# --- Streams of float32 ---

# Operations that need float32: with one of them, such as a norm, a stream may be an island.
_OF_ISLANDS = frozenset(
    """
    reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum cumprod cummax cumlogsumexp
    reduce_window_sum reduce_window exp exp2 expm1 log log1p pow sqrt rsqrt erf erfc erf_inv lgamma
    digamma psum sort top_k
    """.split()
)
_PARTS = frozenset({"real", "imag"})
_COMPLEX = frozenset(map(np.dtype, (np.complex64, np.complex128)))


@dataclasses.dataclass(eq=False, slots=True)
class Stream:
    """Float32 or float64 values that were computed from 16-bit ones.

    A stream starts at a cast, at a promotion, where a 16-bit array meets a wide one, or at a wide
    product. It ends where its values are cast back. It is an island or a leak. An island is a norm,
    a softmax or a loss in float32: it returns to 16 bits, or ends in the loss, before a product
    reads it and before it widens 16-bit results of other modules.
    """

    kind: str  # how it starts: `cast`, `promotion` or `product`
    node: Node  # where it starts
    cause: Value | None = None  # the wide value that a 16-bit one met there
    # The products that are wide because of it, including the one at which it starts.
    products: list[Node] = dataclasses.field(default_factory=list)
    # The nodes where it widened 16-bit results of another module or function.
    widened: list[Node] = dataclasses.field(default_factory=list)
    nbytes: int = 0  # the bytes of its values that are saved for the backward pass
    is_island: bool = False  # whether it has one of `_OF_ISLANDS`
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
    """The streams of a graph, found in one pass over `forward`.

    `forward` has the nodes that neither belong to the backward pass nor read its results.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._streams: list[Stream] = []
        self._of: dict[Value, Stream] = {}
        self.casts: dict[Value, Node] = {}  # the casts of values that were only moved since
        self._read: set[Node] = set()  # those of these casts that an operation has read
        # Products that make a matrix to decompose, and the nodes between the two.
        decomposed = (v for n in graph.nodes if n.name in DECOMPOSITIONS for v in n.operands)
        meant = {*Graph.back(decomposed, to_products)}
        # Products that read the float32 state of a recurrence, and do not change it.
        for carry in (node for node in graph.nodes if node.is_carry and node.results[0].is_wide):
            if carry.operands[0].number is None:  # the code itself begins no state
                continue
            changing = {*Graph.back(carry.operands[1:], lambda node: node.operands)}
            is_fed = any(value.kind == "input" for node in changing for value in node.operands)
            if is_fed:
                through = lambda node: [] if node.is_product else node.results  # noqa: E731
                read = Graph.forward(carry.results, through)
                meant.update(n for n in read if n.is_product and n not in changing)
        self._meant = frozenset(meant)  # to be in float32
        self.forward: list[Node] = []
        after: set[Value] = set()  # results of the other nodes
        for node in graph.nodes:
            if node.is_backward or not after.isdisjoint(node.first_operands):
                after.update(node.results)
            else:
                self.forward.append(node)
        # FLOPs of products in float32, and of those in 16 bits; leaks count among the latter.
        self._flops = [0, 0]
        for node in self.forward:
            stream = self._visit(node)
            if stream is not None:
                self._of.update((v, stream) for v in node.results if v.is_wide)
        # A step computes in 16 bits if most of its products do, or its outermost policy.
        wide, half = self._flops
        self.is_half = 0 < half >= wide or graph.outermost_dtype in LOW
        self.saved = sum(map(self._saved, self.forward))  # bytes of floats in all dtypes
        self.found = [stream for stream in self._streams if stream.into is None]

    def _visit(self, node: Node) -> Stream | None:
        """Returns the stream of the wide results of a node; None if there is none."""
        if any(value.dtype in _COMPLEX for value in (*node.operands, *node.results)):
            for value in self._of.keys() & node.operands:  # no complex number has 16-bit parts
                self._of[value].whole.is_island = True
            return None
        if node.is_product and not is_outer(node.eqn):  # which is elementwise, also to autocast
            return self._product(node)
        if not any(value.is_wide for value in node.results):
            return None
        if node.name != CAST:
            return self._combine(node)
        if not node.operands[0].is_low:
            return self._of.get(node.operands[0])
        self.casts[node.results[0]] = node
        return self._start("cast", node)

    def _start(self, kind: str, node: Node, cause: Value | None = None) -> Stream:
        self._streams.append(Stream(kind, node, cause))
        return self._streams[-1]

    def _met(self, operands: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        """Returns the wide values: just cast, others of streams, and those of no stream."""
        wide = [value for value in operands if value.is_wide]
        cast = [value for value in wide if value in self.casts]
        other = [value for value in wide if value not in self._of]
        return cast, [v for v in wide if v in self._of and v not in self.casts], other

    def _combine(self, node: Node) -> Stream | None:
        """Follows streams through a node that is neither a cast nor a product."""
        cast, wide, other = self._met(node.first_operands)
        if node.name in MOVES and cast and not wide:
            self.casts.update((value, self.casts[cast[0]]) for value in node.results)
            return self._of[cast[0]]
        if not cast and not wide:
            return None
        stream = self._united(wide or cast)
        # What another operation has read, as `x ** 2` before its derivative `2 * x`, was not cast
        # for this one.
        fresh = [value for value in cast if self.casts[value] not in self._read]
        self._read.update(self.casts[value] for value in cast)
        if wide:
            for value in cast:
                self._widen(stream, value, node)
        elif other and not self.is_asked(node) and any(self._is_silent(v, node) for v in fresh):
            # What a framework's code meets is no cause that the user could change.
            stream.into = self._start("promotion", node, None if writer_of(node.eqn) else other[0])
            stream = stream.into
        origins = (each for _, each in map(self.origin, other) if each is not None)
        stream.is_island |= node.name in _OF_ISLANDS or any(o.name in _PARTS for o in origins)
        return stream

    def _united(self, values: list[Value]) -> Stream:
        """Returns the stream of values that meet: the first leak, else all of them as one."""
        streams = list(dict.fromkeys(self._of[value].whole for value in values))
        first = next((stream for stream in streams if stream.kind != "cast"), streams[0])
        for stream in streams:
            stream.merge_into(first)
        return first

    def _widen(self, stream: Stream, value: Value, node: Node) -> None:
        """Adds a value that was cast up to meet a stream to that stream."""
        part = self._of[value].whole
        if part is stream or part.kind != "cast":
            return
        part.merge_into(stream)
        is_own = value.size == 1 or not _is_computed(self.casts[value].operands[0])
        if not is_own and not self.is_asked(node) and self._home(stream.node) != self._home(node):
            stream.widened.append(node)

    def _product(self, node: Node) -> Stream | None:
        cast, wide, other = self._met(node.operands[:2])
        parts = [self._of[value].whole for value in (*cast, *wide)]
        if not parts and not other:
            self._flops[1] += node.flops
            return self._start("cast", node) if node.results[0].is_wide else None
        if self.is_asked(node):
            stream = self._united([*cast, *wide]) if parts else None
            for part in parts:
                part.is_island = True
            return stream
        leaks = parts[len(cast) :]
        if leaks and not other and all(each.kind != "cast" or each.widened for each in leaks):
            stream = leaks[0]
        else:
            met = [*wide, *other] or [v for v in cast if not self._is_silent(v, node)]
            stream = self._start("product", node, met[0] if len(met) == 1 else None)
        is_half = any(value.is_low for value in node.operands[:2])
        is_half |= stream.node is not node or (bool(cast) and not self.is_written(node))
        self._flops[is_half] += node.flops
        stream.products.append(node)
        for part in parts:
            if not part.is_island and not part.widened:
                part.merge_into(stream)
        return stream

    def is_of_leak(self, value: Value) -> bool:
        """Whether a value belongs to a stream that a finding is about."""
        stream = self._of[value].whole if value in self._of else None
        return self.is_half and stream is not None and bool(stream.products or stream.widened)

    def origin(self, value: Value) -> tuple[Value, Node | None]:
        """Returns the first wide value before a wide one, and the node that made or first read it.

        It is the start of a stream, an argument, an array that is closed over, or made of integers.
        """
        node: Node | None = None
        while value not in self._of and value.node is not None:
            node = value.node
            wide = [v for v in node.first_operands if v.is_wide and v.kind != "literal"]
            if not wide:
                break
            value = next((v for v in wide if v.node is not None), wide[0])
        return value, self._of[value].node if value in self._of else node

    def is_asked(self, node: Node) -> bool:
        """Whether the user asks for float32 in a node: by a policy, a rule or a precision.

        A product that sums over all axes counts as a norm, which is meant to be in float32. So is a
        matrix to decompose, and what reads the state of a recurrence.
        """
        place, program = where(node.scope), self._graph.program
        if place.is_full or node in self._meant:
            return True
        if node.is_product and (is_precise(node.eqn) or _is_inner(node)):
            return True
        if place.module is None or self._graph.compute_dtype(node) not in WIDE:
            return False
        parts = place.module.path.split("/")  # the rule may select a module around it
        return any("/".join(parts[: i + 1]) in program.chosen for i in range(len(parts)))

    def _is_silent(self, value: Value, node: Node) -> bool:
        """Whether JAX, not the user, cast a value as a part of an operation."""
        return self.casts[value].user_call == node.user_call

    def is_written(self, node: Node) -> bool:
        """Whether the user's code casts an operand of a node up right before it."""
        cast = [value for value in node.operands if value in self.casts]
        return any(not self._is_silent(value, node) for value in cast)

    def _home(self, node: Node) -> tuple[str, str]:
        """Returns the path of the module of a node; outside of modules, scope and function."""
        found, place = where(node.scope), node.place
        if found.module is not None:
            return found.module.path, ""
        return found.path, place.function if place else ""

    def _saved(self, node: Node) -> int:
        """Returns the bytes of floats that the backward pass reads, and adds them to streams."""
        saved = [v for v in node.results if any(reader.is_backward for reader in v.readers)]
        for value in saved:
            if value.is_wide and value in self._of and not self.is_asked(node):
                own = self._of[value]  # the bytes of a loss are its own, also if a leak reaches it
                (own if own.is_island else own.whole).nbytes += value.nbytes
        return sum(value.nbytes for value in saved if value.is_low or value.is_wide)


def _is_computed(value: Value) -> bool:
    """Whether arithmetic made a value: it is not a moved or cast argument or constant."""
    return before(value, MOVES_AND_CASTS | {"carry", "join"}).node is not None


def _is_inner(node: Node) -> bool:
    """Whether a product sums over all axes of both operands, as a norm does."""
    if node.name != "dot_general":
        return False
    (contracted, _), (batch, _) = node.eqn.params["dimension_numbers"]
    of_both = [node.operands[0].shape[axis] for axis in (*contracted, *batch)]
    return [value.size for value in node.operands[:2]] == [math.prod(of_both)] * 2


# --- Rules that may fix findings ---


class Remedies:
    """The rules of policy maps that may fix findings in a graph, the most precise first."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._is_autocast = graph.program.uses_autocast

    def narrower(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules that narrow: of the modules that made the operands, and of loops."""
        short = short_names(self._graph.half_dtype)
        for maker in _makers(nodes):
            for select, compute, output in self._selectors(maker.scope):
                if compute in WIDE and output in WIDE:
                    yield f"{select}: c=f32,o={short}"
        if self._is_autocast:
            loops = (node.eqn.primitive.name for node in nodes if node.is_structure)
            yield from (f"op.{name}: {short}" for name in loops if name in ("scan", "while"))

    def wider(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules that compute in float32: of classes of several modules, modules, scopes."""
        scopes = dict.fromkeys(node.scope for node in nodes)
        counts = Counter(rule for scope in scopes for rule in dict.fromkeys(self._widened(scope)))
        yield from sorted(counts, key=lambda rule: -counts[rule])

    def wider_operations(self, nodes: list[Node]) -> Iterator[str]:
        """Yields the rules of `wider`, and under autocast those of operations."""
        yield from self.wider(nodes)
        if self._is_autocast:
            yield from (f"op.{name}: f32" for name in dict.fromkeys(node.name for node in nodes))

    def wider_makers(self, nodes: list[Node]) -> Iterator[str]:
        """Yields rules by which modules return the operands in float32, then those of `wider`."""
        makers = _makers(nodes)
        for maker in makers:
            for select, compute, output in self._selectors(maker.scope):
                if compute is not None and compute != output:
                    short = short_names(compute.name)
                    yield f"{select}: c={short},o={short}"
        yield from self.wider(makers)
        yield from self.wider(nodes)

    def _widened(self, scope: str) -> Iterator[str]:
        for select, compute, output in self._selectors(scope):
            if compute not in WIDE:
                yield f"{select}: full"
            if not self._is_autocast and not (compute in WIDE and output in WIDE):
                yield f"{select}: c=f32,o=f32"

    def _selectors(self, scope: str) -> Iterator[tuple[str, np.dtype | None, np.dtype | None]]:
        """Yields the selectors of a module, or under autocast of a scope, the most precise first.

        Each comes with the dtypes in which the module computes and returns; None if no adapter ran
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


def _makers(nodes: list[Node]) -> list[Node]:
    """Returns the nodes that computed the operands, before moves and casts."""
    makers = (before(value, MOVES_AND_CASTS).node for node in nodes for value in node.operands)
    return [maker for maker in makers if maker is not None and not maker.is_structure]


# --- How a finding is made ---


class UntriedFinding(NamedTuple):
    """A finding with advice, before rules for it are tried."""

    finding: Finding
    nodes: list[Node]  # the operations that it is about
    rules: tuple[str, ...]  # to be tried before those of the kind
    edited: Sequence[Node] = ()  # those whose operands its advice casts to 16 bits


class AuditedStep:
    """A program that is searched for findings, and its streams of float32.

    `platform` is the hardware that multiplies; None if it is unknown. `explained` has nodes that a
    finding explains: later searches skip them.
    """

    def __init__(self, graph: Graph, platform: str | None) -> None:
        self.graph, self.platform, self.streams = graph, platform, Streams(graph)
        self.explained: set[Node] = set()
        self._first: dict[tuple[str, type, str], Key] = {}

    def key(self, node: Node) -> Key:
        """Returns where a node is: the same for a forward product and its backward ones."""
        return node.path, node.place

    def flops_of(self, nodes: Iterable[Node]) -> int:
        """Returns the FLOPs of those nodes that are products, and of their backward products."""
        keys = {self.key(node) for node in nodes if node.is_product}
        return sum(n.flops for n in self.graph.nodes if n.is_product and self.key(n) in keys)

    def in_float32(self, value: Value, what: str, by_cast: str = "") -> str:
        """Returns advice by which code that reads a value computes in float32.

        No cast helps where a policy has rounded an argument, nor under autocast: its code was
        traced in float32, and JAX drops casts from float32 to float32.

        Args:
            value: what the code reads.
            what: the code, for example `"exp"`.
            by_cast: the advice where a cast helps, unless it is one before the code.
        """
        if self.graph.program.uses_autocast:
            return f"with jmpx.full_precision(): around {what}"
        if name := self.rounded_argument(value):
            return f"no cast of `{name}` to 16 bits: by=operations in the policy makes none"
        return by_cast or f"x.astype(jnp.float32) before {what}"

    def rounded_argument(self, value: Value) -> str:
        """Returns the name of the largest argument that a policy rounds before a value, or "".

        It is also empty if a product makes the value.
        """
        nodes = list(Graph.back([value], to_products))
        casts = (n for n in nodes if n.name == CAST and n.results[0].is_low)
        inputs = (before(n.operands[0], MOVES) for n in casts if writer_of(n.eqn) == "jmpx")
        rounded = [value for value in inputs if value.kind == "input"]
        if not rounded or any(node.is_product for node in nodes):
            return ""
        return self.graph.program.names[max(rounded, key=lambda each: each.size).index]

    def found(
        self, kind: str, severity: str, node: Node, message: str, advice: str, *rules: str,
        **sizes: int,
    ) -> UntriedFinding:  # fmt: skip
        """Returns a finding about an operation.

        Args:
            kind: the name of its kind.
            severity: one of `SEVERITIES`.
            node: the operation.
            message: one sentence: what happens, and why it matters.
            advice: what to write in the code.
            *rules: rules to try before those of the kind.
            **sizes: `flops`, `nbytes`, and `count` unless it is how often the node runs.
        """
        path, place = self.key(node)
        if node.module and not node.is_product and writer_of(node.eqn) in FRAMEWORKS:
            # Equal findings in the code of one class, as in its norms, are one: at the first.
            key = kind, node.module.cls, message
            path, place = self._first.setdefault(key, (path, place))
        sizes = {"count": node.times, **sizes}
        finding = Finding(kind, severity, message, place, path, "", advice, **sizes)
        return UntriedFinding(finding, [node], rules)
