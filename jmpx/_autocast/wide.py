"""Products that run in float32 although the policy gives them 16 bits, and warnings of them.

JAX traces the backward pass that a user wrote for `jax.custom_vjp` only when it differentiates, and
in the dtypes of the forward pass: autocast cannot evaluate it in others. The same holds for a
function with a partitioning of its own, and for a kernel.
"""

import enum
import itertools
from collections.abc import Collection, Iterator

import jax.numpy as jnp
import numpy as np

from jmpx._autocast.multiplied import PRODUCTS, is_outer
from jmpx._autocast.products import is_precise, low_dtype
from jmpx._autocast.regions import Regions, Used
from jmpx._autocast.rules import Operation, is_float32, lookup
from jmpx._autocast.value import FLOAT32
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, Jaxpr, operation_name
from jmpx._jaxprs.inner import all_equations
from jmpx._jaxprs.places import place_of
from jmpx._jaxprs.product_flops import PRODUCT_FLOPS
from jmpx._policies.maps import PolicyMap

_CUSTOM_VJP = "custom_vjp_call"

# Parts of the names of other kernels: `ffi_call`, those of jax-triton and of cuDNN. The remaining
# primitives without a rule move data.
_KERNELS = ("ffi_call", "custom_call", "kernel", "attention", "matmul", "gemm")

REMEDY = (
    "cast the operands before the call, as in `q.astype(jnp.bfloat16)`, or mark it with "
    "jmpx.full_precision where float32 is meant"
)


class Ran(enum.Enum):
    """How a product ran to which the policy gives 16 bits."""

    LOW = "in 16 bits"
    PRECISE = (
        "their precision is above the default, so leave out `precision=` and "
        "jax.default_matmul_precision where 16 bits are meant"
    )
    OTHER = "their operands are of another dtype, such as float64, and autocast casts only float32"


def note_products(operation: Operation) -> None:
    """Notes how an operation runs that is a product or holds some, if the policy says 16 bits."""
    name, dtype, equation = operation.name, operation.dtype, operation.equation
    if dtype.itemsize > 2 or operation.region.is_fixed:
        return
    used = operation.interpreter.regions.used
    if name in PRODUCTS:
        how = _how(equation, dtype) if operation.override is None else Ran.LOW
        used.products.update(set() if how is None else {how})
    elif (name == _CUSTOM_VJP or lookup(equation) is None) and _stays_wide(operation):
        used.wide.add(equation)


def _how(equation: Equation, dtype: np.dtype) -> Ran | None:
    dtypes = {atom.aval.dtype for atom in equation.invars}
    widest = max((d.itemsize for d in dtypes if jnp.issubdtype(d, jnp.floating)), default=0)
    if not widest or is_outer(equation):
        return None
    if widest <= 2 or low_dtype(equation, dtype) != FLOAT32:
        return Ran.LOW
    return Ran.PRECISE if is_precise(equation) else Ran.OTHER


def _stays_wide(operation: Operation) -> bool:
    """Whether an operation that runs as traced has float32 products that should have 16 bits.

    A kernel without a jaxpr shows only its operands: at least two matrices, one of them in 16 bits.
    """
    equation = operation.equation
    if all(getattr(atom.aval, "size", 0) == 1 for atom in filter(is_float32, equation.invars)):
        return False
    regions = operation.interpreter.fresh().regions  # a rule that matches inside has no effect
    if _has_wide_product(equation, operation.scope, regions):
        return True
    has_low = any(value.dtype.itemsize == 2 for value in operation.float32_values)
    return has_low and any(map(_is_kernel, _with_inner(equation)))


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


def _with_inner(equation: Equation) -> Iterator[Equation]:
    """Yields an equation, and those of all jaxprs in it."""
    yield equation
    yield from itertools.chain.from_iterable(map(all_equations, core.inner_jaxprs(equation.params)))


def _is_kernel(equation: Equation) -> bool:
    """Whether an equation calls code without a jaxpr on matrices."""
    name = operation_name(equation.primitive.name)
    matrices = [a for a in equation.invars if is_float32(a) and len(a.aval.shape) > 1]
    is_named = len(matrices) > 1 and any(word in name for word in _KERNELS)
    return is_named and not core.holds_jaxpr(equation.params)


def wide_products(policy_map: PolicyMap, used: Used, jaxpr: Jaxpr) -> Iterator[str]:
    """Yields what to say of functions that stay float32, or if no product runs in 16 bits."""
    if used.wide:
        found = {f"{e.primitive.name} at {_place(e)}" for e in used.wide}
        total, wide = _flops(jaxpr, used.wide)
        is_known = total and np.isfinite(total)
        share = f", with {100 * wide / total:.0f} % of the FLOPs of all products"
        yield (
            f"JAX cannot trace {' and '.join(sorted(found))} again in 16 bits, so autocast leaves "
            f"float32 there{share if is_known else ''}: {REMEDY}."
        )
    elif used.products and Ran.LOW not in used.products:
        reasons = " and ".join(how.value for how in Ran if how in used.products)
        yield (
            f"No product runs in 16 bits under autocast with policy map {str(policy_map)!r}: "
            f"{reasons}."
        )


def _place(equation: Equation) -> str:
    return str(place_of(equation) or "a line of a library")


def _flops(jaxpr: Jaxpr, wide: Collection[Equation]) -> tuple[float, float]:
    """Returns the FLOPs of all products, and of those in `wide`; NaN where they are not known."""
    total = found = 0.0
    for equation in jaxpr.eqns:
        flops, part = _flops_of(equation, wide)
        total, found = total + flops, found + (flops if equation in wide else part)
    return total, found


def _flops_of(equation: Equation, wide: Collection[Equation]) -> tuple[float, float]:
    name = operation_name(equation.primitive.name)
    if name in PRODUCTS:
        sizes = [size for atom in equation.invars for size in atom.aval.shape]
        if not all(isinstance(size, int) for size in sizes):  # of a symbolic shape
            return np.nan, 0.0
        is_float = jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
        return float(PRODUCT_FLOPS[name](equation)) if is_float else 0.0, 0.0
    # A jaxpr shows neither the products of a kernel nor how often those of a Pallas kernel run.
    inner_ones = _with_inner(equation) if equation in wide else ()
    if any(_is_kernel(e) or e.primitive.name == "pallas_call" for e in inner_ones):
        return np.nan, 0.0
    times = equation.params["length"] if name == "scan" else 1
    inner = [_flops(jaxpr, wide) for jaxpr in core.inner_jaxprs(equation.params)]
    return times * sum(flops for flops, _ in inner), times * sum(part for _, part in inner)
