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


# Functions and layers that users take for operations, on the right: no jaxpr holds one, it holds
# those on the left, which decide about the precision. Rules are to name those.
_FUNCTIONS = {
    ("dot_general",): """
        matmul dot vdot inner einsum tensordot linear dense multi_dot batch_matmul
    """,
    ("conv_general_dilated",): "conv conv1d conv2d conv3d conv_transpose convolve correlate",
    ("dot_general", "exp", "reduce_sum"): "attention dot_product_attention",
    ("exp", "reduce_sum"): "softmax",
    ("exp", "reduce_sum", "log"): "log_softmax logsumexp cross_entropy softmax_cross_entropy",
    ("exp", "log1p"): "softplus log_sigmoid logaddexp",
    ("expm1",): "elu selu celu",
    ("tanh", "erfc"): "gelu",  # approximate, and exact
    ("logistic",): "sigmoid silu swish glu",
    ("max",): "relu maximum",
    ("min",): "minimum",
    ("max", "min"): "relu6 clip",
    ("reduce_sum",): "sum mean average",
    ("reduce_sum", "square"): "var",
    ("reduce_sum", "square", "sqrt"): "std",
    ("reduce_sum", "sqrt"): "norm",
    ("reduce_sum", "rsqrt"): """
        layer_norm layernorm batch_norm batchnorm group_norm groupnorm instance_norm
        rms_norm rmsnorm
    """,
    ("reduce_prod",): "prod",
    ("reduce_max",): "amax",
    ("reduce_min",): "amin",
    ("reduce_window_max",): "max_pool",
    ("reduce_window_sum",): "avg_pool",
    ("select_n",): "where select",
    ("gather",): "take take_along_axis embed embedding",
    ("scatter_add",): "segment_sum",
    ("div",): "divide true_divide reciprocal",
    ("mul",): "multiply",
    ("sub",): "subtract",
    ("neg",): "negative",
    ("abs",): "absolute",
    ("pow",): "power",
    ("log",): "log10",
    ("asin",): "arcsin",
    ("acos",): "arccos",
    ("atan",): "arctan",
    ("atan2",): "arctan2",
    ("asinh",): "arcsinh",
    ("acosh",): "arccosh",
    ("atanh",): "arctanh",
}
_INSTEAD = {name: ops for ops, names in _FUNCTIONS.items() for name in names.split()}


def instead_of(name: str) -> str | None:
    """Returns the selectors to write for a function that is no operation of its own, in words.

    Args:
        name: what stands after `op.` in a rule, such as `softmax`.

    Returns:
        The selectors, such as `"'op.exp' and 'op.reduce_sum'"`; None for any other name.
    """
    if name.lower() not in _INSTEAD:
        return None
    *others, last = (f"'op.{operation}'" for operation in _INSTEAD[name.lower()])
    return f"{', '.join(others)} and {last}" if others else last
