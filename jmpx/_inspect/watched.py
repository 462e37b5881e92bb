"""Runs a jaxpr, and shows each of its equations with its operands and results to a watcher.

The watcher is a pure function that updates a state. Loops carry the state, so that a watched
program can be jitted, and each trip of a loop is watched.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.axes import as_whole, vary
from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import Inner, holds, inner_of, walk

SiteKey: TypeAlias = tuple[int, ...]  # see `Site.key`
Trips: TypeAlias = tuple[Array, ...]  # int32 of shape (), for each loop around, outermost first
Constant: TypeAlias = Callable[[Array], Array]  # returns the array to use for a constant
Run: TypeAlias = Callable[[Equation, list[Array]], list[Array]]  # runs an equation
Results: TypeAlias = tuple[list[Array], PyTree]  # results, and the state after them
Step: TypeAlias = Callable[..., Results]  # runs an equation at its site
Update: TypeAlias = Callable[..., PyTree]  # returns a new state


class Site(NamedTuple):
    """An equation at its place in a program. In a function that is called twice, it has two."""

    path: tuple[Equation, ...] = ()  # the equations that hold it, the outermost first, and its own
    trips: Trips = ()  # as it runs, the trip of each of `loops`, from 0

    @property
    def equation(self) -> Equation:
        """The equation itself."""
        return self.path[-1]

    @property
    def key(self) -> SiteKey:
        """Identifies the site; it begins with the key of the equation that holds it."""
        return tuple(map(id, self.path))

    def inside(self, eqn: Equation) -> "Site":
        """Returns the site of an equation in a jaxpr that this one runs."""
        return Site((*self.path, eqn), self.trips)

    @property
    def loops(self) -> tuple[Equation, ...]:
        """The loops among the equations around it."""
        return tuple(filter(is_loop, self.path))


_PROGRAM = Site()


def is_loop(eqn: Equation) -> bool:
    """Whether an equation runs a jaxpr several times."""
    return eqn.primitive.name in ("scan", "while")


def sites(jaxpr: Jaxpr, holder: Site = _PROGRAM) -> Iterator[Site]:
    """Yields the sites of the equations that an evaluation binds, in the program's order."""
    for eqn in jaxpr.eqns:
        site, inner = holder.inside(eqn), inner_of(eqn)
        if inner is None:
            yield site
        for each in () if inner is None else inner.jaxprs:
            yield from sites(each, site)


def _held(eqn: Equation) -> Sequence[Jaxpr]:
    """Returns the jaxprs that an evaluation runs in place of an equation, conditions included."""
    inner = inner_of(eqn)
    if inner is None:
        return ()
    return inner.jaxprs if inner.condition is None else (*inner.jaxprs, inner.condition)


def constants(jaxpr: Jaxpr) -> Iterator[Array]:
    """Yields the constants of a jaxpr and of those inside of it, in the order of an evaluation."""
    yield from core.consts_of(jaxpr)
    for each in (each for eqn in jaxpr.eqns for each in _held(eqn)):
        yield from constants(each)


def is_opaque(jaxpr: Jaxpr) -> bool:
    """Whether an evaluation depends on more than the structure and the constants of a jaxpr.

    It does if the jaxpr calls Python, or if an equation that is not gone into, such as a linear
    solve, holds constants.
    """
    return any(
        any(map(is_opaque, _held(eqn)))
        if _held(eqn)
        else "callback" in eqn.primitive.name or holds(eqn, _has_constants)
        for eqn in jaxpr.eqns
    )


def _has_constants(eqn: Equation) -> bool:
    return any(len(core.consts_of(jaxpr)) for jaxpr in core.inner_jaxprs(eqn.params))


def unwatched(state: PyTree, *_: object) -> PyTree:
    """Returns the state: the watcher of a run that notes nothing."""
    return state


def stored(
    state: dict[SiteKey, list[Array]], site: Site, arrays: list[Array]
) -> dict[SiteKey, list[Array]]:
    """Returns a state by sites with the arrays of a site stored, in a loop at its trip indices."""
    if site.trips:
        arrays = [old.at[site.trips].set(x) for old, x in zip(state[site.key], arrays, strict=True)]
    return {**state, site.key: arrays}


