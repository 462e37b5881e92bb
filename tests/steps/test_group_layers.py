"""Groups of examples: the mean of each stacked layer in its loop, and what travels in which dtype.

What XLA's partitioner makes of a program is read from its text.
"""

import collections
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import partitioned, read
from helpers import normal, versions, zoo
from helpers.jaxprs import equations
from helpers.maps import mesh_of
from helpers.training import assert_near, in_float64, over
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx
import jmpx.mpx as mpx

LAYERS, SIZE, GROUPS, EXAMPLES = 3, 16, 8, 8
NO_SCALE = jmpx.NoOpLossScale()


def params_of(rng):
    return {
        "w": normal(rng, LAYERS, SIZE, SIZE) / 4,
        "b": normal(rng, LAYERS, SIZE),
        "out": normal(rng, SIZE, SIZE) / 4,
    }


def body(h, layer):
    return h + jnp.tanh(h @ layer["w"] + layer["b"]), None


def layers_of(params):
    return {"w": params["w"], "b": params["b"]}


def loss_of(params, h):
    y = h @ params["out"]
    return jnp.mean((y if y.dtype == jnp.float64 else y.astype(jnp.float32)) ** 2)


def looped(run=lambda body, x, layers: jax.lax.scan(body, x, layers)[0]):
    return lambda params, x: loss_of(params, run(body, x, layers_of(params)))


def value_and_grad(loss, policy="c=f32", scaling=NO_SCALE, groups=GROUPS, **options):
    batch = jmpx.Batch(**{"sharding": over(groups), **options})
    return jmpx.value_and_grad(loss, scaling, policy=policy, batch=batch)


def by_hand(loss, policy, scaling):
    """Groups that the user makes, of a gradient function with a mapped axis: means come last."""
    options = {"policy": policy, "over": jmpx.Over("group")}
    grad_fn = jmpx.value_and_grad(loss, scaling, **options)
    mapped: Any = jax.vmap(
        lambda params, x: tuple(grad_fn(params, x)),
        in_axes=(None, 0),
        out_axes=None,
        axis_name="group",
        spmd_axis_name="data",
    )

    def run(params, x):
        spec = NamedSharding(mesh_of(GROUPS), P("data", P.UNCONSTRAINED, P.UNCONSTRAINED))
        groups = jax.lax.with_sharding_constraint(x.reshape(GROUPS, -1, x.shape[-1]), spec)
        return jmpx.types.ValueAndGradients(*mapped(params, groups))

    return run


# Ways to run layers


def checkpointed(body, x, layers):
    return jax.lax.scan(jax.checkpoint(body), x, layers)[0]


def nested(body, x, layers):
    layers = jax.tree.map(lambda w: w.reshape(LAYERS, 1, *w.shape[1:]), layers)
    inner = jax.checkpoint(lambda h, layers: (jax.lax.scan(body, h, layers)[0], None))
    return jax.lax.scan(inner, x, layers)[0]


def in_parts(body, x, layers):
    for part in slice(0, 1), slice(1, LAYERS):
        x, _ = jax.lax.scan(body, x, jax.tree.map(lambda w, part=part: w[part], layers))
    return x


def stacked(body, x, layers):
    single = [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(LAYERS)]
    return jax.lax.scan(body, x, jax.tree.map(lambda *ws: jnp.stack(ws), *single))[0]


def transposed(body, x, layers):
    other = lambda h, layer: body(h, {"w": layer["w"].T, "b": layer["b"]})  # noqa: E731
    return jax.lax.scan(other, x, {"w": layers["w"].transpose(0, 2, 1), "b": layers["b"]})[0]


RUNS = {
    "checkpointed": ("c=bf16", checkpointed),
    "jitted": ("c=f16,r=f16", lambda body, *args: jax.jit(partial(checkpointed, body))(*args)),
    "all checkpointed": (
        "c=bf16",
        lambda body, *args: jax.checkpoint(lambda *args: jax.lax.scan(body, *args)[0])(*args),
    ),
    "nested": ("by=operations,c=bf16", nested),
    "in parts": ("c=bf16,r=bf16", in_parts),
    "stacked": ("c=f16", stacked),
    "transposed": ("c=f32", transposed),
    "backward": (
        "c=bf16,r=bf16",
        lambda body, *args: jax.lax.scan(body, *args, reverse=True, unroll=2)[0],
    ),
}


def largest_stack(jaxpr):
    """Returns the number of elements of the largest array that a scan stacks."""
    scans = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    return max(var.aval.size for eqn in scans for var in eqn.outvars)


# Of these, the default run reads the program, and does not compile it.
SEEN = [name for name in RUNS if name not in ("jitted", "backward")]


