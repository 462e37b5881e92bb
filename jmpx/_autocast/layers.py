"""The layers of a jaxpr: runs of equations that follow each other again and again.

A model whose layers are written out is traced as one long list of equations. What is alike in it is
evaluated once, and derived once, as a jitted function that each of the layers calls; XLA inlines
the calls. An equation with an effect, or a function with a derivative rule outside of `jax.jit`,
ends a part of a layer. Operations that run eagerly have no layers.
"""

import collections
import itertools
from collections.abc import Hashable, Iterator, Sequence

from jmpx._jaxprs.backward import variables
from jmpx._jaxprs.core import Equation, Jaxpr
from jmpx._jaxprs.inner import once_per_jaxpr
from jmpx._jaxprs.pieces import Piece, split
from jmpx._jaxprs.structure import structure_of

_ALIKE = 8  # so many equations have to be alike before anything else is compared
_LEAST = 4  # equations of a part of a layer: a call of fewer would save nothing
_SHORTEST = 16  # equations of a layer: of shorter ones, several are called together
_TRIES = 16  # how many places are compared with one
_MANY = 8  # operations for which JAX had better cache a function, which takes as long as some

# A function with a derivative rule of its own is made anew in each trace, and no two are alike.
_SINGLE = frozenset({"custom_jvp_call", "custom_vjp_call", "remat2", "shard_map"})


def find_layers(jaxpr: Jaxpr) -> list[tuple[bool, Piece]]:
    """Returns the pieces of a jaxpr, in order, and which repeat; nothing if none does."""
    groups = layers(jaxpr)
    pieces = split(jaxpr, [indices for _, indices in groups])
    return [(repeats, piece) for (repeats, _), piece in zip(groups, pieces, strict=True)]


@once_per_jaxpr
def layers(jaxpr: Jaxpr) -> list[tuple[bool, range]]:
    """Returns the indices of all equations, in order, in groups; and which groups repeat."""
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
    """Returns the tokens of which a jaxpr has many."""
    counts = collections.Counter(map(token, jaxpr.eqns))
    return frozenset(each for each, count in counts.items() if count >= _MANY)


def _groups(equations: Sequence[Equation]) -> Iterator[tuple[bool, range]]:
    """Yields groups of equations; the ones that may repeat are the parts of layers."""
    single = [_is_single(equation) for equation in equations]
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
    """Returns what equations at the same place of alike layers have in common."""
    shapes = tuple(getattr(var.aval, "shape", None) for var in equation.outvars)
    return equation.primitive.name, shapes


def _layers(tokens: Sequence[Hashable]) -> Iterator[range]:
    """Yields ranges of tokens each of which is equal to the one before it or after it."""
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
            size, number = _lengthened(size, number)
            if number > 1:
                yield from (range(start + i * size, start + (i + 1) * size) for i in range(number))
                start += number * size - 1
                break
        start += 1


def _lengthened(size: int, number: int) -> tuple[int, int]:
    """Returns the size and the number of layers, several of which are one if they are short."""
    together = -(-_SHORTEST // size)
    return size * together, number // together


def _is_single(equation: Equation) -> bool:
    return bool(equation.effects) or equation.primitive.name in _SINGLE


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
