"""Runs a program, and finds in which equations infinities and NaNs first appear."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.leaves import PyTree
from jmpx._inspect.compiled import Compiled
from jmpx._jaxprs import core, watched
from jmpx._jaxprs.moves import PLACEMENTS, RESHAPES
from jmpx._jaxprs.types import Array, Aval, Equation, Jaxpr
from jmpx._jaxprs.watched import Run, Site, Trips, is_loop

T = TypeVar("T")
# The results of these hold the numbers of the operand, so that a search looks at the operand alone.
# An identity may have several operands, as `optimization_barrier` has: it is not among them.
HAND_ON = RESHAPES | PLACEMENTS | {"copy", "neg"}
INF, NAN = 1, 2  # the worst that an array holds; 0 is neither
MADE, TURNED = 1, 2  # out of finite numbers; NaN out of infinities
# Of each site: the worst number; in a loop, also the kind of the first event and its trips.
Key: TypeAlias = tuple[int, ...]
_Notes: TypeAlias = dict[Key, tuple[Array, ...]]
Constant: TypeAlias = Callable[[Array], Array]


class Event(NamedTuple):
    """An equation that made an infinity or a NaN."""

    site: Site  # the equation
    is_made: bool  # whether all its operands were finite; else it made a NaN out of infinities
    trips: tuple[int, ...]  # the trips of the loops around it in which it first did, from 0
    order: tuple[int, ...]  # its place in the order in which equations ran: less is earlier


class Seen(NamedTuple):
    """What a run of a program showed: the worst numbers, `NAN`, `INF` or 0."""

    worst: dict[Key, int]  # of the results of each watched site, by its key
    in_loops: dict[Key, Event]  # the events of sites in loops, by their keys
    inputs: list[int]  # of each input of the program
    outputs: list[int]  # of each result of the program


def is_inexact(x: Array | Aval) -> bool:
    """Whether an array, or an abstract one, has a floating or complex dtype."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def worst_of(array: Array) -> int:
    """Returns `NAN`, `INF` or 0: the worst number that an array holds."""
    if not is_inexact(array):
        return 0
    x = np.asarray(array)  # jax.numpy would compile a check for each shape
    return NAN if np.isnan(x).any() else INF if np.isinf(x).any() else 0


def worst_traced(arrays: Sequence[Array]) -> jax.Array:
    """Returns the worst number that any of the arrays holds, as an int32 of shape ()."""
    lax = jax.lax
    worst = jnp.zeros((), jnp.int32)
    for x in filter(is_inexact, arrays):
        for part in (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,):
            # One reduction for both, which XLA computes in one pass with what makes the array.
            infinite = lax.convert_element_type(lax.bitwise_not(lax.is_finite(part)), jnp.int32)
            nan = lax.convert_element_type(lax.ne(part, part), jnp.int32)
            each = lax.reduce_max(lax.add(infinite, nan), tuple(range(np.ndim(part))))
            worst = lax.max(worst, each)
    return worst


def is_watched(eqn: Equation) -> bool:
    """Whether a search looks at the results of an equation."""
    return eqn.primitive.name not in HAND_ON and any(is_inexact(v.aval) for v in eqn.outvars)


def _same(array: Array) -> Array:
    return array


def _silent(eqn: Equation, operands: list[Array]) -> list[Array]:
    return core.bind(eqn, operands) if eqn.outvars else []  # a print has none