@pytest.mark.parametrize("name", SEEN)
def test_means_are_taken_in_the_loop(name, rng):
    args = params_of(rng), normal(rng, EXAMPLES, SIZE)
    grad_fn = value_and_grad(looped(RUNS[name][1]), RUNS[name][0])
    jaxpr = jax.make_jaxpr(lambda *args: tuple(grad_fn(*args))[::3])(*args)
    assert largest_stack(jaxpr) <= LAYERS * SIZE * SIZE


@pytest.mark.parametrize(
    "name", [versions(name) if name in SEEN else pytest.param(name) for name in RUNS]
)
def test_gradients_have_the_bits_of_a_mean_after_the_loop(name, rng):
    policy, run = RUNS[name]
    args = params_of(rng), normal(rng, EXAMPLES, SIZE)
    options = {"policy": policy, "scaling": jmpx.DynamicLossScale(2.0**6)}
    results, sizes = [], []
    for make in (value_and_grad, by_hand):
        grad_fn = make(looped(run), **options)
        traced = jax.jit(lambda *args, grad_fn=grad_fn: grad_fn(*args)).trace(*args)
        sizes.append(largest_stack(traced.jaxpr))
        results.append(traced.lower().compile()(*args))
    assert sizes[0] <= LAYERS * SIZE * SIZE and sizes[1] >= GROUPS * SIZE * SIZE
    # XLA of JAX 0.12 joins float32 sums over examples and over groups, in an order of its own.
    tolerance = 1e-6 * (policy == "c=f32")
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def twice(body, x, layers):
    return checkpointed(body, checkpointed(body, x, layers), layers)


def with_norms(params, x):
    return looped()(params, x) + 1e-2 * sum((w**2).sum() for w in jax.tree.leaves(params))


def with_a_constant(params, x):
    again = lambda h, layer: (jnp.tanh(body(h, layer)[0] @ params["out"]), None)  # noqa: E731
    return loss_of(params, jax.lax.scan(again, x, layers_of(params))[0])


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.parametrize("loss", [looped(twice), with_norms, with_a_constant])
def test_other_reads_of_a_stacked_parameter_count(loss, rng):
    # Where a loss reads a parameter several times, the reads are summed after their means.
    args = params_of(rng), normal(rng, 4 * EXAMPLES, SIZE)
    result = jax.jit(value_and_grad(loss, microbatches=2))(*args)
    assert_near(result, in_float64(*args, loss=loss), 5e-6)


# Layers of a framework


@pytest.mark.usefixtures("standard_promotion")
def test_layers_of_a_framework(rng):
    stacked = lambda m, x: hk.layer_stack(LAYERS)(lambda x: x + jnp.tanh(hk.Linear(SIZE)(x)))(x)  # noqa: E731
    x = normal(rng, EXAMPLES, SIZE)
    _, apply, params = zoo.build("haiku", stacked, x, rng=rng)
    loss = lambda params, x: jnp.mean(apply(params, x).astype(jnp.float32) ** 2)  # noqa: E731
    grad_fn = value_and_grad(loss, "by=modules,c=bf16")
    jaxpr = jax.make_jaxpr(lambda params, x: grad_fn(params, x).grads)(params, x)
    assert largest_stack(jaxpr) <= LAYERS * SIZE * SIZE
    grads = jax.jit(value_and_grad(loss))(params, x).grads
    expected = jax.jit(jax.grad(loss))(params, x)
    for a, b in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# What the partitioner makes of it


@pytest.mark.parametrize(
    ("sizes", "spec", "reduce"),
    [versions((8,), P(None, "data"), "f32"), ((4, 2), P(None, "data", "model"), "bf16")],
)
def test_a_layer_is_summed_in_the_loop(sizes, spec, reduce, rng):
    size, mesh = 64, mesh_of(*sizes)
    params = {"w": normal(rng, LAYERS, size, size) / 8, "out": jnp.zeros((size, 1))}
    x, rows = normal(rng, 4096, size), NamedSharding(mesh, P("data"))
    split = {"w": NamedSharding(mesh, spec), "out": NamedSharding(mesh, P())}

    def loss(params, x):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
        return loss_of(params, jax.lax.scan(layer, x, params["w"])[0])

    def step(params, x):
        result = value_and_grad(loss, f"c=bf16,r={reduce}", sharding=rows)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, result.grads)

    lowered = jax.jit(step, in_shardings=(split, rows), out_shardings=split).lower(params, x)
    found = read(partitioned(lowered)[0])
    sums = [one for one in found if one.kind == "all-reduce" and one.group == sizes[0]]
    (layer,) = [one for one in sums if one.bytes > 4 * size]  # and no other of a whole stack
    assert layer.dtype == reduce and layer.times == LAYERS
    whole = size * size * (4 if reduce == "f32" else 2)
    assert layer.bytes == whole // (2 if len(sizes) > 1 else 1)
    gathers = {one.dtype for one in found if one.kind == "all-gather" and one.bytes > 4 * size}
    assert gathers == {"bf16"}


WIDTH, ROWS = 64, 512  # products of few examples would move activations, and not weights


