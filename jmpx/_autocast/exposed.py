"""Which results must not be rounded onto a bound, because of what reads them later.

In bfloat16 a sigmoid is exactly 1 from a logit of 6 on: `log(1 - p)` is infinite then, and its
gradient NaN, where float32 trains. A result is *exposed* if its number, or one that lies as near to
a bound, reaches a function that is infinite at the bound, or leaves autocast, as a probability does
whose loss is computed outside. A product of two arrays ends the way: a gate stays in 16 bits.
"""

import weakref
from collections.abc import Sequence

from jmpx import _jaxpr
from jmpx._jaxpr import Atom, Equation, Jaxpr, operation_name

# Primitives whose results hold only numbers of their first operand.
COPIES = frozenset(
    """
    broadcast_in_dim reshape transpose squeeze rev slice tile copy name stop_gradient
    convert_element_type sharding_constraint reshard pvary
    """.split()
)

# If each operand of these is uniform, the result is: all its elements are one number.
ELEMENTWISE = frozenset(
    """
    add sub mul div rem max min clamp neg abs sqrt rsqrt square integer_pow pow exp exp2 log
    """.split()
)

# These, or their slopes, are infinite at a bound of their operand, as a division is at that of its
# denominator.
_SINGULAR = frozenset(
    """
    log log1p log2 rsqrt sqrt cbrt pow erf_inv acos asin acosh atanh lgamma digamma polygamma
    """.split()
)

# Results of these are as near to a bound as their operands: sums, clamps, selections and powers.
_WAYS = COPIES | frozenset(
    """
    add sub add_any neg abs max min clamp square integer_pow one_minus_square
    reduce_sum reduce_max reduce_min reduce_prod reduce_window_sum reduce_window_max
    reduce_window_min cumsum cumprod cummax cummin sort top_k
    select_n gather dynamic_slice dynamic_update_slice concatenate stack unstack split pad
    scatter scatter_add scatter_sub scatter_max scatter_min select_and_gather_add
    psum psum_invariant pmax pmin reduce_scatter all_gather all_gather_invariant all_to_all ppermute
    pbroadcast all_gather_reduced optimization_barrier device_put
    """.split()
)

_Flags = tuple[bool, ...]  # of the operands or the results of an equation or a jaxpr

# jaxpr -> which of its results are exposed -> all its exposed variables.
_found: weakref.WeakKeyDictionary[Jaxpr, dict[_Flags, frozenset[Atom]]]
_found = weakref.WeakKeyDictionary()


def find_exposed(jaxpr: Jaxpr, results: Sequence[bool]) -> frozenset[Atom]:
    """Returns the variables of a jaxpr that must not be rounded onto a bound.

    Args:
        jaxpr: the jaxpr, closed or open.
        results: which of its results are exposed outside; none that is not named is.
    """
    known, key = _found.setdefault(jaxpr, {}), tuple(results)
    if key not in known:
        known[key] = frozenset(_find_exposed(jaxpr, key))
    return known[key]


def _find_exposed(jaxpr: Jaxpr, results: _Flags) -> set[Atom]:
    named = [(operation_name(eqn.primitive.name), eqn) for eqn in jaxpr.eqns]
    uniform = _uniform(named)
    pairs = zip(jaxpr.outvars, results, strict=False)
    exposed = {atom for atom, flag in pairs if flag and not _jaxpr.is_literal(atom)}
    for name, equation in reversed(named):
        flags = _operands(name, equation, exposed, uniform)
        pairs = zip(equation.invars, flags, strict=True)
        exposed.update(atom for atom, flag in pairs if flag and not _jaxpr.is_literal(atom))
    return exposed


def _operands(name: str, equation: Equation, exposed: set[Atom], uniform: set[Atom]) -> _Flags:
    """Returns which operands of an equation are exposed, given which of its results are."""
    count, is_exposed = len(equation.invars), any(var in exposed for var in equation.outvars)
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
    if name not in _WAYS:
        return _through(name, equation, exposed)
    if len(equation.outvars) == count:
        return tuple(var in exposed for var in equation.outvars)
    return (is_exposed,) * count


def _through(name: str, equation: Equation, exposed: set[Atom]) -> _Flags:
    """Returns which operands are exposed in the jaxprs that an equation holds, as a call does."""
    count, params, results = (
        len(equation.invars),
        equation.params,
        exposed_within(equation, exposed),
    )
    if name == "cond":
        columns = zip(*(_inputs(branch, results) for branch in params["branches"]), strict=True)
        return False, *map(any, columns)
    if name == "while":
        consts = params["cond_nconsts"]
        return (False,) * consts + _inputs(params["body_jaxpr"], results)
    jaxprs = _jaxpr.inner_jaxprs(params)
    if len(jaxprs) != 1 or len(jaxprs[0].invars) != count:
        return (False,) * count
    return _inputs(jaxprs[0], results)


def exposed_within(equation: Equation, exposed: frozenset[Atom] | set[Atom]) -> _Flags:
    """Returns which results are exposed of the jaxpr that an equation holds.

    They are those of the equation; a loop also reads what it carries in its next turn.

    Args:
        equation: the equation.
        exposed: the exposed variables of the jaxpr that holds it.
    """
    results, name = tuple(var in exposed for var in equation.outvars), equation.primitive.name
    if name == "scan":
        start, size = _jaxpr.scan_counts(equation)
        body = equation.params["jaxpr"]
    elif name == "while":
        start, size = equation.params["body_nconsts"], len(results)
        body = equation.params["body_jaxpr"]
    else:
        return results
    while True:
        read = _inputs(body, results)[start : start + size]
        carry = tuple(a or b for a, b in zip(read, results, strict=False))
        if carry == results[:size]:
            return results
        results = carry + results[size:]


def _inputs(jaxpr: Jaxpr, results: _Flags) -> _Flags:
    exposed = find_exposed(jaxpr, results)
    return tuple(var in exposed for var in jaxpr.invars)


def _uniform(named: Sequence[tuple[str, Equation]]) -> set[Atom]:
    """Returns results all of whose elements are one number."""
    found: set[Atom] = set()
    for name, equation in named:
        if name in COPIES or name in ELEMENTWISE:
            if all(_is_uniform(atom, found) for atom in equation.invars):
                found.update(equation.outvars)
    return found


def _is_uniform(atom: Atom, uniform: set[Atom]) -> bool:
    return _jaxpr.is_literal(atom) or atom in uniform or getattr(atom.aval, "size", 0) == 1
