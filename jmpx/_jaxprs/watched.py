"""Runs a jaxpr and shows each of its equations, with what goes in and out, to a watcher.

The watcher is a pure function that updates a state. The state goes through loops as part of their
carry, so that a watched program can be jitted, and what runs inside of a loop is watched in each
trip.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.axes import as_whole, vary
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr

State = TypeVar("State")
Trips: TypeAlias = tuple[Any, ...]  # int32 of shape (): one for each loop around, outermost first
# What runs an equation that holds no jaxpr.
Run: TypeAlias = Callable[[Equation, list[Any]], list[Any]]


class Site(NamedTuple):
    """An equation at its place in a program. A function that is called twice has two sites.

    Args:
        number: its place in the order of the program, from 0. Equations that stand for a jaxpr,
            such as loops and calls, have no number, as the equations in it have theirs.
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
    def loops(self) -> tuple[Equation, ...]:
        """The loops among the equations around it."""
        return tuple(filter(is_loop, self.around))


def is_loop(eqn: Equation) -> bool:
    """Whether an equation runs a jaxpr several times."""
    return eqn.primitive.name in ("scan", "while")


# Of primitives that stand for a jaxpr: the parameters that hold what is watched. All others are
# watched as one equation, the jaxprs of a Pallas kernel or of a linear solve included.
_WATCHED = {
    "call": ("call_jaxpr",),
    "closed_call": ("call_jaxpr",),
    "jit": ("jaxpr",),
    "remat2": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "shard_map": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("body_jaxpr",),
    "cond": ("branches",),
}


def _watched_jaxprs(eqn: Equation) -> list[Jaxpr]:
    keys = _WATCHED.get(eqn.primitive.name, ())
    jaxprs = core.inner_jaxprs({key: eqn.params[key] for key in keys})
    branch = core.platform_branch(eqn)
    return jaxprs if branch is None else [jaxprs[branch]]


class _Around(NamedTuple):
    """What surrounds a jaxpr."""

    number: int  # of its first equation
    scope: str = ""
    is_backward: bool = False
    equations: tuple[Equation, ...] = ()


def _inside(site: Site) -> _Around:
    return _Around(site.number, site.scope, site.is_backward, (*site.around, site.equation))


def _sites_in(jaxpr: Jaxpr, around: _Around, count: Callable[[Jaxpr], int]) -> Iterator[Site]:
    """Yields a site for each equation of a jaxpr, also for those that stand for jaxprs."""
    number = around.number
    for eqn in jaxpr.eqns:
        is_backward = around.is_backward or "transpose(" in str(eqn.source_info.name_stack)
        scope = core.scope_within(around.scope, eqn)
        yield Site(number, eqn, scope, is_backward, around.equations)
        inner = _watched_jaxprs(eqn)
        number += sum(map(count, inner)) if inner else 1


def _counter() -> Callable[[Jaxpr], int]:
    """Returns a function that counts the sites of a jaxpr, each jaxpr once."""

    @functools.cache
    def count(jaxpr: Jaxpr) -> int:
        inner = map(_watched_jaxprs, jaxpr.eqns)
        return sum(sum(map(count, jaxprs)) if jaxprs else 1 for jaxprs in inner)

    return count


def sites(jaxpr: Jaxpr, scope: str = "") -> list[Site]:
    """Returns the sites of a program: `sites(jaxpr)[site.number]` is the one of that number.

    Args:
        jaxpr: the jaxpr, closed or open.
        scope: the scope around it.
    """
    count = _counter()

    def walk(jaxpr: Jaxpr, around: _Around) -> Iterator[Site]:
        for site in _sites_in(jaxpr, around, count):
            inner = _watched_jaxprs(site.equation)
            if not inner:
                yield site
            within = _inside(site)
            for each in inner:
                yield from walk(each, within)
                within = within._replace(number=within.number + count(each))

    return list(walk(jaxpr, _Around(0, scope)))


def evaluate(
    jaxpr: Jaxpr,
    arrays: Sequence[Any],
    watch: Callable[[State, Site, list[Any], list[Any], Trips], State],
    state: State,
    scope: str = "",
    *,
    run: Run = core.bind,
    constant: Callable[[Any], Any] = lambda array: array,
    reduce: Callable[[State, tuple[Any, ...]], State] | None = None,
    by_site: bool = False,
) -> tuple[list[Any], State]:
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
    watcher = _Watcher(watch, run, constant, reduce, by_site)
    with np.errstate(all="ignore"):  # JAX casts literals by NumPy, -1e9 to float16 for one
        return watcher.evaluate(jaxpr, arrays, state, _Around(0, scope), ())


