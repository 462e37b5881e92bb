"""Finds how a function reads parameters of other devices: by gathers, or by other operations."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax

from jmpx._base.axes import axis_names
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, evaluate, inner_jaxprs, is_literal, trace
from jmpx._jaxprs.inner import all_equations, inner_of, walk
from jmpx._jaxprs.moves import EXCHANGES, HIDING, PLACEMENTS

R = TypeVar("R")
S = TypeVar("S")

_NOTHING: frozenset[int] = frozenset()

# Primitives that give a device the arrays of others.
_GATHERS = EXCHANGES | {"pgather"}
# Primitives that name axes, and send nothing along them. `jax.lax.pbroadcast` does send.
_CASTS = ("preduced", "reduced_vary_cast", "vary_unreduced_cast")
_SEND_NOTHING = (*(PLACEMENTS - {"pbroadcast"}), *_CASTS)

# The operands of which the result holds elements; the others are indices and masks, through which
# no gradient passes.
_PICKED_FROM = {
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}


class Gather(NamedTuple):
    """An operation that gives a device parts of parameters that other devices hold."""

    params: frozenset[int]  # the indices of the parameters
    operation: str  # the name of the primitive
    axes: frozenset[Hashable]  # the mapped axes over which it does so
    in_groups: bool  # whether it does so within groups of an axis, by `axis_index_groups`
    # Whether each device picks its part by its place on an axis, as from a copy.
    by_place: bool


class Exchange(NamedTuple):
    """An operation through which the loss of a device depends on a parameter of other devices."""

    param: int  # the index of the parameter
    operation: str  # the name of the primitive
    axis: Hashable  # the mapped axis


class Source(NamedTuple):
    """What an array is computed from."""

    # The parameters that it holds elements of, or None if it depends on data. A scalar holds none:
    # it scales a parameter, or picks a part of one.
    origin: frozenset[int] | None
    # The parameters that contribute to it, so that a gradient can go back to them.
    params: frozenset[int] = _NOTHING
    gathers: frozenset[Gather] = frozenset()  # the gathers that contribute to it
    # The operations that bring it numbers that depend on parameters of other devices.
    exchanges: frozenset[Exchange] = frozenset()
    # The parameters that contribute to it by an operation that hides its computation.
    hidden: frozenset[int] = _NOTHING
    by_place: bool = False  # whether it depends on the place of its device on a mapped axis


def find_exchanges(
    func: Callable[[list[jax.Array]], R],
    params: list[jax.Array],
    axes: Iterable[Hashable],
) -> tuple[Callable[[list[jax.Array]], R], Source]:
    """Traces a function of parameters once, and finds what its loss reads of other devices.

    A gather of activations, as in contrastive losses, counts as another exchange, as they depend on
    data. Exchanges that reach aux alone, or no gradient, do not count. Returns a function that does
    the same without another call of `func`, and the source of the loss, its first result.
    """
    traced = trace(func, (params,), {})
    inputs = [Source(frozenset([i]), frozenset([i])) for i in range(len(params))]
    results = _follow(traced.jaxpr, inputs, frozenset(axes))
    return lambda params: traced.rebuild(evaluate(traced.jaxpr, params)), results[0]


def _join(sources: Sequence[Source]) -> Source:
    """Returns the source of an array that is computed from arrays of these sources."""
    if not sources:
        return Source(_NOTHING)
    origins, params, gathers, exchanges, hidden, by_place = zip(*sources, strict=True)
    return Source(
        None if None in origins else _union(origins),
        _union(params),
        _union(gathers),
        _union(exchanges),
        _union(hidden),
        any(by_place),
    )


def _picked(name: str, operands: Sequence[Source]) -> Source:
    """Returns the joined source of the operands that an operation picks elements of."""
    elements = _PICKED_FROM.get(name, slice(None))
    source = _join(operands[elements])
    indices = [operand for operand in operands if operand not in operands[elements]]
    # An index that comes as data may be the device's place.
    by_place = name == "axis_index" or any(o.by_place or o.origin is None for o in indices)
    return source._replace(by_place=source.by_place or by_place)


def _union(sets: Sequence[frozenset[S]]) -> frozenset[S]:
    """Returns the union of sets, one of which mostly holds the others."""
    largest: frozenset[S] = max(sets, key=len, default=frozenset())
    if all(each is largest or each <= largest for each in sets):
        return largest
    return largest.union(*sets)


def _sent_along(eqn: Equation) -> frozenset[Hashable]:
    """Returns the mapped axes along which an equation, or one in its jaxprs, sends something."""
    found: set[Hashable] = set()
    for each in (eqn, *(e for jaxpr in inner_jaxprs(eqn.params) for e in all_equations(jaxpr))):
        if not each.primitive.name.startswith(_SEND_NOTHING):
            for key in ("axis_name", "axes"):
                found.update(axis_names(each.params.get(key, ())))
    # `reduce_sum` and its like have axes that are numbers.
    return frozenset(name for name in found if not isinstance(name, int))


def _follow(jaxpr: Jaxpr, inputs: Sequence[Source], axes: frozenset[Hashable]) -> list[Source]:
    """Returns the sources of a jaxpr's results, given those of its operands."""

    def step(eqn: Equation, operands: list[Source]) -> list[Source]:
        inner = inner_of(eqn)
        if inner is None:
            return _operation(eqn, operands, axes)
        operands, end = operands[inner.first :], inner.consts + inner.carry
        while True:  # until the sources of a loop's carry no longer change
            branches = [_follow(each, operands, axes) for each in inner.jaxprs]
            results = list(map(_join, zip(*branches, strict=True)))
            before = operands[inner.consts : end]
            operands[inner.consts : end] = map(_join, zip(before, results, strict=False))
            if operands[inner.consts : end] == before:
                return results

    return walk(jaxpr, inputs, step, _constant, _join)


def _constant(atom: Atom, _: object) -> Source:
    return Source(_NOTHING if is_literal(atom) or not _shape(atom) else None)


def _shape(atom: Atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())  # A token has no shape.


def _operation(eqn: Equation, operands: list[Source], axes: frozenset[Hashable]) -> list[Source]:
    """Returns the sources of the results of an equation that is seen as a whole."""
    name = eqn.primitive.name
    source = Source(None) if name == "stop_gradient" else _picked(name, operands)
    along = _sent_along(eqn)
    over = along & axes
    if source.origin and over and name in _GATHERS:
        in_groups = eqn.params.get("axis_index_groups") is not None
        gather = Gather(source.origin, name, over, in_groups, source.by_place)
        source = source._replace(gathers=source.gathers | {gather})
    if name.startswith(HIDING) or (along and inner_jaxprs(eqn.params)):
        source = source._replace(hidden=source.hidden | source.params)
    if along and source.params:
        new = {Exchange(param, name, axis) for param in source.params for axis in along}
        source = source._replace(exchanges=source.exchanges | new)
    # An array that is reduced to a scalar, such as a parameter's norm, may be gathered.
    of_arrays = any(map(_shape, eqn.invars))
    scalar = source if source.origin is None else source._replace(origin=_NOTHING)
    return [scalar if of_arrays and not _shape(var) else source for var in eqn.outvars]
