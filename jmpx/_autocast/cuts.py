"""Where to cut a jaxpr: where few arrays live, so that little has to be saved."""

import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jmpx import _jaxpr
from jmpx._autocast.saving import is_weight_product
from jmpx._jaxpr import Atom, Equation, Jaxpr

# A part with more products than this has more than one block of a model, as a decoder has, in
# which the encoder's output lives all along.
_MANY = 16

_holding: weakref.WeakKeyDictionary[Jaxpr, bool] = weakref.WeakKeyDictionary()


class Role(enum.Enum):
    """What an equation is to the pieces of a jaxpr."""

    ORDINARY = "it joins the equations next to it"
    PRODUCT = "so does it, and makes their piece worth a checkpoint"
    INSIDE = "it holds jaxprs that are cut themselves"
    ALONE = "it is in no piece"
    LATER = "it has an effect and no results, and runs after its piece"


class Life(NamedTuple):
    """From where to where an array lives.

    Args:
        start: the index of the equation that makes it.
        end: that of the last equation that reads it.
        size: its bytes.
        is_saved: whether it is saved in any case, as the result of a product.
    """

    start: int
    end: int
    size: int
    is_saved: bool


def variables(equation: Equation) -> list[Atom]:
    """Returns the operands that are no literals."""
    return [atom for atom in equation.invars if not _jaxpr.is_literal(atom)]


def holds_product(equation: Equation) -> bool:
    """Whether an equation is a weight product, or a jaxpr that it holds has one."""
    if is_weight_product(equation.primitive, equation.params, equation.invars):
        return True
    return any(map(_has_product, _jaxpr.inner_jaxprs(equation.params)))


def _has_product(jaxpr: Jaxpr) -> bool:
    if jaxpr not in _holding:
        _holding[jaxpr] = any(map(holds_product, jaxpr.eqns))
    return _holding[jaxpr]


def find_cuts(equations: Sequence[Equation], roles: Sequence[Role]) -> set[int]:
    """Returns the indices of equations before which one array at most lives.

    Only large floating arrays count that depend on a product: what is computed from parameters or
    inputs alone, such as a mask, is no activation. There is one cut at most between two equations
    that hold products: the one at which the least has to be saved.
    """
    holders = [i for i, role in enumerate(roles) if role not in (Role.ORDINARY, Role.LATER)]
    return set(_cuts(holders, _lives(equations, roles)))


def _lives(equations: Sequence[Equation], roles: Sequence[Role]) -> list[Life]:
    made: dict[Atom, Life] = {}
    for i, (equation, role) in enumerate(zip(equations, roles, strict=True)):
        if role is Role.LATER:
            continue
        read = [var for var in variables(equation) if var in made]
        made.update((var, made[var]._replace(end=i)) for var in read)
        if read or role is not Role.ORDINARY:
            is_product = role is Role.PRODUCT and not _jaxpr.holds_jaxpr(equation.params)
            made.update((var, Life(i, i, _size(var), is_product)) for var in equation.outvars)
    bound = max((life.size for life in made.values()), default=0) / 100
    return [life for life in made.values() if life.size > bound and life.end > life.start]


def _size(atom: Atom) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return 0
    return atom.aval.size * dtype.itemsize


def _cuts(holders: Sequence[int], lives: Sequence[Life]) -> Iterator[int]:
    """Yields the cuts between equations that hold products.

    An array that lives through half of a long part without a cut, such as the output of an encoder
    in the decoder or the skip connection of a U-Net, has to be saved anyway: it does not count
    there.

    Args:
        holders: the indices of equations that hold products.
        lives: the lives of the arrays that count.
    """
    parts = [list(holders[:1])]
    for before, after in zip(holders, holders[1:], strict=False):
        cut = _cheapest(before, after, lives)
        if cut is not None:
            yield cut
            parts.append([])
        parts[-1].append(after)
    for part in parts:
        if len(part) > _MANY:
            counting = [life for life in lives if 2 * _shared(life, part) < len(part)]
            if len(counting) < len(lives):
                yield from _cuts(part, counting)


def _shared(life: Life, part: Sequence[int]) -> int:
    """Returns how many equations an array lives through."""
    return sum(life.start < i <= life.end for i in part)


def _cheapest(before: int, after: int, lives: Sequence[Life]) -> int | None:
    """Returns the best cut after one equation and not after another; None if there is none."""
    near = [life for life in lives if life.start < after and life.end > before]
    found: list[tuple[int, int]] = []
    for i in range(before + 1, after + 1):
        live = [life for life in near if life.start < i <= life.end]
        if len(live) <= 1:
            found.append((sum(life.size for life in live if not life.is_saved), i))
    return min(found)[1] if found else None
