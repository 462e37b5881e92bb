"""Changed jaxprs: the same program with other parameters or names, without running it anew."""

from collections.abc import Callable
from typing import Any

from jmpx._jaxprs.types import Equation, Jaxpr, Params, is_jaxpr


def with_equations(jaxpr: Jaxpr, change: Callable[[Equation], Equation]) -> Jaxpr:
    """Returns a jaxpr, closed or open, with changed equations; the same object if none changed."""
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr  # of a closed one, until JAX 0.11
    eqns = [change(eqn) for eqn in inner.eqns]
    if all(new is old for new, old in zip(eqns, inner.eqns, strict=True)):
        return jaxpr
    new = inner.replace(eqns=eqns)
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def with_jaxprs(params: Params, change: Callable[[Jaxpr], Jaxpr]) -> Params:
    """Returns the parameters of an equation with changed jaxprs; the same object if none did."""
    return with_values(params, lambda value: change(value) if is_jaxpr(value) else value)


def with_values(params: Params, change: Callable[[Any], object]) -> Params:
    """Returns the parameters of an equation with changed values, also in tuples, as above."""

    def changed(value: object) -> object:
        if isinstance(value, tuple):  # or a named one, as of custom_linear_solve
            new = list(map(changed, value))
            is_new = any(a is not b for a, b in zip(new, value, strict=True))
            return getattr(value, "_make", tuple)(new) if is_new else value
        return change(value)

    new = {key: changed(value) for key, value in params.items()}
    return new if any(new[key] is not params[key] for key in params) else params
