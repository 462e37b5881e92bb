"""Which variables of a jaxpr reach something, found from its results backwards.

A path goes through the jaxprs that equations hold, operand by operand, and a loop's carry through
all of its turns.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr

Flags: TypeAlias = tuple[bool, ...]  # of the operands or the results of an equation or a jaxpr
# Tells which operands of an equation reach it, given all variables that are found.
Step: TypeAlias = Callable[[Equation, Collection[Atom]], Flags]
# Returns the step for the equations of a jaxpr.
Search: TypeAlias = Callable[[Jaxpr], Step]

# jaxpr -> (search, which of its results reach it outside) -> all its variables that reach it.
_found: weakref.WeakKeyDictionary[Jaxpr, dict[tuple[Search, Flags], frozenset[Atom]]]
_found = weakref.WeakKeyDictionary()


def find(search: Search, jaxpr: Jaxpr, results: Sequence[bool] = ()) -> frozenset[Atom]:
    """Returns the variables of a jaxpr that reach what a search looks for.

    Args:
        search: the search.
        jaxpr: the jaxpr, closed or open.
        results: which of its first results reach it outside; the others do not.
    """
    known, key = _found.setdefault(jaxpr, {}), (search, tuple(results))
    if key not in known:
        known[key] = frozenset(_find(search, jaxpr, key[1]))
    return known[key]


def _find(search: Search, jaxpr: Jaxpr, results: Flags) -> set[Atom]:
    step, found = search(jaxpr), set[Atom]()

    def add(atoms: Sequence[Atom], flags: Flags) -> None:
        pairs = zip(atoms, flags, strict=False)
        found.update(atom for atom, flag in pairs if flag and not core.is_literal(atom))

    add(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        through = _through(search, equation, found) if is_call(equation) else step(equation, found)
        add(equation.invars, through)
    return found


def variables(equation: Equation) -> list[Atom]:
    """Returns the operands of an equation, without literals."""
    return [atom for atom in equation.invars if not core.is_literal(atom)]


def is_call(equation: Equation) -> bool:
    """Whether an equation runs the jaxprs that it holds on its operands: a call, loop or branch."""
    if equation.primitive.name in ("cond", "while"):
        return True
    jaxprs = core.inner_jaxprs(equation.params)
    return len(jaxprs) == 1 and len(jaxprs[0].invars) == len(equation.invars)


def _through(search: Search, equation: Equation, found: Collection[Atom]) -> Flags:
    """Returns which operands of a call reach something."""
    results = within(search, equation, found)
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        columns = [_inputs(search, branch, results) for branch in params["branches"]]
        return False, *map(any, zip(*columns, strict=True))
    if name == "while":
        in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
        cond = _inputs(search, params["cond_jaxpr"], ())
        body = _inputs(search, params["body_jaxpr"], results)
        carry = zip(cond[in_cond:], body[in_body:], strict=True)
        return *cond[:in_cond], *body[:in_body], *map(any, carry)
    (jaxpr,) = core.inner_jaxprs(params)
    return _inputs(search, jaxpr, results)


def within(search: Search, equation: Equation, found: Collection[Atom]) -> Flags:
    """Returns which results of the jaxpr that an equation holds reach something.

    They are those of the equation; a loop also reads what it carries in its next turn.

    Args:
        search: the search.
        equation: the equation.
        found: the variables that reach it in the jaxpr that holds the equation.
    """
    results, params = tuple(var in found for var in equation.outvars), equation.params
    if equation.primitive.name == "scan":
        (start, size), body = core.scan_counts(equation), params["jaxpr"]
    elif equation.primitive.name == "while":
        start, size, body = params["body_nconsts"], len(results), params["body_jaxpr"]
    else:
        return results
    while True:
        read = _inputs(search, body, results)[start : start + size]
        carry = tuple(a or b for a, b in zip(read, results, strict=False))
        if carry == results[:size]:
            return results
        results = carry + results[size:]


def _inputs(search: Search, jaxpr: Jaxpr, results: Flags) -> Flags:
    found = find(search, jaxpr, results)
    return tuple(var in found for var in jaxpr.invars)
