"""Which operation runs in which dtype, on a product and beside one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32, assert_same_bits, dtypes, normal
from helpers.autocast import assert_ran, check_sides, whole
from helpers.jaxprs import equations_of
from jax import lax

import jmpx


def gate(h):
    return h[::-1] * jnp.tanh(h)


OPERATIONS = {
    "bfloat16": [
        lambda h: h @ h,
        gate,
        jax.nn.relu,
        jax.nn.gelu,
        jax.nn.silu,
        jnp.sqrt,
        jnp.sin,
        lambda h: h**2,
        lambda h: h / 3 - 1,
        lambda h: jnp.where(h > 0, h, -1e9),
        lambda h: jnp.max(h, axis=0),
        lambda h: jnp.concatenate([h.T, h.reshape(h.T.shape)]),
        lambda h: jnp.pad(h, 1)[1:].at[0].set(0.0),
        lambda h: h + jnp.arange(h.shape[1], dtype=jnp.float32),
        lambda h: h + jnp.exp(jnp.arange(h.shape[1]).astype(jnp.float32)),
        lambda h: h * jax.random.normal(jax.random.key(0), h.shape),
        lambda h: jnp.sort(h),
        lambda h: lax.top_k(h, 1)[0],
        lambda h: lax.cond(h[0, 0] > 0, gate, jnp.abs, h),
        lambda h: jax.jit(gate)(h),
        lambda h: jax.checkpoint(gate)(h),
        lambda h: lax.conv(h[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"),
    ],
    "float32": [
        jnp.exp,
        jnp.tanh,  # the last operation: a loss outside may read its distance from 1
        jax.nn.sigmoid,
        lambda h: jnp.log(jnp.abs(h) + 1.0),
        lambda h: jnp.abs(h) ** 1.5,
        jnp.sum,
        lambda h: jnp.mean(h, axis=0),
        jnp.cumsum,
        lambda h: lax.rsqrt(jnp.abs(h) + 1.0),
        jax.nn.softmax,
        jax.nn.log_softmax,
        jax.nn.logsumexp,
        lambda h: jnp.linalg.norm(h),
        lambda h: lax.erf_inv(jnp.tanh(h)),
        lambda h: jax.scipy.special.gammaln(h + 9.0),
        lambda h: jnp.linalg.qr(h)[0],
        lambda h: jax.ops.segment_sum(h, jnp.zeros(h.shape[0], int), 2),
        lambda h: lax.cond(h[0, 0] > 0, jnp.tanh, jnp.exp, h),
        lambda h: lax.fori_loop(0, 3, lambda _, c: c + h[0], jnp.zeros(h.shape[1])),
        lambda h: jnp.matmul(h, h, precision="highest"),
    ],
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "op, dtype", [(op, dtype) for dtype, ops in OPERATIONS.items() for op in ops]
)
def test_classes_of_operations(rng, op, dtype):
    w, x = normal(rng, 3, 3), normal(rng, 3, 3)

    def f(w, x):
        return op(x @ w)

    result = jmpx.autocast(f, output=None)(w, x)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.astype(jnp.float32), f(w, x), rtol=0.06, atol=0.06)
    restored = jmpx.autocast(f)(w, x)
    assert_same_bits(restored, result.astype(jnp.float32))


def test_inputs_and_constants_yield_to_what_a_product_made(rng):
    w, b, x = normal(rng, 3, 2), normal(rng, 2), normal(rng, 4, 3)
    table = normal(rng, 4, 2)

    @jmpx.autocast(output=None)
    def f(w, b, x):
        h = x @ w + b  # a float32 input
        h = h * jnp.float32(0.5) + table  # a constant, a closed-over array
        h = h + jnp.sin(jnp.exp(-jnp.arange(2.0)))  # what was computed of constants alone
        return h, b + 1.0, h + jnp.exp(h)

    activation, alone, statistic = f(w, b, x)
    assert dtypes([activation, alone, statistic]) == ["bfloat16", "float32", "float32"]


def test_one_cast_a_weight(rng):
    w, x = normal(rng, 3, 3), normal(rng, 4, 3)
    casts = [
        eqn
        for eqn in equations_of(jmpx.autocast(lambda w, x: (x @ w) @ w), w, x)
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.shape == (3, 3)
    ]
    assert len(casts) == 1


def test_what_was_traced_in_16_bits_stays(rng):
    x = normal(rng, 3, 3)

    @jmpx.autocast(policy="c=bf16", output=None)
    def f(x):
        half = x.astype(jnp.float16)
        return half @ half, (half @ half).astype(jnp.float32), x @ x

    assert dtypes(f(x)) == ["float16", "float32", "bfloat16"]


def test_a_full_policy_changes_nothing(rng):
    w, x = normal(rng, 5, 5), normal(rng, 4, 5)
    f = jax.nn.gelu
    assert_same_bits(jmpx.autocast(lambda w, x: f(x @ w), "full")(w, x), f(x @ w))


# Operations on a product and an input. Inputs are whole numbers, so that results have to be equal.

INDEX = np.array([2, 0])


def reduce_by_hand(h, x):
    return lax.reduce(h, np.float32(-99), lambda a, b: jnp.where(a > b, a, b), (1,))


def pool(h, init, computation):
    return lax.reduce_window(h, np.float32(init), computation, (2, 2), (1, 1), "VALID")


def convolve(h, x):
    return lax.conv_general_dilated(h[None, None], x[None, None, :2, :2], (1, 1), "SAME")


# By name: a function of a product and an input, the operation to look at, and its dtypes.
EXACT = {
    "sort": (
        lambda h, x: lax.sort((h, x, jnp.arange(16).reshape(4, 4)), num_keys=1),
        "sort",
        "bfloat16 float32",
    ),
    "argsort": (lambda h, x: h + jnp.argsort(h).astype(F32), "sort", "bfloat16"),
    "top_k": (lambda h, x: lax.top_k(h, 2), "top_k", "bfloat16"),
    "argmax": (lambda h, x: (jnp.argmax(h, 1), h.max(0), h.min()), "argmax", "bfloat16"),
    "set": (lambda h, x: h.at[1].set(x[0]), "scatter", "float32"),
    "add": (lambda h, x: h.at[INDEX].add(x[:2]), "scatter_add", "float32"),
    "multiply": (lambda h, x: x.at[INDEX].multiply(h[:2]), "scatter_mul", "float32"),
    "max": (lambda h, x: h.at[INDEX].max(x[:2]), "scatter_max", "float32"),
    "min": (lambda h, x: x.at[INDEX].min(h[:2]), "scatter_min", "float32"),
    "gather": (lambda h, x: h[INDEX], "gather", "bfloat16"),
    "dynamic_slice": (
        lambda h, x: lax.dynamic_slice(h, (INDEX[1], 1), (2, 2)),
        "dynamic_slice",
        "bfloat16",
    ),
    "dynamic_update_slice": (
        lambda h, x: lax.dynamic_update_slice(x, h[:2], (1, INDEX[1])),
        "dynamic_update_slice",
        "bfloat16",
    ),
    "concatenate": (lambda h, x: jnp.concatenate([h, x]), "concatenate", "bfloat16"),
    "pad": (lambda h, x: jnp.pad(h, 1), "pad", "bfloat16"),
    "clip": (lambda h, x: jnp.clip(h, -2, x), "max", "bfloat16"),
    "where": (lambda h, x: jnp.where(x > 0, h, x), "select_n", "bfloat16"),
    "roll and flip": (lambda h, x: jnp.roll(h, 1)[::-1].T.reshape(2, 8), "rev", "bfloat16"),
    "cumsum": (lambda h, x: jnp.cumsum(h, 0), "cumsum", "float32"),
    "cumprod": (lambda h, x: jnp.cumprod(jnp.clip(h, -1, 1), 0), "cumprod", "float32"),
    "cummax": (lambda h, x: lax.cummax(h), "cummax", "bfloat16"),
    "max_pool": (lambda h, x: pool(h, -np.inf, lax.max), "reduce_window_max", "bfloat16"),
    "avg_pool": (lambda h, x: pool(h, 0, lax.add), "reduce_window_sum", "float32"),
    "convolution": (convolve, "conv_general_dilated", "bfloat16"),
    "einsum": (lambda h, x: jnp.einsum("ij,kj->ik", h, x), "dot_general", "bfloat16"),
    "ragged_dot": (
        lambda h, x: lax.ragged_dot(h, jnp.stack([x, x.T]), jnp.array([1, 3])),
        "ragged_dot_general",
        "bfloat16",
    ),
    "reduce by a function": (reduce_by_hand, "reduce", "float32"),
    "associative_scan": (lambda h, x: lax.associative_scan(jnp.add, h), "add", "bfloat16"),
    "barrier": (
        lambda h, x: lax.optimization_barrier((h, x)),
        "optimization_barrier",
        "bfloat16 float32",
    ),
    "bitcast": (
        lambda h, x: lax.bitcast_convert_type(h, jnp.int32),
        "bitcast_convert_type",
        "float32",
    ),
    "nextafter": (lambda h, x: jnp.nextafter(h, x), "nextafter", "float32"),
    "device_put": (lambda h, x: jax.device_put(h, jax.devices()[0]), "device_put", "bfloat16"),
}
# Operations whose derivatives are operations of another kind, so that gradients are compared too.
DIFFERENTIATED = set(
    """
    sort top_k scatter scatter_add scatter_max gather dynamic_slice dynamic_update_slice concatenate
    select_n cumsum reduce_window_max reduce_window_sum conv_general_dilated ragged_dot_general
    """.split()
)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", EXACT)
def test_operations_on_products(rng, name):
    fn, operation, dtypes = EXACT[name]
    args = whole(rng, 4, 4), whole(rng, 4, 4)
    weights = whole(rng, 64)

    def f(x, w):
        results = fn(x @ w, x)
        leaves = [leaf for leaf in jax.tree.leaves(results) if leaf.dtype == F32]
        products = [leaf * weights[: leaf.size].reshape(leaf.shape) for leaf in leaves]
        return sum(p.sum() for p in products) if operation in DIFFERENTIATED else 0.0, results

    def transform(f):
        grad = jax.grad(f, (0, 1), has_aux=True)
        return grad if operation in DIFFERENTIATED else lambda *args: f(*args)[1]

    check_sides(transform, f, *args, tolerance=0)
    assert_ran(jmpx.autocast(lambda x, w: fn(x @ w, x)), *args, **{operation: dtypes})
