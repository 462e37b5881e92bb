"""Casts of inputs, moved to what reads them: so a piece casts an input again, and keeps no copy.

By arguments, all parameters are cast before anything reads them. If the casts stayed there, each of
the 16-bit copies would live until the backward pass of its layer. What two equations read is cast
twice, so that its cotangents are summed in its own dtype, as by operations.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jmpx._jaxprs import core
from jmpx._jaxprs.backward import variables
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import once_per_jaxpr
from jmpx._jaxprs.rewriting import casting, new_variable, renamed, replaced, with_jaxprs
from jmpx._remat.pieces import CUT_INSIDE


def sunk(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr in which casts of its inputs stand before each of their readers, or in them.

    A cast moves into the jaxpr of an equation that reads it. Those of a scan's constants do not:
    their cotangents would be summed in another dtype, turn by turn.
    """
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    casts: dict[Atom, Equation] = {}  # by their results
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        if _is_cast(eqn) and eqn.invars[0] in inputs:
            casts[eqn.outvars[0]] = eqn
            continue
        read = {i: a for i, a in enumerate(eqn.invars) if not core.is_literal(a) and a in casts}
        inside = {i: casts[atom] for i, atom in read.items() if _takes(eqn, i)}
        outside = {atom: new_variable(atom.aval) for i, atom in read.items() if i not in inside}
        for atom, new in outside.items():
            cast = casts[atom].replace(outvars=[new])
            # In the scopes of the reader, so that layers stay alike.
            eqns.append(core.with_stack(cast, core.marked_stack_of(eqn)))
        if outside:
            eqn = eqn.replace(invars=renamed(eqn.invars, outside))
        eqns.append(_casting(eqn, inside) if inside else eqn)
    returned = {atom for atom in jaxpr.outvars if not core.is_literal(atom)}
    eqns += (cast for var, cast in casts.items() if var in returned)
    return replaced(jaxpr, eqns=eqns) if casts else jaxpr


def _is_cast(eqn: Equation) -> bool:
    """Whether an equation casts a variable to another floating dtype."""
    if eqn.primitive.name != "convert_element_type" or not variables(eqn):
        return False
    dtypes = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    is_floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return is_floating and dtypes[0] != dtypes[1] and eqn.params.get("sharding") is None


def _takes(eqn: Equation, i: int) -> bool:
    """Whether a cast of an operand may move into the jaxpr of an equation."""
    if eqn.primitive.name == "scan":
        return i >= sum(core.scan_counts(eqn))
    return eqn.primitive.name in CUT_INSIDE and i >= (eqn.primitive.name == "cond")


def _casting(eqn: Equation, casts: dict[int, Equation]) -> Equation:
    """Returns an equation whose jaxprs cast some of its operands."""
    operands = list(eqn.invars)
    for i, cast in casts.items():
        operands[i] = cast.invars[0]
    first = int(eqn.primitive.name == "cond")  # whose first operand chooses a branch
    wide = tuple((i - first, cast.invars[0].aval.dtype) for i, cast in casts.items())
    params = with_jaxprs(eqn.params, lambda jaxpr: _taking(jaxpr, wide))
    return eqn.replace(invars=operands, params=params)


@once_per_jaxpr
def _taking(jaxpr: Jaxpr, wide: Sequence[tuple[int, np.dtype]]) -> Jaxpr:
    """Returns a jaxpr that takes some operands in other dtypes, and casts them."""
    invars, casts = list(jaxpr.invars), list[Equation]()
    for i, dtype in wide:
        var = invars[i]
        invars[i] = new_variable(core.with_dtype(var.aval, dtype))
        casts.append(casting(invars[i], var))
    return replaced(jaxpr, invars=invars, eqns=[*casts, *jaxpr.eqns])
