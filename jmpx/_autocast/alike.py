"""Keys of pieces: those with equal keys are one function, which JAX traces and derives once."""

import itertools
from collections.abc import Hashable, Iterator, Sequence

import jax

from jmpx._autocast.neighbours import Neighbours
from jmpx._autocast.pieces import Piece
from jmpx._autocast.regions import Regions
from jmpx._autocast.value import Value
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, Scopes
from jmpx._jaxprs.structure import structure_of


def key_of(
    piece: Piece,
    values: Sequence[Value],
    scope: str,
    depth: int,
    neighbours: Neighbours,
    regions: Regions,
) -> Hashable:
    """Returns a key of a piece: equal ones compute the same, in the same dtypes, at the same lines.

    The first scopes of each equation, as many as `depth` says, are around the whole piece, as a
    layer's name is: they count only for what the policy map says of them. The key has no hash where
    a parameter of an equation has none. What it names by `id` lives as long as the piece.
    """
    places = (_of_place(equation, scope, regions, depth) for equation in piece.equations)
    return (
        structure_of(piece.equations, piece.inputs, piece.outputs),
        tuple(map(_of_value, values)),
        tuple(itertools.chain.from_iterable(places)),
        neighbours.said_of(piece.results),
        tuple(var in piece.named for var in piece.results),
    )


def scopes_around(piece: Piece) -> Scopes:
    """Returns the scopes, as JAX keeps them, that are around all equations of a piece."""
    first, *stacks = (core.stack_of(equation) for equation in piece.equations)
    for stack in stacks:
        if stack[: len(first)] != first:
            pairs = zip(first, stack, strict=False)
            first = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return first


def _of_value(value: Value) -> Hashable:
    constants = id(value.constant), None if isinstance(value.array, jax.Array) else id(value.array)
    avals = tuple(map(jax.typeof, (value.array, *value.casts.values())))
    return value.traits, constants, avals, tuple(value.casts)


def _of_place(equation: Equation, scope: str, regions: Regions, depth: int) -> Iterator[Hashable]:
    """Yields what the scopes and the lines of an equation, and of those that it holds, say."""
    within = core.scope_within(scope, equation)
    region = regions.region(within)
    yield core.stack_of(equation)[depth:], equation.source_info.traceback
    yield region, regions.override(core.operation_name(equation.primitive.name), region)
    for jaxpr in core.inner_jaxprs(equation.params):
        yield tuple(map(id, core.consts_of(jaxpr)))
        for inner in jaxpr.eqns:
            yield from _of_place(inner, within, regions, 0)
