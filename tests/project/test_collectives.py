"""What FSDP steps send, as `benchmarks/compiled_step.py` counts it."""

import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_step import partitioned, sends
from helpers import normal, versions, zoo
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import Transformer

import jmpx
import jmpx.mpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
ROWS = P("data")
MODEL = Transformer(layers=1, width=32, heads=2, hidden=64, classes=24, islands=True)


def test_a_loop_of_unknown_trips_is_refused():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    body = lambda x: lax.psum(x, "data") - x  # noqa: E731
    step = lambda x: lax.while_loop(lambda x: x[0] > 0, body, x)  # noqa: E731
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    program = jax.jit(mapped).lower(jax.ShapeDtypeStruct((64,), jnp.float32))
    with pytest.raises(ValueError, match="how often the loop around an all-reduce runs"):
        sends(program)
    with pytest.raises(ValueError, match="how often the loop around an all-reduce runs"):
        sends(partitioned(program)[0])


# What the steps of `fsdp.py` send, in a smaller model.


@pytest.fixture(scope="module")
def problem():
    with jax.numpy_dtype_promotion("standard"):
        return fsdp.problem(MODEL, sequences=16, length=8)


def kinds(way, compiler, problem):
    found = fsdp.measure(way, compiler, problem, jax.devices())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.params)) * 7 / 8 / 2**20
    return found, {key: round(value / size, 2) for key, value in found["by_kind"].items()}


# In shares of what one gather or reduce-scatter of the float32 parameters sends.
JIT = {
    "float32": {"all-gather f32": 1, "all-reduce f32": 2},
    "c=bf16": {"all-gather bf16": 0.5, "all-reduce bf16": 1},
    "c=bf16,r=f32": {"all-gather bf16": 0.5, "all-reduce f32": 2},
    "c=bf16,r=f32, 2 micro-batches": {"all-gather bf16": 1, "all-reduce f32": 4},
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", JIT)
def test_what_the_partitioner_inserts(way, problem, monkeypatch):
    """It sums the gradients of each micro-batch, and the batch itself is not sent."""
    two = fsdp.with_policy("c=bf16,r=f32", microbatches=2)
    monkeypatch.setitem(fsdp.WAYS, "c=bf16,r=f32, 2 micro-batches", two)
    found, shares = kinds(way, "partitioner", problem)
    assert shares == pytest.approx(JIT[way], abs=0.05)
    # No larger than on one device, but for the last bits.
    assert 0 < found["gradient_error"] < 1.05 * found["error_one_device"] < 0.1
    assert (found["error_one_device"] > 1e-4) == (way != "float32")


SHARD_MAP = {
    "all_gather of bf16": {"all-gather bf16": 0.5, "reduce-scatter bf16": 0.5},
    "jmpx.distributed.gather, c=bf16": {"all-gather bf16": 0.5, "reduce-scatter f32": 1},
    "jmpx.distributed.gather, c=bf16,r=bf16": {"all-gather bf16": 0.5, "reduce-scatter bf16": 0.5},
}


@pytest.mark.slow  # compiles a step for each way
@pytest.mark.parametrize("way", SHARD_MAP)
def test_what_gathers_under_shard_map_send(way, problem):
    assert kinds(way, "stablehlo", problem)[1] == SHARD_MAP[way]
    found, shares = kinds(way, "partitioner", problem)
    assert shares == SHARD_MAP[way]
    assert 0 < found["gradient_error"] < 1.05 * found["error_one_device"] < 0.1


def test_a_sharding_over_other_axes_stays_as_it_is(rng):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    columns, rows = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("model"))
    batch = NamedSharding(mesh, P("data"))

    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"]).astype(jnp.float32)

    shapes = {"up": (columns, (32, 64)), "down": (rows, (64, 32)), "x": (batch, (64, 32))}
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, (sharding, shape) in shapes.items()
    }
    x = arrays.pop("x")

    def of(policy):
        grad_fn = jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy=policy)
        step = jax.jit(lambda params, x: grad_fn(params, x).grads)
        found = sends(partitioned(step.lower(arrays, x))[0])
        return [
            sorted((one.kind, one.dtype, one.bytes) for one in found if one.group == size)
            for size in (2, 4)  # the sizes of the axes "model" and "data"
        ]

    (over_model, over_data), (with_reduce, gradients) = of("c=bf16"), of("c=bf16,r=f32")
    assert over_model == with_reduce
    assert {(kind, dtype) for kind, dtype, _ in over_data} == {("all-reduce", "bf16")}
    assert {(kind, dtype) for kind, dtype, _ in gradients} == {("all-reduce", "f32")}
    assert sum(n for *_, n in gradients) == 2 * sum(n for *_, n in over_data) == 4 * 2 * 32 * 32


