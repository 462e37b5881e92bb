"""What is traced again, what is kept, and what is freed."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, assert_same_bits
from helpers.autocast import assert_near, assert_ran, check, dtypes_of, eleven, seven
from jax import lax

import jmpx

# Other tests are about these warnings.
pytestmark = pytest.mark.filterwarnings(
    "ignore:JAX cannot trace", "ignore:No product runs in 16 bits"
)


def test_a_jitted_function_is_called_often_and_in_several_dtypes(pair):
    @jax.jit
    def shared(x, w):
        return x @ w

    def many(x, w):
        low = shared(x.astype(BF16), w.astype(BF16))
        return (
            shared(x, w),
            shared(w, x),
            shared(shared(x, w), w),
            low,
            shared(x.astype(F16), w.astype(F16)),
            shared(x, w),
        )

    check(many, *pair, dot_general="bfloat16 float16")
    cast = jmpx.autocast(lambda x, w: shared(x, w) + shared(w, x))
    calls = [e for e in jax.make_jaxpr(cast)(*pair).eqns if e.params.get("name") == "shared"]
    assert len(calls) == 2 and calls[0].params["jaxpr"] is calls[1].params["jaxpr"]
    outside = jax.jit(jmpx.autocast(shared))
    for dtype in (F32, BF16, F16, jnp.int32, F32):
        assert jax.eval_shape(outside, *(v.astype(dtype) for v in pair)).dtype == dtype


def test_what_changed_since_the_last_call_is_seen(pair):
    state = {"scale": 1.0}
    cast = jmpx.autocast(lambda x, w: (x @ w) * state["scale"])
    before = cast(*pair)
    state["scale"] = 3.0
    assert_near(cast(*pair), 3 * before)
    assert_ran(cast, *pair, dot_general="bfloat16")
    inner = jax.jit(jnp.matmul)
    cast = jmpx.autocast(lambda x, w: inner(x, w))
    assert_ran(cast, *pair, dot_general="bfloat16")
    with jax.default_matmul_precision("highest"):
        assert_ran(cast, *pair, dot_general="float32")
        assert_same_bits(jax.jit(cast)(*pair), jax.jit(lambda x, w: inner(x, w))(*pair))
    assert_ran(cast, *pair, dot_general="bfloat16")


def many_things(x, w):
    """jit, scan, cond, custom rules, a checkpoint and a mask in one function."""

    @jax.jit
    def layer(x):
        return jax.nn.relu(x @ w)

    x, _ = lax.scan(lambda c, _: (jax.checkpoint(layer)(c), None), x, None, length=2)
    x = lax.cond(x[0, 0] > 0, lambda: seven(x, w), lambda: eleven(x, w))
    return jnp.where(w > 0, x, -1e9).sum()


SIDES = {
    "inside": jax.grad(jmpx.autocast(many_things)),
    "outside": jmpx.autocast(jax.grad(many_things)),
}


@pytest.mark.parametrize("side", SIDES)
def test_no_tracer_leaks(pair, side):
    gc.freeze()  # the search for leaks collects garbage at each trace: only that of this test
    try:
        with jax.checking_leaks():
            assert "bfloat16" in dtypes_of(SIDES[side], *pair)["dot_general"]
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("side", SIDES)
def test_jax_checks_its_own_invariants(pair, side):
    with jax.enable_checks(True):
        assert "bfloat16" in dtypes_of(SIDES[side], *pair)["dot_general"]


def relu_of_a_product(x, captured):
    return jax.nn.relu(x @ captured)


def callback_with(x, captured):
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda h: h * np.asarray(captured), spec, x @ x)


@pytest.mark.thorough
@pytest.mark.parametrize("f", [relu_of_a_product, callback_with])
def test_what_a_function_captured_is_freed(pair, f):
    def call():
        captured = jnp.array(pair[1])
        inner = jax.jit(lambda x: f(x, captured))
        jax.jit(jmpx.autocast(inner))(pair[0])
        return weakref.ref(captured)

    captured = call()
    gc.collect()
    assert captured() is None


def test_a_captured_constant_stays_a_constant(pair):
    big = np.ones((4, 1000), np.float32)
    x, _ = pair
    result = check(lambda x: jax.jit(lambda x: x @ big + x @ jnp.asarray(big))(x), x)
    assert result.shape == (4, 1000)
    assert "1.0, 1.0" not in str(jax.make_jaxpr(jmpx.autocast(lambda x: x @ big))(x))
