"""Products that run in float32 although the policy gives them 16 bits, and warnings of them.

JAX traces the backward pass that a user wrote for `jax.custom_vjp` only when it differentiates, and
in the dtypes of the forward pass: autocast cannot evaluate it in others. The same holds for a
function with a partitioning of its own, and for a kernel.
"""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jmpx._autocast.backward import PRODUCTS, is_outer
from jmpx._autocast.products import is_precise, low_dtype
from jmpx._autocast.regions import Regions, Used
from jmpx._autocast.rules import Operation, is_float32, lookup
from jmpx._autocast.value import FLOAT32
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, operation_name
from jmpx._jaxprs.places import place_of
from jmpx._policies.maps import PolicyMap


def note_products(operation: Operation) -> None:
    """Notes how an operation runs that is a product or holds some, if the policy says 16 bits."""
    equation, dtype = operation.equation, operation.dtype
    if dtype.itemsize > 2 or operation.region.is_fixed:
        return
    used = operation.interpreter.regions.used
    if operation.name in PRODUCTS:
        is_low = _is_low(equation, dtype)
        if is_low is not None:
            used.products.add(is_low or operation.override is not None)
    elif operation.name == "custom_vjp_call" or lookup(equation) is None:
        regions = operation.interpreter.fresh().regions  # a rule that matches inside has no effect
        if _has_wide_product(equation, operation.scope, regions):
            used.wide.add(equation)


def _is_low(equation: Equation, dtype: np.dtype) -> bool | None:
    """Whether a product runs in 16 bits; None for one without floats, and for an outer product."""
    dtypes = {atom.aval.dtype for atom in equation.invars}
    sizes = [d.itemsize for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    if not sizes or is_outer(equation):
        return None
    return max(sizes) <= 2 or low_dtype(equation, dtype) != FLOAT32


def _has_wide_product(equation: Equation, scope: str, regions: Regions) -> bool:
    """Whether a product in the jaxprs of an equation runs in float32 instead of 16 bits."""
    for inner in (inner for jaxpr in core.inner_jaxprs(equation.params) for inner in jaxpr.eqns):
        within = core.scope_within(scope, inner)
        if _is_wide_product(inner) and not regions.region(within).is_full:
            return True
        if _has_wide_product(inner, within, regions):
            return True
    return False


def _is_wide_product(equation: Equation) -> bool:
    is_product = operation_name(equation.primitive.name) in PRODUCTS
    is_wide = is_product and all(map(is_float32, equation.invars[:2]))
    return is_wide and not is_precise(equation) and not is_outer(equation)


def wide_products(policy_map: PolicyMap, used: Used) -> Iterator[str]:
    """Yields what to say of functions that stay float32, or if no product runs in 16 bits."""
    if used.wide:
        found = sorted({f"{e.primitive.name} at {place_of(e) or 'a library'}" for e in used.wide})
        yield (
            f"JAX cannot trace {' and '.join(found)} again in 16 bits, so autocast leaves float32 "
            "there: cast the operands before the call, as in `q.astype(jnp.bfloat16)`, or mark it "
            "with jmpx.full_precision where float32 is meant."
        )
    elif used.products == {False}:
        yield (
            f"No product runs in 16 bits under autocast with policy map {str(policy_map)!r}: leave "
            "out `precision=` and jax.default_matmul_precision where 16 bits are meant; operands "
            "of another dtype, such as float64, keep it."
        )
