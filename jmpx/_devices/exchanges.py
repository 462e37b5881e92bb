"""Finds what a function reads of the parameters of other devices: the gathers, and all else."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax

from jmpx._base.axes import axis_names
from jmpx._jaxprs.core import evaluate, inner_jaxprs, is_literal, scan_counts, trace

R = TypeVar("R")
S = TypeVar("S")

# JAX has public types of these in `jax.extend` alone, which is imported on first use.
Jaxpr: TypeAlias = Any  # open or closed
Equation: TypeAlias = Any
Atom: TypeAlias = Any  # a variable or a literal

_NOTHING: frozenset[int] = frozenset()

# Primitives that give a device the arrays of others; `all_gather` has variants with suffixes.
_EXCHANGES = ("all_gather", "all_to_all", "ragged_all_to_all", "ppermute", "pgather")
# Primitives that name axes, and send nothing along them: they change what JAX knows of an array.
_SEND_NOTHING = ("pvary", "preduced", "reduced_vary_cast", "vary_unreduced_cast")

# Primitives of which nobody sees what they do with their operands.
_HIDING = ("pure_callback", "io_callback", "ffi_call", "pallas_call", "custom_partitioning")

# The operands of which the result holds elements; the others are indices and masks, through which
# no gradient passes.
_PICKED_FROM = {
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}


class Gather(NamedTuple):
    """An operation that gives a device parts of parameters that other devices hold.

    Attributes:
        params: the indices of the parameters.
        operation: the name of the primitive.
        axes: the mapped axes over which it does so.
        in_groups: whether it does so within groups of an axis, by `axis_index_groups`.
        by_place: whether each device picks what it gives by its place on an axis, as from a copy.
    """

    params: frozenset[int]
    operation: str
    axes: frozenset[Hashable]
    in_groups: bool
    by_place: bool


class Exchange(NamedTuple):
    """An operation through which the loss of a device depends on a parameter of other devices.

    Attributes:
        param: the index of the parameter.
        operation: the name of the primitive.
        axis: the mapped axis.
    """

    param: int
    operation: str
    axis: Hashable


_NO_GATHER: frozenset[Gather] = frozenset()
_NO_EXCHANGE: frozenset[Exchange] = frozenset()


class Source(NamedTuple):
    """What an array is computed from.

    Attributes:
        origin: the parameters that it holds elements of, or None if it depends on data. A scalar
            holds none: it scales a parameter, or picks a part of one.
        params: the parameters that contribute to it, by whatever way a gradient can go back.
        gathers: the gathers that contribute to it.
        exchanges: all operations that bring it something that depends on parameters of others.
        hidden: the parameters that contribute to it by an operation into which nobody sees.
        by_place: whether it depends on the place of its device on a mapped axis.
    """

    origin: frozenset[int] | None
    params: frozenset[int] = _NOTHING
    gathers: frozenset[Gather] = _NO_GATHER
    exchanges: frozenset[Exchange] = _NO_EXCHANGE
    hidden: frozenset[int] = _NOTHING
    by_place: bool = False


def find_exchanges(
    func: Callable[[list[jax.Array]], R], params: list[jax.Array], axes: Iterable[Hashable]
) -> tuple[Callable[[list[jax.Array]], R], Source]:
    """Traces a function of parameters once, and finds what its loss reads of other devices.

    The backward pass of a gather sums the gradient over the devices and gives each device the part
    of its shard. An activation may be gathered, too, as contrastive losses do: it depends on data,
    and is an exchange that is no gather. What reaches aux alone, or no gradient, does not count.

    Args:
        func: the function, the first array of whose result is the loss; others may be any leaves.
        params: the arrays to trace it with.
        axes: the names of the mapped axes over which a gather counts.

    Returns:
        A function that does the same without another call of `func`, and the source of the loss.
    """
    traced = trace(func, (params,), {})
    search = _Search(frozenset(axes))
    results = search.run(
        traced.jaxpr, [Source(frozenset([i]), frozenset([i])) for i in range(len(params))]
    )
    return lambda params: traced.rebuild(evaluate(traced.jaxpr, params)), results[0]


def _open(jaxpr: Jaxpr) -> Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _shape(atom: Atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())  # A token has no shape.


def _join(sources: Sequence[Source]) -> Source:
    """Returns the source of an array that is computed from arrays of these sources."""
    origins = [source.origin for source in sources if source.origin is not None]
    return Source(
        _union(origins) if len(origins) == len(sources) else None,
        _union([source.params for source in sources]),
        _union([source.gathers for source in sources]),
        _union([source.exchanges for source in sources]),
        _union([source.hidden for source in sources]),
        any(source.by_place for source in sources),
    )


def _picked(name: str, operands: Sequence[Source]) -> Source:
    """Returns the source of an operation's result, before what the operation itself adds."""
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


