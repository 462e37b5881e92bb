"""The gradient functions over several devices: the mean over an axis, and one decision for all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.jaxprs import equations
from helpers.training import LOSS_SCALES, loss_fn, make_params
from jax.sharding import Mesh, PartitionSpec

import jmpx

MAPS = ["vmap", "pmap", "shard_map", "shard_map without vma"]


def replicate(run, how, params, batch):
    """Calls `run(params, scaling, shard)` once for each of four shards of the batch."""
    mesh = Mesh(jax.devices()[:4], "data")
    if how.startswith("shard_map"):
        spec = PartitionSpec()
        mapped = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(spec, PartitionSpec("data")),
            out_specs=spec,
            check_vma=how == "shard_map",
        )
        return jax.jit(mapped)(params, batch)
    shards = batch.reshape(4, -1, *batch.shape[1:])
    if how == "vmap":
        return jax.jit(jax.vmap(run, in_axes=(None, 0), axis_name="data"))(params, shards)
    return jax.pmap(run, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:4])(
        params, shards
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["NoOp", "Dynamic"])
@pytest.mark.parametrize("how", MAPS)
# JAX 0.10 announces the end of pmap with a DeprecationWarning.
@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_value_and_gradients_are_the_mean_over_an_axis(how, kind, rng):
    params = make_params(rng)
    batch = normal(rng, 8, 6)

    def run(params, shard):
        return jmpx.filter_value_and_grad(
            loss_fn, LOSS_SCALES[kind](), policy="c=f16", over=jmpx.Over("data")
        )(params, shard)

    value, scaling, finite, grads = replicate(run, how, params, batch)
    per_shard = [run_alone(kind, params, shard) for shard in batch.reshape(4, 2, 6)]
    if how in ("vmap", "pmap"):  # one result for each replica, all the same
        for leaf in jax.tree.leaves((value, finite, grads)):
            assert (leaf == leaf[:1]).all()
        value, finite, grads = jax.tree.map(lambda leaf: leaf[0], (value, finite, grads))
    assert bool(finite)
    np.testing.assert_allclose(value, np.mean([v for v, _ in per_shard]), rtol=1e-6)
    for name, grad in grads.items():
        expected = np.mean([g[name] for _, g in per_shard], axis=0)
        assert grad.dtype == jnp.float32
        # Each shard's gradient is of float16 precision, their mean is not rounded to it.
        np.testing.assert_allclose(grad, expected, rtol=2e-3, atol=2e-5)


@functools.cache
def alone(kind):
    # Compiled, as `pmap` and `shard_map` are: the roundings that XLA leaves out are the same ones.
    return jax.jit(jmpx.filter_value_and_grad(loss_fn, LOSS_SCALES[kind](), policy="c=f16"))


def run_alone(kind, params, shard):
    value, _, _, grads = alone(kind)(params, shard)
    return value, grads


@pytest.mark.parametrize("how", MAPS)
@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_the_mean_is_taken_in_float32_to_the_bit(how, rng):
    # Integers that float16 holds, whose mean it does not: 2048 + 1 needs twelve bits.
    batch = jnp.asarray([[2048.0], [1.0], [2048.0], [1.0]], jnp.float32)
    params = {"w": jnp.ones(1, jnp.float32)}

    def run(params, shard):
        return jmpx.filter_value_and_grad(
            lambda p, x: (p["w"] * x).sum(),
            jmpx.NoOpLossScale(),
            policy="c=f16",
            over=jmpx.Over("data"),
        )(params, shard)

    value, _, _, grads = replicate(run, how, params, batch)
    assert np.ravel(value)[0] == 1024.5
    assert np.ravel(grads["w"])[0] == 1024.5


@pytest.mark.parametrize("how", MAPS)
@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_all_replicas_take_the_decision_of_the_one_that_overflowed(how, rng):
    params = make_params(rng)
    batch = normal(rng, 8, 6).at[5, 2].set(jnp.inf)

    def run(params, shard):
        value, scaling, finite, grads = jmpx.filter_value_and_grad(
            lambda p, x: (x @ p["w"]).sum(),
            jmpx.DynamicLossScale(4.0),
            policy="c=f16",
            over=jmpx.Over("data"),
        )(params, shard)
        return finite, jmpx.all_finite(grads), scaling.loss_scale, scaling.counter

    finite, _, scale, counter = replicate(run, how, params, batch)
    assert (
        not np.any(finite) and (np.asarray(scale) == 2).all() and (np.asarray(counter) == 0).all()
    )


@pytest.mark.parametrize("vma", [True, False])
def test_the_only_reduction_is_in_float32(vma, rng):
    mesh = Mesh(jax.devices()[:4], "data")
    spec = PartitionSpec()

    def run(params, shard):
        return jmpx.filter_value_and_grad(
            loss_fn, jmpx.DynamicLossScale(), policy="c=f16", over=jmpx.Over("data")
        )(params, shard)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(spec, PartitionSpec("data")), out_specs=spec, check_vma=vma
    )
    batch = rng.normal(size=(8, 6)).astype(np.float32)
    jaxpr = jax.make_jaxpr(mapped)(make_params(rng), batch)
    sums = [e for e in equations(jaxpr) if e.primitive.name.startswith("psum")]
    assert sums
    for eqn in sums:
        assert {v.aval.dtype for v in eqn.invars} == {np.dtype("float32")}


def test_without_an_axis_a_jitted_step_shards_by_itself(rng):
    mesh = Mesh(jax.devices(), "data")
    sharded = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    params = make_params(rng)
    batch = rng.normal(size=(16, 6)).astype(np.float32)
    grad_fn = jax.jit(jmpx.filter_value_and_grad(loss_fn, jmpx.DynamicLossScale(), policy="c=bf16"))
    value, *_, grads = grad_fn(params, jax.device_put(batch, sharded))
    expected, *_, expected_grads = grad_fn(params, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    np.testing.assert_allclose(grads["w"], expected_grads["w"], rtol=5e-2, atol=2e-3)
