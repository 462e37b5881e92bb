"""Findings: float32 in a step that is meant to compute in 16 bits."""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from jmpx._inspect.audit.report import SEVERITIES
from jmpx._inspect.audit.step import AuditedStep, Key, Remedies, Stream, UntriedFinding
from jmpx._inspect.audit.values import MOVES_AND_CASTS, is_half_product, reaches_end
from jmpx._inspect.graph import LOW, WIDE, Node, Value, before
from jmpx._inspect.text import count_text, short_names
from jmpx._jaxprs.equations import DECOMPOSITIONS, Place, source_of, writer_of
from jmpx._jaxprs.inner import is_outer
from jmpx._jaxprs.marks import module_of

_FLOAT32, _MIXED = "float32-product", "mixed-product"
KINDS = dict.fromkeys((_FLOAT32, _MIXED, "promotion", "saved-float32"), Remedies.narrower)
_SMALL = (0.01, 0.001)  # shares below which a leak is one step less severe
_HALF = 0.3  # of the FLOPs; with fewer in 16 bits, a step is meant to compute in float32
_LARGE = 0.05  # of all bytes that are saved for the backward pass


def search(step: AuditedStep) -> Iterator[UntriedFinding]:
    """Yields the findings about float32 that leaks into a step of 16 bits.

    A leak is less severe if its share of the FLOPs and of the saved bytes is small. Shares are
    added up by line, because a line may run in many layers.
    """
    if not step.streams.is_half:
        yield from _wide_part(step)
        return
    leaks = _Leaks(step)
    found = [*leaks.of_streams(), *leaks.of_backward()]
    products = max(sum(each.flops for each in step.graph.nodes), 1)
    shares = defaultdict[tuple[str, Place | None], float](float)
    for each in (one.finding for one in found):
        share = max(each.flops / products, each.nbytes / max(step.streams.saved, 1))
        shares[each.name, each.place] += share
    for one in found:
        each = one.finding
        steps = sum(shares[each.name, each.place] < limit for limit in _SMALL)
        rank = min(SEVERITIES.index(each.severity) + steps, len(SEVERITIES) - 1)
        yield one._replace(finding=each._replace(severity=SEVERITIES[rank]))


def _wide_part(step: AuditedStep) -> Iterator[UntriedFinding]:
    """Yields a finding if a step multiplies mostly in float32, but also much in 16 bits."""
    products = [node for node in step.streams.forward if node.is_product]
    wide = [n for n in products if n.operands[0].is_wide and not step.streams.is_asked(n)]
    flops, total = (sum(node.flops for node in nodes) for nodes in (wide, products))
    if wide and sum(map(is_half_product, products)) and flops < (1 - _HALF) * total:
        node, half = max(wide, key=lambda each: each.flops), step.graph.half_dtype
        text = (
            f"{flops / total:.0%} of the FLOPs run in float32, in a step with products in {half}: "
            "the largest one here."
        )
        advice = f"cast what enters it, and its weights, with .astype(jnp.{half})"
        yield step.found(_FLOAT32, "medium", node, text, advice, count=len(wide), flops=flops)


