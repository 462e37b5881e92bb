"""Findings: float32 where a step means to compute in 16 bits."""

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jmpx._autocast.products import PRODUCTS
from jmpx._inspect.audit.data import SEVERITIES, Finding
from jmpx._inspect.audit.dependence import reaches_end
from jmpx._inspect.audit.flops import flops, is_product
from jmpx._inspect.audit.low_values import LOW, MOVES
from jmpx._inspect.audit.streams import CAST, WIDE, Stream, Streams, compute_dtype, outermost_dtype
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._jaxprs.places import Place
from jmpx._policies.places import where

_SHORT = {"bfloat16": "bf16", "float16": "f16"}
_SMALL = (0.01, 0.001)  # shares below which a leak is one step less severe
_LARGE = 0.05  # of all bytes that are saved for the backward pass


def leaks(graph: Graph, streams: Streams, explained: set[int]) -> Iterator[Finding]:
    """Yields the findings about float32 that leaks into a step of 16 bits.

    Args:
        graph: the graph.
        streams: the streams in it.
        explained: the ids of nodes that another finding is about.
    """
    if not streams.is_half:
        return
    step = _Step(graph, streams, explained)
    found = [*step.of_streams(), *step.of_backward(), *step.saved_others()]
    yield from _weighed(found, sum(map(flops, filter(is_product, graph.nodes))), streams.saved)


def _weighed(found: list[Finding], products: int, saved: int) -> Iterator[Finding]:
    """Yields findings with the severity that their shares of FLOPs and bytes leave them.

    Those of one line are one share: a line may run in many layers.

    Args:
        found: the findings.
        products: the FLOPs of all products.
        saved: the bytes that are saved for the backward pass.
    """
    shares: Counter[tuple[str, Place | None]] = Counter()
    for each in found:
        share = max(each.flops / max(products, 1), each.nbytes / max(saved, 1))
        shares[each.name, each.place] += share  # pyright: ignore[reportArgumentType]
    for each in found:
        share = shares[each.name, each.place]
        steps = sum(share < limit for limit in _SMALL)
        worst = SEVERITIES.index(each.severity)
        yield each._replace(severity=SEVERITIES[min(worst + steps, len(SEVERITIES) - 1)])


class _Key(NamedTuple):
    """Where a product is in the program, the same forward and backward."""

    path: str
    place: Place | None


