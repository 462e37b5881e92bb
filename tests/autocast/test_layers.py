"""Layers that follow each other are evaluated once: in the same dtypes, with the same bits.

Operations run one by one, so that XLA fuses none.
"""

import cProfile
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, normal
from helpers.autocast import rows
from helpers.op_by_op import one_by_one
from jax import lax

import jmpx
from jmpx._jaxprs import core

WIDTH = 8


def block(h, layer, i, wide=lambda x: x):
    """A pre-norm block, as long as one of a transformer."""
    centered = wide(h) - wide(h).mean(axis=-1, keepdims=True)
    normal = centered * lax.rsqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-6)
    x = normal.astype(h.dtype) * layer["scale"] + layer["b"]
    scores = jnp.where(jnp.tri(len(h), dtype=bool), wide(x @ x.T) * WIDTH**-0.5, -1e9)
    mixed = jax.nn.softmax(scores).astype(h.dtype) @ x
    return h + jax.nn.gelu(mixed @ layer["w"] + layer["b"])


def scaled(h, layer, i):
    """Layers that differ by a number of a weight: the third one is computed in float32."""
    return block(h, layer, i) * (1 + 2**-12 if i == 2 else 1.5)


def with_rule(h, layer, i):
    """Layers of which one has a rule of its own, by its scope."""
    with jax.named_scope(f"layer_{i}"):
        return block(h, layer, i)


def closed_over(h, layer, i):
    """Layers that read another constant array each."""
    return block(h * np.linspace(1, 1 + i, WIDTH, dtype=np.float32), layer, i)


def looped(h, layer, i):
    """Layers with a loop, a branch and a function with a derivative rule."""
    h, _ = lax.scan(lambda h, w: (jnp.sin(h @ layer["w"]) * w, None), h, jnp.ones(2))
    h = lax.cond(h[0, 0] < 1e30, lambda h: h @ layer["w"], jnp.cos, h)
    return block(jax.nn.relu(h), layer, i)


def program(layer_fn, shared=False, skip=False):
    """A loss of layers; their weights are one if they are `shared`; `skip` reads all results."""

    def loss_fn(params, x):
        h, kept = x @ params[0]["w"], []
        for i, layer in enumerate(params):
            h = layer_fn(h, params[0] if shared else layer, i)
            kept.append(h)
        return jnp.mean((jnp.stack(kept) if skip else h).astype(jnp.float32) ** 2)

    return loss_fn


CASES = {
    "block": (program(block), "c=bf16"),
    "block, float16": (program(block), "c=f16; op.exp: f16"),
    "shared": (program(block, shared=True), "c=bf16"),
    "skip": (program(block, skip=True), "c=bf16"),
    "number": (program(scaled), "c=bf16"),
    "rule": (program(with_rule), "c=bf16; layer_3: f32"),
    "constant": (program(closed_over), "c=bf16"),
    "looped": (program(looped, skip=True), "c=bf16"),
}


def arguments(rng, layers=4):
    layer = lambda: {"w": normal(rng, WIDTH, WIDTH), "b": normal(rng, WIDTH)}  # noqa: E731
    params = [layer() | {"scale": normal(rng, WIDTH)} for _ in range(layers)]
    return params, normal(rng, 4, WIDTH)


def calls(jaxpr):
    """The functions of layers that a jaxpr calls."""
    return [e.params["jaxpr"] for e in jaxpr.eqns if e.params.get("name") == "piece"]


@pytest.mark.parametrize("case", rows(CASES, "block", "rule"))
def test_layers_compute_what_they_compute_one_by_one(case, rng, monkeypatch):
    loss_fn, policy = CASES[case]
    params, x = arguments(rng)
    results = []
    for _ in range(2):
        applied = jmpx.apply_policy(lambda params, x: loss_fn(params, x), policy)
        traced = jax.make_jaxpr(applied)(params, x)
        found = calls(traced)
        assert bool(found) != bool(results)
        if found and case in ("block", "shared", "skip"):  # in others, layers differ
            assert len({id(jaxpr) for jaxpr in found}) < len(found)
        results.append(one_by_one(jax.value_and_grad(applied), params, x))
        monkeypatch.setattr(core, "is_traced", lambda: False)
    (value, grads), (expected, others) = results
    assert_same_bits(value, expected)
    for grad, other in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        # Cotangents of one array are summed in another order.
        scale = np.abs(other).max()
        np.testing.assert_allclose(grad / scale, other / scale, atol=2e-2)
        assert grad.dtype == np.float32


def test_a_deep_model_is_traced_in_hardly_more_calls_than_by_hand(rng):
    params, x = arguments(rng, layers=24)
    with_islands = program(functools.partial(block, wide=lambda x: x.astype(jnp.float32)))

    def by_hand(params, x):
        return with_islands(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x)))

    def python_calls(fn):
        profile = cProfile.Profile()
        for _ in range(2):  # the first time, JAX traces functions that it keeps
            traced = jax.jit(jax.value_and_grad(lambda *args: fn(*args))).trace
            with profile:
                traced(params, x)
            total = sum(entry.callcount for entry in profile.getstats())
            profile.clear()
        return total

    applied = jmpx.apply_policy(program(block), "c=bf16")
    assert python_calls(applied) < 1.15 * python_calls(by_hand)
