"""Gradient functions warn of float16 without a loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, warns_once

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
import jmpx.mpx as mpx

NO_SCALE = "computes in float16 without a loss scale, .* jmpx.DynamicLossScale.. "
STATIC, NOOP = jmpx.StaticLossScale(1), jmpx.NoOpLossScale()
pytestmark = pytest.mark.filterwarnings(
    "error:The gradient function computes in float16:UserWarning"
)


def dynamic():
    return jmpx.DynamicLossScale(2.0**10)


def loss_fn(w, x):
    return jnp.mean((x @ w).astype(jnp.float32) ** 2)


@pytest.fixture
def arguments(rng):
    return normal(rng, 3, 2), normal(rng, 4, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("policy", ["c=f16", "16-mixed", jnp.float16, "float16"])
def test_float16_without_a_loss_scale(policy, wrap, arguments):
    make = lambda scale: jmpx.filter_value_and_grad(loss_fn, scale, policy=policy)  # noqa: E731
    step = wrap(lambda w, x: tuple(make(NOOP)(w, x)))
    with warns_once(__file__, NO_SCALE):
        value, _, _, grads = step(*arguments)
    for scale in (STATIC, dynamic()):  # what the warning says to write is silent
        same = make(scale)(*arguments)
        if scale is STATIC:
            np.testing.assert_array_equal(same.grads, grads)
            np.testing.assert_array_equal(same.value, value)


@pytest.mark.parametrize("policy", ["c=f16; Linear: full", "c=bf16; Linear: f16"])
def test_maps_that_compute_in_float16(policy, arguments):
    def loss(w, x):
        return loss_fn(*jmpx.autocast(lambda w, x: (w * 1.0, x), "c=f16")(w, x))

    with pytest.warns(UserWarning) as caught:
        jmpx.filter_grad(loss, NOOP, policy=policy)(*arguments)
    assert any("in float16 without a loss scale" in str(w.message) for w in caught)


@pytest.mark.parametrize("policy", ["c=bf16", "full", "params=f16,c=f32,o=f16"])
def test_other_policies_need_no_scale(policy, arguments):
    jmpx.filter_grad(loss_fn, NOOP, policy=policy)(*arguments)
    off = mpx.filter_grad(loss_fn, NOOP, use_mixed_precision=False, policy="c=f16")
    off(*arguments)
