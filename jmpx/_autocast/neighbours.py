"""The surroundings of an operation: norms, softmaxes, products, and readers that expose it."""

import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, inner_jaxprs, is_literal, operation_name
from jmpx._jaxprs.equations import EXCHANGES, IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES
from jmpx._jaxprs.inner import (
    Flags,
    Step,
    find,
    inner_of,
    multiplied,
    once_per_jaxpr,
    variables,
    within,
)

# Primitives whose only result holds only numbers of their only array. Moves of several arrays, and
# those whose other operands are indices, are not among them.
COPIES = {"convert_element_type", "slice", "tile"} | RESHAPES | PLACEMENTS | IDENTITIES
COPIES = frozenset(COPIES - {"optimization_barrier", "device_put"})

# The result is uniform, all its elements one number, if each operand is.
ELEMENTWISE = frozenset(
    """
    add sub mul div rem max min clamp neg abs sqrt rsqrt square integer_pow pow exp exp2 log
    """.split()
)

# These, or their slopes, are infinite at a bound of their operand, as a division is at a
# denominator of 0.
_SINGULAR = frozenset(
    """
    log log1p log2 rsqrt sqrt cbrt pow erf_inv acos asin acosh atanh lgamma digamma polygamma
    """.split()
)

# Results of these are as near to a bound as their operands: sums, clamps, selections and powers.
_PATHS = frozenset(
    """
    add sub add_any neg abs max min clamp square integer_pow one_minus_square
    reduce_sum reduce_max reduce_min reduce_prod reduce_window_sum reduce_window_max
    reduce_window_min cumsum cumprod cummax cummin sort top_k select_n reduce reduce_window
    scatter scatter_add scatter_sub scatter_max scatter_min select_and_gather_add
    psum psum_invariant pmax pmin reduce_scatter
    """.split()
)
_PATHS |= COPIES | IDENTITIES | PICKS | JOINS | EXCHANGES


def exposed(jaxpr: Jaxpr) -> Step:
    """A search for the variables of a jaxpr that must not be rounded onto a bound."""
    return functools.partial(_operands, _uniform(jaxpr))


def _operands(uniform: set[Atom], equation: Equation, found: Collection[Atom]) -> Flags:
    """Returns which operands of an equation are exposed, given which of its results are."""
    name, count = operation_name(equation.primitive.name), len(equation.invars)
    is_exposed = any(var in found for var in equation.outvars)
    if name in _SINGULAR or (name == "integer_pow" and equation.params["y"] < 0):
        return (True,) * count
    if name in ("div", "rem"):
        return is_exposed and _is_uniform(equation.invars[1], uniform), True
    if name == "mul":
        left, right = equation.invars
        is_square = left is right
        return tuple(
            is_exposed and (is_square or _is_uniform(other, uniform)) for other in (right, left)
        )
    if name not in _PATHS:
        return (False,) * count
    if len(equation.outvars) == count:
        return tuple(var in found for var in equation.outvars)
    return (is_exposed,) * count


def _uniform(jaxpr: Jaxpr) -> set[Atom]:
    """Returns results all of whose elements are one number."""
    found: set[Atom] = set()
    for equation in jaxpr.eqns:
        name = operation_name(equation.primitive.name)
        if name in COPIES or name in ELEMENTWISE:
            if all(_is_uniform(atom, found) for atom in equation.invars):
                found.update(equation.outvars)
    return found


def _is_uniform(atom: Atom, uniform: set[Atom]) -> bool:
    return core.is_literal(atom) or atom in uniform or getattr(atom.aval, "size", 0) == 1


# Equations whose dtypes depend on the equations next to them.


POWERS = frozenset({"square", "integer_pow"})
EXPONENTIALS = frozenset({"exp", "exp2", "expm1"})
ROOTS = frozenset({"sqrt", "rsqrt", "pow"})
SUMS = frozenset("reduce_sum reduce_prod psum psum_invariant".split())
_MASKS = COPIES | {"select_n", "mul"}

# These choose among numbers. Their derivatives compare the numbers with the chosen one.
CHOOSERS = frozenset({"max", "min", "scatter_max", "scatter_min"})

_CHOOSING = CHOOSERS | COPIES | {"gather", "eq"}


Dtypes: TypeAlias = frozenset[np.dtype]


class Ends(NamedTuple):
    """How a jaxpr's results are used outside of it; a result without a flag counts as False."""

    exposed: tuple[bool, ...] = ()  # which of the first results are exposed; see `exposed`
    raised: tuple[bool, ...] = ()  # which are read by an exponential
    summed: tuple[bool, ...] = ()  # which are read by a sum
    normalized: tuple[bool, ...] = ()  # which are multiplied by a root
    multiplied: tuple[bool, ...] | None = None  # which reach a product; None: it does not matter
    has_data: bool = False  # whether arrays that the jaxpr closes over are data; see `Traits`
    # The dtypes in which the numbers of the first results are read; see `binding.number_dtypes`.
    read: tuple[Dtypes, ...] = ()


NOTHING = Ends()  # no use is known


