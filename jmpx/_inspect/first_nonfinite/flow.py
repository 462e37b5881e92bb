"""Which of the infinities and NaNs of a run reach the results: a walk from them, backwards."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jmpx._inspect.first_nonfinite.numbers import NAN, is_inexact, worst_of
from jmpx._inspect.first_nonfinite.search import Event, Key, Search, Seen
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.running import key_of
from jmpx._jaxprs.types import Array
from jmpx._jaxprs.watched import Site


class _Reached(NamedTuple):
    """What leads to some values."""

    events: list[Event]
    given: list[Value]  # arguments and constants that hold infinities or NaNs


class Flow:
    """The values of a program, and what each of them held in a run of a search.

    Args:
        graph: the program.
        search: its search.
        seen: the numbers that the run showed.
        arrays: the inputs of that run.
    """

    def __init__(self, graph: Graph, search: Search, seen: Seen, arrays: Sequence[Array]) -> None:
        self.graph, self.search, self.seen, self.arrays = graph, search, seen, arrays
        self.keys = {id(node): key_of(node) for node in graph.nodes if not node.is_structure}
        pairs = zip(graph.inputs, seen.inputs, strict=True)
        self.known: dict[int, int] = {id(value): worst for value, worst in pairs}
        while self._spread():  # a loop carries values from its end to its beginning
            pass

    def origin(self) -> Event | Value | None:
        """Returns the origin of the first infinity or NaN that reaches a result of the program.

        It is an equation, an argument or a constant. Arrays that the program checks for infinities
        count as results, because the results of a step that was skipped are all finite.
        """
        events, given = self._reached(self._ends())
        broken = [value for value in given if self._worst(value) == NAN]
        if broken:
            return broken[0]
        if not events:
            return given[0] if given else None
        first = min(events, key=lambda event: event.order)
        node = self.node(first.site)
        if not first.is_made and node is not None:
            given = self._reached(node.operands).given
            overflowed = [value for value in given if not self._is_mask(value)]
            if overflowed:
                return overflowed[0]
        return first

    def node(self, site: Site) -> Node | None:
        """Returns the node of a site."""
        found = (node for node in self.graph.nodes if self._key(node) == site.key)
        return next(found, None)

    def _key(self, node: Node) -> Key:
        """Returns the key of the site of a node; a structural node has none."""
        return self.keys.get(id(node), ())

    def _worst(self, value: Value) -> int:
        """Returns the worst number that a value ever held."""
        if id(value) not in self.known:
            self.known[id(value)] = 0 if value.node is not None else worst_of(self.array(value))
        return self.known[id(value)]

    def array(self, value: Value) -> Array:
        """Returns an argument or a constant."""
        if value.kind == "input":
            return self.arrays[value.index]
        constant = value.constant
        return constant if hasattr(constant, "dtype") else np.asarray(constant, value.dtype)

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

    def _ends(self) -> list[Value]:
        """Returns the results that are not finite, and the arrays that the program checks."""
        pairs = zip(self.graph.outputs, self.seen.outputs, strict=True)
        ends = [value for value, worst in pairs if worst and value.node is not None]
        return [*ends, *(value for node in self.graph.nodes for value in _checked(node))]

    def _reached(self, ends: Sequence[Value]) -> _Reached:
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
        order = {"input": 0, "const": 1, "literal": 2}
        return _Reached(events, sorted(given, key=lambda value: (order[value.kind], value.index)))

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
    if not is_check:
        return
    readers = [reader for result in node.results for reader in result.readers]
    readers += [again for each in readers for result in each.results for again in result.readers]
    if any(reader.name in ("reduce_and", "reduce_or") for reader in readers):
        yield node.operands[0]
