"""Which operation runs in which dtype, on a product and beside one, and what stays as traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, assert_same_bits, dtypes, enable_x64, normal
from helpers.autocast import assert_ran, check_sides, dtypes_of, rows, values, whole
from helpers.jaxprs import equations_of
from jax import lax
from jax.experimental import io_callback

import jmpx


def gate(h):
    return h[::-1] * jnp.tanh(h)


OPERATIONS = {
    "bfloat16": [
        gate,
        jax.nn.gelu,
        jnp.sqrt,
        lambda h: h**2,
        lambda h: h / 3 - 1,
        lambda h: h + jnp.arange(h.shape[1], dtype=jnp.float32),
        lambda h: h + jnp.exp(jnp.arange(h.shape[1]).astype(jnp.float32)),
        lambda h: h * jax.random.normal(jax.random.key(0), h.shape),
        lambda h: lax.cond(h[0, 0] > 0, gate, jnp.abs, h),
        lambda h: jax.jit(jax.checkpoint(gate))(h),
    ],
    "float32": [
        jnp.exp,
        jnp.tanh,  # the last operation: a loss outside may read its distance from 1
        lambda h: jnp.log(jnp.abs(h) + 1.0),
        lambda h: jnp.abs(h) ** 1.5,
        jnp.sum,
        lambda h: lax.rsqrt(jnp.abs(h) + 1.0),
        jax.nn.softmax,
        lambda h: jnp.linalg.norm(h),
        lambda h: lax.erf_inv(jnp.tanh(h)),
        lambda h: lax.cond(h[0, 0] > 0, jnp.tanh, jnp.exp, h),
        lambda h: lax.fori_loop(0, 3, lambda _, c: c + h[0], jnp.zeros(h.shape[1])),
    ],
}


@pytest.mark.parametrize(
    "op, dtype", [(op, dtype) for dtype, ops in OPERATIONS.items() for op in ops]
)
def test_classes_of_operations(pair, op, dtype):
    f = lambda w, x: op(x @ w)  # noqa: E731
    assert jax.eval_shape(jmpx.autocast(f, output=None), *pair).dtype == dtype


def test_inputs_and_constants_yield_to_what_a_product_made(rng):
    w, b, x = normal(rng, 3, 2), normal(rng, 2), normal(rng, 4, 3)
    table = normal(rng, 4, 2)

    @jmpx.autocast(output=None)
    def f(w, b, x):
        h = x @ w + b  # a float32 input
        h = h * jnp.float32(0.5) + table  # a constant, a closed-over array
        h = h + jnp.sin(jnp.exp(-jnp.arange(2.0)))  # what was computed of constants alone
        return h, b + 1.0, h + jnp.exp(h)

    activation, alone, statistic = jax.eval_shape(f, w, b, x)
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
    f = jnp.tanh
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
LOW, FULL = "bfloat16", "float32"
EXACT = {
    "sort": (
        lambda h, x: lax.sort((h, x, jnp.arange(16).reshape(4, 4)), num_keys=1),
        *("sort", "bfloat16 float32"),
    ),
    "set": (lambda h, x: h.at[1].set(x[0]), "scatter", FULL),
    "add": (lambda h, x: h.at[INDEX].add(x[:2]), "scatter_add", FULL),
    "max": (lambda h, x: h.at[INDEX].max(x[:2]), "scatter_max", FULL),
    "gather": (lambda h, x: h[INDEX], "gather", LOW),
    "dynamic_update_slice": (
        lambda h, x: lax.dynamic_update_slice(x, h[:2], (1, INDEX[1])),
        *("dynamic_update_slice", LOW),
    ),
    "concatenate": (lambda h, x: jnp.concatenate([h, x]), "concatenate", LOW),
    "pad": (lambda h, x: jnp.pad(h, 1), "pad", LOW),
    "clip": (lambda h, x: jnp.clip(h, -2, x), "max", LOW),
    "where": (lambda h, x: jnp.where(x > 0, h, x), "select_n", LOW),
    "cumsum": (lambda h, x: jnp.cumsum(h, 0), "cumsum", FULL),
    "cummax": (lambda h, x: lax.cummax(h), "cummax", LOW),
    "max_pool": (lambda h, x: pool(h, -np.inf, lax.max), "reduce_window_max", LOW),
    "avg_pool": (lambda h, x: pool(h, 0, lax.add), "reduce_window_sum", FULL),
    "convolution": (convolve, "conv_general_dilated", LOW),
    "ragged_dot": (
        lambda h, x: lax.ragged_dot(h, jnp.stack([x, x.T]), jnp.array([1, 3])),
        *("ragged_dot_general", LOW),
    ),
    "reduce by a function": (reduce_by_hand, "reduce", FULL),
    "associative_scan": (lambda h, x: lax.associative_scan(jnp.add, h), "add", LOW),
    "barrier": (
        lambda h, x: lax.optimization_barrier((h, x)),
        *("optimization_barrier", "bfloat16 float32"),
    ),
    "device_put": (lambda h, x: jax.device_put(h, jax.devices()[0]), "device_put", LOW),
}


@pytest.mark.parametrize("name", EXACT)
def test_dtypes_of_operations_on_products(pair, name):
    fn, operation, dtypes = EXACT[name]
    assert_ran(jmpx.autocast(lambda x, w: fn(x @ w, x)), *pair, **{operation: dtypes})


def test_an_outer_product_of_activations_leaves_them_in_16_bits(rng):
    """As a product of numbers does: a rotary embedding by `einsum` is one."""
    x, w = whole(rng, 4, 4), whole(rng, 4, 4)
    f = jmpx.autocast(lambda x, w: jnp.einsum("ij,j->ij", x @ w, x[0]), output=None)
    assert "dot_general" in str(jax.make_jaxpr(f)(x, w).eqns[-2:])
    assert f(x, w).dtype == jnp.bfloat16
    np.testing.assert_array_equal(f(x, w).astype(F32), (x @ w) * x[0])


def test_a_scatter_that_combines_each_number_once_leaves_activations_in_16_bits(rng):
    """As `h * factor` and `h + term` do; with indices that may be equal, it is a sum of many."""

    @jmpx.autocast(output=None)
    def f(x, w):
        h = x @ w
        factors, terms = h.at[:, 0].multiply(-2), h.at[1].add(x[0])
        return factors, terms, h.at[1].subtract(x[0]), h.at[INDEX].add(x[:2])

    x, w = whole(rng, 4, 4), whole(rng, 4, 4)
    results = f(x, w)
    assert [r.dtype.name for r in results] == ["bfloat16"] * 3 + ["float32"]
    for result, expected in zip(results, f.__wrapped__(x, w), strict=True):
        np.testing.assert_array_equal(result.astype(F32), expected)

    large = jmpx.autocast(lambda x, w: (x @ w).at[:, 0].multiply(1e5), "f16", output=None)
    result, expected = large(x / 4096, w), (x @ w / 4096).at[:, 0].multiply(1e5)
    assert result.dtype == np.float16  # and the factor, which it does not hold, is not infinite
    np.testing.assert_allclose(result.astype(F32), expected, rtol=1e-3)


@pytest.mark.parametrize("name", rows(["sort", "max", "where", "ragged_dot"], "sort", "max"))
def test_values_of_operations_on_products(rng, name):
    """Their derivatives are operations of another kind, so that gradients are compared, too."""
    fn, _, _ = EXACT[name]
    args = whole(rng, 4, 4), whole(rng, 4, 4)
    weights = whole(rng, 64)

    def f(x, w):
        results = fn(x @ w, x)
        leaves = [leaf for leaf in jax.tree.leaves(results) if leaf.dtype == F32]
        products = [leaf * weights[: leaf.size].reshape(leaf.shape) for leaf in leaves]
        return sum(p.sum() for p in products), results

    check_sides(lambda f: jax.grad(f, (0, 1), has_aux=True), f, *args, tolerance=0)


# Operations that run as they were traced: integers, keys, callbacks, kernels, references.


def of_integers(x):
    n = x.astype(int)
    return n @ n, n // 2, n**2, n.sum(), n << 1, lax.dot(n, n, preferred_element_type=jnp.int32)


def of_complex(x):
    z = lax.complex(x, x)
    return z @ z, jnp.exp(z), jnp.abs(z), z.real


def of_fp8(x):
    low = x.astype(jnp.float8_e4m3fn)
    numbers = (((1,), (0,)), ((), ()))
    mixed = lax.dot_general(low, x, numbers, preferred_element_type=F32)
    return lax.dot_general(low, low, numbers, preferred_element_type=F32), mixed, low.astype(BF16)


def of_16_bits(x):
    h = x.astype(F16)
    wide = jnp.matmul(h, h, preferred_element_type=F32)
    return jnp.tanh(h @ h).sum(), wide, jnp.einsum("ij,kj->ik", h, h, preferred_element_type=F32)


def of_keys(key):
    keys = jax.random.split(jax.random.fold_in(key, 7), 7)
    return (
        jax.random.normal(keys[0], (3,)),
        jax.random.uniform(keys[1], (3,)),
        jax.random.truncated_normal(keys[2], -1.0, 1.0, (3,)),
        jax.random.bernoulli(keys[3], 0.3, (8,)),
        jax.random.gamma(keys[4], 2.0, (2,)),
        jax.random.permutation(keys[5], 8),
        jax.random.categorical(keys[6], jnp.arange(3.0, dtype=F32)),
        jax.random.bits(key),
    )


UNTOUCHED = {
    "integers": of_integers,
    "complex": of_complex,
    "fp8": of_fp8,
    "16 bits": of_16_bits,
    "bits": lambda x: (
        lax.bitcast_convert_type(x, jnp.int32),
        jnp.nextafter(x, 9.0),
        lax.reduce_precision(x, 5, 3),
    ),
    "high on one side": lambda x: lax.dot(x, x, precision=("default", "highest")),
    "an algorithm": lambda x: jnp.matmul(x, x, precision=lax.DotAlgorithmPreset.F32_F32_F32),
    "a convolution": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME", "highest"),
    "positions": lambda x: jnp.sin(jnp.einsum("i,j->ij", jnp.arange(4.0, dtype=F32), x[0])),
    "keys": lambda x: of_keys(jax.random.key(3)),
    "old keys": lambda x: of_keys(jax.random.PRNGKey(3)),
    "fft": lambda x: jnp.abs(jnp.fft.rfft(x)),
}


def steps(fn, *args):
    """The operations of `fn(*args)` in order, with what they take and return.

    Without casts to the same dtype, and calls, whose operations follow.
    """
    found = []
    for eqn in equations_of(fn, *args):
        avals = [str(v.aval).strip("~") for v in (*eqn.invars, *eqn.outvars)]
        is_cast = eqn.primitive.name == "convert_element_type"
        if eqn.primitive.name not in ("jit", "pjit") and not (is_cast and avals[0] == avals[1]):
            found.append((eqn.primitive.name, *avals))
    return found


@pytest.mark.parametrize("name", UNTOUCHED)
def test_operations_that_stay_as_they_are(pair, name):
    x, w = pair
    fn = UNTOUCHED[name]
    cast = steps(jmpx.autocast(lambda x: (fn(x), w @ w)), x)
    *plain, _ = steps(lambda x: (fn(x), w @ w), x)
    assert cast[: len(plain)] == plain  # the same operations on the same values: the same bits
    assert cast[len(plain) :] == [
        ("convert_element_type", "float32[4,4]", "bfloat16[4,4]"),
        ("dot_general", "bfloat16[4,4]", "bfloat16[4,4]", "bfloat16[4,4]"),
        ("convert_element_type", "bfloat16[4,4]", "float32[4,4]"),
    ]


def test_float64_stays(rng):
    def f(x):
        h = jnp.tanh(x @ x)
        scanned, _ = lax.scan(lambda c, _: (c @ x, None), x, None, length=2)
        return h.sum(), (jnp.exp(h), scanned)

    with enable_x64():
        x = jnp.asarray(rng.normal(size=(3, 3)))
        cast = jmpx.autocast(lambda x: (*f(x), x.astype(F32) @ x.astype(F32)))
        assert_ran(cast, x, dot_general="bfloat16 float64", tanh="float64", exp="float64")
        gradient = jax.grad(lambda x: cast(x)[:2], has_aux=True)
        assert_same_bits(*(jax.jit(g)(x) for g in (gradient, jax.grad(f, has_aux=True))))


def assert_float32(x):
    assert x.dtype == np.float32, f"the user's function was called with {x.dtype}"
    return x


def with_a_ref(h):
    ref = jax.new_ref(h)
    ref[0] += 2 * h[1]
    ref[1, :2] = h[0, :2]
    return ref[...] + h


def with_linear_call(h):
    return jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, x: r.T @ x, h, h)


def with_callbacks(h):
    shape = jax.ShapeDtypeStruct(h.shape, F32)
    h = jax.pure_callback(assert_float32, shape, h)
    return io_callback(assert_float32, shape, h, ordered=True)


AS_TRACED = {"callbacks": with_callbacks, "ref": with_a_ref, "linear_call": with_linear_call}


@pytest.mark.filterwarnings("ignore:JAX cannot trace")  # other tests are about that
@pytest.mark.parametrize("name", AS_TRACED)
def test_what_keeps_its_dtypes_gets_float32(rng, name):
    args = [jnp.clip(whole(rng, 4, 4), -1, 1) for _ in range(2)]
    plain = lambda x, w: AS_TRACED[name](x @ w)  # noqa: E731
    cast = jmpx.autocast(plain)
    assert_same_bits(*values(args, cast, plain))
    assert "bfloat16" in dtypes_of(cast, *args)["dot_general"]


def test_effects_keep_their_order(pair, capsys, log):
    def f(x, w):
        h = x @ w
        jax.debug.callback(lambda v: log.append(v.dtype.name), h, ordered=True)

        def body(c, n):
            io_callback(lambda n: log.append(int(n)), None, n, ordered=True)
            return c @ w, None

        h, _ = lax.scan(body, h, np.arange(3))
        jax.debug.print("after {}", h.astype(int)[0, 0] * 0, ordered=True)
        io_callback(lambda: log.append("end"), None, ordered=True)
        return h

    for g in (jax.jit(f), jmpx.autocast(f), jax.jit(jmpx.autocast(f))):
        log.clear()
        jax.block_until_ready(g(*pair))
        jax.effects_barrier()
        assert log == ["float32", 0, 1, 2, "end"]
    assert capsys.readouterr().out == "after 0\n" * 3
    assert_ran(jmpx.autocast(f), *pair, dot_general="bfloat16")


def test_a_product_of_high_precision_stays_wide_where_it_meets_one_of_16_bits(pair):
    def f(w, x):
        return lax.dot(x, w, precision=lax.Precision.HIGHEST) + x @ w

    assert jmpx.autocast(f, "c=bf16", output=None)(*pair).dtype == F32
