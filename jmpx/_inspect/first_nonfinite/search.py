"""Runs a program, and notes in which equations infinities and NaNs first appear."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmpx._inspect.first_nonfinite.numbers import INF, NAN, is_inexact, worst_traced
from jmpx._jaxprs import core, watched
from jmpx._jaxprs.core import Equation, Jaxpr
from jmpx._jaxprs.watched import Run, Site, Trips, is_loop

# These hand on each number that they read, so that their operands tell what they hold.
HAND_ON = ("broadcast_in_dim", "copy", "neg", "pvary", "reshape", "rev", "squeeze", "transpose")
# XLA may otherwise compute chains of 16-bit operations in float32, and an overflow disappears. What
# runs once or twice is not worth optimizing: that would take half of the time to compile.
_AS_WRITTEN = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
MADE, TURNED = 1, 2  # out of finite numbers; NaN out of infinities


class Event(NamedTuple):
    """An equation that made an infinity or a NaN.

    Attributes:
        site: the equation.
        is_made: whether all its operands were finite; else it made a NaN out of infinities.
        trips: the trips of the loops around it in which it first did, from 0.
        order: its place in the order in which equations ran: less is earlier.
    """

    site: Site
    is_made: bool
    trips: tuple[int, ...]
    order: tuple[int, ...]


class Seen(NamedTuple):
    """What a run of a program showed.

    Attributes:
        worst: of each watched site, by its number, the worst number that its results held.
        in_loops: of each site in a loop, whether it made one, as an event.
        inputs: of each input of the program, the worst number that it holds.
        outputs: of each result of the program, the worst number that it holds.
    """

    worst: dict[int, int]
    in_loops: dict[int, Event]
    inputs: list[int]
    outputs: list[int]


def is_watched(eqn: Equation) -> bool:
    """Whether it is noted what the results of an equation hold."""
    return eqn.primitive.name not in HAND_ON and any(is_inexact(v.aval) for v in eqn.outvars)


def silent(eqn: Equation, operands: list[Any]) -> list[Any]:
    """Runs an equation; one that calls Python and has no results is left out, as a print."""
    return core.bind(eqn, operands) if eqn.outvars else []


class Search:
    """A program that is compiled once, and searched with several inputs.

    Args:
        jaxpr: the closed jaxpr.
        run: how an equation runs.
        constant: what a constant is replaced by.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        run: Run = silent,
        constant: Callable[[Any], Any] = lambda array: array,
    ) -> None:
        self.jaxpr, self.run, self.constant = jaxpr, run, constant
        self.sites = watched.sites(jaxpr)
        self.starts: dict[tuple[int, ...], int] = {}  # of each loop, the number of its first site
        for site in self.sites:
            for i in range(len(site.around)):
                self.starts.setdefault((*map(id, site.around[: i + 1]),), site.number)
        self._compiled = jax.jit(self._watch_all, compiler_options=_AS_WRITTEN)

    def _evaluate(
        self, arrays: Sequence[Any], watch: Any, state: Any, reduce: Any, by_site: bool = False
    ) -> Any:
        return watched.evaluate(
            self.jaxpr,
            arrays,
            watch,
            state,
            run=self.run,
            constant=self.constant,
            reduce=reduce,
            by_site=by_site,
        )

    def _watch_all(self, *arrays: Any) -> tuple[dict[int, Any], Any, Any]:
        zero = jnp.zeros((), jnp.int32)
        state = {
            site.number: (zero,) * (2 + len(site.loops) if site.loops else 1)
            for site in self.sites
            if is_watched(site.equation)
        }
        results, state = self._evaluate(arrays, _note, state, _joined, by_site=True)
        inputs, outputs = ([worst_traced([x]) for x in each] for each in (arrays, results))
        return state, inputs, outputs

    def look(self, arrays: Sequence[Any]) -> Seen:
        """Runs the program on its inputs."""
        rows, inputs, outputs = jax.device_get(self._compiled(*arrays))
        worst, in_loops = {}, {}
        for number, row in rows.items():
            worst[number], *event = map(int, row)
            if any(event[:1]):
                kind, *trips = event
                in_loops[number] = self.event(self.sites[number], kind == MADE, trips)
        return Seen(worst, in_loops, list(map(int, inputs)), list(map(int, outputs)))

    def event(self, site: Site, is_made: bool, trips: Sequence[int] = ()) -> Event:
        """Returns an event of a site, in its place in the order in which equations run."""
        order, counts = [], iter(trips)
        for i, eqn in enumerate(site.around):
            if is_loop(eqn):
                order += [self.starts[(*map(id, site.around[: i + 1]),)], next(counts)]
        return Event(site, is_made, tuple(trips), (*order, site.number))

    def operands_of(self, event: Event, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the program again; returns the operands and results of an equation in its trip."""
        atoms = [*event.site.equation.invars, *event.site.equation.outvars]
        is_kept = [_is_plain(atom.aval) for atom in atoms]

        def watch(state: Any, site: Site, operands: Any, results: Any, trips: Trips) -> Any:
            if site.number != event.site.number:
                return state
            found, kept = state
            pairs = zip(trips, event.trips, strict=True)
            is_it = ~found & jnp.stack([jnp.array(True), *(a == b for a, b in pairs)]).all()
            seen = [a for a, k in zip((*operands, *results), is_kept, strict=True) if k]
            seen = [_select(is_it, new, old) for new, old in zip(seen, kept, strict=True)]
            return found | is_it, seen

        def run(*arrays: Any) -> list[Any]:
            pairs = zip(atoms, is_kept, strict=True)
            kept = [jnp.zeros(a.aval.shape, a.aval.dtype) for a, k in pairs if k]
            _, (_, kept) = self._evaluate(arrays, watch, (jnp.array(False), kept), _of_one_device)
            return kept

        kept = iter(jax.jit(run, compiler_options=_AS_WRITTEN)(*arrays))
        seen = [next(kept) if k else None for k in is_kept]
        end = len(event.site.equation.invars)
        return seen[:end], seen[end:]


def _is_plain(aval: Any) -> bool:
    """Whether an operand is an array of numbers; random keys and references are not."""
    return hasattr(aval, "shape") and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _select(flag: jax.Array, new: Any, old: jax.Array) -> jax.Array:
    return jnp.where(flag, jnp.asarray(new, old.dtype), old)


def _note(
    state: dict[int, Any], site: Site, operands: list[Any], results: list[Any], trips: Trips
) -> dict[int, Any]:
    """Notes what the results of a site hold; in a loop, also when it first made what they hold.

    The notes are scalars, which XLA computes together with what they are of: arrays of them would
    take several times as long to compile.
    """
    if not is_watched(site.equation):
        return state
    worst = worst_traced(results)
    if not trips:
        return state | {site.number: (worst,)}
    worst_before, kind_before, *trips_before = state[site.number]
    before = worst_traced(operands)
    is_made, is_turned = (worst > 0) & (before == 0), (worst == NAN) & (before == INF)
    kind = jnp.where(is_made, MADE, jnp.where(is_turned, TURNED, 0)).astype(jnp.int32)
    is_first = (kind > 0) & (kind_before == 0)
    pairs = zip((kind, *trips), (kind_before, *trips_before), strict=True)
    event = [jax.lax.select(is_first, new, old) for new, old in pairs]
    return state | {site.number: (jax.lax.max(worst_before, worst), *event)}


def _joined(state: dict[int, Any], axes: tuple[Any, ...]) -> dict[int, Any]:
    """Joins what all devices noted: the worst number, and the first event of a site."""
    late = jnp.iinfo(jnp.int32).max

    def joined(worst: jax.Array, *event: jax.Array) -> tuple[jax.Array, ...]:
        # The devices run the same trips; those of the first event are compared one by one.
        is_first = event[0] > 0 if event else False
        for trip in event[1:]:
            is_first &= trip == jax.lax.pmin(jnp.where(is_first, trip, late), axes)
        firsts = (jnp.where(is_first, part, 0) for part in event)
        return tuple(jax.lax.pmax(part, axes) for part in (worst, *firsts))

    return {number: joined(*row) for number, row in state.items()}


def _of_one_device(state: Any, axes: tuple[Any, ...]) -> Any:
    """Returns the operands of one of the devices that saw the equation make what it made."""
    found, kept = state
    is_bad = worst_traced(kept) > 0
    late = jnp.iinfo(jnp.int32).max
    rank = jnp.where(found & is_bad, jax.lax.axis_index(axes).astype(jnp.int32), late)
    is_it = (rank == jax.lax.pmin(rank, axes)) & (rank < late)

    def of_it(array: jax.Array) -> jax.Array:
        if array.dtype == jnp.bool_:
            return jax.lax.pmax(jnp.where(is_it, array, False).astype(jnp.int32), axes) > 0
        return jax.lax.psum(jnp.where(is_it, array, jnp.zeros_like(array)), axes)

    return jax.lax.pmax(found.astype(jnp.int32), axes) > 0, [of_it(array) for array in kept]
