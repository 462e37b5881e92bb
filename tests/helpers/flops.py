"""Counts of FLOPs: our own, and XLA's."""

import jax
import jax.numpy as jnp

from jmpx._inspect.audit.summary import products
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program


def shape_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flops(f, *args):
    """FLOPs of the products of a function, which is looked at as it is."""
    results = lambda *args: [f(*args)]  # noqa: E731, a list is no loss
    return sum(row.flops for row in products(Graph(traced_program(results, args))))


def xla_flops(f, *args):
    """What XLA counts in the program as it was lowered, before it optimizes it."""
    costs = jax.jit(f).lower(*args).cost_analysis()
    return costs.get("flops", 0)  # pyright: ignore[reportOptionalMemberAccess]
