"""Gradient functions warn of float16 without a loss scale, and of a loss scale without float16."""

import warnings

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal, warns_once

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
import jmpx.mpx as mpx

NO_SCALE = "computes in float16 without a loss scale, .* jmpx.DynamicLossScale.. "
NO_FLOAT16 = "has a dynamic loss scale, and nothing in it runs in float16: "
STATIC, NOOP = jmpx.StaticLossScale(1), jmpx.NoOpLossScale()
pytestmark = [
    pytest.mark.filterwarnings(f"error:The gradient function {words}:UserWarning")
    for words in ("computes in float16", "has a dynamic")
]


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


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_dynamic_scale_where_nothing_casts(microbatches, wrap, arguments):
    options = {"policy": "full", "batch": jmpx.Batch(microbatches=microbatches)}

    def loss(w, x):
        return loss_fn(w, x)

    def step(w, x, scale):
        return tuple(jmpx.filter_grad(loss, scale, **options)(w, x))

    def other(w, x):
        return loss_fn(w, x)

    with warns_once(__file__, NO_FLOAT16):
        wrap(step)(*arguments, dynamic())
    for scale in (STATIC, NOOP):
        jmpx.filter_grad(other, scale, **options)(*arguments)
    jmpx.filter_grad(other, dynamic(), policy="c=f16")(*arguments)


def by_hand(w, x):
    return loss_fn(w.astype(jnp.float16), x.astype(jnp.float16))


CASTS = {
    "by hand": by_hand,
    "by hand in jit": lambda w, x: jax.jit(by_hand)(w, x),
    "by hand in a checkpoint": lambda w, x: jax.checkpoint(by_hand)(w, x),
    "by hand in a scan": lambda w, x: jax.lax.scan(lambda c, x: (c, by_hand(w, x)), 0, x[None])[1][
        0
    ],
    "cast_function": lambda w, x: jmpx.mpx.cast_function(loss_fn, jnp.float16, jnp.float32)(w, x),
    "autocast": lambda w, x: loss_fn(*jmpx.autocast(lambda w, x: (w * 1.0, x), "c=f16")(w, x)),
    "equinox": lambda w, x: jnp.mean(jax.vmap(jmpx.equinox.with_policies(w, "c=f16,o=f32"))(x)),
    "nnx": lambda w, x: jnp.mean(jmpx.flax.with_policies(w, "c=f16,o=f32")(x)),
    "haiku": lambda w, x: jnp.mean(NETWORK.apply(w, None, x)),
}
NETWORK = hk.transform(lambda x: hk.Linear(2)(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASTS)
def test_whatever_casts_inside_is_seen(name, arguments, standard_promotion):
    w, x = arguments
    if name == "equinox":
        w = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    if name == "nnx":
        w = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    if name == "haiku":
        w = NETWORK.init(jax.random.key(0), x)
    for _ in range(2):
        with jmpx.push_policy(hk.Linear, "c=f16,o=f32"):
            jmpx.filter_grad(CASTS[name], dynamic(), policy="full")(w, x)


def test_parameters_in_16_bits_are_seen(arguments):
    w, x = jmpx.cast_tree(arguments, jnp.float16)
    jmpx.filter_grad(lambda w, x: loss_fn(w, x), dynamic(), policy="full")(w, x)


def test_the_look_breaks_nothing(arguments):
    """A function that only runs once, or not with tracers, runs as it would without the look."""
    calls = []

    def once(w, x):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("called again")
        return loss_fn(w, x)

    def concrete(w, x):
        return loss_fn(w, x) if w.sum() > -1e9 else x.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for func in (once, concrete):
            assert jmpx.filter_grad(func, dynamic(), policy="full")(*arguments).grads_finite
