"""Operations that run as they were traced: integers, keys, callbacks, kernels, references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, assert_same_bits, enable_x64
from helpers.autocast import assert_near, assert_ran, dtypes_of, values, whole
from helpers.jaxprs import equations_of
from jax import lax
from jax.experimental import io_callback, pallas as pl

import jmpx


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


def of_16_bits(x, dtype):
    h = x.astype(dtype)
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
        jax.random.key_data(keys[0]),
        jax.random.bits(key),
    )


UNTOUCHED = {
    "integers": of_integers,
    "complex": of_complex,
    "fp8": of_fp8,
    "bfloat16": lambda x: of_16_bits(x, BF16),
    "float16": lambda x: of_16_bits(x, F16),
    "bits": lambda x: (
        lax.bitcast_convert_type(x, jnp.int32),
        jnp.nextafter(x, 9.0),
        lax.reduce_precision(x, 5, 3),
    ),
    "highest": lambda x: jnp.matmul(x, x, precision="highest"),
    "high": lambda x: jnp.matmul(x, x, precision=lax.Precision.HIGH),
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


def test_dropout_draws_the_same_mask(pair):
    def f(key, x, w):
        h = x @ w
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        noise = jax.random.normal(key, h.shape)
        return jnp.where(keep, h / 0.5, 0) + 0.1 * noise, keep, noise, jax.random.key_data(key)

    cast = jmpx.autocast(f)
    result, reference = values((jax.random.key(1), *pair), cast, f)
    assert_same_bits(result[1:], reference[1:])
    assert_near(result, reference)
    assert_ran(cast, jax.random.key(1), *pair, dot_general="bfloat16")


def assert_float32(x):
    assert x.dtype == np.float32, f"the user's function was called with {x.dtype}"
    return x


def with_pallas(h):
    def kernel(x_ref, o_ref):
        assert x_ref.dtype == F32
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(h.shape, F32), interpret=True)(h)


def with_pure_callback(h):
    return jax.pure_callback(assert_float32, jax.ShapeDtypeStruct(h.shape, F32), h)


def with_io_callback(h):
    return io_callback(assert_float32, jax.ShapeDtypeStruct(h.shape, F32), h, ordered=True)


def with_a_ref(h):
    ref = jax.new_ref(h)
    ref[0] += 2 * h[1]
    ref[1, :2] = h[0, :2]
    return ref[...] + h


def with_refs_in_a_scan(h):
    ref, count = jax.new_ref(jnp.zeros_like(h)), jax.new_ref(jnp.array(0))

    def body(c, row):
        ref[...] += row * c
        count[...] += 1
        return c @ jnp.eye(4, dtype=F32), row

    c, rows = lax.scan(body, h, h)
    return ref[...], count[...], c, rows


def with_linear_call(h):
    return jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, x: r.T @ x, h, h)


AS_TRACED = {
    "pallas": with_pallas,
    "pure_callback": with_pure_callback,
    "io_callback": with_io_callback,
    "ref": with_a_ref,
    "refs in a scan": with_refs_in_a_scan,
    "linear_call": with_linear_call,
}


@pytest.mark.filterwarnings("ignore:JAX cannot trace")  # other tests are about that
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", AS_TRACED)
def test_what_keeps_its_dtypes_gets_float32(rng, name):
    w, x = (jnp.clip(whole(rng, 4, 4), -1, 1) for _ in range(2))
    cast = jmpx.autocast(lambda x, w: AS_TRACED[name](x @ w))
    assert_same_bits(*values((x, w), cast, lambda x, w: AS_TRACED[name](x @ w)))
    assert "bfloat16" in dtypes_of(cast, x, w)["dot_general"]


def test_effects_keep_their_order(pair, capsys):
    seen, written = [], []

    def f(x, w):
        h = x @ w
        jax.debug.callback(lambda v: seen.append(v.dtype.name), h, ordered=True)
        io_callback(lambda v: written.append(v.dtype.name), None, h, ordered=True)

        def body(c, n):
            jax.debug.callback(lambda n: seen.append(int(n)), n, ordered=True)
            return c @ w, None

        h, _ = lax.scan(body, h, np.arange(3))
        jax.debug.print("after {}", h.astype(int)[0, 0] * 0, ordered=True)
        io_callback(lambda: written.append("end"), None, ordered=True)
        return h

    for g in (jax.jit(f), jmpx.autocast(f), jax.jit(jmpx.autocast(f))):
        seen.clear()
        written.clear()
        jax.block_until_ready(g(*pair))
        jax.effects_barrier()
        assert seen == ["float32", 0, 1, 2]
        assert written == ["float32", "end"]
    assert capsys.readouterr().out == "after 0\n" * 3
    assert_ran(jmpx.autocast(f), *pair, dot_general="bfloat16")
