"""Runs a jaxpr and shows each of its equations, with what goes in and out, to a watcher.

The watcher is a pure function that updates a state. The state goes through loops as part of their
carry, so that a watched program can be jitted, and what runs inside of a loop is watched in each
trip.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.axes import as_whole, vary
from jmpx._base.leaves import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import Inner, inner_of, walk

State = TypeVar("State")
Trips: TypeAlias = tuple[Array, ...]  # int32 of shape (): one for each loop around, outermost first
# What runs an equation that stands for itself.
Run: TypeAlias = Callable[[Equation, list[Array]], list[Array]]


class Site(NamedTuple):
    """An equation at its place in a program. A function that is called twice has two sites.

    Args:
        number: its place in the order of the program, from 0. Equations that stand for a jaxpr,
            such as loops and calls, have no number of their own: it is that of the first in them.
        equation: the equation.
        scope: the scope, with marks of modules.
        is_backward: whether it is of a backward pass.
        around: the equations that hold it, the outermost first.
    """

    number: int
    equation: Equation
    scope: str
    is_backward: bool
    around: tuple[Equation, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """What identifies it in the program: the equations around it, and its own."""
        return (*map(id, self.around), id(self.equation))

    @property
    def loops(self) -> tuple[Equation, ...]:
        """The loops among the equations around it."""
        return tuple(filter(is_loop, self.around))


def is_loop(eqn: Equation) -> bool:
    """Whether an equation runs a jaxpr several times."""
    return eqn.primitive.name in ("scan", "while")


class _Around(NamedTuple):
    """What surrounds a jaxpr."""

    scope: str = ""
    is_backward: bool = False
    equations: tuple[Equation, ...] = ()

    @classmethod
    def inside(cls, site: Site) -> "_Around":
        """Returns what surrounds the jaxprs of a site's equation."""
        return cls(site.scope, site.is_backward, (*site.around, site.equation))

    def site(self, number: int, eqn: Equation) -> Site:
        """Returns the site of an equation of the jaxpr."""
        is_backward = self.is_backward or "transpose(" in str(eqn.source_info.name_stack)
        scope = core.scope_within(self.scope, eqn)
        return Site(number, eqn, scope, is_backward, self.equations)


def _counter() -> Callable[[Jaxpr], int]:
    """Returns a function that counts the sites of a jaxpr, each jaxpr once."""

    @functools.cache
    def count(jaxpr: Jaxpr) -> int:
        return sum(_sites_of(eqn, count) for eqn in jaxpr.eqns)

    return count


def _sites_of(eqn: Equation, count: Callable[[Jaxpr], int]) -> int:
    """Returns how many sites an equation has: its own, or those in the jaxprs that it runs."""
    inner = inner_of(eqn)
    return 1 if inner is None else sum(map(count, inner.jaxprs))


def sites(jaxpr: Jaxpr, scope: str = "") -> list[Site]:
    """Returns the sites of a program: `sites(jaxpr)[site.number]` is the one of that number.

    Args:
        jaxpr: the jaxpr, closed or open.
        scope: the scope around it.
    """
    found: list[Site] = []

    def search(jaxpr: Jaxpr, around: _Around) -> None:
        for eqn in jaxpr.eqns:
            site, inner = around.site(len(found), eqn), inner_of(eqn)
            if inner is None:
                found.append(site)
            for each in () if inner is None else inner.jaxprs:
                search(each, _Around.inside(site))

    search(jaxpr, _Around(scope))
    return found


def evaluate(
    jaxpr: Jaxpr,
    arrays: Sequence[Array],
    watch: Callable[[State, Site, list[Array], list[Array], Trips], State],
    state: State,
    scope: str = "",
    *,
    run: Run = core.bind,
    constant: Callable[[Array], Array] = lambda array: array,
    reduce: Callable[[State, tuple[str, ...]], State] | None = None,
    by_site: bool = False,
) -> tuple[list[Array], State]:
    """Runs a jaxpr, and has a watcher see each equation with its operands and results.

    Functions with derivatives of their own run as plain ones: differentiate first, then evaluate.
    The condition of a while loop runs, but is not watched.

    Args:
        jaxpr: the jaxpr, closed or open.
        arrays: its operands.
        watch: `watch(state, site, operands, results, trips)` returns the new state, in the shapes
            and dtypes of the old one. `trips` counts the trips of the loops `site.loops`, from 0,
            in the order in which they run.
        state: a pytree of arrays.
        scope: the scope around it.
        run: `run(equation, operands)` returns the results of an equation that stands for no jaxpr.
        constant: what a constant or a literal is replaced by, such as the same one in float32.
        reduce: `reduce(state, axes)` makes one state of those of all devices along mapped axes.
            A `jax.shard_map` in the program needs it.
        by_site: whether the state is a dict by the numbers of sites, and `watch` changes the value
            of its site alone. Then a loop carries no more than the values of the sites in it, which
            compiles much sooner.

    Returns:
        The results of the jaxpr, and the last state.

    Raises:
        ValueError: if the program holds a `jax.shard_map` and there is no `reduce`.
    """
    watcher = _Watcher(watch, run, constant, reduce, by_site, _counter())
    with np.errstate(all="ignore"):  # JAX casts literals by NumPy, -1e9 to float16 for one
        return watcher.evaluate(jaxpr, arrays, state, (), _Around(scope), 0)


