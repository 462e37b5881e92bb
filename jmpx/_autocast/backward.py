"""Which variables of a jaxpr reach something, found from its results backwards.

The way goes through the jaxprs that equations hold, operand by operand, and a loop's carry through
all of its turns.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name

Flags: TypeAlias = tuple[bool, ...]  # of the operands or the results of an equation or a jaxpr
Named: TypeAlias = Sequence[tuple[str, Equation]]
# Tells which operands of an equation reach it, given its name and all variables that are found.
Step: TypeAlias = Callable[[str, Equation, set[Atom]], Flags]
# Returns the step of a jaxpr, given its equations.
Search: TypeAlias = Callable[[Named], Step]

# jaxpr -> (search, which of its results reach it outside) -> all its variables that reach it.
_found: weakref.WeakKeyDictionary[Jaxpr, dict[tuple[Search, Flags], frozenset[Atom]]]
_found = weakref.WeakKeyDictionary()


def find(search: Search, jaxpr: Jaxpr, results: Sequence[bool] = ()) -> frozenset[Atom]:
    """Returns the variables of a jaxpr that reach something.

    Args:
        search: what they are to reach.
        jaxpr: the jaxpr, closed or open.
        results: which of its results reach it outside; none that is not named does.
    """
    known, key = _found.setdefault(jaxpr, {}), (search, tuple(results))
    if key not in known:
        known[key] = frozenset(_find(search, jaxpr, key[1]))
    return known[key]


def _find(search: Search, jaxpr: Jaxpr, results: Flags) -> set[Atom]:
    named = [(operation_name(eqn.primitive.name), eqn) for eqn in jaxpr.eqns]
    step = search(named)
    pairs = zip(jaxpr.outvars, results, strict=False)
    found = {atom for atom, flag in pairs if flag and not core.is_literal(atom)}
    for name, equation in reversed(named):
        if is_call(equation):
            flags = _through(search, equation, within(search, equation, found))
        else:
            flags = step(name, equation, found)
        pairs = zip(equation.invars, flags, strict=True)
        found.update(atom for atom, flag in pairs if flag and not core.is_literal(atom))
    return found


def is_call(equation: Equation) -> bool:
    """Whether an equation runs the jaxprs that it holds on its operands: a call, loop or branch."""
    if equation.primitive.name in ("cond", "while"):
        return True
    jaxprs = core.inner_jaxprs(equation.params)
    return len(jaxprs) == 1 and len(jaxprs[0].invars) == len(equation.invars)


def _through(search: Search, equation: Equation, results: Flags) -> Flags:
    """Returns which operands of a call reach something, given which results of its jaxpr do."""
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


def within(search: Search, equation: Equation, found: frozenset[Atom] | set[Atom]) -> Flags:
    """Returns which results reach something of the jaxpr that an equation holds.

    They are those of the equation; a loop also reads what it carries in its next turn.

    Args:
        search: what they are to reach.
        equation: the equation.
        found: the variables that reach it of the jaxpr that holds the equation.
    """
    results, name = tuple(var in found for var in equation.outvars), equation.primitive.name
    if name == "scan":
        start, size = core.scan_counts(equation)
        body = equation.params["jaxpr"]
    elif name == "while":
        start, size = equation.params["body_nconsts"], len(results)
        body = equation.params["body_jaxpr"]
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
