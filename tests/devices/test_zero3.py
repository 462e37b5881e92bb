"""ZeRO-3: training steps whose parameters and optimizer's state are sharded over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal
from helpers.collectives import wire_bytes
from helpers.maps import AXIS, mesh_of
from jax.sharding import PartitionSpec as P

import jmpx

DEVICES, WIDTH, LAYERS = 8, 16, 1


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


def sharded_gradients(policy, scaling, vma, sharded):
    """A jitted function of whole parameters and a batch, which `shard_map` splits."""
    read = lambda tree, axes: jmpx.distributed.gather(tree, AXIS, policy, axis=axes)  # noqa: E731
    loss, over = lambda params, tokens: loss_fn(params, tokens, read), jmpx.Over(AXIS, sharded)
    run = jmpx.filter_value_and_grad(loss, scaling, policy=policy, over=over, uncast=0)
    results = jmpx.types.ValueAndGradients(P(), P(), P(), SPECS)
    specs = {"in_specs": (SPECS, P(AXIS)), "out_specs": results}
    return jax.jit(jax.shard_map(run, mesh=mesh_of(DEVICES), check_vma=vma, **specs))


@pytest.mark.parametrize(
    ("policy", "error", "sent", "vma", "sharded"),
    [
        pytest.param("full", 1e-5, 4, False, True, marks=pytest.mark.thorough),
        ("c=bf16,o=f32,r=bf16", 0.05, 2, True, {"embed": True, "layers": True}),
        pytest.param("c=f16,o=f32,r=f16", 0.02, 2, True, None, marks=pytest.mark.thorough),
    ],
)
def test_gradients_are_those_of_one_device_and_so_many_bytes_travel(
    policy, error, sent, vma, sharded, rng
):
    """For parameters of 3.27 MiB they are 4.29 MiB a step, with reduce=bf16 2.86."""
    params, tokens = make_params(rng), jnp.asarray(rng.integers(0, 32, (2 * DEVICES, 5)))
    scaling = jmpx.StaticLossScale(2.0**4)  # the sum of eight gradients fits into float16
    step = sharded_gradients(policy, scaling, vma, sharded)
    value, _, finite, grads = step(params, tokens)
    expected_value, expected = jax.jit(jax.value_and_grad(loss_fn))(params, tokens)
    assert finite and jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(value, expected_value, rtol=error)
    for grad, one in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert grad.dtype == jnp.float32
        assert np.linalg.norm(grad - one) <= error * np.linalg.norm(one)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    in_layers = size - params["embed"].size  # a checkpoint gathers them twice
    assert wire_bytes(step.lower(params, tokens).as_text(), DEVICES) == {
        "all_gather": (4 if policy == "full" else 2) * (size + in_layers) * 7 // 8,
        "reduce_scatter": sent * size * 7 // 8,
        "all_reduce": 0,
    }


def test_an_overflow_on_one_device_skips_the_step_on_all(rng):
    """The flag and the scale are common, and so is the choice between old and new parameters."""
    optimizer, scaling = optax.sgd(0.1, momentum=0.9), jmpx.DynamicLossScale(2.0**4)

    def loss(shards, x):
        whole = jmpx.distributed.gather(shards, AXIS, "c=f16")
        return jnp.mean((x @ whole["w"]).astype(jnp.float32) ** 2)

    def run(params, state, x):
        options = {"policy": "c=f16,o=f32", "over": jmpx.Over(AXIS), "uncast": 0}
        scale, finite, grads = jmpx.filter_grad(loss, scaling, **options)(params, x)
        params, state = jmpx.optimizer_update(params, optimizer, state, grads, finite)
        return params, state, scale.loss_scale, finite[None]

    params, x = {"w": normal(rng, 16, 3)}, normal(rng, 2 * DEVICES, 16)
    state = optimizer.init(params)
    split = jax.tree.map(lambda leaf: P(AXIS) if leaf.ndim else P(), state)
    ins, outs = (P(AXIS), split, P(AXIS)), (P(AXIS), split, P(), P(AXIS))
    mapped = jax.shard_map(run, mesh=mesh_of(DEVICES), in_specs=ins, out_specs=outs)
    step = jax.jit(mapped)
    new, _, scale, finite = step(params, state, x)
    assert finite.all() and scale == 16 and (new["w"] != params["w"]).all()
    new, after, scale, finite = step(params, state, x.at[3, 2].set(6e4))  # of the second device
    assert finite.shape == (DEVICES,) and not finite.any() and scale == 8
    np.testing.assert_array_equal(new["w"], params["w"])
    assert not after[0].trace["w"].any()
