"""The table of docs/sharding.md: what works on an Explicit mesh, and what JAX refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import AxisType, PartitionSpec as P

import jmpx

POLICIES = ["c=bf16,o=f32", "by=operations,c=bf16"]
SPECS = {
    "whole": {"w": P(), "b": P(), "v": P()},
    "fsdp": {"w": P("data"), "b": P("data"), "v": P("data")},
    "rows": {"w": P("data"), "b": P(), "v": P("data")},
    "tensor": {"w": P(None, "model"), "b": P("model"), "v": P("model", None)},
}
ILLEGAL = "illegally sharded|Contracting dimensions are sharded|out_sharding"
AUTO = "cannot contain axis names that are of type Auto"


def plain(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def resharded(params, x):
    return plain({name: jax.sharding.reshard(w, P()) for name, w in params.items()}, x)


def with_out_sharding(spec):
    def model(params, x):
        h = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.dot(h, params["v"], out_sharding=spec)

    return model


def plain_lookup(params, tokens):
    return (params["w"][tokens] + params["b"]) @ params["v"]


def placed_lookup(params, tokens):
    return (params["w"].at[tokens].get(out_sharding=P("data")) + params["b"]) @ params["v"]


# The parameters, the model, how gradients are computed, and what JAX says, if it refuses.
CASES = [
    ("whole", plain, "alone", None),
    ("whole", plain, "groups", None),
    ("whole", plain, "shard_map", None),
    ("rows", plain, "alone", None),
    ("fsdp", plain, "alone", ILLEGAL),
    ("fsdp", resharded, "alone", None),
    ("fsdp", plain, "groups", None),
    ("tensor", plain, "alone", ILLEGAL),
    ("tensor", with_out_sharding(P("data")), "alone", None),
    ("tensor", plain, "groups", None),
    ("tensor", with_out_sharding(P("data")), "groups", AUTO),
    ("tensor", with_out_sharding(P()), "shard_map", None),
    ("whole", plain_lookup, "alone", ILLEGAL),
    ("whole", placed_lookup, "alone", None),
    ("whole", plain_lookup, "groups", None),
    ("whole", plain_lookup, "shard_map", None),
]


def gradients(model, how, policy):
    def loss(params, x):
        return jnp.mean(model(params, x).astype(jnp.float32) ** 2)

    options = {
        "alone": {},
        "groups": {"batch": jmpx.Batch(sharding=P("data"))},
        "shard_map": {"over": jmpx.Over("data")},
    }[how]
    run = jmpx.filter_grad(loss, jmpx.NoOpLossScale(), policy=policy, **options)
    if how == "shard_map":
        specs = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
        run = jax.shard_map(run, **specs)
    return jax.jit(lambda params, x: run(params, x).grads)


def make_params(rng):
    return {"w": normal(rng, 16, 32) / 4, "b": normal(rng, 32), "v": normal(rng, 32, 8) / 6}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("spec", "model", "how", "refusal"), CASES)
def test_a_cell_of_the_table(spec, model, how, refusal, policy, rng):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    params = make_params(rng)
    tokens = "lookup" in model.__name__
    x = jnp.asarray(rng.integers(0, 16, 24)) if tokens else normal(rng, 24, 16)
    expected = jax.grad(lambda p: jnp.mean((plain_lookup if tokens else plain)(p, x) ** 2))(params)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(w, SPECS[spec][name]) for name, w in params.items()}
        args = placed, jax.device_put(x, P("data"))
        if refusal is not None:
            with pytest.raises(Exception, match=refusal):
                gradients(model, how, policy)(*args)
            return
        found = gradients(model, how, policy)(*args)
    for name, grad in found.items():
        np.testing.assert_allclose(np.asarray(grad), expected[name], rtol=0.05, atol=5e-3)
        assert grad.sharding.is_equivalent_to(placed[name].sharding, grad.ndim)


@pytest.mark.parametrize("policy", POLICIES)
def test_reduce_alone_warns(policy, rng):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="reduces nothing"):
        gradients(plain, "alone", f"{policy},r=f32")(make_params(rng), normal(rng, 24, 16))


def test_shards_are_gathered_under_shard_map(rng):
    # JAX 0.12.0.1 does not differentiate an all_gather beside another axis that is Explicit.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    params, x = make_params(rng), normal(rng, 24, 16)
    expected = jax.grad(lambda p: jnp.mean(plain(p, x) ** 2))(params)

    def loss(shards, x):
        whole = jmpx.distributed.gather(shards, "data", "c=bf16")
        return jnp.mean(plain(whole, x).astype(jnp.float32) ** 2)

    run = jmpx.filter_grad(
        loss, jmpx.NoOpLossScale(), policy="c=bf16", over=jmpx.Over("data"), uncast=0
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put((params, x), P("data"))
        mapped = jax.shard_map(
            lambda *args: run(*args).grads, in_specs=P("data"), out_specs=P("data")
        )
        found = jax.jit(mapped)(*placed)
    for name, grad in found.items():
        np.testing.assert_allclose(np.asarray(grad), expected[name], rtol=0.05, atol=5e-3)
        assert grad.dtype == jnp.float32 and jax.typeof(grad).sharding.spec[0] == "data"