class Neighbours(NamedTuple):
    """Results of a jaxpr whose dtypes depend on the equations next to their own."""

    # Parts of a float32 statistic, which run in float32, too: the shift of a softmax, `x - max`, if
    # an exponential reads it, and the squares of a norm, if a sum does.
    statistics: set[Atom]
    slopes: set[Atom]  # `n * x` next to `x**n`: part of its derivative, and as likely to overflow
    # Comparisons of a number with a maximum of it and others, as in the derivative of a maximum.
    # The maximum was rounded, so the number has to be rounded, too.
    choices: set[Atom]
    exposed: frozenset[Atom]  # variables that must not be rounded onto a bound; see `exposed`
    raised: frozenset[Atom]  # variables that an exponential reads
    summed: frozenset[Atom]  # those that a sum reads
    normalized: frozenset[Atom]  # those that a root of fewer numbers multiplies, or divides
    multiplied: frozenset[Atom] | None  # those that reach a product; None where it does not matter
    has_data: bool  # whether arrays that the jaxpr closes over are data
    read: Mapping[Atom, Dtypes]  # see `binding.number_dtypes`

    def ends_within(self, equation: Equation) -> Ends:
        """Returns how the results of the jaxpr in an equation are used."""
        paths = self.multiplied
        return Ends(
            exposed=within(exposed, equation, self.exposed),
            raised=within(raised, equation, self.raised),
            summed=within(summed, equation, self.summed),
            normalized=within(normalized, equation, self.normalized),
            multiplied=None if paths is None else within(multiplied, equation, paths),
            has_data=self.has_data,
        )

    def said_of(self, atoms: Sequence[Atom]) -> Hashable:
        """Returns the facts about some results, as a key."""
        known = (found or () for found in self[:-2])
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
    paths = None if ends.multiplied is None else find(jaxpr, multiplied, ends.multiplied)
    read_by = find(jaxpr, raised, ends.raised), find(jaxpr, summed, ends.summed)
    found = _statistics(named, *read_by), _slopes(named), _choices(named)
    read_by += (find(jaxpr, normalized, ends.normalized),)
    is_exposed = find(jaxpr, exposed, ends.exposed)
    return Neighbours(*found, is_exposed, *read_by, paths, ends.has_data, read)


def _statistics(named: _Named, raised: Collection[Atom], summed: Collection[Atom]) -> set[Atom]:
    found = set()
    for name, eqn in named:
        is_square = name in POWERS or (name == "mul" and eqn.invars[0] is eqn.invars[1])
        read = raised if name == "sub" else summed if is_square else ()
        found.update(var for var in eqn.outvars if var in read)
    return found


def raised(jaxpr: Jaxpr) -> Step:
    """A search for the variables that an exponential reads."""
    del jaxpr
    return functools.partial(_is_read, EXPONENTIALS)


def summed(jaxpr: Jaxpr) -> Step:
    """A search for the variables that a sum reads."""
    del jaxpr
    return functools.partial(_is_read, frozenset({"reduce_sum"}))


def _is_read(names: Collection[str], equation: Equation, found: Collection[Atom]) -> Flags:
    name = operation_name(equation.primitive.name)
    is_copied = name in COPIES and equation.outvars[0] in found
    return (name in names or is_copied,) * len(equation.invars)


def normalized(jaxpr: Jaxpr) -> Step:
    """A search for the variables that a root of fewer numbers multiplies or divides."""
    return functools.partial(_is_normalized, _roots(jaxpr))


def _is_normalized(roots: Mapping[Atom, int], equation: Equation, found: Collection[Atom]) -> Flags:
    name, atoms = operation_name(equation.primitive.name), equation.invars
    if name not in ("mul", "div") or not roots:
        is_copied = name in COPIES and equation.outvars[0] in found
        return (is_copied,) * len(atoms)
    size = equation.outvars[0].aval.size
    is_root = [not is_literal(atom) and 0 < roots.get(atom, 0) < size for atom in atoms]
    return is_root[1] and not is_root[0], is_root[0] and not is_root[1] and name == "mul"


def _roots(jaxpr: Jaxpr) -> dict[Atom, int]:
    """Returns roots of arrays, and results of as many numbers made of them, with these numbers."""
    roots: dict[Atom, int] = {}
    counts: dict[Atom, int] = {}  # how many numbers a result has, not counting broadcasts
    for equation in jaxpr.eqns:
        name, read = operation_name(equation.primitive.name), variables(equation)
        if read and (name in COPIES or name in ELEMENTWISE):
            (result,) = equation.outvars
            sizes = [counts.get(atom, getattr(atom.aval, "size", 0)) for atom in read]
            counts[result] = count = max(sizes)
            of_roots = max(roots.get(atom, 0) for atom in read)
            if count > 1 and (name in ROOTS or count == of_roots):
                roots[result] = count
    return roots


@once_per_jaxpr
def has_norms(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr may hold a norm: a root, or a sum other than that of a softmax."""
    weights: set[Atom] = set()  # of a softmax, which divides them by their sum
    for equation in jaxpr.eqns:
        name, read = operation_name(equation.primitive.name), variables(equation)
        if name in EXPONENTIALS or (name in _MASKS and any(atom in weights for atom in read)):
            weights.update(equation.outvars)
        elif name in ROOTS or (name in SUMS and not any(atom in weights for atom in read)):
            return True
        elif any(map(has_norms, inner_jaxprs(equation.params))):
            return True
    return False


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
