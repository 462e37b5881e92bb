"""Float32 that a norm, a rule or complex numbers ask for is no leak; one behind it is."""

import functools
import itertools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32
from helpers.findings_of import found, line_of, shape
from helpers.zoo import build
from jax import lax

import jmpx
import jmpx.flax

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]

WIDTH = 8


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)


def wide_rms_norm(x):
    wide = x.astype(F32)
    return wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)


def rms_norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def with_running_statistics(x):
    mean, variance = np.random.default_rng(0).uniform(1, 2, (2, WIDTH)).astype(F32)
    return (x - jnp.asarray(mean)) * lax.rsqrt(jnp.asarray(variance) + 1e-6)


EQUINOX = [eqx.nn.LayerNorm, eqx.nn.RMSNorm, functools.partial(eqx.nn.GroupNorm, 2)]
NNX = [nnx.LayerNorm, nnx.RMSNorm, functools.partial(nnx.BatchNorm, use_running_average=True)]
# Functions of the maker of a model's layers and of a `dtype` field, which return norms.
NORMS = {
    "linen": lambda m, dtype: [
        *(cls(dtype=dtype) for cls in (nn.LayerNorm, nn.RMSNorm)),
        nn.LayerNorm(dtype=dtype, use_fast_variance=False, use_scale=False, use_bias=False),
        nn.GroupNorm(2, dtype=dtype),
        nn.BatchNorm(True, dtype=dtype),
    ],
    "haiku": lambda m, dtype: [hk.LayerNorm(-1, True, True), hk.RMSNorm(-1)],
    "nnx": lambda m, dtype: [
        m.get(f"norm_{i}", lambda norm=norm: norm(WIDTH, dtype=dtype, rngs=nnx.Rngs(0)))
        for i, norm in enumerate(NNX)
    ],
    "equinox": lambda m, dtype: [
        jax.vmap(jax.vmap(m.get(f"norm_{i}", lambda norm=norm: norm(WIDTH))))
        for i, norm in enumerate(EQUINOX)
    ],
    "by hand": lambda m, dtype: [layer_norm, wide_rms_norm, rms_norm, with_running_statistics],
}


def model_of(framework, field, between=lambda x: x):
    """A loss of a model with a residual block for each norm, and its arguments."""

    def body(m, x):
        x = m.linear("first", WIDTH)(x)
        for i, norm in enumerate(NORMS[framework](m, field)):
            y = between(norm(x).astype(x.dtype)).astype(x.dtype)
            x = x + m.linear(f"down_{i}", WIDTH)(jax.nn.gelu(m.linear(f"up_{i}", 2 * WIDTH)(y)))
        return m.linear("last", WIDTH)(x)

    made_in = "haiku" if framework == "by hand" else framework
    net = build(made_in, body, jnp.ones((2, 3, WIDTH)), rng=np.random.default_rng(0))
    return lambda model, x: jnp.mean(net.apply(model, x).astype(F32) ** 2), net.model


def run(framework, policy, field, **options):
    """The findings but those on roots in 16 bits."""
    loss, model = model_of(framework, field, **options)
    x = shape(2, 3, WIDTH)
    if policy is None:
        findings = found(loss, *jmpx.cast_tree((model, x), BF16))
    else:
        findings = found(jmpx.apply_policy(loss, policy), model, x)
    return [each for each in findings if each.name != "low-exp"]


