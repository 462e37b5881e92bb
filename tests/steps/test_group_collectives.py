"""Which collectives XLA's partitioner makes of groups, and in which dtypes."""

import collections
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from collectives import partitioned, read
from flax import nnx
from helpers import normal
from helpers.groups import make_mesh
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

SIZE, EXAMPLES = 64, 512  # products of few examples would move activations, and not weights
BITS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def collectives_of(run, params, x, shards):
    """Counts the collectives of each kind by dtype, those of few bytes and of flags apart."""
    mesh = make_mesh(8)
    split = lambda leaf: NamedSharding(mesh, P("data") if shards and leaf.ndim > 1 else P())  # noqa: E731
    put = jax.tree.map(split, params)
    batch = NamedSharding(mesh, P("data"))
    with jax.numpy_dtype_promotion("standard"):
        lowered = jax.jit(run, in_shardings=(put, batch), out_shardings=(put, None)).lower(
            params, x
        )
    found = collections.defaultdict(collections.Counter)
    text, _ = partitioned(lowered)
    for one in read(text):
        kind = "flag" if one.dtype == "pred" else one.kind
        found[kind][one.dtype if one.bytes > 1024 else f"few {one.dtype}"] += 1
    return found


def large(found, *kinds):
    return {dtype for kind in kinds for dtype in found[kind] if not dtype.startswith("few ")}


def mlp(rng):
    params = {f"w{i}": normal(rng, SIZE, SIZE) / 8 for i in range(2)} | {"b": jnp.zeros(SIZE)}
    return params, lambda params, x: functools.reduce(
        lambda x, i: jnp.tanh(x @ params[f"w{i}"] + params["b"]), range(2), x
    )


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def by_policy(rng):
    params, apply = mlp(rng)
    return params, lambda p, x: mean_square(apply(p, x)), "c=bf16"


def by_autocast(rng):
    params, apply = mlp(rng)
    return params, lambda p, x: mean_square(jmpx.autocast(apply, policy="bf16")(p, x)), "*: bf16"


def by_function_cast(rng):
    params, apply = mlp(rng)
    cast = jmpx.mpx.cast_function(apply, jnp.bfloat16)
    return params, lambda p, x: mean_square(cast(p, x)), "full"


def by_equinox(rng):
    def apply(model, x):
        return mean_square(jax.vmap(jmpx.equinox.with_policies(model, "c=bf16"))(x))

    return eqx.nn.MLP(SIZE, SIZE, SIZE, 1, key=jax.random.key(0)), apply, "full"


def by_haiku(rng):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([SIZE, SIZE])(x)))
    params = net.init(jax.random.key(0), jnp.zeros((1, SIZE)))

    def loss(params, x):
        with jmpx.haiku.policies("c=bf16"):
            return mean_square(net.apply(params, x))

    return params, loss, "full"


def by_linen(rng):
    net = nn.Sequential([nn.Dense(SIZE), jnp.tanh, nn.Dense(SIZE)])
    params = net.init(jax.random.key(0), jnp.zeros((1, SIZE)))

    def loss(params, x):
        with jmpx.flax.policies("c=bf16"):
            return mean_square(net.apply(params, x))

    return params, loss, "full"


def by_nnx(rng):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(SIZE, SIZE, rngs=rngs), nnx.Linear(SIZE, SIZE, rngs=rngs))
    graph, params = nnx.split(model)

    def loss(params, x):
        return mean_square(jmpx.flax.with_policies(nnx.merge(graph, params), "c=bf16")(x))

    return params, loss, "full"


WAYS = {
    "policy": by_policy,
    "autocast": by_autocast,
    "cast_function": by_function_cast,
    "equinox": by_equinox,
    "haiku": by_haiku,
    "linen": by_linen,
    "nnx": by_nnx,
}


def plain(loss, policy):
    return jmpx.filter_value_and_grad(loss, jmpx.DynamicLossScale(2.0**8), policy=policy)


def groups(loss, policy):
    scaling, sharding = jmpx.DynamicLossScale(2.0**8), NamedSharding(make_mesh(8), P("data"))
    return jmpx.filter_value_and_grad(
        loss, scaling, policy=policy, batch=jmpx.Batch(sharding=sharding)
    )


def by_hand(loss, policy):
    """Groups that the user makes, of a gradient function with a mapped axis."""
    scaling = jmpx.DynamicLossScale(2.0**8)
    grad_fn = jmpx.filter_value_and_grad(loss, scaling, policy=policy, over=jmpx.Over("group"))

    def run(params, x):
        parts = x.reshape(8, -1, SIZE)
        free = P.UNCONSTRAINED
        parts = jax.lax.with_sharding_constraint(
            parts, NamedSharding(make_mesh(8), P("data", free, free))
        )
        mapped: Any = jax.vmap(
            lambda params, x: tuple(grad_fn(params, x)),
            in_axes=(None, 0),
            out_axes=None,
            axis_name="group",
            spmd_axis_name="data",
        )
        return jmpx.types.ValueAndGradients(*mapped(params, parts))

    return run


def step(grad_fn):
    def run(params, x):
        value, _, finite, grads = grad_fn(params, x)
        new = jax.tree.map(
            lambda p, g: p if g is None else jnp.where(finite, p - g, p), params, grads
        )
        return new, value

    return run


def arrays_of(way, rng):
    params, loss, policy = WAYS[way](rng)
    arrays, rest = eqx.partition(params, eqx.is_array)
    return arrays, lambda p, x: loss(eqx.combine(p, rest), x), policy


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", [plain, groups, by_hand])
@pytest.mark.parametrize("way", WAYS)
def test_casts_come_before_gathers(way, how, rng):
    params, loss, policy = arrays_of(way, rng)
    x = normal(rng, EXAMPLES, SIZE)
    found = collectives_of(step(how(loss, policy)), params, x, shards=True)
    assert large(found, "all-gather") == {"bf16"}
    summed = large(found, "all-reduce", "reduce-scatter")
    assert summed == ({"bf16"} if how is plain else {"f32"})


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("reduce", BITS)
@pytest.mark.parametrize("compute", ["bf16", "f16"])
def test_gradients_are_summed_in_reduce(compute, reduce, shards, rng):
    params, loss, _ = arrays_of("policy", rng)
    x = normal(rng, EXAMPLES, SIZE)
    run = step(groups(loss, f"c={compute},r={reduce}"))
    found = collectives_of(run, params, x, shards)
    assert large(found, "all-reduce", "reduce-scatter") == {BITS[reduce]}
    assert large(found, "all-gather") == ({compute} if shards else set())
    flags = sum(found["flag"].values())
    assert flags == (2 if shards else 0)  # of two sharded weights: XLA combines them later
