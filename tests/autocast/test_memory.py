"""What autocast keeps for the backward pass, what it lowers to, and how exact gradients are."""

import functools

import autocast as benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F16, F32, normal
from helpers.autocast import (
    LOW_DTYPES,
    assert_near,
    assert_ran,
    both,
    check_sides,
    operand_dtypes,
    values,
)
from helpers.jaxprs import equations_of
from jax.ad_checkpoint import checkpoint_name

import jmpx

SAVED = "autocast, save"


@pytest.fixture(scope="module")
def transformer():
    rng = np.random.default_rng(5)
    model = benchmark.Transformer()
    return model.init(rng), benchmark.losses(model, model.batch(rng))


def test_residuals(transformer):
    """Holds the benchmark's figures, which do not depend on the machine, to the project's bars."""
    params, ways = transformer
    kept = {way: benchmark.residual_bytes(loss_fn, params) for way, loss_fn in ways.items()}
    ratios = {way: bytes_ / kept["float32"] for way, bytes_ in kept.items()}
    assert ratios["autocast"] < 0.66
    assert ratios[SAVED] < 0.16
    # Of each block the two activations between pieces, and what the first products of its halves
    # made; of the head the scores, which the loss reads in float32, and the labels.
    tokens, width = 8 * 128, 256
    blocks, head = 4 * tokens * (2 + 3 + 4) * width * 2, tokens * 64 * 4 + tokens * 4
    assert blocks <= kept[SAVED] <= blocks + head + 20 * tokens
    assert 0.85 < ratios["grampax"] < 0.9  # what it is worth to leave activations low


def test_products_as_lowered_for_cuda(transformer):
    params, ways = transformer
    assert benchmark.dot_operands(ways["autocast"], params) == {"bf16 x bf16": 75}
    head = lambda p, x: x @ p  # noqa: E731
    f = jmpx.autocast(lambda p: jmpx.full_precision(head)(jnp.tanh(p @ p), p).sum())
    assert benchmark.dot_operands(f, jnp.eye(4)) == {"bf16 x bf16": 3, "f32 x f32": 3}


@pytest.mark.thorough
def test_gradients_are_nearer_to_float32_than_those_of_a_bfloat16_model(rng):
    model = benchmark.Transformer(1, 32, 2, 64, scanned=True)
    params = model.init(rng)
    ways = benchmark.losses(model, model.batch(rng, 4, 16))
    full, half, autocast, saving = (
        benchmark.gradients(ways[way], params) for way in ("float32", "bfloat16", "autocast", SAVED)
    )
    assert np.linalg.norm(autocast - full) <= np.linalg.norm(half - full)
    assert np.linalg.norm(saving - full) <= 1.1 * np.linalg.norm(half - full)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "policy, loss_scale",
    [("c=f16", jmpx.DynamicLossScale(2**12)), ("c=bf16", jmpx.NoOpLossScale())],
)
def test_with_a_loss_scale(rng, policy, loss_scale):
    model = benchmark.Transformer(1, 16, 2, 32, classes=8)
    params, (x, labels) = model.init(rng), model.batch(rng, 2, 8)

    def loss_fn(params, apply=model.apply):
        return benchmark.cross_entropy(apply(params, x), labels)

    step = jmpx.filter_value_and_grad(
        functools.partial(loss_fn, apply=jmpx.autocast(model.apply, policy)),
        loss_scale,
        policy="full",
    )
    loss, _, grads_finite, grads = jax.jit(step)(params)
    value, expected = jax.jit(jax.value_and_grad(loss_fn))(params)
    assert grads_finite
    np.testing.assert_allclose(loss, value, rtol=1e-2)
    flat = [
        np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)]) for tree in (grads, expected)
    ]
    tolerance = 3e-3 if policy == "c=f16" else 3e-2
    assert np.linalg.norm(flat[0] - flat[1]) < tolerance * np.linalg.norm(flat[1])


# Checkpoints.

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("h"),
    "all but names": jax.checkpoint_policies.save_anything_except_these_names("h"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_checkpoint_policies_are_followed(pair, name):
    def f(x, w):
        h = checkpoint_name(jnp.sin(x @ w), "h")
        return jnp.sin(h @ w).sum()

    def products(f):
        return sum(e.primitive.name == "dot_general" for e in equations_of(f, *pair))

    remat = functools.partial(jax.checkpoint, policy=POLICIES[name])
    inside, outside = both(jmpx.autocast(remat(f))), both(remat(jmpx.autocast(f)))
    around, plain = jmpx.autocast(both(remat(f))), both(remat(f))
    for cast in (inside, outside, around):
        assert_ran(cast, *pair, dot_general="bfloat16")
    if name == "names":
        assert_near(*values(pair, inside, plain))
    assert products(around) == products(plain) >= products(both(f))
    assert products(inside) == products(outside) == products(plain)


def test_a_checkpoint_that_captured_a_constant(pair):
    x, w = (np.asarray(v) for v in pair)
    check_sides(jax.grad, jax.checkpoint(lambda x: jnp.tanh(x @ w + w[0]).sum()), x)


@pytest.mark.thorough
def test_a_learned_scale_costs_no_memory(rng):
    w, x = normal(rng, 16, 16), normal(rng, 64, 16)

    def loss(params):
        h = x
        for scale in params["scales"]:
            h = jnp.tanh(scale * (h @ params["w"]))
        return (h**2).mean()

    params = {"w": w, "scales": [jnp.float32(0.5), jnp.float32(2.0)]}
    kept = benchmark.residual_bytes(jmpx.autocast(loss, "c=f16"), params)
    no_scale = benchmark.residual_bytes(
        jmpx.autocast(lambda p: loss({"w": p["w"], "scales": [0.5, 2.0]}), "c=f16"), params
    )
    # For each scale: the product to be scaled, in 16 bits, and the scale, broadcast, in 32 bits.
    assert kept <= no_scale + 2 * x.size * (2 + 4) + 16
    got, expected = jax.grad(jmpx.autocast(loss, "c=f16"))(params), jax.grad(loss)(params)
    assert_near(got, expected, 1e-2)


def test_a_gelu_leaves_float16_and_keeps_no_more_than_in_bfloat16(rng):
    w, x = normal(rng, 16, 16), normal(rng, 64, 16)

    def loss(w):
        return (jax.nn.gelu(x @ w) @ w).sum()

    kept = [benchmark.residual_bytes(jmpx.autocast(loss, policy), w) for policy in LOW_DTYPES]
    assert kept[0] <= kept[1]
    gelu = jmpx.autocast(lambda w: jax.nn.gelu(x @ w), "c=f16", output=None)
    assert gelu(w).dtype == F16
    assert operand_dtypes("tanh", gelu, w) == {F16}
    assert operand_dtypes("integer_pow", gelu, w) == {F32}
