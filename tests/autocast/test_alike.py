"""Pieces that are alike share the function under their checkpoint, and others do not."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, normal
from helpers.jaxprs import equations, trace

import jmpx

LAYERS = 6


def block(x, w, i):
    del i
    return x + jnp.tanh(x @ w) @ w


def with_own_number(x, w, i):
    return x + jnp.tanh(x @ w * [1.5, -0.0, 0.0, 0.25, 3.0, 0.1][i]) @ w


def with_own_constant(x, w, i):
    return x + jnp.tanh(x @ w + np.full(8, i, np.float32)) @ w


def with_a_jitted_constant(x, w, i):
    bias = jnp.full(8, float(i))
    return x + jax.jit(lambda x: jnp.tanh(x + bias))(x @ w) @ w


def with_own_derivative(x, w, i):
    @jax.custom_jvp
    def scaled(x):
        return jnp.sin(x)

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * i))
    return x + scaled(x @ w) @ w


def with_own_scope(x, w, i):
    with jax.named_scope("wide" if i % 2 else "low"):
        return x + jnp.tanh(x @ w) @ w


def with_an_output_read_later(x, w, i):
    return block(x, w, i) if i else block(x, w, i) + w[0]


def layered(block, x, ws):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = block(x, w, i)
    return x


@pytest.fixture
def arrays(rng):
    return normal(rng, 4, 8), [normal(rng, 8, 8) / 4 for _ in range(LAYERS)]


def shared(fn, *args, policy="c=bf16"):
    """Returns how many pieces there are, and how many functions they share."""
    found = equations(trace(jmpx.autocast(fn, policy, save="products"), *args))
    remats = [id(eqn.params["jaxpr"]) for eqn in found if eqn.primitive.name == "remat2"]
    return len(remats), len(set(remats))


def test_equal_layers_are_one_function(arrays):
    count, functions = shared(functools.partial(layered, block), *arrays)
    assert count >= LAYERS
    assert functions <= 4  # the first, whose input is no activation; the second; the others


@pytest.mark.parametrize(
    "block",
    [
        with_own_number,
        with_own_constant,
        with_a_jitted_constant,
        with_own_derivative,
        with_own_scope,
        with_an_output_read_later,
    ],
)
def test_what_differs_is_not_shared(arrays, block):
    def loss(ws, **options):
        cast = jmpx.autocast(functools.partial(layered, block), "c=bf16; layer_3: full", **options)
        return jnp.square(cast(arrays[0], ws)).sum()

    grads = jax.grad(functools.partial(loss, save="products"))(arrays[1])
    assert_same_bits(grads, jax.grad(loss)(arrays[1]))


def test_each_layer_keeps_its_name_and_its_line(arrays):
    fn = jmpx.autocast(functools.partial(layered, block), save="products")
    text = jax.jit(jax.grad(lambda x, ws: fn(x, ws).sum())).lower(*arrays).as_text(debug_info=True)
    assert all(f"layer_{i}/" in text or f"layer_{i})" in text for i in range(LAYERS))

    def by_hand(x, w):
        x = block(x, w, 0)
        x = block(x, w, 1)
        return block(x, w, 2)

    functions = shared(by_hand, arrays[0], arrays[1][0])
    assert functions[0] == functions[1]  # their lines differ


def test_no_array_is_kept(arrays):
    x, ws = arrays
    fn = jmpx.autocast(functools.partial(layered, block), save="products")
    jax.grad(lambda ws: fn(x, ws).sum())(ws)
    kept = [weakref.ref(w) for w in ws]
    ws.clear()
    gc.collect()
    assert all(ref() is None for ref in kept)
