"""Counts of FLOPs: our own, and XLA's."""

import jax
import jax.numpy as jnp

from jmpx._autocast.products import PRODUCTS
from jmpx._inspect.audit.flops import flops_of, is_counted
from jmpx._jaxprs.core import inner_jaxprs, operation_name


def shape_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def name_of(eqn):
    return operation_name(eqn.primitive.name)


def operations(f, *args):
    """The equations of a function and of those that it calls, but not of what reduces with them."""
    pending = list(jax.make_jaxpr(f)(*args).eqns)
    while pending:
        eqn = pending.pop()
        yield eqn
        if not is_counted(name_of(eqn)):
            pending += [inner for jaxpr in inner_jaxprs(eqn.params) for inner in jaxpr.eqns]


def flops(f, *args):
    """FLOPs of all operations, and of the products alone."""
    eqns = list(operations(f, *args))
    return sum(map(flops_of, eqns)), sum(flops_of(eqn) for eqn in eqns if name_of(eqn) in PRODUCTS)


def xla_flops(f, *args):
    """What XLA counts in the program as it was lowered, before it optimizes it."""
    costs = jax.jit(f).lower(*args).cost_analysis()
    return costs.get("flops", 0)  # pyright: ignore[reportOptionalMemberAccess]