POLICIES = ["c=bf16", "c=f16", "by=modules,c=bf16", "by=arguments,c=bf16", None]
CASES = [
    (framework, policy, field)
    for framework, policy, field in itertools.product(NORMS, POLICIES, [None, F32])
    if field is None or framework in ("linen", "nnx")
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("framework, policy, field", CASES)
def test_norms_are_no_leaks(framework, policy, field):
    findings = run(framework, policy, field)
    assert [each for each in findings if each.severity != "low"] == []


def planted(x):
    wide = x * np.float32(3)  # <-
    return x + (wide @ wide.swapaxes(-1, -2) @ wide).astype(x.dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("framework", NORMS)
@pytest.mark.parametrize("policy", [each for each in POLICIES if each not in ("c=bf16", "c=f16")])
def test_a_leak_behind_a_norm_is_found(framework, policy):
    findings = run(framework, policy, None, between=planted)
    lines = {(each.name, each.place.line) for each in findings if each.severity != "low"}
    assert lines == {("promotion", line_of(planted))}


# Float32 behind a norm that autocast or a rule asks for, and that 16 bits cannot replace.


def modulated(w, x):
    """A norm whose result another function scales, as in a diffusion transformer."""
    gate, shift = jnp.split(jnp.tanh(x @ w["wide"]), 2, axis=-1)
    with jax.named_scope("norm"):
        y = layer_norm(x @ w["square"])
    return (y * (1 + gate) + shift) @ w["square"]


def state_space(w, x):
    """A norm that complex matrices read, and whose result meets the real part of theirs."""
    y, b = layer_norm(x @ w["square"]), lax.complex(*jnp.split(w["wide"], 2, axis=-1))
    z = jnp.cumsum(y @ b * (0.5 + 0.1j), axis=1) @ b
    return (jax.nn.gelu(z.real + jnp.abs(z) + y * w["skip"]) @ w["square"]) @ w["square"]


WEIGHTS = {
    "square": shape(WIDTH, WIDTH),
    "wide": shape(WIDTH, 2 * WIDTH),
    "skip": shape(WIDTH),
}


@pytest.mark.parametrize("policy", ["c=bf16", "c=f16"])
@pytest.mark.parametrize("body", [modulated, state_space])
def test_what_autocast_computes_in_float32_is_no_leak(body, policy):
    loss = jmpx.apply_policy(lambda w, x: jnp.mean(body(w, x) ** 2), policy)
    assert found(loss, WEIGHTS, shape(2, 16, WIDTH)) == []


def test_parts_of_complex_numbers_are_saved_in_float32():
    def loss(w, x):
        h = x @ w["square"]
        for _ in range(3):
            re, im = (jnp.sin(h.astype(F32)), jnp.cos(h.astype(F32)))
            z = jnp.fft.fft(lax.complex(re, im))
            h = jnp.tanh(z.real * h).astype(BF16) @ w["square"]
        return jnp.mean(h.astype(F32) ** 2)

    args = jmpx.cast_tree((WEIGHTS, shape(2, 16, WIDTH)), BF16)
    assert found(loss, *args, names=("saved-float32", "promotion")) == []


@pytest.mark.parametrize("framework", ["haiku", "linen", "nnx", "equinox"])
@pytest.mark.parametrize(
    "rule, severities", [("*/head: product=f32", []), ("*/head: c=f32,o=f32", ["low"])]
)
def test_a_rule_that_rounds_between_a_norm_and_a_head(framework, rule, severities):
    """The head multiplies in 16 bits; or it computes in float32, as its own rule says."""

    def body(m, x):
        return m.linear("head", 50)(m.norm("norm")(m.linear("hidden", WIDTH)(x)))

    net = build(framework, body, np.ones((2, 5, WIDTH)), rng=np.random.default_rng(0))
    apply = net.under(f"c=bf16,o=f32; LayerNorm: full; {rule}")
    loss = lambda model, x: jnp.mean(jax.nn.logsumexp(jnp.asarray(apply(model, x)), -1))  # noqa: E731
    findings = found(loss, net.model, shape(2, 5, WIDTH))
    assert [each.severity for each in findings] == severities
    assert {each.name for each in findings} <= {"cast-to-and-fro"}


# Float32 in the backward pass alone: the advice names what is written there.

OPTIONS: dict[str, Any] = {"preferred_element_type": F32}


def summed(w, x):
    y = jnp.einsum(
        "btd,de->bte",
        x,
        w,
        preferred_element_type=F32,
    )
    return jnp.mean((y.astype(BF16) @ w).astype(F32) ** 2)


def summed_by_options(w, x):
    y = jnp.matmul(x, w, **OPTIONS)
    return jnp.mean((y.astype(BF16) @ w).astype(F32) ** 2)


@jax.custom_vjp
def product(x, w):
    return x @ w


def of_product(kept, y):
    x, w = (each.astype(F32) for each in kept)
    dw = jnp.einsum("btd,bte->de", x, y.astype(F32))
    return (y.astype(F32) @ w.T).astype(BF16), dw.astype(BF16)


product.defvjp(lambda x, w: (x @ w, (x, w)), of_product)


@pytest.mark.parametrize(
    "loss, advice",
    [
        (summed, "leave out preferred_element_type, and cast"),
        (summed_by_options, "have it return bfloat16, and cast"),
        (lambda w, x: jnp.mean((product(x, w) @ w).astype(F32)), "cast its operands with"),
    ],
)
def test_advice_on_a_backward_pass_names_what_is_written(loss, advice):
    (finding,) = found(loss, shape(WIDTH, WIDTH, dtype=BF16), shape(2, 3, WIDTH, dtype=BF16))
    assert finding.name in ("mixed-product", "float32-product")
    assert finding.advice.startswith(advice)