class Search:
    """A program that is compiled once, and searched with several inputs: see `evaluate`."""

    def __init__(self, jaxpr: Jaxpr, run: Run = _silent, constant: Constant = _same) -> None:
        self.jaxpr, self.run, self.constant = jaxpr, run, constant
        self.compiled = Compiled(jaxpr)
        self.sites = {site.key: site for site in watched.sites(jaxpr)}
        # The place of each site in the program; a loop has the place of its first site.
        self.places: dict[Key, int] = {}
        for place, key in enumerate(self.sites):
            for end in range(1, len(key) + 1):
                self.places.setdefault(key[:end], place)
        self.watched = {k: site for k, site in self.sites.items() if is_watched(site.equation)}

    def _evaluate(
        self, constant: Constant, arrays: Sequence[Array], *args: Any, **options: Any
    ) -> tuple[list[Array], Any]:
        options |= {"run": self.run, "constant": lambda array: self.constant(constant(array))}
        return watched.evaluate(self.jaxpr, arrays, *args, **options)

    def _watch_all(
        self, constant: Constant, arrays: Sequence[Array]
    ) -> tuple[list[tuple[Array, ...]], list[Array], list[Array]]:
        """Returns the notes of all watched sites, and the worst numbers of inputs and results."""
        zero = jnp.zeros((), jnp.int32)
        state = {
            key: (zero,) * (2 + len(site.loops) if site.loops else 1)
            for key, site in self.watched.items()
        }
        results, state = self._evaluate(
            constant, arrays, _note, state, reduce=_joined, by_site=True
        )
        inputs, outputs = ([worst_traced([x]) for x in each] for each in (arrays, results))
        return [state[key] for key in self.watched], inputs, outputs

    def _compiled(self, fn: Callable[..., T], args: tuple[PyTree, ...], *depends_on: Hashable) -> T:
        return self.compiled.run(fn, args, self.run, self.constant, *depends_on)

    def look(self, arrays: Sequence[Array]) -> Seen:
        """Runs the program on its inputs."""
        rows, inputs, outputs = jax.device_get(self._compiled(self._watch_all, (list(arrays),)))
        worst, in_loops = {}, {}
        for (key, site), row in zip(self.watched.items(), rows, strict=True):
            worst[key], *event = map(int, row)
            if any(event[:1]):
                kind, *trips = event
                in_loops[key] = self.event(site, kind == MADE, trips)
        return Seen(worst, in_loops, list(map(int, inputs)), list(map(int, outputs)))

    def event(self, site: Site, is_made: bool, trips: Sequence[int] = ()) -> Event:
        """Returns an event of a site, in its place in the order in which equations run."""
        order, counts = [], iter(trips)
        for i, eqn in enumerate(site.around):
            if is_loop(eqn):
                order += [self.places[site.key[: i + 1]], next(counts)]
        return Event(site, is_made, tuple(trips), (*order, self.places[site.key]))

    def operands_of(
        self, event: Event, arrays: Sequence[Array]
    ) -> tuple[list[Array | None], list[Array | None]]:
        """Runs the program again; returns the operands and results of an equation in its trip.

        One that does not hold numbers, such as a random key, is None.
        """
        key, eqn = event.site.key, event.site.equation
        avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
        empty = [jnp.zeros(a.shape, a.dtype) if _is_plain(a) else None for a in avals]

        def run(constant: Constant, arrays: list[Array], wanted: Array) -> list[Array | None]:
            def watch(
                state: PyTree, site: Site, operands: list[Array], results: list[Array], trips: Trips
            ) -> PyTree:
                if site.key != key:
                    return state
                found, kept = state
                is_it = ~found & (jnp.stack([*trips, jnp.int32(0)])[:-1] == wanted).all()
                pairs = zip((*operands, *results), kept, strict=True)
                select = lambda new, old: jnp.where(is_it, jnp.asarray(new, old.dtype), old)  # noqa: E731
                return found | is_it, [
                    old if old is None else select(new, old) for new, old in pairs
                ]

            state = jnp.array(False), empty
            return self._evaluate(constant, arrays, watch, state, reduce=_of_one_device)[1][1]

        wanted = np.asarray(event.trips, np.int32)
        kept = self._compiled(run, (list(arrays), wanted), self.places[key])
        return kept[: len(eqn.invars)], kept[len(eqn.invars) :]


def _is_plain(aval: Aval) -> bool:
    """Whether an operand is an array of numbers; random keys and references are not."""
    return hasattr(aval, "shape") and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _note(
    state: _Notes, site: Site, operands: list[Array], results: list[Array], trips: Trips
) -> _Notes:
    """Notes the worst number of a site's results; in a loop, also when the site first made one."""
    # XLA computes scalars together with the results. Arrays of notes would take several times as
    # long to compile.
    if not is_watched(site.equation):
        return state
    worst = worst_traced(results)
    if not trips:
        return state | {site.key: (worst,)}
    worst_before, kind_before, *trips_before = state[site.key]
    before = worst_traced(operands)
    is_made, is_turned = (worst > 0) & (before == 0), (worst == NAN) & (before == INF)
    kind = jnp.where(is_made, MADE, jnp.where(is_turned, TURNED, 0)).astype(jnp.int32)
    is_first = (kind > 0) & (kind_before == 0)
    pairs = zip((kind, *trips), (kind_before, *trips_before), strict=True)
    event = [jax.lax.select(is_first, new, old) for new, old in pairs]
    return state | {site.key: (jax.lax.max(worst_before, worst), *event)}


def _joined(state: _Notes, axes: tuple[str, ...]) -> _Notes:
    """Joins the notes of all devices: the worst number, and the first event of a site."""
    late = jnp.iinfo(jnp.int32).max

    def joined(worst: jax.Array, *event: jax.Array) -> tuple[jax.Array, ...]:
        # The devices run the same trips; those of the first event are compared one by one.
        is_first = event[0] > 0 if event else False
        for trip in event[1:]:
            is_first &= trip == jax.lax.pmin(jnp.where(is_first, trip, late), axes)
        firsts = (jnp.where(is_first, part, 0) for part in event)
        return tuple(jax.lax.pmax(part, axes) for part in (worst, *firsts))

    return {key: joined(*row) for key, row in state.items()}


def _of_one_device(state: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the operands of the first device on which the equation made the event."""
    found, kept = state
    is_bad = worst_traced(kept) > 0
    late = jnp.iinfo(jnp.int32).max
    rank = jnp.where(found & is_bad, jax.lax.axis_index(axes).astype(jnp.int32), late)
    is_it = (rank == jax.lax.pmin(rank, axes)) & (rank < late)

    def of_it(array: jax.Array) -> jax.Array:
        if array.dtype == jnp.bool_:
            return jax.lax.pmax(jnp.where(is_it, array, False).astype(jnp.int32), axes) > 0
        return jax.lax.psum(jnp.where(is_it, array, jnp.zeros_like(array)), axes)

    return jax.lax.pmax(found.astype(jnp.int32), axes) > 0, jax.tree.map(of_it, kept)