class _Watcher:
    """The functions of an evaluation; `evaluate` describes them."""

    def __init__(
        self, watch: Any, run: Run, constant: Any, reduce: Any = None, by_site: bool = False
    ) -> None:
        self.watch, self.run, self.constant, self.reduce = watch, run, constant, reduce
        self.by_site, self.count = by_site, _counter()

    def part(self, state: Any, site: Site) -> Any:
        """Returns the part of the state that the sites in an equation may change."""
        if not self.by_site:
            return state
        end = site.number + sum(map(self.count, _watched_jaxprs(site.equation)))
        return {number: state[number] for number in range(site.number, end) if number in state}

    def whole(self, state: Any, part: Any) -> Any:
        """Returns the state with a part of it changed."""
        return state | part if self.by_site else part

    def evaluate(
        self, jaxpr: Jaxpr, arrays: Sequence[Any], state: Any, around: _Around, trips: Trips
    ) -> tuple[list[Any], Any]:
        """Runs a jaxpr; `trips` counts the trips of the loops around it."""
        env = dict(zip(jaxpr.invars, arrays, strict=True))
        for var, const in zip(jaxpr.constvars, core.consts_of(jaxpr), strict=False):
            env[var] = self.constant(const)

        def read(atom: Atom) -> Any:
            if core.is_literal(atom):
                return self.constant(np.asarray(atom.val, atom.aval.dtype))
            return env[atom]

        found = _sites_in(jaxpr, around, self.count)
        for site, last in zip(found, core.last_uses(jaxpr), strict=True):
            eqn, operands = site.equation, list(map(read, site.equation.invars))
            with core.at_source_of(eqn):
                rule = _RULES.get(eqn.primitive.name)
                if rule is None:
                    results = self.run(eqn, operands)
                    seen = ([*map(as_whole, each)] for each in (operands, results))
                    state = self.watch(state, site, *seen, trips)
                else:
                    results, state = rule(self, site, operands, state, trips)
            env.update(zip(eqn.outvars, results, strict=True))
            for var in last:
                del env[var]
        return list(map(read, jaxpr.outvars)), state

    def inner(
        self, site: Site, operands: Sequence[Any], state: Any, trips: Trips, index: int = 0
    ) -> tuple[list[Any], Any]:
        """Runs one of the jaxprs that an equation stands for."""
        jaxprs = _watched_jaxprs(site.equation)
        around = _inside(site)
        before = sum(map(self.count, jaxprs[:index]))
        around = around._replace(number=around.number + before)
        return self.evaluate(jaxprs[index], operands, state, around, trips)


def _call(
    watcher: _Watcher, site: Site, operands: list[Any], state: Any, trips: Trips
) -> tuple[list[Any], Any]:
    return watcher.inner(site, operands, state, trips)


def _scan(
    watcher: _Watcher, site: Site, operands: list[Any], state: Any, trips: Trips
) -> tuple[list[Any], Any]:
    params = site.equation.params
    num_consts, num_carry = core.scan_counts(site.equation)
    end = num_consts + num_carry
    consts, carry, xs = operands[:num_consts], operands[num_consts:end], operands[end:]

    def body(carried: Any, xs: Any) -> Any:
        state, trip, carry = carried
        inputs = [*consts, *carry, *xs]
        results, state = watcher.inner(site, inputs, state, (*trips, trip))
        return (state, trip + 1, results[:num_carry]), results[num_carry:]

    (part, _, carry), ys = jax.lax.scan(
        body,
        (watcher.part(state, site), _first_trip(), carry),
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys], watcher.whole(state, part)


def _while(
    watcher: _Watcher, site: Site, operands: list[Any], state: Any, trips: Trips
) -> tuple[list[Any], Any]:
    params = site.equation.params
    in_cond, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carry = operands[:in_cond], operands[in_cond:start], operands[start:]
    unwatched = _Watcher(lambda state, *_: state, watcher.run, watcher.constant)

    def cond(carried: Any) -> Any:
        inputs = [*cond_consts, *carried[2]]
        (result,), _ = unwatched.evaluate(params["cond_jaxpr"], inputs, (), _inside(site), ())
        return result

    def body(carried: Any) -> Any:
        state, trip, carry = carried
        results, state = watcher.inner(site, [*body_consts, *carry], state, (*trips, trip))
        return state, trip + 1, results

    first = watcher.part(state, site), _first_trip(), carry
    part, _, carry = jax.lax.while_loop(cond, body, first)
    return carry, watcher.whole(state, part)


def _first_trip() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _cond(
    watcher: _Watcher, site: Site, operands: list[Any], state: Any, trips: Trips
) -> tuple[list[Any], Any]:
    if core.platform_branch(site.equation) is not None:
        return watcher.inner(site, operands[1:], state, trips)

    def branch(index: int) -> Callable[..., Any]:
        return lambda state, *operands: watcher.inner(site, operands, state, trips, index)

    branches = [branch(i) for i in range(len(site.equation.params["branches"]))]
    index = operands[0].astype(jnp.int32)
    results, part = jax.lax.switch(index, branches, watcher.part(state, site), *operands[1:])
    return results, watcher.whole(state, part)


def _shard_map(
    watcher: _Watcher, site: Site, operands: list[Any], state: Any, trips: Trips
) -> tuple[list[Any], Any]:
    reduce, params = watcher.reduce, site.equation.params
    if reduce is None:
        raise ValueError(
            "Cannot watch inside of the jax.shard_map of this program, where each device has "
            "values of its own: give what runs on one device, without the jax.shard_map."
        )
    axes = tuple(core.manual_axes(site.equation))

    def body(state: Any, trips: Trips, *arrays: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        state = jax.tree.unflatten(treedef, vary(leaves, axes))
        results, state = watcher.inner(site, arrays, state, trips)
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
    results, part = mapped(watcher.part(state, site), trips, *operands)
    return results, watcher.whole(state, part)


_RULES = dict.fromkeys(_WATCHED, _call) | {
    "shard_map": _shard_map,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
