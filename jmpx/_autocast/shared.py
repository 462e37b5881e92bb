"""Pieces of a jaxpr that are evaluated once, as a jitted function, where they are alike."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jmpx._autocast.neighbours import Neighbours
from jmpx._autocast.regions import Regions
from jmpx._autocast.value import Array, Traits, Value
from jmpx._base.leaves import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation
from jmpx._jaxprs.pieces import Piece
from jmpx._jaxprs.structure import kind_of

OnValues: TypeAlias = Callable[[Sequence[Value]], list[Value]]
_Cast = tuple[np.dtype, bool]  # a key of `Value.casts`
_Known = tuple[Traits, tuple[_Cast, ...]]  # the traits and the casts


def shared(run: OnValues, values: Sequence[Value], is_read: Sequence[bool]) -> OnValues:
    """Returns a jitted function of these values and others that are alike.

    Casts go in and out with the values, so that each is made once: the cotangents of one cast are
    summed in its dtype, those of two casts in the dtype of the value.
    """
    # The function is kept for other pieces, and must not keep the arrays alive.
    constants: list[Any] = [v.array if isinstance(v.array, np.ndarray) else None for v in values]
    known = [
        (v.traits, () if constant is not None else tuple(v.casts))
        for v, constant in zip(values, constants, strict=True)
    ]
    gives_casts = [flag and c is None for flag, c in zip(is_read, constants, strict=True)]
    results: list[_Known] = []
    made: list[list[_Cast]] = []  # of each operand

    def piece(given: Sequence[Sequence[Array]]) -> PyTree:
        arrays = [each or (c,) for each, c in zip(given, constants, strict=True)]
        operands = list(map(_value, arrays, known))
        outputs = run(list(operands))
        results[:] = [(v.traits, tuple(v.casts)) for v in outputs]
        triples = zip(operands, known, gives_casts, strict=True)
        made[:] = [
            [key for key in v.casts if gives and key not in casts]
            for v, (_, casts), gives in triples
        ]
        new = [[v.casts[key] for key in keys] for v, keys in zip(operands, made, strict=True)]
        return [(v.array, *v.casts.values()) for v in outputs], new

    # Since JAX 0.12, the calls are inlined when the program is lowered; before, when it is traced,
    # which would take longer than it saves. XLA inlines them, too, but an H100's compiler then
    # copies some gradients of weights: .7 % of a ViT's step, by its estimate.
    jitted = jax.jit(piece, inline=hasattr(jax, "Inline"))

    def call(values: Sequence[Value]) -> list[Value]:
        pairs = zip(values, constants, strict=True)
        given = [(v.array, *v.casts.values()) if c is None else () for v, c in pairs]
        outputs, new = jitted(given)
        for value, keys, each in zip(values, made, new, strict=True):
            value.casts.update(zip(keys, each, strict=True))
        return list(map(_value, outputs, results))

    return call


def _value(arrays: Sequence[Array], known: _Known) -> Value:
    """Returns the value of an array and its casts."""
    traits, casts = known
    value = Value.of(arrays[0], traits)
    value.casts.update(zip(casts, arrays[1:], strict=True))
    return value


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
    layer's name is: they count only for what the policy map says of them. What it names by `id`
    lives as long as the piece.
    """
    results = [var for equation in piece.equations for var in equation.outvars]
    return (
        kind_of(piece.equations, piece.inputs, piece.outputs, depth),
        tuple(map(_of_value, values)),
        tuple(said_of(piece.equations, scope, regions)),
        neighbours.said_of(results),
    )


def _of_value(value: Value) -> Hashable:
    constant = None if isinstance(value.array, jax.Array) else id(value.array)
    avals = tuple(map(jax.typeof, (value.array, *value.casts.values())))
    return value.traits, constant, avals, tuple(value.casts)


def said_of(equations: Sequence[Equation], scope: str, regions: Regions) -> Iterator[Hashable]:
    """Yields what the policy map says of equations, and of those in the jaxprs that they hold."""
    for equation in equations:
        within = core.scope_within(scope, equation)
        region = regions.region(within)
        yield region, regions.override(core.operation_name(equation.primitive.name), region)
        for jaxpr in core.inner_jaxprs(equation.params):
            yield from said_of(jaxpr.eqns, within, regions)