class _Leaks:
    """The leaks of a step that computes in 16 bits."""

    def __init__(self, step: AuditedStep) -> None:
        self._step, self._graph, self._streams = step, step.graph, step.streams
        self._half = step.graph.half_dtype
        # The wide products of the backward pass, by the keys of their forward products.
        self._backward: dict[Key, list[Node]] = {}
        self._sums: dict[Key, Node] = {}  # forward products of 16 bits that return float32
        for node in self._graph.nodes:
            dtypes = {value.dtype for value in node.operands[:2]}
            is_wide = bool(dtypes & WIDE) and dtypes <= WIDE | LOW  # no complex number
            if node.is_backward and node.is_product and is_wide:
                self._backward.setdefault(step.key(node), []).append(node)
        for node in (each for each in self._streams.forward if each.is_product):
            is_low = all(value.is_low for value in node.operands[:2])
            is_sum = is_low and node.results[0].is_wide
            self._sums |= {step.key(node): node} if is_sum else {}
            is_told = node in step.explained or self._streams.is_asked(node) or is_outer(node.eqn)
            # A loss should read float32 sums of 16-bit products, although these widen the
            # backward pass.
            if is_told or (is_sum and reaches_end(node, avoided=LOW)):
                self._backward.pop(step.key(node), None)
        # The gradient of a decomposition multiplies in float32, as the decomposition does.
        for node in (each for each in self._streams.forward if each.name in DECOMPOSITIONS):
            self._backward.pop(step.key(node), None)

    def of_streams(self) -> Iterator[UntriedFinding]:
        """Yields the findings about streams that are not islands."""
        saved: dict[Place | None, list[Stream]] = {}
        causes: dict[tuple[str, object], list[Stream]] = {}
        for stream in self._streams.found:
            # Autocast's next product rounds what its rules put into float32; a carry stays so.
            is_carried = any(each.is_carry for each in stream.node.results[0].readers)
            is_own = self._graph.program.uses_autocast and not is_carried
            is_widening = stream.widened and not is_own
            if stream.products or is_widening:
                causes.setdefault((stream.kind, self._change(stream)), []).append(stream)
            elif stream.nbytes and not stream.is_island and not writer_of(stream.node.eqn):
                saved.setdefault(stream.node.place, []).append(stream)
        for (kind, _), streams in causes.items():
            yield (self._product if kind == "product" else self._promotion)(streams)
        for streams in saved.values():
            share = sum(stream.nbytes for stream in streams) / self._streams.saved
            if share > _LARGE:
                yield from (self._saved(each, share) for each in streams)

    def _change(self, stream: Stream) -> object:
        """Returns a key of what one would change for a leak, which several may share."""
        known, origin = (stream, None) if stream.cause is None else self._known(stream.cause)
        return self._layer(stream) or (origin if known is None and origin else stream)

    def _layer(self, stream: Stream) -> type | None:
        """Returns the class of the outermost layer whose `dtype` has Flax multiply in float32."""
        node, dtype = stream.node, self._graph.compute_dtype(stream.node)
        are_cast = stream.cause is None and self._streams.casts.keys() >= {*node.operands[:2]}
        is_half = are_cast if dtype is None else dtype in LOW
        if stream.kind != "product" or writer_of(node.eqn) != "flax" or not is_half:
            return None
        around = filter(None, map(module_of, node.scope.split("/")))
        classes = (each.cls for each in around if each not in self._graph.outermost)
        return next((cls for cls in classes if "dtype" in inspect.signature(cls).parameters), None)

    def of_backward(self) -> Iterator[UntriedFinding]:
        """Yields findings about wide backward products whose forward products are not wide."""
        for key, nodes in self._backward.items():
            is_mixed = any(value.is_low for node in nodes for value in node.operands[:2])
            kind, half, because = _MIXED if is_mixed else _FLOAT32, self._half, ""
            advice = f"cast its operands with .astype(jnp.{half})"
            if (product := self._sums.get(key)) is not None:
                because = f", because its result is float32 while its operands are {half}"
                is_said = (option := "preferred_element_type") in source_of(product.eqn)
                what = f"leave out {option}" if is_said else f"have it return {half}"
                advice = f"{what}, and cast the result with .astype instead"
            text = f"The backward pass of a product runs in float32{because}."
            sizes = {"count": sum(n.times for n in nodes), "flops": sum(n.flops for n in nodes)}
            found = self._step.found(kind, "medium", nodes[0], text, advice, **sizes)
            yield found._replace(edited=nodes)

    def _found(
        self, kind: str, severity: str, node: Node, message: str, remedy: Sequence[str],
        streams: Sequence[Stream],
    ) -> UntriedFinding:  # fmt: skip
        """Returns a finding about streams, which counts the backward products of theirs, too."""
        products = [product for stream in streams for product in stream.products]
        for key in dict.fromkeys(map(self._step.key, products)):
            products += self._backward.pop(key, ())
        sizes = {
            "count": node.times if len(streams) == 1 else sum(s.node.times for s in streams),
            "flops": sum(each.flops for each in products),
            "nbytes": sum(stream.nbytes for stream in streams),
        }
        found = self._step.found(kind, severity, node, message, *remedy, **sizes)
        return found._replace(edited=[stream.node for stream in streams])

    def _product(self, streams: list[Stream]) -> UntriedFinding:
        """Returns the finding about products that one change fixes."""
        node, wide = streams[0].node, streams[0].cause
        what = "convolution" if node.name.startswith("conv") else "product"
        runs, here = f"A {what} runs", ""
        if len(streams) > 1:
            runs, here = f"{len(streams)} {what}s run", ", the first of them here"
        remedy, kind = self._remedy(node, wide), _FLOAT32 if wide is None else _MIXED
        because = "" if wide is None else f", because of {self._named(wide, node)}"
        if (layer := self._layer(streams[0])) is not None:
            because = f", because of the `dtype` of {layer.__name__}"
            remedy = (f"give {layer.__name__} dtype=jnp.{self._half}", *self._rules(node))
            if len({stream.node.path for stream in streams}) > 1:
                remedy = (remedy[0], *self._rules(node, layer), *remedy[1:])
        elif wide and self._known(wide)[0] is None and writer_of(node.eqn) == "flax":
            because += ", or of the `dtype` of the layer"  # no trace tells which
            remedy = (f"give the layer here dtype=jnp.{self._half}", *self._rules(node))
        dtype = (wide or node.results[0]).dtype.name
        message = f"{runs} in {dtype}{here}{because}{self._behind(streams, 1)}."
        return self._found(kind, "high", node, message, remedy, streams)

    def _promotion(self, streams: list[Stream]) -> UntriedFinding:
        """Returns the finding about promotions that one change fixes."""
        node, cause, behind = streams[0].node, streams[0].cause, self._behind(streams, 0)
        if cause is not None:
            named = self._named(cause, node)
            message = f"A {self._half} array meets {named} and goes on in float32{behind}."
            remedy = self._remedy(node, cause)
        elif carries := [each for each in node.results[0].readers if each.is_carry]:
            node = carries[0]
            message = f"A loop carries {self._half} values in float32{behind}."
            remedy = (f"carry it in {self._half}",)
        else:
            message = f"A {self._half} array is cast to float32 and goes on so{behind}."
            remedy = (f"cast it back with .astype(jnp.{self._half}) before other modules read it",)
        severity = "high" if any(stream.products for stream in streams) else "medium"
        return self._found("promotion", severity, node, message, remedy, streams)

    def _saved(self, stream: Stream, share: float) -> UntriedFinding:
        message = (
            f"{stream.node.results[0].dtype.name} values outside of norms, softmaxes and losses "
            f"are {share:.0%} of what is saved for the backward pass."
        )
        advice = (
            "leave out the cast to float32, or compute it anew by save=products or jax.checkpoint"
        )
        return self._found("saved-float32", "medium", stream.node, message, (advice,), [stream])

    def _behind(self, streams: list[Stream], own: int) -> str:
        """Returns a clause that counts the products and arrays that a leak puts into float32."""
        products = sum(node.times for stream in streams for node in stream.products)
        products -= own * sum(stream.node.times for stream in streams)
        arrays = sum(node.times for stream in streams for node in stream.widened)
        counts = (products, "product"), (arrays, f"{self._half} array")
        parts = " and ".join(count_text(count, noun) for count, noun in counts if count)
        return f", with {parts} behind it" if parts else ""

    def _known(self, value: Value) -> tuple[str | float | None, Node | None]:
        """Returns the argument's name or the number that a wide value is, and where it was made."""
        source, origin = self._streams.origin(value)
        moved = before(value, MOVES_AND_CASTS)
        if source is moved and source.kind == "input":  # never rounded
            return self._graph.program.names[source.index], origin
        calls = [each.user_call for each in (*filter(None, [value.node]), *value.readers[:1])]
        is_own = calls[0] == calls[-1]  # no other call made an array of it
        return moved.number if is_own else None, origin

    def _named(self, value: Value, node: Node) -> str:
        """Returns a name for a wide value that a node reads."""
        dtype, (known, origin) = value.dtype.name, self._known(value)
        if known is not None:
            is_name = isinstance(known, str)
            what = (
                f"argument `{known}`" if is_name else f"number {known:.6g} (of NumPy, or an array)"
            )
            return f"the {dtype} {what}"
        if (place := origin and origin.place) and place[:2] != (node.place or ())[:2]:
            return f"a {dtype} array that is made at {place}"
        is_const = self._streams.origin(value)[0].kind == "const"
        return f"a {dtype} array{' that is closed over' if is_const else ''}"

    def _remedy(self, node: Node, cause: Value | None) -> Sequence[str]:
        """Returns advice against a leak, followed by a rule that may do the same."""
        known, origin = (None, None) if cause is None else self._known(cause)
        if isinstance(known, float):
            return ("write a Python number: math.sqrt(...) or float(...), not np.sqrt(...)",)
        is_here = known is not None or origin is None or origin.place == node.place
        if node.is_product and is_here and self._streams.is_written(node):
            advice = f"leave out its cast to float32, so that both operands are {self._half}"
            # The loss should read float32 sums, which do not need float32 operands.
            by = ", with preferred_element_type" if reaches_end(node) else ""
            return (f"{advice}{by}", *self._rules(node))
        if cause is None or known is not None:
            operand = "its operands" if known is None else f"`{known}`"
            reader = node if node.is_product or origin is None else origin
            return (f"cast {operand} with .astype(jnp.{self._half})", *self._rules(reader))
        if origin is not None and writer_of(origin.eqn):
            layer = f"give the layer there dtype=jnp.{self._half}"
            result = f"its result with .astype(jnp.{self._half})"
            return (f"{layer}, or cast {result}", *self._rules(origin))
        return (f"cast it with .astype(jnp.{self._half}) where a {self._half} array meets it",)

    def _rules(self, node: Node, layer: type | None = None) -> Iterator[str]:
        """Yields the rule that makes a node's module, or all of a class, compute in 16 bits."""
        selector = node.selector if layer is None else layer.__name__
        if selector is not None and any(self._graph.program.policies.values()):
            short = short_names(self._half)
            yield f"{selector}: c={short},o={short}"
