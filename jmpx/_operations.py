"""Which operation runs in which precision under autocast: one table.

Three classes are those of `torch.autocast`: matrix products in 16 bits, whatever needs range or
digits in float32, the rest in what its operands have. The others keep constants that 16 bits cannot
hold, powers in float16 and JAX's particular operations right.
"""

import enum


class Kind(enum.Enum):
    """What autocast does with an operation on values that were float32 when traced."""

    LOW = "operands and results in the compute dtype"
    FULL = "operands and results in float32"
    COMPARE = "operands in float32 if their dtypes differ, because the answer is yes or no"
    PROMOTE = "operands in the widest dtype that one of them has"
    PLACE = "as PROMOTE, and what is finite in float32, such as a mask of -1e9, stays finite"
    SCALE = "as PROMOTE, but run in float32 and rounded next to a number that 16 bits cannot hold"
    POWER = "as PROMOTE, but as FULL instead of float16, where large powers overflow"
    BOUNDED = "as PROMOTE, but of powers in the compute dtype: the result is exact at infinity"
    INTERNAL = "as PROMOTE, but run in float32 and rounded"
    UPDATE = "as PLACE, but run in float32 and rounded"
    EACH = "each operand in the dtype that it has"
    KEEP = "operands and results in exactly the dtypes that were traced"


_TABLE = {
    Kind.LOW: """
        conv_general_dilated dot_general ragged_dot ragged_dot_general
    """,
    Kind.FULL: """
        exp exp2 expm1 log log1p log2 pow rsqrt
        acos acosh asin asinh atanh cosh sinh tan erf_inv
        reduce_sum reduce_prod reduce reduce_window reduce_window_sum
        cumsum cumprod cumlogsumexp scatter_add scatter_sub scatter_mul select_and_scatter_add
        lgamma digamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad
        bessel_i0e bessel_i1e regularized_incomplete_beta
        cholesky eig eigh geqrf hessenberg householder_product lu ormqr qr schur svd
        triangular_solve tridiagonal tridiagonal_solve custom_linear_solve fft
        complex real imag conj
    """,
    Kind.COMPARE: """
        eq eq_to ne lt lt_to le le_to gt ge
    """,
    Kind.PROMOTE: """
        add_any max min clamp neg abs sign floor ceil round is_finite
        sqrt cbrt one_minus_square sin cos
        reduce_max reduce_min argmax argmin cummax cummin top_k approx_top_k
        reduce_window_max reduce_window_min select_and_gather_add
        broadcast_in_dim reshape transpose squeeze rev slice split tile
        unstack dynamic_slice iota copy copy_p name stop_gradient
        sharding_constraint mesh_cast reshard pvary pcast pbroadcast
        all_gather all_gather_invariant all_gather_reduced all_to_all ppermute
        empty empty2
    """,
    Kind.PLACE: """
        add sub select_n concatenate stack pad gather dynamic_update_slice
    """,
    Kind.SCALE: """
        mul div rem atan2
    """,
    Kind.POWER: """
        square integer_pow polynomial
    """,
    Kind.BOUNDED: """
        atan tanh logistic erf erfc
    """,
    Kind.UPDATE: """
        scatter scatter_max scatter_min
    """,
    Kind.INTERNAL: """
        select_and_scatter mulhi
        psum psum_invariant psum2 reduce_scatter
    """,
    Kind.EACH: """
        sort pmax pmin optimization_barrier device_put
    """,
    Kind.KEEP: """
        bitcast_convert_type nextafter reduce_precision erf_inv_grad
        random_bits random_fold_in random_gamma random_seed random_split random_wrap random_unwrap
        random_clone rng_bit_generator rng_uniform threefry2x32
        get swap addupdate new_ref ref_get ref_set freeze
    """,
}

KINDS = {name: kind for kind, names in _TABLE.items() for name in names.split()}

# Operations that carry functions of their own, which the transformation knows by themselves.
HIGHER_ORDER = frozenset(
    "call closed_call cond core_call custom_jvp_call custom_vjp_call jit pjit remat2 checkpoint "
    "scan shard_map while".split()
)

# What an operation of the left becomes when its result feeds one of the right: full. The shift of
# a softmax and the squares of a norm are part of the statistic that is taken in float32 anyway.
FEEDS = {
    "sub": frozenset({"exp", "exp2", "expm1"}),
    "square": frozenset({"reduce_sum"}),
    "integer_pow": frozenset({"reduce_sum"}),
    "mul": frozenset({"reduce_sum"}),
}


# What chooses among numbers, so that its gradient compares them with the one that it chose.
CHOICES = frozenset({"max", "min", "scatter_max", "scatter_min"})

# Arithmetic: of operands that hold one number each it makes one number.
ELEMENTWISE = frozenset(
    """
    add sub mul div rem max min clamp neg abs sqrt rsqrt square integer_pow pow exp exp2 log
    """.split()
)

# Operations whose results hold no other numbers than their first operand.
COPIES = frozenset(
    """
    broadcast_in_dim reshape transpose squeeze rev slice tile copy copy_p name stop_gradient
    convert_element_type sharding_constraint mesh_cast reshard pvary pcast
    """.split()
)


def operation_name(primitive: str) -> str:
    """Returns a primitive's name as rules spell it: `scatter-add` is `scatter_add`."""
    return primitive.replace("-", "_")
