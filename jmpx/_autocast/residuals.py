"""Functions with a backward pass of their own, whose residuals `save="products"` keeps.

A checkpoint runs the forward pass of a `jax.custom_vjp` again for the residuals that its backward
pass reads. Of a flash attention these are the result and sums of the scores, small beside the work.
"""

from collections.abc import Sequence

import jax
import jax.core
from jax.ad_checkpoint import checkpoint_name

from jmpx._autocast.backward import PRODUCTS
from jmpx._autocast.rules import is_floating, lookup
from jmpx._autocast.saving import SAVED
from jmpx._base.leaves import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Equation, Params, operation_name
from jmpx._jaxprs.inner import any_holds, inner_of


def keeps_residuals(equation: Equation) -> bool:
    """Whether a piece keeps the residuals of an equation: of a custom_vjp that holds much work."""
    # With symbolic zeros the forward pass is told which operands vary, which a second `jax.vjp`
    # around it does not know.
    params = equation.params
    is_rule = equation.primitive.name == "custom_vjp_call" and not params["symbolic_zeros"]
    return is_rule and any_holds(params["call_jaxpr"], _is_costly)


def _is_costly(equation: Equation) -> bool:
    """Whether an equation is a product or a kernel.

    A kernel is what autocast has no rule for: Pallas, a foreign function, cuDNN's attention.
    """
    is_kernel = inner_of(equation) is None and lookup(equation) is None
    is_kernel &= any(map(is_floating, equation.outvars))
    return is_kernel or operation_name(equation.primitive.name) in PRODUCTS


def run_keeping_residuals(
    equation: Equation, arrays: Sequence[Array], params: Params
) -> list[Array]:
    """Runs a custom_vjp; a checkpoint around it saves its results and its residuals."""

    # JAX calls the two passes later: they must not keep the arrays alive.
    @jax.custom_vjp
    def call(*arrays: Array) -> list[Array]:
        return core.bind(equation, arrays, **params)

    def forward(*arrays: Array) -> PyTree:
        known = {id(array): array for array in arrays}  # what is read is computed again

        def named(leaf: Array) -> Array:  # once, as a result that is a residual is saved once
            if isinstance(leaf, jax.core.Tracer) and id(leaf) not in known:
                known[id(leaf)] = checkpoint_name(leaf, SAVED)
            return known.get(id(leaf), leaf)

        bound = jax.vjp(lambda *arrays: core.bind(equation, arrays, **params), *arrays)
        return jax.tree.map(named, bound)

    call.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
    return call(*arrays)
