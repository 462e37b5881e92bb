"""Runs a program, and notes in which equations infinities and NaNs first appear."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx import _jaxpr, _watched
from jmpx._first_nonfinite.numbers import INF, NAN, flags_of, is_inexact
from jmpx._jaxpr import Equation, Jaxpr
from jmpx._watched import Run, Site, Trips

# These hand on each number that they read, so that their operands tell what they hold.
_HAND_ON = ("broadcast_in_dim", "copy", "neg", "pvary", "reshape", "rev", "squeeze", "transpose")
# XLA may otherwise compute chains of 16-bit operations in float32, and an overflow disappears.
_AS_WRITTEN = {"xla_allow_excess_precision": False}
MADE, TURNED = 1, 2  # out of finite numbers; NaN out of infinities
_BITS, _KIND, _TIME, _TRIPS = 0, 1, 2, 3  # the columns of a row


class Event(NamedTuple):
    """An equation that made an infinity or a NaN.

    Attributes:
        site: the equation.
        is_made: whether all its operands were finite; else it made a NaN out of infinities.
        time: its place in the order in which equations ran.
        trips: the trips of the loops around it in which it first did, from 0.
    """

    site: Site
    is_made: bool
    time: int
    trips: tuple[int, ...]


class Seen(NamedTuple):
    """What a run of a program showed.

    Attributes:
        bits: of each watched site, by its number, whether its results held NaNs or infinities.
        events: the equations that made one, by the numbers of their sites.
        outputs: of each result of the program, whether it holds NaNs or infinities.
    """

    bits: dict[int, int]
    events: dict[int, Event]
    outputs: list[int]


def is_watched(eqn: Equation) -> bool:
    """Whether it is noted what the results of an equation hold."""
    return eqn.primitive.name not in _HAND_ON and any(is_inexact(v.aval) for v in eqn.outvars)


def silent(eqn: Equation, operands: list[Any]) -> list[Any]:
    """Runs an equation; one that calls Python and has no results is left out, as a print."""
    return _jaxpr.bind(eqn, operands) if eqn.outvars else []


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
        self.sites = _watched.sites(jaxpr)
        self.depth = max((len(site.loops) for site in self.sites), default=0)
        self._compiled = jax.jit(self._watch_all, compiler_options=_AS_WRITTEN)

    def _evaluate(self, arrays: Sequence[Any], watch: Any, state: Any, reduce: Any) -> Any:
        return _watched.evaluate(
            self.jaxpr,
            arrays,
            watch,
            state,
            run=self.run,
            constant=self.constant,
            reduce=reduce,
        )

    def _watch_all(self, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        rows = jnp.zeros((len(self.sites), _TRIPS + self.depth), jnp.int32)
        state = rows, jnp.zeros((), jnp.int32)
        results, (rows, _) = self._evaluate(arrays, _note, state, _first_of_rows)
        outputs = [_bits(flags_of([result])) for result in results]
        return rows, jnp.stack(outputs) if outputs else jnp.zeros(0, jnp.int32)

    def look(self, arrays: Sequence[Any]) -> Seen:
        """Runs the program on its inputs."""
        rows, outputs = map(np.asarray, self._compiled(*arrays))
        events = {}
        for site in (self.sites[i] for i in np.flatnonzero(rows[:, _KIND])):
            row = rows[site.number]
            trips = tuple(map(int, row[_TRIPS : _TRIPS + len(site.loops)]))
            is_made = row[_KIND] == MADE
            events[site.number] = Event(site, bool(is_made), int(row[_TIME]), trips)
        watched = (site.number for site in self.sites if is_watched(site.equation))
        bits = {number: int(rows[number, _BITS]) for number in watched}
        return Seen(bits, events, outputs.tolist())

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


def _bits(flags: tuple[jax.Array, jax.Array]) -> jax.Array:
    nan, inf = (flag.astype(jnp.int32) for flag in flags)
    return NAN * nan + INF * inf


def _note(state: Any, site: Site, operands: list[Any], results: list[Any], trips: Trips) -> Any:
    """Notes in the row of a site what its results hold, and when it first made what it holds."""
    rows, time = state
    if not is_watched(site.equation):
        return state
    old = rows[site.number]
    nan, inf = flags_of(results)
    nan_before, inf_before = flags_of(operands)
    is_made = (nan | inf) & ~nan_before & ~inf_before
    is_turned = nan & ~nan_before & inf_before
    kind = jnp.where(is_made, MADE, jnp.where(is_turned, TURNED, 0)).astype(jnp.int32)
    is_first = (kind > 0) & (old[_KIND] == 0)
    new = [old[_BITS] | _bits((nan, inf)), kind, time, *trips]
    new += [jnp.zeros((), jnp.int32)] * (len(old) - len(new))
    is_new = jnp.stack([jnp.array(True), *[is_first] * (len(old) - 1)])
    return rows.at[site.number].set(jnp.where(is_new, jnp.stack(new), old)), time + 1


def _first_of_rows(state: Any, axes: tuple[Any, ...]) -> Any:
    """Joins the rows of all devices: of each site, the trip in which the first device made one."""
    rows, time = state
    late = jnp.iinfo(jnp.int32).max
    times = jnp.where(rows[:, _KIND] > 0, rows[:, _TIME], late)
    first = jax.lax.pmin(times, axes)
    is_first = (times == first) & (first < late)
    rest = jnp.where(is_first[:, None], rows[:, _KIND:], 0)
    bits = [jax.lax.pmax(rows[:, _BITS] & bit, axes) for bit in (NAN, INF)]
    joined = jnp.concatenate([(bits[0] | bits[1])[:, None], jax.lax.pmax(rest, axes)], axis=1)
    return joined, jax.lax.pmax(time, axes)


def _of_one_device(state: Any, axes: tuple[Any, ...]) -> Any:
    """Returns the operands of one of the devices that saw the equation make what it made."""
    found, kept = state
    is_bad = jnp.stack(flags_of(kept)).any()
    late = jnp.iinfo(jnp.int32).max
    rank = jnp.where(found & is_bad, jax.lax.axis_index(axes).astype(jnp.int32), late)
    is_it = (rank == jax.lax.pmin(rank, axes)) & (rank < late)

    def of_it(array: jax.Array) -> jax.Array:
        if array.dtype == jnp.bool_:
            return jax.lax.pmax(jnp.where(is_it, array, False).astype(jnp.int32), axes) > 0
        return jax.lax.psum(jnp.where(is_it, array, jnp.zeros_like(array)), axes)

    return jax.lax.pmax(found.astype(jnp.int32), axes) > 0, [of_it(array) for array in kept]
