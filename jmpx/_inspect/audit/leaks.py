"""Findings: float32 where a step means to compute in 16 bits."""

import inspect
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from jmpx._autocast.products import PRODUCTS
from jmpx._base.text import count_text, short_names
from jmpx._inspect.audit.data import SEVERITIES
from jmpx._inspect.audit.flops import flops, is_product
from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.streams import Stream
from jmpx._inspect.audit.values import (
    LOW,
    MOVES_AND_CASTS,
    WIDE,
    before,
    compute_dtype,
    half_dtype,
    number,
    reaches_end,
)
from jmpx._inspect.graph import Node, Value
from jmpx._jaxprs.places import Place
from jmpx._policies.places import where

_FLOAT32 = Kind("float32-product", Remedies.narrower)
_MIXED = Kind("mixed-product", Remedies.narrower)
_PROMOTION = Kind("promotion", Remedies.narrower)
_SAVED = Kind("saved-float32", Remedies.narrower)
KINDS = (_FLOAT32, _MIXED, _PROMOTION, _SAVED)
_Key: TypeAlias = tuple[str, Place | None]  # where a product is, the same forward and backward
_SMALL = (0.01, 0.001)  # shares below which a leak is one step less severe
_LARGE = 0.05  # of all bytes that are saved for the backward pass


def search(step: Step) -> Iterator[Found]:
    """Yields the findings about float32 that leaks into a step of 16 bits."""
    if step.streams.is_half:
        leaks = _Leaks(step)
        found = [*leaks.of_streams(), *leaks.of_backward(), *leaks.saved_others()]
        products = sum(map(flops, filter(is_product, step.graph.nodes)))
        yield from _weighed(found, products, step.streams.saved)


def _weighed(found: list[Found], products: int, saved: int) -> Iterator[Found]:
    """Yields findings with the severity that their shares of FLOPs and saved bytes leave them.

    Those of one line are one share: a line may run in many layers.
    """
    shares: dict[tuple[str, Place | None], float] = {}
    for _, each, *_ in found:
        share = max(each.flops / max(products, 1), each.nbytes / max(saved, 1))
        shares[each.name, each.place] = shares.get((each.name, each.place), 0.0) + share
    for one in found:
        each = one.finding
        steps = sum(shares[each.name, each.place] < limit for limit in _SMALL)
        rank = min(SEVERITIES.index(each.severity) + steps, len(SEVERITIES) - 1)
        yield one._replace(finding=each._replace(severity=SEVERITIES[rank]))