# The same in each way to cast.


WIDTH, ROWS_OF_BATCH = 64, 512  # products of few examples would move activations, and not weights


def two_layers(m, x):
    return m.linear("second", WIDTH)(jnp.tanh(m.linear("first", WIDTH)(x)))


def mlp(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


FUNCTIONS = {
    "policy": mlp,
    "autocast": jmpx.autocast(mlp, policy="bf16"),
    "cast_function": jmpx.mpx.cast_function(mlp, jnp.bfloat16),
}


def collectives_of(way, policy, shards):
    """Returns the dtypes of what a step gathers, and of what it sums, flags and few bytes apart."""
    mesh, x = Mesh(np.array(jax.devices()), ("data",)), jnp.zeros((ROWS_OF_BATCH, WIDTH))
    if way in FUNCTIONS:
        apply, model = FUNCTIONS[way], dict.fromkeys(["first", "second"], jnp.ones((WIDTH, WIDTH)))
    else:
        net = zoo.build(way, two_layers, x)
        apply, model = net.split(net.under("c=bf16"))
    loss = lambda model, x: jnp.mean(apply(model, x).astype(jnp.float32) ** 2)  # noqa: E731
    grad_fn = jmpx.value_and_grad(loss, jmpx.DynamicLossScale(2.0**8), policy=policy)

    def step(model, x):
        value, _, finite, grads = grad_fn(model, x)
        return jax.tree.map(lambda p, g: jnp.where(finite, p - g, p), model, grads), value

    split = lambda leaf: NamedSharding(mesh, P("data") if shards and leaf.ndim > 1 else P())  # noqa: E731
    put, batch = jax.tree.map(split, model), NamedSharding(mesh, P("data"))
    jitted = jax.jit(step, in_shardings=(put, batch), out_shardings=(put, None))
    found = {"gathers": set(), "sums": set()}
    for one in sends(partitioned(jitted.lower(model, x))[0]):
        if one.dtype != "pred" and one.bytes > 1024:
            found["gathers" if one.kind == "all-gather" else "sums"].add(one.dtype)
    return found["gathers"], found["sums"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "policy", "sums"),
    [
        ("policy", "by=arguments,c=bf16,r=f32", "f32"),
        ("autocast", "full,r=f32", "f32"),
        ("cast_function", "full", "bf16"),
        ("cast_function", "full,r=f32", "f32"),
        ("equinox", "full,r=f32", "f32"),
    ],
)
def test_casts_come_before_gathers_and_after_sums(way, policy, sums):
    assert collectives_of(way, policy, shards=True) == ({"bf16"}, {sums})


@pytest.mark.parametrize(("compute", "shards"), [("bf16", False), ("f16", True)])
def test_gradients_are_summed_in_float32(compute, shards):
    found = collectives_of("policy", f"c={compute},r=f32", shards)
    assert found == ({compute} if shards else set(), {"f32"})


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [versions((8,), P(None, "data")), ((4, 2), P(None, "data", "model"))],
)
def test_a_stacked_layer_is_summed_in_the_loop(sizes, spec, rng):
    size, layers = 64, 3
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model")[: len(sizes)])
    params = {"w": normal(rng, layers, size, size) / 8, "out": jnp.zeros((size, 1))}
    x, rows = normal(rng, 4096, size), NamedSharding(mesh, P("data"))
    split = {"w": NamedSharding(mesh, spec), "out": NamedSharding(mesh, P())}

    def loss(params, x):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
        h = jax.lax.scan(layer, x, params["w"])[0] @ params["out"]
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(params, x):
        grads = jmpx.grad(loss, jmpx.NoOpLossScale(), policy="c=bf16,r=f32")(params, x).grads
        return jax.tree.map(lambda p, g: p - g, params, grads)

    lowered = jax.jit(step, in_shardings=(split, rows), out_shardings=split).lower(params, x)
    found = sends(partitioned(lowered)[0])
    sums = [one for one in found if one.kind == "all-reduce" and one.group == sizes[0]]
    (layer,) = [one for one in sums if one.bytes > 4 * size]  # and no other of a whole stack
    assert layer.dtype == "f32" and layer.times == layers
    assert layer.bytes == 4 * size * size // (2 if len(sizes) > 1 else 1)
    gathers = {one.dtype for one in found if one.kind == "all-gather" and one.bytes > 4 * size}
    # On a CPU, these products have float32 operands, for which tensor parallelism gathers more.
    assert gathers == ({"bf16"} if len(sizes) == 1 else {"bf16", "f32"})