def _axes_of(eqn: Equation) -> frozenset[Hashable]:
    """Returns the mapped axes along which an equation, or one inside of it, sends something."""
    if eqn.primitive.name.startswith(_SEND_NOTHING):
        return frozenset()
    named = [name for key in ("axis_name", "axes") for name in axis_names(eqn.params.get(key, ()))]
    # `reduce_sum` and its like have axes that are numbers.
    axes = frozenset(name for name in named if not isinstance(name, int))
    inner = [_axes_of(each) for jaxpr in inner_jaxprs(eqn.params) for each in _open(jaxpr).eqns]
    return axes.union(*inner)


@dataclasses.dataclass(frozen=True)
class _Search:
    """Follows parameters through a jaxpr.

    Attributes:
        axes: the names of the axes over which a gather counts.
    """

    axes: frozenset[Hashable]

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Source]) -> list[Source]:
        """Returns the sources of a jaxpr's outputs, given those of its inputs."""
        jaxpr = _open(jaxpr)
        sources: dict[Atom, Source] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            sources[var] = Source(None if _shape(var) else _NOTHING)

        def read(atom: Atom) -> Source:
            return Source(_NOTHING) if is_literal(atom) else sources[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            results = self.step(eqn, operands)
            sources.update(zip(eqn.outvars, results, strict=True))
            for atom in eqn.invars:
                if hasattr(atom.aval, "inner_aval"):  # a mutable array, which may be written to
                    sources[atom] = _join([*operands, *results])
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, eqn: Equation, operands: list[Source]) -> list[Source]:
        """Returns the sources of an equation's results."""
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, operands)
        if name == "while":
            return self.while_loop(eqn, operands)
        if name == "cond":
            branches = [self.run(branch, operands[1:]) for branch in eqn.params["branches"]]
            return [_join(results) for results in zip(*branches, strict=True)]
        for jaxpr in inner_jaxprs(eqn.params):
            if len(_open(jaxpr).invars) == len(operands):
                results = self.run(jaxpr, operands)
                if len(results) == len(eqn.outvars):
                    return results
        return self.operation(eqn, operands)

    def scan(self, eqn: Equation, operands: list[Source]) -> list[Source]:
        consts, carry = scan_counts(eqn)
        return self.loop(eqn.params["jaxpr"], operands, consts, consts + carry)

    def while_loop(self, eqn: Equation, operands: list[Source]) -> list[Source]:
        operands = operands[eqn.params["cond_nconsts"] :]
        consts = eqn.params["body_nconsts"]
        return self.loop(eqn.params["body_jaxpr"], operands, consts, len(operands))

    def loop(self, body: Jaxpr, operands: list[Source], start: int, stop: int) -> list[Source]:
        """Runs a body until the sources of its carry, at `start` to `stop`, no longer change."""
        while True:
            results = self.run(body, operands)
            carried = list(map(_join, zip(operands[start:stop], results, strict=False)))
            if carried == operands[start:stop]:
                return results
            operands = [*operands[:start], *carried, *operands[stop:]]

    def operation(self, eqn: Equation, operands: list[Source]) -> list[Source]:
        """Returns the sources of an operation's results."""
        name = eqn.primitive.name
        source = _picked(name, operands)
        if name == "stop_gradient":
            source = Source(None)
        axes = _axes_of(eqn)
        over = axes & self.axes
        if source.origin and over and name.startswith(_EXCHANGES):
            in_groups = eqn.params.get("axis_index_groups") is not None
            gather = Gather(source.origin, name, over, in_groups, source.by_place)
            source = source._replace(gathers=source.gathers | {gather})
        # What is inside of an operation comes here if it could not be followed.
        if name.startswith(_HIDING) or (axes and any(inner_jaxprs(eqn.params))):
            source = source._replace(hidden=source.hidden | source.params)
        if axes and source.params:
            new = {Exchange(param, name, axis) for param in source.params for axis in axes}
            source = source._replace(exchanges=source.exchanges.union(new))
        # An array that is reduced to a scalar, such as a parameter's norm, may be gathered.
        of_arrays = any(_shape(atom) for atom in eqn.invars)
        scalar = source if source.origin is None else source._replace(origin=_NOTHING)
        return [scalar if of_arrays and not _shape(var) else source for var in eqn.outvars]
