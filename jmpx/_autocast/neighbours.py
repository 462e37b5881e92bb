"""Equations whose dtypes depend on the equations next to them, found by a look at the jaxpr."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jmpx._autocast.backward import find, multiplied, variables, within
from jmpx._autocast.exposed import COPIES, exposed
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, is_literal, operation_name
from jmpx._jaxprs.inner import inner_of

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


Dtypes: TypeAlias = frozenset[np.dtype]


class Ends(NamedTuple):
    """What becomes of the results of a jaxpr outside of it; nothing of results without a flag."""

    exposed: tuple[bool, ...] = ()  # which of the first results are exposed; see `exposed.py`
    multiplied: tuple[bool, ...] | None = None  # which reach a product; None: it does not matter
    # The dtypes in which the numbers of the first results are read; see `reads.number_dtypes`.
    read: tuple[Dtypes, ...] = ()


NOTHING = Ends()  # nothing is known of it


class Neighbours(NamedTuple):
    """Results of a jaxpr whose dtypes depend on the equations next to their own."""

    statistics: set[Atom]  # results that a statistic in float32 reads; see `CONSUMERS`
    slopes: set[Atom]  # `n * x` next to `x**n`: part of its derivative, and as likely to overflow
    # Comparisons of a number with the maximum of it and others, as the derivative of a maximum
    # makes them. The maximum was rounded, so the number has to be rounded, too.
    choices: set[Atom]
    exposed: frozenset[Atom]  # variables that must not be rounded onto a bound; see `exposed.py`
    multiplied: frozenset[Atom] | None  # those that reach a product; None where it does not matter
    read: Mapping[Atom, Dtypes]  # see `reads.number_dtypes`

    def ends_within(self, equation: Equation) -> Ends:
        """Returns what becomes of the results of the jaxpr that an equation holds."""
        is_exposed = within(exposed, equation, self.exposed)
        if self.multiplied is None:
            return Ends(is_exposed)
        return Ends(is_exposed, within(multiplied, equation, self.multiplied))

    def said_of(self, atoms: Sequence[Atom]) -> Hashable:
        """Returns what is known of some results."""
        known = (found or () for found in self[:-1])
        flags = (tuple(atom in found for atom in atoms) for found in known)
        return tuple(flags), tuple(map(self.read.get, atoms))

    def is_last(self, equation: Equation) -> bool:
        """Whether an equation other than a call reaches no product."""
        if self.multiplied is None or any(var in self.multiplied for var in equation.outvars):
            return False
        return inner_of(equation) is None


_Named = Sequence[tuple[str, Equation]]


def find_neighbours(jaxpr: Jaxpr, ends: Ends, read: Mapping[Atom, Dtypes]) -> Neighbours:
    """Returns the results of a jaxpr whose dtypes depend on the equations next to their own."""
    named = [(operation_name(eqn.primitive.name), eqn) for eqn in jaxpr.eqns]
    found = _statistics(named), _slopes(named), _choices(named)
    paths = None if ends.multiplied is None else find(jaxpr, multiplied, ends.multiplied)
    return Neighbours(*found, find(jaxpr, exposed, ends.exposed), paths, read)


def _statistics(named: _Named) -> set[Atom]:
    consumers: dict[Atom, frozenset[str]] = {}  # a producer's result -> who makes a statistic of it
    found = set()
    for name, eqn in named:
        if name in CONSUMERS and (name != "mul" or eqn.invars[0] is eqn.invars[1]):
            consumers[eqn.outvars[0]] = CONSUMERS[name]
        elif consumers:
            found.update(atom for atom in variables(eqn) if name in consumers.get(atom, ()))
    return found


def _slopes(named: _Named) -> set[Atom]:
    powers: set[tuple[Atom, int]] = set()
    found = set()
    for name, eqn in named:
        if name in POWERS:
            powers.update((atom, eqn.params.get("y", 2)) for atom in variables(eqn))
        elif name == "mul" and powers:
            numbers = [atom.val for atom in eqn.invars if is_literal(atom)]
            if len(numbers) == 1:
                (atom,) = variables(eqn)
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
        atoms = [sources.get(atom, atom) for atom in variables(eqn)]
        if name in CHOOSERS:
            chosen[eqn.outvars[0]] = set(atoms)
        elif name == "eq":
            if any(a in chosen.get(b, ()) for a in atoms for b in atoms):
                found.add(eqn.outvars[0])
        elif atoms:
            sources[eqn.outvars[0]] = atoms[0]
    return found
