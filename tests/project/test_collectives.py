"""What FSDP steps send, as `benchmarks/collectives.py` counts it."""

from typing import Any

import collectives
import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import read
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import Transformer

import jmpx

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
        read(program)
    with pytest.raises(ValueError, match="how often the loop around an all-reduce runs"):
        read(collectives.partitioned(program)[0])


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
    "batch_sharding, c=bf16": {"all-gather bf16": 0.5, "all-reduce f32": 2},
    "batch_sharding, c=bf16,r=bf16": {"all-gather bf16": 0.5, "all-reduce bf16": 1},
    "batch_sharding, c=bf16, 2 micro-batches": {"all-gather bf16": 1, "all-reduce f32": 2},
    "vmap of axis_name": {"all-gather bf16": 0.5, "all-reduce f32": 2},
}


def vmap_of_axis_name(model, mesh, params, *batch):
    """Groups of a batch by hand: the axis of a vmap, which the mesh splits."""
    of_a_group = fsdp.with_jmpx(model.loss, "c=bf16", over=jmpx.Over("groups"))
    names: Any = {"axis_name": "groups", "spmd_axis_name": "data"}
    mapped = jax.vmap(of_a_group, in_axes=(None, 0, 0), out_axes=None, **names)
    groups = [array.reshape(mesh.size, -1, *array.shape[1:]) for array in batch]
    return mapped(params, *jax.lax.with_sharding_constraint(groups, NamedSharding(mesh, P("data"))))


@pytest.mark.thorough
@pytest.mark.parametrize("way", JIT)
def test_what_the_partitioner_inserts(way, problem, monkeypatch):
    name = "batch_sharding, c=bf16, 2 micro-batches"
    make = fsdp.with_policy("c=bf16", groups=True, microbatches=2)
    monkeypatch.setitem(fsdp.WAYS, name, make)
    monkeypatch.setitem(fsdp.WAYS, "vmap of axis_name", vmap_of_axis_name)
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


def test_groups_leave_a_sharding_over_other_axes_as_it_is(rng):
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

    def of(**options):
        grad_fn = jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy="c=bf16", **options)
        step = jax.jit(lambda params, x: grad_fn(params, x).grads)
        found = read(collectives.partitioned(step.lower(arrays, x))[0])
        return [
            sorted((one.kind, one.dtype, one.bytes) for one in found if one.group == size)
            for size in (2, 4)  # the sizes of the axes "model" and "data"
        ]

    (over_model, over_data), (with_groups, gradients) = of(), of(batch=jmpx.Batch(sharding=batch))
    assert over_model == with_groups
    assert {(kind, dtype) for kind, dtype, _ in over_data} == {("all-reduce", "bf16")}
    assert {(kind, dtype) for kind, dtype, _ in gradients} == {("all-reduce", "f32")}
    assert sum(n for *_, n in gradients) == 2 * sum(n for *_, n in over_data) == 4 * 2 * 32 * 32