@dataclasses.dataclass(frozen=True)
class _Watcher:
    """The functions of an evaluation; `evaluate` describes them."""

    watch: Callable[..., PyTree]
    run: Run
    constant: Callable[[Array], Array]
    reduce: Callable[..., PyTree] | None
    by_site: bool
    count: Callable[[Jaxpr], int]

    def evaluate(
        self,
        jaxpr: Jaxpr,
        arrays: Sequence[Array],
        state: PyTree,
        trips: Trips,
        around: _Around,
        number: int,
    ) -> tuple[list[Array], PyTree]:
        """Runs a jaxpr whose first site has a number; `trips` are those of the loops around it."""

        def step(eqn: Equation, operands: list[Array]) -> list[Array]:
            nonlocal state, number
            site = around.site(number, eqn)
            number += _sites_of(eqn, self.count)
            with core.at_source_of(eqn):
                results, state = self.step(site, operands, state, trips)
            return results

        return walk(jaxpr, arrays, step, self.read), state

    def read(self, atom: Atom, array: Array) -> Array:
        """Returns what stands for a constant or a literal."""
        is_literal = core.is_literal(atom)
        return self.constant(np.asarray(array, atom.aval.dtype) if is_literal else array)

    def step(
        self, site: Site, operands: list[Array], state: PyTree, trips: Trips
    ) -> tuple[list[Array], PyTree]:
        """Runs an equation, or what it holds."""
        inner = inner_of(site.equation)
        if inner is None:
            results = self.run(site.equation, operands)
            seen = ([*map(as_whole, arrays)] for arrays in (operands, results))
            return results, self.watch(state, site, *seen, trips)
        held = _Held(self, site, inner)
        if not self.by_site:
            return _RULES[inner.kind](held, operands, state, trips)
        numbers = range(site.number, site.number + sum(map(self.count, inner.jaxprs)))
        part = {number: state[number] for number in numbers if number in state}
        results, part = _RULES[inner.kind](held, operands, part, trips)
        return results, state | part


@dataclasses.dataclass(frozen=True)
class _Held:
    """The jaxprs that an equation runs.

    Attributes:
        watcher: who watches them.
        site: the equation.
        inner: the jaxprs, and how it runs them.
    """

    watcher: _Watcher
    site: Site
    inner: Inner

    def run(
        self, operands: Sequence[Array], state: PyTree, trips: Trips, index: int = 0
    ) -> tuple[list[Array], PyTree]:
        """Runs one of the jaxprs."""
        number = self.site.number + sum(map(self.watcher.count, self.inner.jaxprs[:index]))
        jaxpr, around = self.inner.jaxprs[index], _Around.inside(self.site)
        return self.watcher.evaluate(jaxpr, operands, state, trips, around, number)

    def scan(
        self, operands: list[Array], state: PyTree, trips: Trips
    ) -> tuple[list[Array], PyTree]:
        consts, carry, xs = self.inner.split(operands)
        params = self.site.equation.params

        def body(carried: PyTree, xs: list[Array]) -> PyTree:
            state, trip, carry = carried
            results, state = self.run([*consts, *carry, *xs], state, (*trips, trip))
            return (state, trip + 1, results[: len(carry)]), results[len(carry) :]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (state, _, carry), ys = jax.lax.scan(body, (state, _first_trip(), carry), xs, **options)
        return [*carry, *ys], state

    def while_loop(
        self, operands: list[Array], state: PyTree, trips: Trips
    ) -> tuple[list[Array], PyTree]:
        consts, carry, _ = self.inner.split(operands)
        in_condition = operands[: self.inner.first]
        unwatched = dataclasses.replace(self.watcher, watch=lambda state, *_: state, reduce=None)

        def condition(carried: PyTree) -> Array:
            inputs, around = [*in_condition, *carried[2]], _Around.inside(self.site)
            results, _ = unwatched.evaluate(self.inner.condition, inputs, {}, (), around, 0)
            return results[0]

        def body(carried: PyTree) -> PyTree:
            state, trip, carry = carried
            results, state = self.run([*consts, *carry], state, (*trips, trip))
            return state, trip + 1, results

        first = state, _first_trip(), carry
        state, _, carry = jax.lax.while_loop(condition, body, first)
        return carry, state

    def branch(
        self, operands: list[Array], state: PyTree, trips: Trips
    ) -> tuple[list[Array], PyTree]:
        index, *operands = operands
        if len(self.inner.jaxprs) == 1:
            return self.run(operands, state, trips)
        branches = [
            lambda state, *operands, index=index: self.run(operands, state, trips, index)
            for index in range(len(self.inner.jaxprs))
        ]
        return jax.lax.switch(index.astype(jnp.int32), branches, state, *operands)

    def shard_map(
        self, operands: list[Array], state: PyTree, trips: Trips
    ) -> tuple[list[Array], PyTree]:
        reduce, params = self.watcher.reduce, self.site.equation.params
        if reduce is None:
            raise ValueError(
                "Cannot watch inside of the jax.shard_map of this program, where each device has "
                "values of its own: give what runs on one device, without the jax.shard_map."
            )
        axes = tuple(core.manual_axes(self.site.equation))

        def body(state: PyTree, trips: Trips, *arrays: Array) -> tuple[list[Array], PyTree]:
            leaves, treedef = jax.tree.flatten(state)
            state = jax.tree.unflatten(treedef, vary(leaves, axes))
            results, state = self.run(arrays, state, trips)
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
        return mapped(state, trips, *operands)


def _first_trip() -> jax.Array:
    return jnp.zeros((), jnp.int32)


_RULES = {
    "call": _Held.run,
    "scan": _Held.scan,
    "while": _Held.while_loop,
    "cond": _Held.branch,
    "shard_map": _Held.shard_map,
}
