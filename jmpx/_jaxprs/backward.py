"""Which variables of a jaxpr reach something, such as a product, found from its results backwards.

A path goes through the jaxprs that equations hold, operand by operand, and a loop's carry through
all of its turns.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, Params, operation_name
from jmpx._jaxprs.inner import Inner, inner_of, once_per_jaxpr

CONVOLUTION = "conv_general_dilated"
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", CONVOLUTION})

Flags: TypeAlias = tuple[bool, ...]  # of the operands or the results of an equation or a jaxpr
# Tells which operands of an equation reach it, given all variables that are found.
Step: TypeAlias = Callable[[Equation, Collection[Atom]], Flags]
# Returns the step for the equations of a jaxpr.
Search: TypeAlias = Callable[[Jaxpr], Step]


@once_per_jaxpr
def find(jaxpr: Jaxpr, search: Search, results: Flags) -> frozenset[Atom]:
    """Returns the variables of a jaxpr that reach what a search looks for.

    The flags say which of its first results reach it outside; the others do not.
    """
    step, found = search(jaxpr), set[Atom]()

    def add(atoms: Sequence[Atom], flags: Flags) -> None:
        pairs = zip(atoms, flags, strict=False)
        found.update(atom for atom, flag in pairs if flag and not core.is_literal(atom))

    add(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        inner = inner_of(equation)
        if inner is None:
            add(equation.invars, step(equation, found))
        else:
            add(equation.invars, _through(search, equation, inner, found))
    return frozenset(found)


def variables(equation: Equation) -> list[Atom]:
    """Returns the operands of an equation, without literals."""
    return [atom for atom in equation.invars if not core.is_literal(atom)]


def _through(search: Search, equation: Equation, inner: Inner, found: Collection[Atom]) -> Flags:
    """Returns which operands of a call reach something."""
    results = within(search, equation, found)
    # Of a `lax.platform_dependent`, any branch may run: the program may be for another platform.
    jaxprs = equation.params.get("branches", inner.jaxprs)
    columns = zip(*(_inputs(search, jaxpr, results) for jaxpr in jaxprs), strict=True)
    flags = tuple(map(any, columns))
    if inner.condition is None:
        return (False,) * inner.first + flags
    cond = _inputs(search, inner.condition, ())
    carry = zip(cond[inner.first :], flags[inner.consts :], strict=True)
    return *cond[: inner.first], *flags[: inner.consts], *map(any, carry)


def within(search: Search, equation: Equation, found: Collection[Atom]) -> Flags:
    """Returns which results of the jaxpr that an equation holds reach something.

    A loop reads what it carries in its next turn.
    """
    results, inner = tuple(var in found for var in equation.outvars), inner_of(equation)
    while inner is not None:
        read = _inputs(search, inner.jaxprs[0], results)[inner.consts : inner.consts + inner.carry]
        carry = tuple(a or b for a, b in zip(read, results, strict=False))
        if carry == results[: inner.carry]:
            break
        results = carry + results[inner.carry :]
    return results


def _inputs(search: Search, jaxpr: Jaxpr, results: Flags) -> Flags:
    found = find(jaxpr, search, results)
    return tuple(var in found for var in jaxpr.invars)


def is_outer(equation: Equation) -> bool:
    """Whether a matrix product sums nothing, as an outer product does."""
    return equation.primitive.name == "dot_general" and not sums(equation.params, equation.invars)


def sums(params: Params, operands: Sequence[Atom]) -> bool:
    """Whether a matrix product of some operands, or of their abstract values, sums anything."""
    (contracted, _), _ = params["dimension_numbers"]
    shape = getattr(operands[0], "aval", operands[0]).shape
    return any(shape[axis] != 1 for axis in contracted)


def multiplied(jaxpr: Jaxpr) -> Step:
    """A search for the variables that reach a product."""
    del jaxpr
    return _multiplied


def _multiplied(equation: Equation, found: Collection[Atom]) -> Flags:
    is_read = any(var in found for var in equation.outvars)
    if operation_name(equation.primitive.name) in PRODUCTS:
        is_read |= not is_outer(equation)
    else:
        is_read |= any(find(j, multiplied, ()) for j in core.inner_jaxprs(equation.params))
    return (is_read,) * len(equation.invars)
