"""Runs a program, notes where infinities and NaNs appear, and follows them to their origin."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._autocast.rules import PRODUCTS
from jmpx._base.trees import PyTree
from jmpx._inspect import watched
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.running import CompileCache
from jmpx._inspect.watched import Constant, Run, Site, SiteKey, Trips, Update, is_loop
from jmpx._jaxprs import core
from jmpx._jaxprs.core import operation_name
from jmpx._jaxprs.equations import PLACEMENTS, RESHAPES
from jmpx._jaxprs.marks import Array, Aval, Equation, Jaxpr

# The results of these hold the numbers of their one operand, which is watched instead of them.
# `optimization_barrier` may have several operands.
HAND_ON = RESHAPES | PLACEMENTS | {"copy", "neg"}
INF, NAN = 1, 2  # the worst number of an array; 0 if all are finite
MADE, TURNED = 1, 2  # kinds of events: made of finite numbers; a NaN made of infinities
_MANY = 64  # how many equations may wait to be noted
_GIVEN = ("input", "const", "literal")  # kinds of values that no equation computes
_INF_BITS, _MAGNITUDE_BITS = 0x7F800000, 0x7FFFFFFF  # of float32
# The note of a site: the largest magnitude; in a loop, also the kind of its first event, and trips.
_Note: TypeAlias = tuple[Array, ...]


class Event(NamedTuple):
    """An equation that made an infinity or a NaN."""

    site: Site
    is_made: bool  # whether all its operands were finite; else it made a NaN out of infinities
    trips: tuple[int, ...]  # the first trips of the loops around it in which it did so, from 0
    order: tuple[int, ...]  # sorts events by the time at which they ran


class Seen(NamedTuple):
    """The worst numbers of a run: `NAN`, `INF` or 0."""

    worst: dict[SiteKey, int]  # of the results of each watched site
    in_loops: dict[SiteKey, Event]  # the events of sites in loops
    inputs: list[int]  # of each input of the program
    outputs: list[int]  # of each result of the program


def is_inexact(x: Array | Aval) -> bool:
    """Whether an array, or an abstract one, has a floating or complex dtype."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _worst_of_bits(largest: Array) -> int:
    """Returns `NAN`, `INF` or 0, given a result of `_magnitudes`."""
    return NAN if largest > _INF_BITS else INF if largest == _INF_BITS else 0


def worst_of(array: Array) -> int:
    """Returns `NAN`, `INF` or 0: the worst number that an array holds."""
    if not is_inexact(array):
        return 0
    x = np.asarray(array)  # jax.numpy would compile a check for each shape
    return NAN if np.isnan(x).any() else INF if np.isinf(x).any() else 0


def _worst_traced(magnitudes: Sequence[Array]) -> jax.Array:
    """Returns the worst of some numbers, as an int32 of shape ()."""
    each = (jnp.int32(x >= _INF_BITS) + jnp.int32(x > _INF_BITS) for x in magnitudes)
    return functools.reduce(jax.lax.max, each, jnp.int32(0))


def _magnitudes(x: Array) -> list[Array]:
    """Returns the bits of the magnitudes in an array, as float32; finite ones of 64 bits are 0.

    As int32 they are in the order of the magnitudes, and those of NaNs are the largest. XLA's
    maxima of floats drop NaNs: of several thousand numbers on CPUs, and over devices.
    """
    if not is_inexact(x):
        return []
    parts = (jax.lax.real(x), jax.lax.imag(x)) if jnp.iscomplexobj(x) else (x,)
    if jnp.finfo(x.dtype).bits > 32:
        parts = [jnp.where(jnp.isfinite(part), 0, part) for part in parts]
    wide = (jax.lax.convert_element_type(part, jnp.float32) for part in parts)
    return [jax.lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE_BITS for x in wide]


