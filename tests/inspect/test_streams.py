"""Leaks through several modules, and leaks of a whole step: what is found, and how large it is."""

import math

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.leaky import WIDTH, W, X, findings, line_of, loss_of, seen, shape

import jmpx
import jmpx.equinox
import jmpx.haiku

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F32 = jnp.bfloat16, jnp.float32


# Streams in float32, which blocks widen.


class Block(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x + rms_norm(x).astype(BF16) @ self.w


class Stream(eqx.Module):
    blocks: list

    def __call__(self, x):
        x = x.astype(F32)  # <-
        for block in self.blocks:
            x = block(x)
        return x.astype(BF16) @ self.blocks[0].w


class Router(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jax.nn.softmax((x @ self.w).astype(F32))  # <-


class Experts(eqx.Module):
    router: Router
    expert: Block

    def __call__(self, x):
        x = x + self.router(x)[..., :1] * self.expert(x)
        return x @ self.expert.w


def rms_norm(x):
    wide = x.astype(F32)
    return wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("make", "cls", "products"),
    [
        (lambda block: Stream([block] * 3), Stream, 0),
        (lambda block: Experts(Router(block.w), block), Router, 1),
    ],
)
def test_float32_that_widens_other_modules(make, cls, products):
    model = make(Block(jnp.ones(W.shape, BF16)))
    found = findings(lambda model, x: loss_of(model(x)), model, shape(X, BF16))
    assert seen(__file__, found) == [(line_of(cls), "promotion")]
    assert found[0].flops == products * 3 * flops_of_product()


def flops_of_product():
    return 2 * math.prod(X.shape) * WIDTH


@pytest.mark.parametrize("length", [1, 5])
def test_flops_are_those_of_both_passes(length):
    def loss(w, half, x):
        def body(x, _):
            return (x * np.float32(2) @ half).astype(BF16) @ w.astype(BF16), None

        return loss_of(jax.lax.scan(body, x, None, length=length)[0])

    (found,) = findings(loss, W, shape(W, BF16), shape(X, BF16))
    # The gradient is in `w` alone, so that of `half` is not computed.
    assert found.flops == length * 2 * flops_of_product()
    assert found.count == length


def test_a_step_in_float32_may_have_some_16_bits():
    def loss(w, x):
        scores = (x @ w.astype(BF16)).astype(F32)
        return loss_of(jnp.tanh(jnp.tanh(scores @ w) @ w) @ w)

    assert findings(loss, W, shape(X, BF16)) == ()


def test_a_gradient_function_that_casts_before_an_adapter():
    def step(model, scale, x):
        def loss(model, x):
            return loss_of(jmpx.equinox.with_policies(model, "c=bf16,o=f32")(x))

        return jmpx.filter_value_and_grad(loss, scale, policy="c=f16")(model, x)  # casts here

    model = Router(jnp.ones(W.shape))
    with pytest.warns(UserWarning, match="cast its arguments"):
        found = findings(step, model, jmpx.DynamicLossScale(jnp.float32(1024)), X)
    assert "double-rounding" in {finding.name for finding in found}


def test_parameters_stored_in_another_16_bit_dtype():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(WIDTH)(x)))
    params = jax.eval_shape(network.init, jax.random.key(0), X)
    params = jax.tree.map(lambda leaf: shape(leaf, BF16), params)

    def loss(params, x):
        with jmpx.haiku.policies("p=bf16,c=f16,o=f32"):
            return loss_of(network.apply(params, x))

    (found,) = findings(loss, params, X)
    assert (found.name, found.count) == ("double-rounding", 2)
    assert "params['linear']" in found.message


def test_convolution():
    def loss(kernel, x):
        for _ in range(2):
            x = convolved(x, kernel.astype(BF16))
        x = jnp.tanh(x.astype(F32))
        return loss_of(convolved(x, kernel))

    kernel = jax.ShapeDtypeStruct((3, WIDTH, WIDTH), F32)
    (found,) = findings(loss, kernel, shape(X, BF16))
    assert found.name == "float32-product"
    assert found.message.startswith("A convolution")
    taps = 2 + 3 + 2  # of the kernel, at the three places of the inputs
    assert found.flops == 3 * 2 * X.shape[0] * taps * WIDTH**2


def convolved(x, kernel):
    names = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=names)
