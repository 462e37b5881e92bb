"""Equations whose dtypes depend on the equations next to them, found by a look at the jaxpr."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmpx._autocast.exposed import COPIES, find_exposed
from jmpx._jaxpr import Atom, Equation, Jaxpr, is_literal, operation_name

# If a consumer on the right reads a producer on the left, the producer runs in float32, too: the
# shift of a softmax, `x - max`, and the squares of a norm are part of a statistic that is taken
# in float32.
CONSUMERS = {
    "sub": frozenset({"exp", "exp2", "expm1"}),
    "square": frozenset({"reduce_sum"}),
    "integer_pow": frozenset({"reduce_sum"}),
    "mul": frozenset({"reduce_sum"}),  # of a number with itself
}

POWERS = frozenset({"square", "integer_pow"})

# Primitives that choose among numbers. Their derivatives compare the numbers with the chosen one.
CHOOSERS = frozenset({"max", "min", "scatter_max", "scatter_min"})

_CHOOSING = CHOOSERS | COPIES | {"gather", "eq"}


class Neighbours(NamedTuple):
    """Results of a jaxpr whose dtypes depend on the equations next to their own.

    Args:
        statistics: results that a statistic in float32 reads; see `CONSUMERS`.
        slopes: `n * x` next to `x**n`: part of its derivative, and as likely to overflow.
        choices: comparisons of a number with the maximum of it and others, as the derivative of a
            maximum makes them. The maximum was rounded, so the number has to be rounded, too.
        exposed: variables that must not be rounded onto a bound; see `exposed.py`.
    """

    statistics: set[Atom]
    slopes: set[Atom]
    choices: set[Atom]
    exposed: frozenset[Atom]


_Named = Sequence[tuple[str, Equation]]


def find_neighbours(jaxpr: Jaxpr, exposed: Sequence[bool]) -> Neighbours:
    """Returns the results of a jaxpr whose dtypes depend on the equations next to their own.

    Args:
        jaxpr: the jaxpr, closed or open.
        exposed: which of its results are exposed outside.
    """
    named = [(operation_name(eqn.primitive.name), eqn) for eqn in jaxpr.eqns]
    found = _statistics(named), _slopes(named), _choices(named)
    return Neighbours(*found, find_exposed(jaxpr, exposed))


def _statistics(named: _Named) -> set[Atom]:
    consumers: dict[Atom, frozenset[str]] = {}  # a producer's result -> who makes a statistic of it
    found = set()
    for name, eqn in named:
        if name in CONSUMERS and (name != "mul" or eqn.invars[0] is eqn.invars[1]):
            consumers[eqn.outvars[0]] = CONSUMERS[name]
        elif consumers:
            found.update(atom for atom in _variables(eqn) if name in consumers.get(atom, ()))
    return found


def _slopes(named: _Named) -> set[Atom]:
    powers: set[tuple[Atom, int]] = set()
    found = set()
    for name, eqn in named:
        if name in POWERS:
            powers.update((atom, eqn.params.get("y", 2)) for atom in _variables(eqn))
        elif name == "mul" and powers:
            numbers = [atom.val for atom in eqn.invars if is_literal(atom)]
            if len(numbers) == 1:
                (atom,) = _variables(eqn)
                if (atom, np.asarray(numbers[0]).item()) in powers:
                    found.add(eqn.outvars[0])
    return found


def _choices(named: _Named) -> set[Atom]:
    sources: dict[Atom, Atom] = {}  # a copy or a part -> the array that its numbers are from
    chosen: dict[Atom, set[Atom]] = {}  # a chooser's result -> the arrays that it chose from
    found = set()
    for name, eqn in named:
        if name not in _CHOOSING:
            continue
        atoms = [sources.get(atom, atom) for atom in _variables(eqn)]
        if name in CHOOSERS:
            chosen[eqn.outvars[0]] = set(atoms)
        elif name == "eq":
            if any(a in chosen.get(b, ()) for a in atoms for b in atoms):
                found.add(eqn.outvars[0])
        elif atoms:
            sources[eqn.outvars[0]] = atoms[0]
    return found


def _variables(eqn: Equation) -> list[Atom]:
    """Returns the operands that are no literals."""
    return [atom for atom in eqn.invars if not is_literal(atom)]
