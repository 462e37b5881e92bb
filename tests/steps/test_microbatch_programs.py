"""Micro-batches: what is traced, compiled and reduced over devices, and other transformations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.jaxprs import equations
from helpers.loops import instructions, operations
from helpers.training import loss_fn, make_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmpx

NO_SCALE = jmpx.NoOpLossScale()
# Their options come from tables, whose types pyright does not follow.
filter_grad: Any = jmpx.filter_grad
filter_value_and_grad: Any = jmpx.filter_value_and_grad


def gradients(**options):
    return filter_grad(loss_fn, jmpx.DynamicLossScale(2.0**10), policy="c=bf16", **options)


def mesh(count):
    return Mesh(jax.devices()[:count], "data")


def on_shards(func, count, *, vma=True):
    return jax.shard_map(
        func,
        mesh=mesh(count),
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=vma,
    )


def assert_close(got, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance)


def test_one_micro_batch_is_the_program_without(rng):
    params, x = make_params(rng), normal(rng, 8, 6)
    without, one = (
        jax.make_jaxpr(gradients(**o))(params, x) for o in ({}, {"batch": jmpx.Batch()})
    )
    assert str(without) == str(one)
    assert all(eqn.primitive.name != "scan" for eqn in equations(one.jaxpr))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_the_function_is_traced_once_and_no_longer_program_is_made_for_more(axis_name, rng):
    calls, sizes = [], []

    def loss(params, x):
        calls.append(x.shape)
        return loss_fn(params, x)

    for count in 2, 16:
        grad_fn = filter_grad(
            loss,
            NO_SCALE,
            policy="c=bf16",
            batch=jmpx.Batch(microbatches=count),
            over=None if axis_name is None else jmpx.Over(axis_name),
        )
        lowered = jax.jit(on_shards(grad_fn, 1) if axis_name else grad_fn).lower(
            make_params(rng), normal(rng, 8 * count, 6)
        )
        sizes.append((len(operations(lowered)), len(instructions(lowered.compile()))))
    assert calls == [(8, 6), (8, 6)]
    assert len(set(sizes)) == 1


@pytest.mark.thorough
def test_memory_of_activations_is_that_of_one():
    """As XLA plans it for the CPU."""
    w, x = jnp.ones((8, 128, 128)), jnp.ones((256, 128))

    def loss(w, x):
        for layer in w:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x**2)

    def temporary(count):
        grad_fn = filter_grad(loss, NO_SCALE, policy="full", batch=jmpx.Batch(microbatches=count))
        analysis: Any = jax.jit(grad_fn).lower(w, x).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    whole, four, sixteen = map(temporary, (1, 4, 16))
    activations = 8 * x.nbytes
    assert whole > activations
    # The loop holds the gradients of the parameters twice: the sums, and those of one micro-batch.
    assert four - w.nbytes < whole - activations / 2
    assert sixteen < four


@pytest.mark.sampled(5)
@pytest.mark.parametrize("reduce", ["f32", "bf16"])
@pytest.mark.parametrize("how", ["shard_map", "shard_map without vma", "sharding"])
def test_devices_are_averaged_once_and_outside_of_the_loop(how, reduce, rng):
    params, x = make_params(rng), normal(rng, 16, 6)
    policy = f"c=bf16,r={reduce}"
    if how == "sharding":
        batch = jmpx.Batch(microbatches=2, sharding=NamedSharding(mesh(4), PartitionSpec("data")))
        grad_fn = filter_grad(loss_fn, NO_SCALE, policy=policy, batch=batch)
    else:
        batch, over = jmpx.Batch(microbatches=2), jmpx.Over("data")
        grad_fn = filter_grad(loss_fn, NO_SCALE, policy=policy, batch=batch, over=over)
        grad_fn = on_shards(grad_fn, 4, vma="without" not in how)
    lowered = jax.jit(grad_fn).lower(params, x)
    assert operations(lowered, in_loops=True).count("stablehlo.dot_general") >= 2
    assert "stablehlo.all_reduce" not in operations(lowered, in_loops=True)
    compiled = lowered.compile()
    kinds, inside = instructions(compiled), instructions(compiled, in_loops=True)
    assert any(kind.startswith("all-reduce") for kind in kinds)
    assert "dot" in inside and not any(
        kind.startswith(("all-", "reduce-scatter")) for kind in inside
    )
    got = compiled(params, x).grads
    assert_close(got, gradients()(params, x).grads, 2e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["jit", "vmap", "pmap", "shard_map", "shard_map without vma"])
# JAX 0.10 announces the end of pmap with a DeprecationWarning.
@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_maps_average_micro_batches_and_devices(how, rng):
    params, x = make_params(rng), normal(rng, 16, 6)
    options = {"policy": "full", "batch": jmpx.Batch(microbatches=2)}
    options |= {} if how == "jit" else {"over": jmpx.Over("data")}
    run = filter_value_and_grad(loss_fn, jmpx.DynamicLossScale(2.0**10), **options)
    shards = x.reshape(4, 4, 6)
    if how == "jit":
        got = jax.jit(run, donate_argnums=0)(jax.tree.map(jnp.copy, params), x)
    elif how == "vmap":
        got = jax.jit(jax.vmap(run, in_axes=(None, 0), axis_name="data"))(params, shards)
    elif how == "pmap":
        mapped = jax.pmap(run, in_axes=(None, 0), axis_name="data", devices=jax.devices()[:4])
        got = mapped(params, shards)
    else:
        got = jax.jit(on_shards(run, 4, vma=how == "shard_map"))(params, x)
    if how in ("vmap", "pmap"):
        got = jax.tree.map(lambda leaf: leaf[3], got)
    value, grads = jax.jit(jax.value_and_grad(loss_fn))(params, x)
    assert_close((got.value, got.grads), (value, grads))
    assert bool(got.grads_finite) and int(got.scaling.counter) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["counted", "of each device", "averaged"])
@pytest.mark.parametrize("vma", [True, False])
def test_model_state_varies_over_devices_as_the_function_makes_it_vary(vma, kind, rng):
    params, x = make_params(rng), normal(rng, 16, 6)

    def loss(params, x, state):
        mean = x.mean(0)
        if kind == "averaged":
            mean = jax.lax.pmean(mean, "data")
        new = state["mean"] * 0.5 + (1 if kind == "counted" else mean)
        return loss_fn(params, x), {"mean": new, "steps": state["steps"] + 1}

    def run(params, x, state):
        got = filter_grad(
            loss,
            NO_SCALE,
            has_aux=True,
            policy="full",
            over=jmpx.Over("data"),
            batch=jmpx.Batch(microbatches=2),
            state_argnum=2,
        )(params, x, state)
        return got.grads, got.aux["steps"], got.aux["mean"][None]

    varies = kind == "of each device"
    spec = PartitionSpec("data") if varies else PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=mesh(4),
        in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec(), spec),
        check_vma=vma,
    )
    state = {"mean": jnp.zeros(6), "steps": jnp.array(0)}
    grads, steps, means = jax.jit(mapped)(params, x, state)
    assert_close(grads, jax.jit(jax.grad(loss_fn))(params, x))
    parts = np.asarray(x).reshape(4, 2, 2, 6).mean(2)  # devices, micro-batches, features
    if kind != "of each device":
        parts = parts.mean(0, keepdims=True)
    if kind == "counted":
        parts = np.ones_like(parts)
    np.testing.assert_allclose(means, 0.5 * parts[:, 0] + parts[:, 1], rtol=1e-5, atol=1e-6)
    assert int(steps) == 2


GATHERS = {
    "lax": lambda w: jax.lax.all_gather(w, "data", tiled=True),
    "jmpx": lambda w: jmpx.distributed.gather(w, "data", "full"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize(("vma", "mask"), [(True, {}), (True, True), (False, True)])
def test_shards_that_each_micro_batch_gathers_get_the_gradients_of_the_whole(
    gather, vma, mask, rng
):
    """The gather is part of the function, so that its backward pass reduces in the loop."""
    w, x = normal(rng, 8, 3), normal(rng, 16, 8)

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    grad_fn = filter_grad(
        lambda shard, x: loss(GATHERS[gather](shard), x),
        NO_SCALE,
        policy="full",
        over=jmpx.Over("data", sharded=mask or None),
        batch=jmpx.Batch(microbatches=2),
    )
    spec = PartitionSpec("data")
    mapped = jax.shard_map(
        lambda w, x: grad_fn(w, x).grads,
        mesh=mesh(4),
        in_specs=(spec, spec),
        out_specs=spec,
        check_vma=vma,
    )
    lowered = jax.jit(mapped).lower(w, x)
    assert operations(lowered, in_loops=True).count("stablehlo.reduce_scatter") == 1
    assert_close(lowered.compile()(w, x), jax.jit(jax.grad(loss))(w, x))


@pytest.mark.thorough
def test_other_transformations_go_through(rng):
    params, x = make_params(rng), normal(rng, 8, 6)
    func = functools.partial(filter_grad, policy="full", batch=jmpx.Batch(microbatches=4))
    plain = jax.jit(jax.grad(loss_fn))(params, x)
    assert_close(func(jax.checkpoint(loss_fn), NO_SCALE)(params, x).grads, plain)
    with jax.disable_jit():
        assert_close(func(loss_fn, NO_SCALE)(params, x).grads, plain)

    def norm(grads):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))

    second = jax.grad(lambda p: norm(jax.grad(loss_fn)(p, x)))(params)
    grad_fn = jax.checkpoint(lambda p: func(loss_fn, NO_SCALE)(p, x).grads)
    assert_close(jax.jit(jax.grad(lambda p: norm(grad_fn(p))))(params), second)
    seeds = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    mapped = jax.vmap(lambda p: func(loss_fn, NO_SCALE)(p, x).grads)(seeds)
    assert_close(jax.tree.map(lambda leaf: leaf[0], mapped), plain)