class _Step:
    """A step that computes in 16 bits, and what is said of it.

    Args:
        graph: its graph.
        streams: the streams in its forward part.
        explained: the ids of nodes that another finding is about.
    """

    def __init__(self, graph: Graph, streams: Streams, explained: set[int]) -> None:
        self._graph = graph
        self._streams = streams
        self._name = self._half_dtype()
        self._backward = self._backward_products(explained)

    def _half_dtype(self) -> str:
        """Returns the name of the 16-bit dtype that most products have."""
        counts: Counter[str] = Counter()
        for node in self._streams.half_products:
            for value in (*node.operands[:2], *node.results):
                value = _before_cast(value)
                if value.dtype in LOW:
                    counts[value.dtype.name] += flops(node)
        return counts.most_common(1)[0][0] if counts else str(outermost_dtype(self._graph))

    def _key(self, node: Node) -> _Key:
        return _Key(self._graph.path(node), self._graph.place(node))

    def _backward_products(self, explained: set[int]) -> dict[_Key, list[Node]]:
        """Returns the wide products of the backward pass, by where their forward products are."""
        found: dict[_Key, list[Node]] = {}
        for node in self._graph.nodes:
            if node.is_backward and node.name in PRODUCTS:
                if any(value.dtype in WIDE for value in node.operands[:2]):
                    found.setdefault(self._key(node), []).append(node)
        # A float32 sum is right where a loss reads it, and makes this of the backward pass.
        kept = [
            node
            for node in self._streams.half_products
            if id(node) in explained or _is_read_by_loss(node)
        ]
        for node in (*self._streams.asked, *kept):
            found.pop(self._key(node), None)
        return found

    def _flops_of(self, products: list[Node]) -> int:
        """Returns the FLOPs of products, with those of the backward products that mirror them."""
        total = sum(map(flops, products))
        for key in dict.fromkeys(map(self._key, products)):
            total += sum(map(flops, self._backward.pop(key, ())))
        return total

    def _finding(self, name: str, severity: str, node: Node, message: str, rule: str) -> Finding:
        place, path = self._graph.place(node), self._graph.path(node)
        return Finding(name, severity, message, place, path, rule, node.times, 0, 0)

    def of_streams(self) -> Iterator[Finding]:
        """Yields the findings about streams that are no islands."""
        saved: dict[Place | None, list[Stream]] = {}
        causes: dict[object, list[Stream]] = {}
        for stream in self._streams.found:
            if stream.kind == "product":
                causes.setdefault(self._cause(stream), []).append(stream)
            elif stream.products or stream.widened:
                yield self._sized(self._promotion(stream), [stream])
            elif stream.nbytes and not stream.is_island:
                saved.setdefault(self._graph.place(stream.node), []).append(stream)
        for cause, streams in causes.items():
            is_field = isinstance(cause, str)
            finding = self._of_fields(cause, streams) if is_field else self._product(streams)
            yield self._sized(finding, streams)
        for streams in saved.values():  # a line may run in many layers
            share = sum(stream.nbytes for stream in streams) / self._streams.saved
            if share > _LARGE:
                yield from (self._sized(self._saved(each, share), [each]) for each in streams)

    def _products_found(self) -> list[Node]:
        return [stream.node for stream in self._streams.found if stream.kind == "product"]

    def _sized(self, finding: Finding, streams: list[Stream]) -> Finding:
        products = [product for stream in streams for product in stream.products]
        return finding._replace(
            count=sum(finding.count if len(streams) == 1 else s.node.times for s in streams),
            flops=self._flops_of(products),
            nbytes=sum(stream.nbytes for stream in streams),
        )

    def _cause(self, stream: Stream) -> object:
        """Returns what is equal for the products that one change mends; of fields, their class."""
        node, wide = stream.node, self._wide(stream.node)
        layer = self._with_field(node, wide)
        if layer:
            return layer
        origin = None if wide is None else self._origin(wide)
        if origin is None:
            return id(stream)
        is_elsewhere = self._graph.place(origin) not in (None, self._graph.place(node))
        return self._key(origin) if is_elsewhere else id(origin)

    def _wide(self, node: Node) -> Value | None:
        """Returns the operand of a product that is wide, where the other one has 16 bits."""
        left, right = (_before_cast(value) for value in node.operands[:2])
        if (left.dtype in LOW) == (right.dtype in LOW):
            return None
        return left if left.dtype in WIDE else right

    def _origin(self, value: Value) -> Node | None:
        """Returns what made the first float32 array that a wide value is computed from."""
        return None if _source(value).node is None else self._streams.origin(value)

    def _with_field(self, node: Node, wide: Value | None) -> str:
        """Returns the class of the layer whose dtype field makes a product wide, else nothing."""
        module, policy = where(node.scope).module, self._graph.policy(node)
        if module is None or not policy or compute_dtype(policy) not in LOW:
            return ""
        if wide is None:
            is_of_layer = not self._streams.is_written(node)
        else:
            is_of_layer = _source(wide).kind == "input"
        has_field = "dtype" in inspect.signature(module.cls).parameters
        return module.cls.__name__ if is_of_layer and has_field else ""

    def _of_fields(self, layer: str, streams: list[Stream]) -> Finding:
        """Returns the finding about all layers of a class that fields keep in float32."""
        count = sum(stream.node.times for stream in streams)
        products = "product" if count == 1 else f"{count} products"
        message = f"{layer} keeps its {products} in float32: its dtype is float32, or an input's."
        rule = f"{layer}: c={_SHORT[self._name]},o={_SHORT[self._name]}"
        return self._finding("float32-product", "high", streams[0].node, message, rule)

    def _product(self, streams: list[Stream]) -> Finding:
        node, count = streams[0].node, len(streams)
        operation = "convolution" if node.name.startswith("conv") else "product"
        first = f"A {operation}" if count == 1 else f"{count} {operation}s"
        runs, here = ("runs", "") if count == 1 else ("run", ", the first of them here")
        wide = self._wide(node)
        follow = self._consequences(streams, 1)
        if wide is None:
            message = f"{first} {runs} in {node.results[0].dtype.name}{here}{follow}."
            rule = self._rule_of_product(node, None)
            return self._finding("float32-product", "high", node, message, rule)
        of = " and ".join(_before_cast(value).dtype.name for value in node.operands[:2])
        because = f", because of {self._named(wide)}{self._made_at(wide, node)}"
        message = f"{first} of {of} {runs} in {wide.dtype.name}{here}{because}{follow}."
        rule = self._rule_of_product(node, wide)
        return self._finding("mixed-product", "high", node, message, rule)

    def _made_at(self, value: Value, node: Node) -> str:
        """Returns where the float32 of a value began, unless that is the line of a node."""
        origin = self._origin(value)
        place = None if origin is None else self._graph.place(origin)
        return "" if place in (None, self._graph.place(node)) else f" that is made at {place}"

    def _rule_of_product(self, node: Node, wide: Value | None) -> str:
        maker = None if wide is None else _source(wide).node
        is_carried = maker is not None and maker.name == "carry"
        policy = self._graph.policy(node)
        is_of_policy = bool(policy) and compute_dtype(policy) in WIDE  # which casts what goes in
        if self._streams.is_written(node) and not (is_carried or is_of_policy):
            advice = f"leave out its cast to float32, so that both operands are {self._name}"
            # A loss is to read the float32 sums, of which the operands take no part.
            return f"{advice}, with preferred_element_type" if reaches_end(node) else advice
        return self._rule(node, wide)

    def _promotion(self, stream: Stream) -> Finding:
        node, cause = stream.node, stream.cause
        severity = "high" if stream.products else "medium"
        follow = self._consequences([stream], 0)
        carries = [each for each in node.results[0].readers if each.name == "carry"]
        if cause is None and carries:
            message = f"A loop carries {self._name} values in float32{follow}."
            rule = self._rule_of_carry()
            return self._finding("promotion", severity, carries[0], message, rule)
        if cause is None:
            message = f"A {self._name} array is cast to float32 and goes on so{follow}."
            rule = f"cast it back with .astype(jnp.{self._name}) before other modules read it"
            return self._finding("promotion", severity, node, message, rule)
        met = f"{self._named(cause)}{self._made_at(cause, node)}"
        message = f"A {self._name} array meets {met} and goes on in float32{follow}."
        return self._finding("promotion", severity, node, message, self._rule(node, cause))

    def _saved(self, stream: Stream, share: float) -> Finding:
        message = (
            f"{stream.node.results[0].dtype.name} values that are no norm's, softmax's or loss's "
            f"own are {share:.0%} of what is saved for the backward pass."
        )
        rule = "leave out the cast to float32, or compute it anew with jax.checkpoint"
        if stream.cause is not None:
            rule = self._rule(stream.node, stream.cause)
        return self._finding("saved-float32", "medium", stream.node, message, rule)

    def _consequences(self, streams: list[Stream], own: int) -> str:
        """Returns what follows from a leak, as a part of a sentence."""
        parts = []
        products = sum(node.times for stream in streams for node in stream.products)
        others = products - own * sum(stream.node.times for stream in streams)
        if others > 0:
            follow = "product follows" if others == 1 else "products follow"
            parts.append(f"{others} {'more ' * own}{follow} in float32")
        count = sum(node.times for stream in streams for node in stream.widened)
        if count:
            parts.append(f"it promotes {count} {self._name} array{'s' * (count > 1)} elsewhere")
        return f": {' and '.join(parts)}" if parts else ""

    def of_backward(self) -> Iterator[Finding]:
        """Yields findings about wide products of the backward pass whose forward ones are not."""
        for key, nodes in self._backward.items():
            dtypes = {value.dtype for node in nodes for value in node.operands[:2]}
            name = "mixed-product" if dtypes & LOW else "float32-product"
            message = (
                "The backward pass of a product runs in float32, because its result is float32 "
                f"while its operands are {self._name}."
            )
            rule = "leave out preferred_element_type, and cast the result with .astype instead"
            finding = self._finding(name, "medium", nodes[0], message, rule)
            yield finding._replace(
                place=key.place, flops=sum(map(flops, nodes)), count=sum(n.times for n in nodes)
            )

    def saved_others(self) -> Iterator[Finding]:
        """Yields findings about large values that come from float32 arguments alone."""
        by_place: dict[_Key, list[Value]] = {}
        of_products = {id(each) for node in self._products_found() for each in node.operands}
        for value in self._streams.saved_others:
            if value.node is not None and id(value) not in of_products:
                by_place.setdefault(self._key(value.node), []).append(value)
        for key, values in by_place.items():
            nbytes = sum(value.nbytes for value in values)
            node = values[0].node
            if (
                node is None
                or reaches_end(node, avoided=LOW)
                or nbytes <= _LARGE * self._streams.saved
            ):
                continue
            message = (
                "float32 values that are computed from float32 arguments are "
                f"{nbytes / self._streams.saved:.0%} of what is saved for the backward pass."
            )
            rule = self._rule(node, values[0])
            finding = self._finding("saved-float32", "medium", node, message, rule)
            yield finding._replace(place=key.place, nbytes=nbytes)

    def _argument(self, value: Value) -> str:
        return self._graph.program.names[value.index]

    def _named(self, value: Value) -> str:
        """Returns what a wide value is, for a sentence."""
        dtype, source = value.dtype.name, _source(value)
        if source.kind == "input":
            return f"the {dtype} argument `{self._argument(source)}`"
        if source.kind in ("literal", "const") and source.size == 1:
            number = float(np.asarray(source.constant).reshape(()))
            return f"the {dtype} number {number:.6g} (of NumPy, or an array)"
        if source.node is not None and source.node.name == "carry":
            return f"the {dtype} carry of a loop"
        if source.kind == "const" or not self._streams.is_variable(source):
            return f"a constant {dtype} array"
        return f"a {dtype} array"

    def _rule(self, node: Node, cause: Value | None) -> str:
        """Returns a rule of a policy map that mends a leak, or what to write."""
        source = None if cause is None else _source(cause)
        short = _SHORT[self._name]
        if source is None or source.kind == "input":
            selector, policy = self._graph.selector(node), self._graph.policy(node)
            is_half = bool(policy) and compute_dtype(policy) in LOW  # A rule would change nothing.
            if selector is not None and any(self._graph.program.policies.values()) and not is_half:
                return f"{selector}: c={short},o={short}"
            what = "its operands" if source is None else f"`{self._argument(source)}`"
            return f"cast {what} with .astype(jnp.{self._name})"
        if source.kind in ("literal", "const") and source.size == 1:
            return "write a Python number: math.sqrt(...) or float(...), not np.sqrt(...)"
        if source.node is not None and source.node.name == "carry":
            return self._rule_of_carry()
        return "cast it where it is made, with .astype(x.dtype)"

    def _rule_of_carry(self) -> str:
        return f"carry it in {self._name}"


def _is_read_by_loss(product: Node) -> bool:
    """Whether a product of 16 bits is summed in float32 for a loss, or another end."""
    is_wide = product.results[0].dtype in WIDE
    is_low = all(value.dtype in LOW for value in product.operands[:2])
    return is_wide and is_low and reaches_end(product, avoided=LOW)


def _before_cast(value: Value) -> Value:
    """Returns what a value was before it was moved and cast up from 16 bits, or itself."""
    each = value
    while each.node is not None and (each.node.name in MOVES or each.node.name == CAST):
        each = each.node.operands[0]
        if each.dtype in LOW:
            return each
    return value


def _source(value: Value) -> Value:
    """Returns where a value comes from, before moves and casts."""
    while value.node is not None and (value.node.name in MOVES or value.node.name == CAST):
        value = value.node.operands[0]
    return value
