"""ZeRO-3: training steps whose parameters and optimizer's state are sharded over devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, normal
from helpers.collectives import wire_bytes
from jax.sharding import Mesh, PartitionSpec as P

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")

AXIS, DEVICES = "data", 8
WIDTH, LAYERS = 16, 1


def make_params(rng):
    """Blocks of a transformer without its attention, whose arrays can all be split by eight."""

    def layer():
        return {
            "scale": 1 + normal(rng, WIDTH) / 8,
            "up": normal(rng, WIDTH, 4 * WIDTH) / 4,
            "down": normal(rng, 4 * WIDTH, WIDTH) / 8,
        }

    return {"embed": normal(rng, 32, WIDTH), "layers": [layer() for _ in range(LAYERS)]}


AXES = {"embed": 0, "layers": [{"scale": 0, "up": 1, "down": 0}] * LAYERS}
SPECS = jax.tree.map(lambda axis: P(*[None] * axis, AXIS), AXES)


def loss_fn(params, tokens, read=lambda tree, axes: tree):
    """The mean loss of a batch; `read(tree, axes)` gathers what a block needs."""

    def block(layer, axes, h):
        layer = read(layer, axes)
        normed = layer["scale"] * h / (1e-3 + jnp.abs(h).mean(-1, keepdims=True))
        return h + jax.nn.gelu(normed @ layer["up"]) @ layer["down"]

    embed = read(params["embed"], AXES["embed"])
    h = embed[tokens]
    for layer, axes in zip(params["layers"], AXES["layers"], strict=True):
        h = jax.checkpoint(lambda layer, h, axes=axes: block(layer, axes, h))(layer, h)
    logits = (h @ embed.T).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def sharded_loss(policy):
    read = lambda tree, axes: jmpx.distributed.gather(tree, AXIS, policy, axis=axes)  # noqa: E731
    return lambda params, tokens: loss_fn(params, tokens, read)


def sharded_gradients(policy, scaling, how="shard_map", sharded=None):
    """A jitted function of whole parameters and a batch, which `shard_map` splits."""

    def run(params, tokens):
        grad_fn = jmpx.filter_value_and_grad(
            sharded_loss(policy),
            scaling,
            policy=policy,
            over=jmpx.Over(AXIS, sharded),
            uncast=0,
        )
        return grad_fn(params, tokens)

    mesh = Mesh(jax.devices()[:DEVICES], AXIS)
    replicated: Any = P()
    results = jmpx.types.ValueAndGradients(replicated, replicated, replicated, SPECS)
    specs = {"in_specs": (SPECS, P(AXIS)), "out_specs": results}
    return jax.jit(jax.shard_map(run, mesh=mesh, check_vma=how == "shard_map", **specs))


def make_tokens(rng):
    return jnp.asarray(rng.integers(0, 32, (2 * DEVICES, 5)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["shard_map", "shard_map without vma"])
@pytest.mark.parametrize(
    ("reduce", "sent"), [("", 4), (",r=f32", 4), (",r=bf16", 2), (",r=f16", 2)]
)
def test_the_bytes_on_the_wire(reduce, sent, how, rng):
    """For parameters of 3.27 MiB they are 4.29 MiB a step, with reduce=bf16 2.86."""
    params = make_params(rng)
    step = sharded_gradients("c=bf16,o=f32" + reduce, jmpx.NoOpLossScale(), how, sharded=True)
    found = wire_bytes(step.lower(params, make_tokens(rng)).as_text(), DEVICES)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    in_layers = parameters - params["embed"].size  # a checkpoint gathers them twice
    assert found == {
        "all_gather": 2 * (parameters + in_layers) * 7 // 8,
        "reduce_scatter": sent * parameters * 7 // 8,
        "all_reduce": 0,
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("how", "sharded"),
    [
        ("shard_map", None),
        ("shard_map", {"embed": True, "layers": True}),
        ("shard_map without vma", True),
    ],
)
@pytest.mark.parametrize("policy", ["full", "c=bf16,o=f32", "c=f16,o=f32,r=f16"])
def test_gradients_are_those_of_the_mean_on_one_device(how, policy, sharded, rng):
    params, tokens = make_params(rng), make_tokens(rng)
    scaling = jmpx.StaticLossScale(2.0**4)  # the sum of eight gradients fits into float16
    step = sharded_gradients(policy, scaling, how, sharded=sharded)
    value, _, finite, grads = step(params, tokens)
    expected_value, expected = jax.jit(jax.value_and_grad(loss_fn))(params, tokens)
    assert finite and jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    error = {"full": 1e-5, "c=bf16,o=f32": 0.05, "c=f16,o=f32,r=f16": 0.02}[policy]
    np.testing.assert_allclose(value, expected_value, rtol=error)
    for grad, one in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert grad.dtype == jnp.float32
        assert np.linalg.norm(grad - one) <= error * np.linalg.norm(one)


def test_an_overflow_on_one_device_skips_the_step_on_all(rng):
    """The flag and the scale are common, and so is the choice between old and new parameters."""
    optimizer, scaling = lenient(optax.adamw(0.1)), jmpx.DynamicLossScale(2.0**4)
    mesh = Mesh(jax.devices()[:DEVICES], AXIS)

    def loss(shards, x):
        return jnp.mean(
            (x @ jmpx.distributed.gather(shards, AXIS, "c=f16")["w"]).astype(jnp.float32) ** 2
        )

    def run(params, state, x):
        _, scale, finite, grads = jmpx.filter_value_and_grad(
            loss, scaling, policy="c=f16,o=f32", over=jmpx.Over(AXIS), uncast=0
        )(params, x)
        params, state = jmpx.optimizer_update(params, optimizer, state, grads, finite)
        return params, state, scale.loss_scale, finite[None]

    params, x = {"w": normal(rng, 16, 3)}, normal(rng, 2 * DEVICES, 16)
    state = optimizer.init(params)
    split = jax.tree.map(lambda leaf: P(AXIS) if leaf.ndim else P(), state)
    specs = {
        "in_specs": (P(AXIS), split, P(AXIS)),
        "out_specs": (P(AXIS), split, P(), P(AXIS)),
    }
    step = jax.jit(jax.shard_map(run, mesh=mesh, **specs))
    new, _, scale, finite = step(params, state, x)
    assert finite.all() and scale == 16 and (new["w"] != params["w"]).all()
    new, after, scale, finite = step(params, state, x.at[3, 2].set(6e4))  # of the second device
    assert finite.shape == (DEVICES,) and not finite.any() and scale == 8
    np.testing.assert_array_equal(new["w"], params["w"])
    assert after[0].count == 0


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["vmap", "pmap"])
def test_a_mask_says_what_is_sharded_in_older_maps(how, rng):
    w, x = normal(rng, DEVICES, 2, 3), normal(rng, DEVICES, 4, 2 * DEVICES)

    def loss(w, x):
        return jnp.mean((x @ jmpx.distributed.gather(w, AXIS, "c=f32,r=f16")) ** 2)

    def run(w, x):
        options = {"policy": "full", "over": jmpx.Over(AXIS, sharded=True)}
        return jmpx.filter_grad(loss, jmpx.NoOpLossScale(), **options)(w, x).grads

    grads = (jax.vmap if how == "vmap" else jax.pmap)(run, axis_name=AXIS)(w, x)
    whole, batch = w.reshape(-1, 3), x.reshape(-1, 2 * DEVICES)
    expected = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(whole)
    np.testing.assert_allclose(grads.reshape(whole.shape), expected, rtol=0.01, atol=0.01)
