"""Equal layers of a program: finds them, and evaluates each once, as a jitted function."""

import collections
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jmpx._autocast.neighbours import Neighbours
from jmpx._autocast.value import Array, Regions, Traits, Value
from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, Jaxpr
from jmpx._jaxprs.inner import Piece, kind_of, once_per_jaxpr, split, structure_of, variables

_ALIKE = 8  # how many equations have to be alike before anything else is compared
_LEAST = 4  # equations of a part of a layer: a call of fewer would save nothing
_SHORTEST = 16  # equations of a layer: several shorter ones are called together
_TRIES = 16  # how many places are compared with one
_MANY = 8  # from this many equal operations on, a cached function saves more time than it takes

# Each trace makes the functions of these anew, so that no two equations are alike.
_SINGLE = frozenset({"custom_jvp_call", "custom_vjp_call", "remat2", "shard_map"})


def find_layers(jaxpr: Jaxpr) -> list[tuple[bool, Piece]]:
    """Returns the pieces of a jaxpr, in order, and which repeat; nothing if none does."""
    groups = layers(jaxpr)
    pieces = split(jaxpr, [indices for _, indices in groups])
    return [(repeats, piece) for (repeats, _), piece in zip(groups, pieces, strict=True)]


@once_per_jaxpr
def layers(jaxpr: Jaxpr) -> list[tuple[bool, range]]:
    """Returns the indices of all equations in groups, in order, and which groups repeat."""
    groups = list(_groups(jaxpr.eqns))
    if not any(repeats for repeats, _ in groups):
        return []
    keys = [_key(jaxpr, indices) if repeats else None for repeats, indices in groups]
    counts = collections.Counter(key for key in keys if key is not None)
    found: list[tuple[bool, range]] = []
    for (_, indices), key in zip(groups, keys, strict=True):
        repeats = key is not None and counts[key] > 1
        if found and not repeats and not found[-1][0]:
            found[-1] = False, range(found[-1][1].start, indices.stop)
        else:
            found.append((repeats, indices))
    return found


@once_per_jaxpr
def repeated(jaxpr: Jaxpr) -> frozenset[Hashable]:
    """Returns the tokens that many equations of a jaxpr have."""
    counts = collections.Counter(map(token, jaxpr.eqns))
    return frozenset(each for each, count in counts.items() if count >= _MANY)


def _groups(equations: Sequence[Equation]) -> Iterator[tuple[bool, range]]:
    """Yields groups of equations; the ones that may repeat are the parts of layers."""
    single = [bool(each.effects) or each.primitive.name in _SINGLE for each in equations]
    end = 0
    for layer in _layers([token(equation) for equation in equations]):
        if end < layer.start:
            yield False, range(end, layer.start)
        for is_single, part in itertools.groupby(layer, single.__getitem__):
            indices = list(part)
            yield not is_single and len(indices) >= _LEAST, range(indices[0], indices[-1] + 1)
        end = layer.stop
    if end < len(equations):
        yield False, range(end, len(equations))


def token(equation: Equation) -> Hashable:
    """Returns a key that equations at the same place of equal layers share."""
    shapes = tuple(getattr(var.aval, "shape", None) for var in equation.outvars)
    return equation.primitive.name, shapes


def _layers(tokens: Sequence[Hashable]) -> Iterator[range]:
    """Yields ranges of tokens; each equals the range before it or after it."""
    starts = range(len(tokens) - _ALIKE + 1)
    first = [tuple(tokens[i : i + _ALIKE]) for i in starts]
    places = collections.defaultdict[Hashable, collections.deque[int]](collections.deque)
    for i in starts:
        places[first[i]].append(i)
    start = 0
    while start < len(first):
        later = places[first[start]]
        while later[0] <= start:
            later.popleft()
            if not later:
                break
        for place in itertools.islice(later, _TRIES):
            size = place - start
            number = 1
            while tokens[start:place] == tokens[start + number * size : place + number * size]:
                number += 1
            together = -(-_SHORTEST // size)  # several short layers are one
            size, number = size * together, number // together
            if number > 1:
                yield from (range(start + i * size, start + (i + 1) * size) for i in range(number))
                start += number * size - 1
                break
        start += 1


def _key(jaxpr: Jaxpr, indices: range) -> Hashable:
    """Returns a key of a part: equal ones compute the same. None if it has no hash."""
    equations = jaxpr.eqns[indices.start : indices.stop]
    defined = {var for equation in equations for var in equation.outvars}
    inputs = {v: None for eqn in equations for v in variables(eqn) if v not in defined}
    key = structure_of(equations, list(inputs), ())
    try:
        hash(key)
    except TypeError:
        return None
    return key


# Equal pieces share one jitted function.


OnValues: TypeAlias = Callable[[Sequence[Value]], list[Value]]
_Cast = tuple[np.dtype, bool]  # a key of `Value.casts`
_Known = tuple[Traits, tuple[_Cast, ...]]  # the traits and the casts


def shared(run: OnValues, values: Sequence[Value], is_read: Sequence[bool]) -> OnValues:
    """Returns a jitted function of these values, and of others with the same traits and casts.

    Casts go in and out with the values, so that each is made once: cotangents of one cast are
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

    # Since JAX 0.12, calls are inlined when the program is lowered; before, inlining in the trace
    # took longer than it saved. XLA inlines them, too, but an H100's compiler then copies some
    # gradients of weights: .7 % of a ViT's step, by its estimate.
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

    The first `depth` scopes of each equation are around the whole piece, as a layer's name is: only
    what the policy map says of them counts. Objects in the key by `id` live as long as the piece.
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
    """Yields what the policy map says of equations, also of those in inner jaxprs."""
    for equation in equations:
        within = core.scope_within(scope, equation)
        region = regions.region(within)
        yield region, regions.override(core.operation_name(equation.primitive.name), region)
        for jaxpr in core.inner_jaxprs(equation.params):
            yield from said_of(jaxpr.eqns, within, regions)