@dataclasses.dataclass(frozen=True)
class Watcher:
    """Runs jaxprs, and shows their equations.

    Custom derivatives are dropped: differentiate first, then evaluate. The condition of a while
    loop runs, but is not watched.

    Attributes:
        watch: `watch(state, site, operands, results)` returns the new state, in the shapes and
            dtypes of the old one.
        run: `run(equation, operands)` returns the results of an equation that holds no jaxpr.
        constant: returns the array to use for a constant or a literal, such as one in float32.
        reduce: `reduce(state, axes)` joins the states of all devices along mapped axes;
            a `jax.shard_map` in the program is refused without it.
        instead: `instead(state, site, operands)` returns the results of an equation that holds no
            jaxpr, and the new state, in place of `run` and `watch`.
    """

    watch: Update = unwatched
    run: Run = core.bind
    constant: Constant = lambda array: array
    reduce: Update | None = None
    instead: Step | None = None

    def evaluate(
        self, jaxpr: Jaxpr, arrays: Sequence[Array], state: PyTree = (), holder: Site = _PROGRAM
    ) -> Results:
        """Runs a jaxpr; returns the results and the last state.

        Args:
            jaxpr: the jaxpr, closed or open.
            arrays: its operands.
            state: a pytree of arrays. If it is a dict by the keys of sites, `watch` changes the
                value of its own site only, and a loop carries only the values of the sites in it,
                which compiles much faster.
            holder: the site of the equation that holds it.
        """

        def step(eqn: Equation, operands: list[Array]) -> list[Array]:
            nonlocal state
            with core.at_source_of(eqn):
                results, state = self.step(holder.inside(eqn), operands, state)
            return results

        with np.errstate(all="ignore"):  # JAX casts literals by NumPy: -1e9 to float16 would warn
            return walk(jaxpr, arrays, step, self.read), state

    def read(self, atom: Atom, array: Array) -> Array:
        """Returns the array to use for a constant or a literal."""
        is_literal = core.is_literal(atom)
        return self.constant(np.asarray(array, atom.aval.dtype) if is_literal else array)

    def step(self, site: Site, operands: list[Array], state: PyTree) -> Results:
        """Runs an equation, or the jaxprs that it holds."""
        inner = inner_of(site.equation)
        if inner is None:
            if self.instead is not None:
                return self.instead(state, site, operands)
            results = self.run(site.equation, operands)
            seen = ([*map(as_whole, arrays)] for arrays in (operands, results))
            return results, self.watch(state, site, *seen)
        if inner.kind == "call":
            return self.evaluate(inner.jaxprs[0], operands, state, site)
        run, key = getattr(self, f"_{inner.kind}"), site.key
        if not isinstance(state, dict):
            return run(site, inner, operands, state)
        part = {each: state[each] for each in state if each[: len(key)] == key}
        results, part = run(site, inner, operands, part)
        return results, state | part

    def _scan(self, site: Site, inner: Inner, operands: list[Array], state: PyTree) -> Results:
        consts, carry, xs = inner.split(operands)
        params = site.equation.params

        def body(carried: PyTree, xs: list[Array]) -> PyTree:
            state, trip, carry = carried
            arrays = [*consts, *carry, *xs]
            at = site._replace(trips=(*site.trips, trip))
            results, state = self.evaluate(inner.jaxprs[0], arrays, state, at)
            return (state, trip + 1, results[: len(carry)]), results[len(carry) :]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (state, _, carry), ys = jax.lax.scan(body, (state, jnp.int32(0), carry), xs, **options)
        return [*carry, *ys], state

    def _while(self, site: Site, inner: Inner, operands: list[Array], state: PyTree) -> Results:
        consts, carry, _ = inner.split(operands)
        plain = dataclasses.replace(self, watch=unwatched, reduce=None, instead=None)

        def condition(carried: PyTree) -> Array:
            arrays = [*operands[: inner.first], *carried[2]]
            return plain.evaluate(inner.condition, arrays, {}, site)[0][0]

        def body(carried: PyTree) -> PyTree:
            state, trip, carry = carried
            arrays = [*consts, *carry]
            at = site._replace(trips=(*site.trips, trip))
            results, state = self.evaluate(inner.jaxprs[0], arrays, state, at)
            return state, trip + 1, results

        state, _, carry = jax.lax.while_loop(condition, body, (state, jnp.int32(0), carry))
        return carry, state

    def _cond(self, site: Site, inner: Inner, operands: list[Array], state: PyTree) -> Results:
        index, *operands = operands
        branches = [
            lambda state, *operands, jaxpr=jaxpr: self.evaluate(jaxpr, operands, state, site)
            for jaxpr in inner.jaxprs
        ]
        if len(branches) == 1:
            return branches[0](state, *operands)
        return jax.lax.switch(index.astype(jnp.int32), branches, state, *operands)

    def _shard_map(self, site: Site, inner: Inner, operands: list[Array], state: PyTree) -> Results:
        reduce, params = self.reduce, site.equation.params
        if reduce is None:
            raise ValueError(
                "Cannot watch inside of the jax.shard_map of this program, where each device has "
                "values of its own: give what runs on one device, without the jax.shard_map."
            )
        axes = tuple(core.manual_axes(site.equation))

        def body(state: PyTree, trips: Trips, *arrays: Array) -> Results:
            leaves, treedef = jax.tree.flatten(state)
            state = jax.tree.unflatten(treedef, vary(leaves, axes))
            at = site._replace(trips=trips)
            results, state = self.evaluate(inner.jaxprs[0], arrays, state, at)
            return results, reduce(state, axes)

        everywhere = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=(everywhere, everywhere, *params["in_specs"]),
            out_specs=(list(params["out_specs"]), everywhere),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )
        return mapped(state, site.trips, *operands)