def two_layers(m, x):
    return m.linear("second", WIDTH)(jnp.tanh(m.linear("first", WIDTH)(x)))


def mlp(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


FUNCTIONS = {
    "policy": mlp,
    "autocast": jmpx.autocast(mlp, policy="bf16"),
    "cast_function": mpx.cast_function(mlp, jnp.bfloat16),
}


def plain(loss, policy, scaling):
    return jmpx.value_and_grad(loss, scaling, policy=policy)


def collectives_of(way, how, policy, shards):
    """Returns the dtypes of what a step gathers, and of what it sums, flags and few bytes apart."""
    mesh, x = mesh_of(GROUPS), jnp.zeros((ROWS, WIDTH))
    if way in FUNCTIONS:
        apply, model = FUNCTIONS[way], dict.fromkeys(["first", "second"], jnp.ones((WIDTH, WIDTH)))
    else:
        net = zoo.build(way, two_layers, x)
        apply, model = net.split(net.under("c=bf16"))
    loss = lambda model, x: jnp.mean(apply(model, x).astype(jnp.float32) ** 2)  # noqa: E731
    grad_fn = how(loss, policy, jmpx.DynamicLossScale(2.0**8))

    def step(model, x):
        value, _, finite, grads = grad_fn(model, x)
        return jax.tree.map(lambda p, g: jnp.where(finite, p - g, p), model, grads), value

    split = lambda leaf: NamedSharding(mesh, P("data") if shards and leaf.ndim > 1 else P())  # noqa: E731
    put, batch = jax.tree.map(split, model), NamedSharding(mesh, P("data"))
    jitted = jax.jit(step, in_shardings=(put, batch), out_shardings=(put, None))
    found = collections.defaultdict(set)
    for one in read(partitioned(jitted.lower(model, x))[0]):
        if one.dtype != "pred" and one.bytes > 1024:
            found["gathers" if one.kind == "all-gather" else "sums"].add(one.dtype)
    return found["gathers"], found["sums"]


@pytest.mark.thorough
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("way", "how", "policy"),
    [
        ("policy", by_hand, "c=bf16"),
        ("autocast", value_and_grad, "*: bf16"),
        ("cast_function", plain, "full"),
        ("equinox", value_and_grad, "full"),
    ],
)
def test_casts_come_before_gathers(way, how, policy):
    gathers, sums = collectives_of(way, how, policy, shards=True)
    assert gathers == {"bf16"} and sums == ({"bf16"} if how is plain else {"f32"})


@pytest.mark.parametrize(
    ("compute", "reduce", "shards"), [("bf16", "f16", False), ("f16", "f32", True)]
)
def test_gradients_are_summed_in_reduce(compute, reduce, shards):
    found = collectives_of("policy", value_and_grad, f"c={compute},r={reduce}", shards)
    assert found == ({compute} if shards else set(), {reduce})


# Shardings of activations


@pytest.mark.parametrize(
    ("spec", "kind", "jit"),
    [
        (P("data"), AxisType.Auto, False),
        versions(P("data", P.UNCONSTRAINED), AxisType.Explicit, False),
        (P(("model", "data"), None), AxisType.Explicit, True),
    ],
)
def test_shardings_of_activations_may_name_the_axes_of_the_batch(spec, kind, jit, rng):
    mesh, args = mesh_of(4, 2, axis_type=kind), (params_of(rng), normal(rng, 16, SIZE))
    constrain = lambda x: jax.lax.with_sharding_constraint(x, spec)  # noqa: E731
    constrain = jax.jit(constrain) if jit else constrain

    def step(h, layer):
        return constrain(body(h, layer)[0]), None

    loss = looped(lambda _, x, layers: checkpointed(step, constrain(x), layers))
    with jax.set_mesh(mesh):
        x = jax.device_put(args[1], NamedSharding(mesh, P("data")))
        params = jax.device_put(args[0], NamedSharding(mesh, P()))
        result = jax.jit(value_and_grad(loss, sharding=P("data")))(params, x)
    assert_near(result, in_float64(*args, loss=looped()), 5e-6)


def test_what_the_other_axes_split_stays_split():
    mesh = mesh_of(4, 2)
    before = NamedSharding(mesh, P(("data", "model"), P.UNCONSTRAINED))

    def loss(w, x):
        return (jax.lax.with_sharding_constraint(x, before) * w).sum()

    grad_fn = value_and_grad(loss, sharding=NamedSharding(mesh, P("data")))
    jaxpr = jax.make_jaxpr(lambda *args: grad_fn(*args).grads)(jnp.ones(()), jnp.zeros((8, 2)))
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "sharding_constraint"]
    # A group is whole along the axis of the batch, whose name is that of the groups' own axis.
    assert P("data", "model", P.UNCONSTRAINED) in [
        P(*((n[0] if isinstance(n, tuple) else n) for n in eqn.params["sharding"].spec))
        for eqn in found
    ]