class _Leaks:
    """The leaks of a step that computes in 16 bits."""

    def __init__(self, step: Step) -> None:
        self._step, self._graph, self._streams = step, step.graph, step.streams
        self._half = half_dtype(step.graph)
        self._backward = self._backward_products()

    def _key(self, node: Node) -> _Key:
        return self._graph.path(node), self._graph.place(node)

    def _backward_products(self) -> dict[_Key, list[Node]]:
        """Returns the wide products of the backward pass, by where their forward products are."""
        found: dict[_Key, list[Node]] = {}
        for node in self._graph.nodes:
            if node.is_backward and node.name in PRODUCTS:
                if any(value.dtype in WIDE for value in node.operands[:2]):
                    found.setdefault(self._key(node), []).append(node)
        # A float32 sum is right where a loss reads it, and makes this of the backward pass.
        for node in self._streams.half_products:
            if id(node) in self._step.explained or _is_read_by_loss(node):
                found.pop(self._key(node), None)
        for node in self._streams.asked:
            found.pop(self._key(node), None)
        return found

    def _found(
        self, kind: Kind, severity: str, node: Node, message: str, remedy: Sequence[str],
        streams: Sequence[Stream],
    ) -> Found:  # fmt: skip
        """Returns a finding about streams, with the backward products that mirror theirs."""
        products = [product for stream in streams for product in stream.products]
        mirrored = [self._backward.pop(key, ()) for key in dict.fromkeys(map(self._key, products))]
        sizes = {
            "count": node.times if len(streams) == 1 else sum(s.node.times for s in streams),
            "flops": sum(map(flops, products)) + sum(flops(n) for nodes in mirrored for n in nodes),
            "nbytes": sum(stream.nbytes for stream in streams),
        }
        return self._step.found(kind, severity, node, message, *remedy, **sizes)

    def of_streams(self) -> Iterator[Found]:
        """Yields the findings about streams that are not islands."""
        saved: dict[Place | None, list[Stream]] = {}
        causes: dict[object, list[Stream]] = {}
        for stream in self._streams.found:
            if stream.kind == "product":
                causes.setdefault(self._cause(stream), []).append(stream)
            elif stream.products or stream.widened:
                yield self._promotion(stream)
            elif stream.nbytes and not stream.is_island:
                saved.setdefault(self._graph.place(stream.node), []).append(stream)
        yield from map(self._product, causes.values())
        for streams in saved.values():  # a line may run in many layers
            share = sum(stream.nbytes for stream in streams) / self._streams.saved
            if share > _LARGE:
                yield from (self._saved(each, share) for each in streams)

    def _cause(self, stream: Stream) -> object:
        """Returns what is equal for the products that one change mends; of fields, their class."""
        node, wide = stream.node, self._wide(stream.node)
        layer = self._with_field(node, wide)
        origin = None if wide is None else self._origin(wide)
        if layer or origin is None:
            return layer or id(stream)
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
        is_made = before(value, MOVES_AND_CASTS).node is not None
        return self._streams.origin(value) if is_made else None

    def _with_field(self, node: Node, wide: Value | None) -> str:
        """Returns the class of the layer whose dtype field makes a product wide, else nothing."""
        module, policy = where(node.scope).module, self._graph.policy(node)
        if module is None or not policy or compute_dtype(policy) not in LOW:
            return ""
        if wide is None:
            is_of_layer = not self._streams.is_written(node)
        else:
            is_of_layer = before(wide, MOVES_AND_CASTS).kind == "input"
        has_field = "dtype" in inspect.signature(module.cls).parameters
        return module.cls.__name__ if is_of_layer and has_field else ""

    def _product(self, streams: list[Stream]) -> Found:
        """Returns the finding about products that one change mends."""
        node, wide = streams[0].node, self._wide(streams[0].node)
        layer = self._with_field(node, wide)
        if layer:
            return self._of_field(layer, streams)
        what = "convolution" if node.name.startswith("conv") else "product"
        first, runs, here = f"A {what}", "runs", ""
        if len(streams) > 1:
            first, runs, here = f"{len(streams)} {what}s", "run", ", the first of them here"
        follow = self._consequences(streams, 1)
        if wide is None:
            kind, remedy = _FLOAT32, self._remedy_of_product(node, None)
            message = f"{first} {runs} in {node.results[0].dtype.name}{here}{follow}."
        else:
            kind, remedy = _MIXED, self._remedy_of_product(node, wide)
            of = " and ".join(_before_cast(value).dtype.name for value in node.operands[:2])
            because = f", because of {self._named(wide)}{self._made_at(wide, node)}"
            message = f"{first} of {of} {runs} in {wide.dtype.name}{here}{because}{follow}."
        return self._found(kind, "high", node, message, remedy, streams)

    def _of_field(self, layer: str, streams: list[Stream]) -> Found:
        """Returns the finding about all layers of a class that fields keep in float32."""
        count = sum(stream.node.times for stream in streams)
        products = "product" if count == 1 else count_text(count, "product")
        message = f"{layer} keeps its {products} in float32: its dtype is float32, or an input's."
        short = short_names(self._half)
        remedy = f"pass it dtype=jnp.{self._half}", f"{layer}: c={short},o={short}"
        return self._found(_FLOAT32, "high", streams[0].node, message, remedy, streams)

    def _made_at(self, value: Value, node: Node) -> str:
        """Returns where the float32 of a value began, unless that is the line of a node."""
        origin = self._origin(value)
        place = None if origin is None else self._graph.place(origin)
        return "" if place in (None, self._graph.place(node)) else f" that is made at {place}"

    def _remedy_of_product(self, node: Node, wide: Value | None) -> Sequence[str]:
        is_carried = wide is not None and _is_carry(before(wide, MOVES_AND_CASTS))
        policy = self._graph.policy(node)
        is_of_policy = bool(policy) and compute_dtype(policy) in WIDE  # which casts what goes in
        if not self._streams.is_written(node) or is_carried or is_of_policy:
            return self._remedy(node, wide)
        advice = f"leave out its cast to float32, so that both operands are {self._half}"
        # The loss should read the float32 sums, which do not need float32 operands.
        return (f"{advice}, with preferred_element_type" if reaches_end(node) else advice,)

    def _promotion(self, stream: Stream) -> Found:
        node, cause = stream.node, stream.cause
        follow = self._consequences([stream], 0)
        if cause is not None:
            met = f"{self._named(cause)}{self._made_at(cause, node)}"
            message = f"A {self._half} array meets {met} and goes on in float32{follow}."
            remedy = self._remedy(node, cause)
        elif carries := [each for each in node.results[0].readers if each.name == "carry"]:
            node = carries[0]
            message = f"A loop carries {self._half} values in float32{follow}."
            remedy = (f"carry it in {self._half}",)
        else:
            message = f"A {self._half} array is cast to float32 and goes on so{follow}."
            remedy = (f"cast it back with .astype(jnp.{self._half}) before other modules read it",)
        severity = "high" if stream.products else "medium"
        return self._found(_PROMOTION, severity, node, message, remedy, [stream])

    def _saved(self, stream: Stream, share: float) -> Found:
        dtype = stream.node.results[0].dtype.name
        message = (
            f"{dtype} values outside of norms, softmaxes and losses are {share:.0%} of what is "
            "saved for the backward pass."
        )
        remedy = ("leave out the cast to float32, or compute it anew with jax.checkpoint",)
        if stream.cause is not None:
            remedy = self._remedy(stream.node, stream.cause)
        return self._found(_SAVED, "medium", stream.node, message, remedy, [stream])

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
            parts.append(f"it promotes {count} {self._half} array{'s' * (count > 1)} elsewhere")
        return f": {' and '.join(parts)}" if parts else ""

    def of_backward(self) -> Iterator[Found]:
        """Yields findings about wide products of the backward pass whose forward ones are not."""
        for nodes in self._backward.values():
            is_mixed = any(value.dtype in LOW for node in nodes for value in node.operands[:2])
            yield self._step.found(
                _MIXED if is_mixed else _FLOAT32,
                "medium",
                nodes[0],
                "The backward pass of a product runs in float32, because its result is float32 "
                f"while its operands are {self._half}.",
                "leave out preferred_element_type, and cast the result with .astype instead",
                count=sum(node.times for node in nodes),
                flops=sum(map(flops, nodes)),
            )

    def saved_others(self) -> Iterator[Found]:
        """Yields findings about large values that come from float32 arguments alone."""
        products = [s.node for s in self._streams.found if s.kind == "product"]
        of_products = {id(each) for node in products for each in node.operands}
        by_place: dict[_Key, list[tuple[Node, Value]]] = {}
        for value in self._streams.saved_others:
            if value.node is not None and id(value) not in of_products:
                by_place.setdefault(self._key(value.node), []).append((value.node, value))
        for found in by_place.values():
            nbytes, (node, value) = sum(value.nbytes for _, value in found), found[0]
            share = nbytes / self._streams.saved
            if share <= _LARGE or reaches_end(node, avoided=LOW):
                continue
            message = (
                f"float32 values that are computed from float32 arguments are {share:.0%} of what "
                "is saved for the backward pass."
            )
            remedy = self._remedy(node, value)
            yield self._step.found(_SAVED, "medium", node, message, *remedy, nbytes=nbytes)

    def _argument(self, value: Value) -> str:
        return self._graph.program.names[value.index]

    def _named(self, value: Value) -> str:
        """Returns what a wide value is, for a sentence."""
        dtype, source = value.dtype.name, before(value, MOVES_AND_CASTS)
        if source.kind == "input":
            return f"the {dtype} argument `{self._argument(source)}`"
        if _is_number(source):
            return f"the {dtype} number {number(source):.6g} (of NumPy, or an array)"
        if _is_carry(source):
            return f"the {dtype} carry of a loop"
        if source.kind == "const" or not self._streams.is_variable(source):
            return f"a constant {dtype} array"
        return f"a {dtype} array"

    def _remedy(self, node: Node, cause: Value | None) -> Sequence[str]:
        """Returns what to write against a leak, and behind it a rule that may do the same."""
        source = None if cause is None else before(cause, MOVES_AND_CASTS)
        if source is None or source.kind == "input":
            what = "its operands" if source is None else f"`{self._argument(source)}`"
            return (f"cast {what} with .astype(jnp.{self._half})", *self._rules(node))
        if _is_number(source):
            return ("write a Python number: math.sqrt(...) or float(...), not np.sqrt(...)",)
        if _is_carry(source):
            return (f"carry it in {self._half}",)
        return ("cast it where it is made, with .astype(x.dtype)",)

    def _rules(self, node: Node) -> Iterator[str]:
        """Yields the rule that has the module of a node compute in 16 bits, if it does not yet."""
        selector, policy = self._graph.selector(node), self._graph.policy(node)
        is_half = bool(policy) and compute_dtype(policy) in LOW
        if selector is not None and any(self._graph.program.policies.values()) and not is_half:
            short = short_names(self._half)
            yield f"{selector}: c={short},o={short}"


def _is_number(value: Value) -> bool:
    return value.kind in ("literal", "const") and value.size == 1


def _is_carry(value: Value) -> bool:
    return value.node is not None and value.node.name == "carry"


def _is_read_by_loss(product: Node) -> bool:
    """Whether a product of 16 bits is summed in float32 for a loss, or another end."""
    is_wide = product.results[0].dtype in WIDE
    is_low = all(value.dtype in LOW for value in product.operands[:2])
    return is_wide and is_low and reaches_end(product, avoided=LOW)


def _before_cast(value: Value) -> Value:
    """Returns what a value was before it was moved and cast up from 16 bits, or itself."""
    each = value
    while each.node is not None and each.node.name in MOVES_AND_CASTS:
        each = each.node.operands[0]
        if each.dtype in LOW:
            return each
    return value
