"""Functions with a backward pass of their own, whose residuals `save=` keeps.

A checkpoint runs the forward pass of a `jax.custom_vjp` again for the residuals that its backward
pass reads. Of a flash attention these are the result and sums of the scores, small beside the work.
"""

import jax
import jax.core
from jax.ad_checkpoint import checkpoint_name

from jmpx._base.leaves import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.backward import PRODUCTS
from jmpx._jaxprs.core import Array, Equation, operation_name
from jmpx._jaxprs.inner import any_holds
from jmpx._jaxprs.moves import HIDING

SAVED = "jmpx_saved"  # what gets that name from `checkpoint_name` is saved
# As the names of kernels begin: the last two are of cuDNN and of Triton.
_KERNELS = (*HIDING, "dot_product_attention", "triton_kernel_call")


def keeps_residuals(equation: Equation) -> bool:
    """Whether a piece keeps the residuals of an equation: of a custom_vjp that holds much work."""
    # With symbolic zeros the forward pass is told which operands vary, which a second `jax.vjp`
    # around it does not know.
    params = equation.params
    is_rule = equation.primitive.name == "custom_vjp_call" and not params["symbolic_zeros"]
    return is_rule and any_holds(params["call_jaxpr"], _is_costly)


def _is_costly(equation: Equation) -> bool:
    """Whether an equation is a product or a kernel: of Pallas, a foreign function, cuDNN's."""
    name = operation_name(equation.primitive.name)
    is_kernel = name.startswith(_KERNELS) and any(map(core.is_floating, equation.outvars))
    return is_kernel or name in PRODUCTS


def with_residuals(equation: Equation) -> Equation:
    """Returns a custom_vjp that does the same; a checkpoint saves its results and residuals."""

    # JAX calls the two passes later: they must not keep the arrays alive.
    @jax.custom_vjp
    def call(*arrays: Array) -> list[Array]:
        return core.bind(equation, arrays)

    def forward(*arrays: Array) -> PyTree:
        known = {id(array): array for array in arrays}  # what is read is computed again

        def named(leaf: Array) -> Array:  # once, as a result that is a residual is saved once
            if isinstance(leaf, jax.core.Tracer) and id(leaf) not in known:
                known[id(leaf)] = checkpoint_name(leaf, SAVED)
            return known.get(id(leaf), leaf)

        bound = jax.vjp(lambda *arrays: core.bind(equation, arrays), *arrays)
        return jax.tree.map(named, bound)

    call.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
    traced = jax.make_jaxpr(lambda *arrays: call(*arrays))(*(a.aval for a in equation.invars))
    (made,) = traced.eqns
    given = dict(zip(traced.invars, equation.invars, strict=True))
    return made.replace(
        invars=[given[atom] for atom in made.invars],
        outvars=equation.outvars,
        source_info=equation.source_info,
    )