def _maxima(before: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(map(jax.lax.max, before, new))


def is_watched(eqn: Equation) -> bool:
    """Whether a search looks at the results of an equation."""
    return eqn.primitive.name not in HAND_ON and any(is_inexact(v.aval) for v in eqn.outvars)


def _silent(eqn: Equation, operands: list[Array]) -> list[Array]:
    return core.bind(eqn, operands) if eqn.outvars else []  # a print has none


class Search:
    """A program that is compiled once, and searched with several inputs."""

    def __init__(
        self, jaxpr: Jaxpr, run: Run = _silent, constant: Constant = lambda array: array
    ) -> None:
        self.jaxpr, self.run, self.constant = jaxpr, run, constant
        self.compiled = CompileCache(jaxpr)
        self.sites = {site.key: site for site in watched.sites(jaxpr)}
        # The number of each site in the order of the program; loops have that of their first site.
        self.numbers: dict[SiteKey, int] = {}
        for number, key in enumerate(self.sites):
            for end in range(1, len(key) + 1):
                self.numbers.setdefault(key[:end], number)
        self.watched = {k: site for k, site in self.sites.items() if is_watched(site.equation)}

    def _watcher(self, constant: Constant, watch: Update, reduce: Update) -> watched.Watcher:
        wide = lambda array: self.constant(constant(array))  # noqa: E731
        return watched.Watcher(watch, self.run, wide, reduce)

    def _watch_all(
        self, constant: Constant, arrays: Sequence[Array]
    ) -> tuple[list[_Note], list[list[Array]], list[list[Array]]]:
        """Returns the notes of watched sites, and the largest magnitudes of inputs and results."""
        state: dict[SiteKey, _Level] = {(): _Level({})}
        for key, site in self.watched.items():
            event = (np.int32(0),) * (1 + len(site.loops) if site.loops else 0)
            state.setdefault(_level_of(site), _Level({})).notes[key] = np.int32(0), *event

        def watch(state: dict[SiteKey, _Level], site: Site, *seen: Any) -> dict[SiteKey, _Level]:
            if site.key in self.watched:
                state[_level_of(site)].see(site, *seen)
            return state

        watcher = self._watcher(constant, watch, _joined)
        results, state = watcher.evaluate(self.jaxpr, arrays, state)
        notes = dict(itertools.chain(*(level.noted().items() for level in state.values())))
        inputs, outputs = (state[()].largest(each) for each in (arrays, results))
        return [notes[key] for key in self.watched], inputs, outputs

    def look(self, arrays: Sequence[Array]) -> Seen:
        """Runs the program on its inputs."""
        found = self.compiled.run(self._watch_all, (list(arrays),), self.run, self.constant)
        rows, inputs, outputs = jax.device_get(found)
        worst, in_loops = {}, {}
        for (key, site), row in zip(self.watched.items(), rows, strict=True):
            largest, *event = row
            worst[key] = _worst_of_bits(largest)
            if any(event[:1]):
                kind, *trips = map(int, event)
                in_loops[key] = self.event(site, kind == MADE, trips)
        ends = ([max(map(_worst_of_bits, x), default=0) for x in y] for y in (inputs, outputs))
        return Seen(worst, in_loops, *ends)

    def event(self, site: Site, is_made: bool, trips: Sequence[int] = ()) -> Event:
        """Returns an event of a site, with its position in the order in which equations run."""
        order, counts = [], iter(trips)
        for i, eqn in enumerate(site.path):
            if is_loop(eqn):
                order += [self.numbers[site.key[: i + 1]], next(counts)]
        return Event(site, is_made, tuple(trips), (*order, self.numbers[site.key]))

    def operands_of(
        self, event: Event, arrays: Sequence[Array]
    ) -> tuple[list[Array | None], list[Array | None]]:
        """Runs the program again; returns the operands and results of an equation in its trip.

        Operands that hold no numbers, such as random keys, are None.
        """
        key, eqn = event.site.key, event.site.equation
        avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
        empty = [jnp.zeros(a.shape, a.dtype) if _is_plain(a) else None for a in avals]

        def run(constant: Constant, arrays: list[Array], wanted: Array) -> list[Array | None]:
            def watch(
                state: PyTree, site: Site, operands: list[Array], results: list[Array]
            ) -> PyTree:
                if site.key != key:
                    return state
                found, kept = state
                is_it = ~found & (jnp.stack([*site.trips, jnp.int32(0)])[:-1] == wanted).all()
                pairs = zip((*operands, *results), kept, strict=True)
                return found | is_it, [
                    old if old is None else jnp.where(is_it, jnp.asarray(new, old.dtype), old)
                    for new, old in pairs
                ]

            state = jnp.array(False), empty
            watcher = self._watcher(constant, watch, _of_one_device)
            return watcher.evaluate(self.jaxpr, arrays, state)[1][1]

        given = (list(arrays), np.asarray(event.trips, np.int32))
        kept = self.compiled.run(run, given, self.run, self.constant, self.numbers[key])
        return kept[: len(eqn.invars)], kept[len(eqn.invars) :]


def _is_plain(aval: Aval) -> bool:
    """Whether an operand is an array of numbers: no random key, no reference."""
    return hasattr(aval, "shape") and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _level_of(site: Site) -> SiteKey:
    """Returns the key of the innermost loop, branch or map around a site."""
    holders = ("cond", "scan", "shard_map", "while")
    ends = [i + 1 for i, eqn in enumerate(site.path) if eqn.primitive.name in holders]
    return site.key[: max(ends, default=0)]


@jax.tree_util.register_pytree_node_class
class _Level:
    """The notes of sites that run together, and the arrays that wait to be noted.

    XLA takes long to compile a reduction for each array. So while JAX traces, arrays wait for the
    next product, which is a kernel of its own, or until JAX flattens the level at its end.
    """

    def __init__(self, notes: dict[SiteKey, _Note]) -> None:
        self.notes = notes
        self.waiting: list[tuple[Site, list[Array], list[Array]]] = []
        self.known: dict[int, tuple[Array, list[Array]]] = {}  # arrays, and their `largest`

    def see(self, site: Site, operands: list[Array], results: list[Array]) -> None:
        """Lets the results of an equation wait, and in a loop its operands."""
        if operation_name(site.equation.primitive.name) in PRODUCTS or len(self.waiting) > _MANY:
            self.noted()
        self.waiting.append((site, operands if site.trips else [], results))

    def noted(self) -> dict[SiteKey, _Note]:
        """Returns the notes, with those of all arrays that waited."""
        waiting, self.waiting = self.waiting, []
        self.largest([x for _, *both in waiting for x in itertools.chain(*both)])
        for site, operands, results in waiting:
            before, now = ([*itertools.chain(*self.largest(x))] for x in (operands, results))
            self.notes[site.key] = _noted(self.notes[site.key], before, now, site.trips)
        return self.notes

    def largest(self, arrays: Sequence[Array]) -> list[list[Array]]:
        """Returns the largest magnitudes in each array: NaN if it holds one; none of integers."""
        # XLA makes one kernel of a reduction of several operands.
        groups: dict[tuple[int, ...], list[tuple[list[Array], Array]]] = {}
        for array in arrays:
            if id(array) not in self.known:
                self.known[id(array)] = array, []
                for part in _magnitudes(array):
                    groups.setdefault(part.shape, []).append((self.known[id(array)][1], part))
        for shape, group in groups.items():
            found, parts = zip(*group, strict=True)
            if shape:
                zeros = (np.int32(0),) * len(parts)
                parts = jax.lax.reduce(parts, zeros, _maxima, tuple(range(len(shape))))
            for largest, part in zip(found, parts, strict=True):
                largest.append(part)
        return [self.known[id(array)][1] for array in arrays]

    def tree_flatten(self) -> tuple[tuple[_Note, ...], tuple[SiteKey, ...]]:
        notes = self.noted()
        return tuple(notes.values()), tuple(notes)

    @classmethod
    def tree_unflatten(cls, keys: tuple[SiteKey, ...], notes: Sequence[_Note]) -> "_Level":
        return cls(dict(zip(keys, notes, strict=True)))


def _noted(note: _Note, operands: list[Array], results: list[Array], trips: Trips) -> _Note:
    """Returns the note of a site, given the largest magnitudes of its operands and results."""
    largest = functools.reduce(jax.lax.max, results)
    if not trips:
        return (largest,)
    largest_before, kind_before, *trips_before = note
    worst, before = _worst_traced(results), _worst_traced(operands)
    is_made, is_turned = (worst > 0) & (before == 0), (worst == NAN) & (before == INF)
    kind = jnp.where(is_made, MADE, jnp.where(is_turned, TURNED, 0)).astype(jnp.int32)
    is_first = (kind > 0) & (kind_before == 0)
    pairs = zip((kind, *trips), (kind_before, *trips_before), strict=True)
    event = [jax.lax.select(is_first, new, old) for new, old in pairs]
    return (jax.lax.max(largest_before, largest), *event)


def _joined(state: dict[SiteKey, _Level], axes: tuple[str, ...]) -> dict[SiteKey, _Level]:
    """Joins the notes of all devices: the largest magnitude, and the first event of a site."""
    late = jnp.iinfo(jnp.int32).max

    def joined(largest: jax.Array, *event: jax.Array) -> _Note:
        # All devices run the same trips: the first event has the lexically least ones.
        is_first = event[0] > 0 if event else False
        for trip in event[1:]:
            is_first &= trip == jax.lax.pmin(jnp.where(is_first, trip, late), axes)
        firsts = (jnp.where(is_first, part, 0) for part in event)
        return tuple(jax.lax.pmax(part, axes) for part in (largest, *firsts))

    return {
        key: _Level({site: joined(*note) for site, note in level.noted().items()})
        for key, level in state.items()
    }


def _of_one_device(state: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the operands of the first device on which the equation made the event."""
    found, kept = state
    is_bad = _worst_traced([*itertools.chain(*_Level({}).largest(kept))]) > 0
    late = jnp.iinfo(jnp.int32).max
    rank = jnp.where(found & is_bad, jax.lax.axis_index(axes).astype(jnp.int32), late)
    is_it = (rank == jax.lax.pmin(rank, axes)) & (rank < late)

    def of_it(array: jax.Array) -> jax.Array:
        total = jax.lax.psum(jnp.where(is_it, array, jnp.zeros_like(array)), axes)
        return total.astype(array.dtype)  # of booleans it is an integer

    return jax.lax.pmax(found.astype(jnp.int32), axes) > 0, jax.tree.map(of_it, kept)


# --- From the results back to the origin ---


class Flow:
    """The values of a program, and the worst number of each in a run on some arrays.

    Attributes:
        found: the origin of the first infinity or NaN that reaches a result of the program: an
            equation, an argument or a constant. None if all results are finite.
    """

    def __init__(self, graph: Graph, search: Search, arrays: Sequence[Array]) -> None:
        self.graph, self.search, self.arrays = graph, search, arrays
        self.seen = search.look(arrays)
        pairs = zip(graph.inputs, self.seen.inputs, strict=True)
        self.known: dict[int, int] = {id(value): worst for value, worst in pairs}
        while self._spread():  # again, because a loop carries values from its end to its start
            pass
        self.found = self._origin()

    def array(self, value: Value) -> Array:
        """Returns an argument or a constant."""
        if value.kind == "input":
            return self.arrays[value.index]
        constant = value.constant
        return constant if hasattr(constant, "dtype") else np.asarray(constant, value.dtype)

    def _worst(self, value: Value) -> int:
        """Returns the worst number that a value ever held."""
        if id(value) not in self.known:
            self.known[id(value)] = 0 if value.node is not None else worst_of(self.array(value))
        return self.known[id(value)]

    def _spread(self) -> bool:
        """Goes through the program once; returns whether a value got a worse number."""
        changed = False
        for node in self.graph.nodes:
            worst = self.seen.worst.get(node.key)
            if worst is None:  # its results hold the numbers of its operands
                worst = max(map(self._worst, node.operands), default=0)
            for value in filter(is_inexact, node.results):
                changed |= self._worst(value) != worst
                self.known[id(value)] = worst
        return changed

    def _origin(self) -> Event | Value | None:
        # The results of a skipped step are finite, so the arrays that it checks count as results.
        pairs = zip(self.graph.outputs, self.seen.outputs, strict=True)
        ends = [value for value, worst in pairs if worst and value.node is not None]
        ends += [value for node in self.graph.nodes for value in _checked(node)]
        events, given = self._reached(ends)
        broken = [value for value in given if self._worst(value) == NAN]
        if broken or not events:
            return next(iter(broken or given), None)
        others = [event for event in events if not self._is_meant(event)]
        first = min(others or events, key=lambda event: event.order)
        if first.is_made:
            return first
        operands = self.graph.by_key[first.site.key].operands
        overflowed = (v for v in self._reached(operands)[1] if not self._is_mask(v))
        return next(overflowed, first)

    def _is_meant(self, event: Event) -> bool:
        """Whether infinities are of constants alone, and no rounding's, as in a mask by log(0)."""
        node = self.graph.by_key[event.site.key]
        nodes = (node, *self.graph.back(node.operands, lambda node: node.operands))
        given = (value.kind == "input" for each in nodes for value in each.operands)
        return not any(value.is_low for value in node.results) and not any(given)

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
            events += [event] if event else []
            # In a loop, NaNs of an operand may be from a later trip.
            is_turned = event is not None and not event.is_made
            nans = [each for each in node.operands if self._worst(each) == NAN]
            waiting += nans if nans and worst == NAN and not is_turned else node.operands
        return events, sorted(given, key=lambda value: (_GIVEN.index(value.kind), value.index))

    def _event(self, node: Node) -> Event | None:
        """Returns the event of a node that made an infinity or a NaN."""
        key = node.key
        if key not in self.seen.worst or self.search.sites[key].loops:
            return self.seen.in_loops.get(key)
        worst, before = self.seen.worst[key], max(map(self._worst, node.operands), default=0)
        is_event = worst > before and (before == 0 or worst == NAN)
        return self.search.event(self.search.sites[key], before == 0) if is_event else None

    def _is_mask(self, value: Value) -> bool:
        """Whether infinities are intentional: in a literal, or if all are -inf."""
        if value.kind == "literal":
            return True
        array = np.asarray(self.array(value))
        return not np.iscomplexobj(array) and not bool((array == np.inf).any())


def _checked(node: Node) -> Iterator[Value]:
    """Yields an array that a node checks for infinities or NaNs, as in `jmpx.all_finite`."""
    is_isnan = node.name == "ne" and node.operands[0] is node.operands[-1]
    readers = _readers(node) if is_isnan or node.name == "is_finite" else []
    readers += [again for each in readers for again in _readers(each)]
    if any(reader.name in ("reduce_and", "reduce_or") for reader in readers):
        yield node.operands[0]


def _readers(node: Node) -> list[Node]:
    return [reader for value in node.results for reader in value.readers]
