"""Which of the infinities and NaNs of a run reach the results: a walk from them, backwards."""

from collections.abc import Iterator, Sequence

import numpy as np

from jmpx._inspect.first_nonfinite.search import NAN, Event, Key, Search, is_inexact, worst_of
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.running import key_of
from jmpx._inspect.watched import Site
from jmpx._jaxprs.marks import Array

_KINDS = ("input", "const", "literal")  # of values that no equation computes


class Flow:
    """The values of a program, and what each of them held when its search ran on some arrays.

    Attributes:
        found: the origin of the first infinity or NaN that reaches a result of the program: an
            equation, an argument or a constant. None if all results are finite.
    """

    def __init__(self, graph: Graph, search: Search, arrays: Sequence[Array]) -> None:
        self.graph, self.search, self.arrays = graph, search, arrays
        self.seen = search.look(arrays)
        self.keys = {id(node): key_of(node) for node in graph.nodes if not node.is_structure}
        pairs = zip(graph.inputs, self.seen.inputs, strict=True)
        self.known: dict[int, int] = {id(value): worst for value, worst in pairs}
        while self._spread():  # a loop carries values from its end to its beginning
            pass
        self.found = self._origin()

    def node(self, site: Site) -> Node | None:
        """Returns the node of a site."""
        return next((node for node in self.graph.nodes if self._key(node) == site.key), None)

    def array(self, value: Value) -> Array:
        """Returns an argument or a constant."""
        if value.kind == "input":
            return self.arrays[value.index]
        constant = value.constant
        return constant if hasattr(constant, "dtype") else np.asarray(constant, value.dtype)

    def _key(self, node: Node) -> Key:
        return self.keys.get(id(node), ())

    def _worst(self, value: Value) -> int:
        """Returns the worst number that a value ever held."""
        if id(value) not in self.known:
            self.known[id(value)] = 0 if value.node is not None else worst_of(self.array(value))
        return self.known[id(value)]

    def _spread(self) -> bool:
        """Goes through the program once; returns whether a value was found to hold more."""
        changed = False
        for node in self.graph.nodes:
            worst = self.seen.worst.get(self._key(node))
            if worst is None:  # it hands on its operands
                worst = max(map(self._worst, node.operands), default=0)
            for value in filter(is_inexact, node.results):
                changed |= self._worst(value) != worst
                self.known[id(value)] = worst
        return changed

    def _origin(self) -> Event | Value | None:
        # The results of a step that was skipped are all finite: what it checks counts, too.
        pairs = zip(self.graph.outputs, self.seen.outputs, strict=True)
        ends = [value for value, worst in pairs if worst and value.node is not None]
        ends += [value for node in self.graph.nodes for value in _checked(node)]
        events, given = self._reached(ends)
        broken = [value for value in given if self._worst(value) == NAN]
        if broken or not events:
            return next(iter(broken or given), None)
        first = min(events, key=lambda event: event.order)
        node = self.node(first.site)
        if first.is_made or node is None:
            return first
        overflowed = (v for v in self._reached(node.operands)[1] if not self._is_mask(v))
        return next(overflowed, first)

    def _reached(self, ends: Sequence[Value]) -> tuple[list[Event], list[Value]]:
        """Returns the events that lead to some values, and the arguments and constants that do."""
        waiting, met = list(ends), set[int]()
        events, given = list[Event](), list[Value]()
        while waiting:
            value = waiting.pop()
            worst, node = self._worst(value), value.node
            if not worst or id(value) in met:
                continue
            met.add(id(value))
            if node is None:
                given.append(value)
                continue
            event = self._event(node)
            events += [] if event is None else [event]
            # In a loop, the NaNs that an operand holds may be of a later trip.
            is_turned = event is not None and not event.is_made
            nans = [each for each in node.operands if self._worst(each) == NAN]
            waiting += nans if nans and worst == NAN and not is_turned else node.operands
        return events, sorted(given, key=lambda value: (_KINDS.index(value.kind), value.index))

    def _event(self, node: Node) -> Event | None:
        """Returns the event of a node that made an infinity or a NaN."""
        key = self._key(node)
        if key not in self.seen.worst:
            return None
        site = self.search.sites[key]
        if site.loops:
            return self.seen.in_loops.get(key)
        worst, before = self.seen.worst[key], max(map(self._worst, node.operands), default=0)
        is_event = worst > before and (before == 0 or worst == NAN)
        return self.search.event(site, before == 0) if is_event else None

    def _is_mask(self, value: Value) -> bool:
        """Whether infinities are intentional: those of a literal, and -inf alone."""
        if value.kind == "literal":
            return True
        array = np.asarray(self.array(value))
        return not np.iscomplexobj(array) and not bool((array == np.inf).any())


def _checked(node: Node) -> Iterator[Value]:
    """Yields an array that a node checks for infinities or NaNs, as in `jmpx.all_finite`."""
    is_check = node.name == "is_finite" or (
        node.name == "ne" and node.operands[0] is node.operands[-1]
    )
    readers = [each for value in node.results for each in value.readers] if is_check else []
    readers += [again for each in readers for value in each.results for again in value.readers]
    if any(reader.name in ("reduce_and", "reduce_or") for reader in readers):
        yield node.operands[0]
