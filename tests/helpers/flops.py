"""Counts of FLOPs: our own, and XLA's."""

import jax
import jax.numpy as jnp

from jmpx._audit.flops import flops_of, is_counted, is_product
from jmpx._jaxpr import inner_jaxprs


def shape_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def operations(f, *args):
    """The equations of a function and of those that it calls, but not of what reduces with them."""
    pending = list(jax.make_jaxpr(f)(*args).eqns)
    while pending:
        eqn = pending.pop()
        yield eqn
        if not is_counted(eqn):
            pending += [inner for jaxpr in inner_jaxprs(eqn.params) for inner in jaxpr.eqns]


def flops(f, *args):
    """FLOPs of all operations, and of the products alone."""
    eqns = list(operations(f, *args))
    return sum(map(flops_of, eqns)), sum(flops_of(eqn) for eqn in eqns if is_product(eqn))


def xla_flops(f, *args):
    """What XLA counts in the program as it was lowered, before it optimizes it."""
    costs = jax.jit(f).lower(*args).cost_analysis()
    return costs.get("flops", 0)  # pyright: ignore[reportOptionalMemberAccess]
