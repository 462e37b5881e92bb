"""The rules of most primitives: they cast down, stay in float32 or follow their operands."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jmpx._autocast import eight_bits
from jmpx._autocast.binding import (
    bind,
    bind_arrays,
    fill_value,
    has_fill,
    narrow_dtype,
    result_dtype,
    rounded,
    run_as_traced,
    run_in,
    run_moved,
    run_recomputed,
)
from jmpx._autocast.rules import (
    Cast,
    Operation,
    is_float32,
    is_precise,
    low_dtype,
    register,
    with_algorithms,
)
from jmpx._autocast.value import FLOAT32, Value
from jmpx._jaxprs.inner import is_outer
from jmpx._jaxprs.marks import RESTORE


def low(operation: Operation) -> list[Value]:
    """Runs in the compute dtype; in float32 if the user asked for more precision."""
    if (in_eight_bits := eight_bits.product(operation)) is not None:
        return in_eight_bits
    if is_precise(operation.equation):
        return run_as_traced(operation, is_weak=False)
    dtype = low_dtype(operation.equation, operation.region.dtype)
    if dtype == FLOAT32:
        return full(operation)
    params = result_dtype(operation.equation, dtype) | with_algorithms(operation, dtype)
    return run_in(dtype, operation, is_weak=False, **params)


def full(operation: Operation) -> list[Value]:
    """Runs in float32."""
    return run_as_traced(operation, operation.is_weak)


def keep(operation: Operation) -> list[Value]:
    """Runs in the traced dtypes, because the result depends on the dtype, as bits do."""
    return full(operation)


def promote(operation: Operation, cast: Cast = Value.to, **params: object) -> list[Value]:
    """Runs in the widest dtype of its operands; weak ones take the dtype of the others."""
    return run_in(operation.promoted, operation, operation.is_weak, cast, **params)


def limit(operation: Operation) -> list[Value]:
    """Runs as `promote`; in float32 if a constant, such as 1 - 1e-7, would become 0, 1 or -1."""
    return (full if _moves_bound(operation) else promote)(operation)


def _moves_bound(operation: Operation) -> bool:
    """Whether a constant that is near to 0, 1 or -1 would become it in the dtype of `promote`."""
    dtype = operation.promoted
    return any(dtype in value.onto_bound for value in operation.float32_values)


def promote_finite(operation: Operation) -> list[Value]:
    """Runs as `promote`, finite numbers stay finite; as `limit` if the result is exposed."""
    if operation.is_exposed and _moves_bound(operation):
        return full(operation)
    return promote(operation, Value.to_finite)


def compare(operation: Operation) -> list[Value]:
    """Runs as `promote` if dtypes are equal, else in float32: rounding one side may decide."""
    dtypes = {value.dtype for value in operation.float32_values}
    return (promote if len(dtypes) == 1 else full)(operation)


def scale(operation: Operation) -> list[Value]:
    """Runs as `promote`; if 16 bits cannot hold an operand, in float32, and rounds the result."""
    return scale_checking(operation.float32_values, operation)


def scale_checking(checked: Sequence[Value], operation: Operation) -> list[Value]:
    """Runs as `scale`, which examines only the operands in `checked`."""
    dtype = operation.promoted
    unfit = [value for value in checked if not value.fits(dtype)]
    if not unfit:
        return promote(operation)
    if all(value.held_by is not None for value in unfit):
        return rounded(full(operation), operation, dtype)
    return run_recomputed(operation, dtype)


def power(operation: Operation) -> list[Value]:
    """Runs as `promote`, but in float32 instead of float16, where powers overflow."""
    if operation.result in operation.neighbours.statistics:
        return full(operation)
    if operation.promoted != np.float16:
        return promote(operation)
    results = run_recomputed(operation, FLOAT32)
    for result in results:
        result.power = True
    return results


def bounded(operation: Operation) -> list[Value]:
    """Runs as `promote`; on powers in the compute dtype, as infinity gives the right result."""
    if all(value.power for value in operation.values):
        return run_in(operation.region.dtype, operation, operation.is_weak)
    return promote(operation)


def saturating(operation: Operation) -> list[Value]:
    """Runs as `bounded`; in float32 if a result that is rounded onto 1 would break its readers."""
    return (full if operation.is_exposed else bounded)(operation)


def through_float32(operation: Operation) -> list[Value]:
    """Runs in float32, and rounds the result to the dtype that `promote` would return."""
    return rounded(full(operation), operation, operation.promoted)


def reduce_devices(operation: Operation) -> list[Value]:
    """Sums over devices in float32, and rounds each sum to the dtype of its terms."""
    pairs = zip(full(operation), operation.values, strict=True)
    return [Value(result.to(v.dtype), v.is_weak, v.tangent) for result, v in pairs]


def exchange(operation: Operation) -> list[Value]:
    """Runs as `promote`; float32 numbers that only 16-bit operations read move in 16 bits."""
    dtype = narrow_dtype(operation)
    return promote(operation) if dtype is None else run_moved(operation, dtype)


def update(operation: Operation) -> list[Value]:
    """Runs in float32 on rounded operands, so that a maximum is one of them; rounds the result."""
    dtype = operation.promoted
    placed = operation.arrays(dtype, Value.to_finite)
    widened = operation._replace(values=[Value(array, is_weak=True) for array in placed])
    return rounded(bind(operation, widened.arrays(FLOAT32), operation.is_weak), operation, dtype)


def per_operand(operation: Operation) -> list[Value]:
    """Runs on each operand in its own dtype; each result has the traits of its operand."""
    results = bind_arrays(operation.equation, [value.array for value in operation.values])
    return [Value.of(result, v.traits) for result, v in zip(results, operation.values, strict=True)]


# JAX's primitives, with underscores for hyphens (`scatter-add`). A test checks that each name is a
# primitive of a supported version of JAX.
KINDS = {
    low: "conv_general_dilated ragged_dot_general",
    full: """
        exp exp2 expm1 log log1p log2 pow rsqrt
        acos acosh asin asinh atanh cosh sinh tan erf_inv
        reduce_sum reduce_prod reduce reduce_window reduce_window_sum
        cumsum cumprod cumlogsumexp select_and_scatter_add
        lgamma digamma polygamma zeta igamma igammac igamma_grad_a
        bessel_i0e bessel_i1e regularized_incomplete_beta
        cholesky eig eigh geqrf hessenberg householder_product lu ormqr qr schur svd
        triangular_solve tridiagonal tridiagonal_solve custom_linear_solve fft
        complex real imag conj
    """,
    compare: "eq_to ne lt lt_to le le_to gt ge",
    promote: """
        add_any neg abs sign floor ceil round is_finite
        sqrt cbrt one_minus_square sin cos
        reduce_max reduce_min argmax argmin cummax cummin top_k approx_top_k
        reduce_window_max reduce_window_min select_and_gather_add
        broadcast_in_dim reshape transpose squeeze rev slice split tile
        unstack dynamic_slice iota copy name stop_gradient
        sharding_constraint reshard pvary pbroadcast
        empty empty2
    """,
    limit: "max min clamp",
    promote_finite: "add select_n concatenate stack pad dynamic_update_slice",
    scale: "div rem atan2",
    power: "square integer_pow polynomial",
    exchange: "all_gather all_gather_invariant all_gather_reduced all_to_all ppermute",
    bounded: "atan",
    saturating: "tanh logistic erf erfc",
    update: "scatter scatter_max scatter_min",
    through_float32: "select_and_scatter mulhi",
    reduce_devices: "psum psum_invariant reduce_scatter",
    per_operand: "sort pmax pmin optimization_barrier device_put",
    keep: """
        bitcast_convert_type nextafter reduce_precision
        random_bits random_fold_in random_gamma random_seed random_split random_wrap random_unwrap
        random_clone rng_bit_generator rng_uniform threefry2x32
        addupdate new_ref freeze
    """,
}

for kind, names in KINDS.items():
    keeps_finite = kind in (promote_finite, update)
    register(*names.split(), cached=kind is not keep, keeps_finite=keeps_finite)(kind)


# Rules of single primitives: a kind of the table, with an exception.


@register("dot_general", cached=True)
def dot_general(operation: Operation) -> list[Value]:
    """Runs as `low`; an outer product runs as `promote`, because it sums nothing.

    The angles of a rotary embedding are one: positions times frequencies.
    """
    if is_outer(operation.equation) and not is_precise(operation.equation):
        dtype = operation.promoted
        params = with_algorithms(operation, dtype) | result_dtype(operation.equation, dtype)
        return promote(operation, **params)
    return low(operation)


@register("mul", cached=True)
def mul(operation: Operation) -> list[Value]:
    """Runs as `scale`, but does not examine factors that are arrays of parameters.

    Every layer has some, and float32 products of them would cost memory.
    """
    if operation.result in operation.neighbours.statistics:
        return full(operation)
    if operation.result in operation.neighbours.slopes:
        return power(operation)
    checked = [v for v in operation.float32_values if v.uniform or v.held_by is not None]
    return scale_checking(checked, operation)


@register("sub", cached=True, keeps_finite=True)
def sub(operation: Operation) -> list[Value]:
    """Runs as `promote_finite`; in float32 if an exponential reads it, as in a softmax."""
    is_shift = operation.result in operation.neighbours.statistics
    return (full if is_shift else promote_finite)(operation)


@register("eq", cached=True)
def eq(operation: Operation) -> list[Value]:
    """Runs as `compare`; next to a maximum it rounds both sides, as the maximum was rounded."""
    is_choice = operation.result in operation.neighbours.choices
    return (promote if is_choice else compare)(operation)


@register("gather", cached=True, keeps_finite=True)
def gather(operation: Operation) -> list[Value]:
    """Runs as `promote_finite`; the number for indices out of bounds stays finite, too.

    Rows of a table that only 16-bit operations read are gathered in 16 bits.
    """
    dtype = narrow_dtype(operation) if operation.is_weak else None
    if dtype is not None and has_fill(operation.equation, dtype):
        return run_moved(operation, dtype)
    params = fill_value(operation.equation, operation.promoted)
    return promote(operation, Value.to_finite, **params)


@register("scatter_add", "scatter_sub", cached=True, keeps_finite=True)
def scatter_sum(operation: Operation) -> list[Value]:
    """Runs in float32, as sums do; rounds the result where each number gets one term, as `add`."""
    return (update if operation.equation.params["unique_indices"] else full)(operation)


@register("scatter_mul", cached=True)
def scatter_mul(operation: Operation) -> list[Value]:
    """Runs in float32; rounds the result where each number gets one factor, as `mul`."""
    results = full(operation)
    is_once = operation.equation.params["unique_indices"]
    return rounded(results, operation, operation.promoted) if is_once else results


@register("get", "swap")
def access(operation: Operation) -> list[Value]:
    """Runs in float32; the result is not weak, as the reference may hold a sum."""
    return run_as_traced(operation, is_weak=False)


@register("custom_vjp_call", everywhere=True)
def custom_vjp_call(operation: Operation) -> list[Value]:
    """Runs a function in float32: its backward pass is for the traced dtypes."""
    return run_as_traced(operation, is_weak=not operation.region.is_fixed)


@register("convert_element_type", everywhere=True)
def convert_element_type(operation: Operation) -> list[Value]:
    """Runs a cast that the user wrote.

    A cast from float32 to float32 is ignored: JAX writes one where only the weak type changes. So
    is the cast by which an inner autocast returns float32 results.
    """
    (value,), (atom,) = operation.values, operation.equation.invars
    if operation.equation.params["new_dtype"] != FLOAT32:
        return bind(operation, [value.array], value.is_weak)
    is_restored = operation.scope.endswith(RESTORE) and not operation.region.is_full
    if is_float32(atom) or is_restored:
        return [value]
    is_float = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    return bind(operation, [value.array], is_weak=not is_float)
