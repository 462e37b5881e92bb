"""Products of bfloat16 with float32 results, which XLA:CPU compiles, and cannot always run.

In JAX 0.7 to 0.12 it fails with "Unsupported element type for DotThunk: BF16 x BF16 = F32" at some
whose result is transposed. None of them has batch axes, and none is of float16.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.rewriting import casting, new_variable, replaced


def may_fail(product: Equation) -> bool:
    """Whether XLA:CPU may fail when it runs a product whose result is in float32."""
    if product.primitive.name != "dot_general" or product.invars[0].aval.dtype != jnp.bfloat16:
        return False
    _, (batch, _) = product.params["dimension_numbers"]
    return not batch


def by_platform(product: Equation) -> list[Equation]:
    """Returns the equations of a product whose operands are cast to float32 on a CPU alone."""
    index, cond = _platforms(jax.sharding.get_abstract_mesh()).eqns
    place = {"source_info": product.source_info, "ctx": product.ctx}

    def like(atoms: Sequence[Atom], dtype: np.dtype | None = None) -> list[Atom]:
        avals = [
            atom.aval if dtype is None else core.with_dtype(atom.aval, dtype) for atom in atoms
        ]
        return list(map(new_variable, avals))

    def branch(jaxpr: Jaxpr, is_cast: bool) -> Jaxpr:
        given, results = like(product.invars), like(product.outvars)
        operands = like(given, np.dtype(np.float32)) if is_cast else given
        eqns = [casting(*pair, product) for pair in zip(given, operands, strict=True) if is_cast]
        eqns.append(product.replace(invars=operands, outvars=results))
        return replaced(jaxpr, invars=given, outvars=results, eqns=eqns)

    on_cpu, elsewhere = cond.params["branches"]
    params = {**cond.params, "branches": (branch(on_cpu, True), branch(elsewhere, False))}
    platform = like(index.outvars)
    return [
        index.replace(outvars=platform, **place),
        cond.replace(
            invars=[*platform, *product.invars], outvars=product.outvars, params=params, **place
        ),
    ]


@functools.cache
def _platforms(mesh: object) -> Jaxpr:
    """Returns a jaxpr that runs one branch on a CPU, and another elsewhere, where this mesh is."""

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    return jax.make_jaxpr(run)(np.float32(0))
