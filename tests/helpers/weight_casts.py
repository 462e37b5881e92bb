"""How often each parameter is cast in each body of a jaxpr."""

import jax
import numpy as np

from helpers.jaxprs import trace

# If its size is that of its operand, the result is that operand in another shape.
SHAPES = {"transpose", "reshape", "squeeze", "broadcast_in_dim"}


class Casts:
    """Counts the casts of parameters in a jaxpr, and in those that its equations carry.

    Attributes:
        counts: for each body that was met, the number of casts by parameter.
    """

    def __init__(self):
        self.counts = []

    def read(self, jaxpr, names):
        """Reads a body, of whose inputs some have names; returns the names of its results."""
        body = getattr(jaxpr, "jaxpr", jaxpr)
        found = {var: name for var, name in zip(body.invars, names, strict=True)}
        counts = {name: 0 for name in names if name is not None}
        self.counts.append(counts)
        for eqn in live_equations(body):
            inputs = [None if hasattr(atom, "val") else found.get(atom) for atom in eqn.invars]
            if eqn.primitive.name == "convert_element_type" and inputs[0] in counts:
                counts[inputs[0]] += 1
                results = inputs
            elif (
                eqn.primitive.name in SHAPES and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
            ):
                results = inputs[:1]
            else:
                results = self.read_inner(eqn, inputs)
            found |= zip(eqn.outvars, results, strict=False)
        return [None if hasattr(atom, "val") else found.get(atom) for atom in body.outvars]

    def read_inner(self, eqn, inputs):
        """Reads the jaxprs of an equation; returns the names of its results if it is a call."""
        results = []
        values = (v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values())
        inner = [jaxpr for value in values for jaxpr in value if hasattr(jaxpr, "eqns")]
        for jaxpr in inner:  # branches read all operands but the first, which chooses one
            taken = len(getattr(jaxpr, "jaxpr", jaxpr).invars)
            results = self.read(jaxpr, inputs[len(inputs) - taken :])
        return results if len(inner) == 1 else []


def live_equations(body):
    """Returns the equations on which the results of a body depend."""
    live = {atom for atom in body.outvars if not hasattr(atom, "val")}
    found = []
    for eqn in reversed(body.eqns):
        if eqn.effects or live.intersection(eqn.outvars):
            live.update(atom for atom in eqn.invars if not hasattr(atom, "val"))
            found.append(eqn)
    return found[::-1]


def casts_of(fn, params, *args):
    """Returns the number of casts by parameter, for each body that reads parameters.

    Casts to and fro count, and casts of a parameter in another shape.
    """
    leaves, structure = jax.tree.flatten(params)
    floats = [np.issubdtype(leaf.dtype, np.floating) for leaf in leaves]

    def on_leaves(leaves):
        return fn(structure.unflatten(leaves), *args)

    casts = Casts()
    casts.read(trace(on_leaves, leaves), [i if f else None for i, f in enumerate(floats)])
    return [counts for counts in casts.counts if counts]
