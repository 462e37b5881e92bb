"""`benchmarks/collectives.py`, which counts what programs send, and what it says of FSDP steps."""

import collectives
import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import Collective, read_hlo, read_stablehlo
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import Transformer

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
ROWS = P("data")
MODEL = Transformer(layers=1, width=32, heads=2, hidden=64, classes=24, islands=True)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


# The reader.


def exchange(kind, x):
    """A collective of x, which is f32[1024] on each of eight devices."""
    if kind == "all-reduce":
        return lax.psum(x, "data")
    if kind == "all-gather":
        return lax.all_gather(x, "data", tiled=True)
    if kind == "reduce-scatter":
        return lax.psum_scatter(x, "data", tiled=True)
    if kind == "all-to-all":
        return lax.all_to_all(x, "data", 0, 0, tiled=True)
    return lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])


SENT = {  # bytes, of a collective of f32[1024]
    "all-reduce": 2 * 4096 * 7 / 8,
    "all-gather": 8 * 4096 * 7 / 8,
    "reduce-scatter": 4096 * 7 / 8,
    "all-to-all": 4096 * 7 / 8,
    "collective-permute": 4096,
}


def lowered(mesh, fn, *shapes, spec=ROWS):
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


@pytest.mark.parametrize("kind", SENT)
def test_the_bytes_of_a_collective_in_stablehlo_and_in_hlo(mesh, kind):
    program = lowered(mesh, lambda x: exchange(kind, x), (8192,))
    for found in (
        read_stablehlo(program),
        read_hlo(collectives.partitioned(program)[0]),
        read_hlo(str(program.compile().as_text())),  # on a CPU, where float32 is not widened
    ):
        assert {(one.kind, one.dtype, one.times) for one in found} == {(kind, "f32", 1)}
        assert sum(one.sent for one in found) == SENT[kind]  # a CPU's all-to-all has eight parts
        assert not any(one.is_scalar for one in found)


def test_groups_of_some_of_the_devices():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    for axes, size in (("data", 4), ("model", 2), (("data", "model"), 8)):
        program = lowered(mesh, lambda x, axes=axes: lax.psum(x, axes), (64,), spec=P())
        for found in read_stablehlo(program), read_hlo(str(program.compile().as_text())):
            assert [(one.group, one.bytes) for one in found] == [(size, 256)]


def test_collectives_in_loops_and_functions_count_as_often_as_they_run(mesh):
    def inner(x, _):
        return x + lax.psum(x * x, "data"), None

    def outer(x, _):
        x, _ = lax.scan(inner, x, length=3)
        return x + lax.all_gather(x, "data").sum(0).astype(jnp.float32), None

    program = lowered(mesh, lambda x: lax.scan(outer, x, length=5)[0], (64,))
    for found in read_stablehlo(program), read_hlo(collectives.partitioned(program)[0]):
        times = {one.kind: one.times for one in found}
        assert times == {"all-reduce": 15, "all-gather": 5}
        assert collectives.mib(found) * 2**20 == 15 * 2 * 32 * 7 / 8 + 5 * 256 * 7 / 8

    def unbounded(x):
        return lax.while_loop(lambda x: x[0] > 0, lambda x: lax.psum(x, "data") - x, x)

    program = lowered(mesh, unbounded, (64,))
    with pytest.raises(ValueError, match="how often the loop around an all-reduce runs"):
        read_stablehlo(program)
    with pytest.raises(ValueError, match="how often the loop around an all-reduce runs"):
        read_hlo(collectives.partitioned(program)[0])


HLO = """HloModule jit_step, is_scheduled=true, num_partitions=8

%start (p: bf16[16]) -> (bf16[16], bf16[128]) {
  %p = bf16[16]{0} parameter(0)
  %g.1 = bf16[128]{0:T(256)} all-gather(%p), replica_groups=mesh['a'=4,'b'=2] {'a','b'}, \
frontend_attributes={chain_id="0"}
  ROOT %c = (bf16[16]{0}, bf16[128]{0}) custom-call(%g.1), custom_call_target="AsyncStart"
}

%done (p.1: bf16[16]) -> bf16[128] {
  %p.1 = bf16[16]{0} parameter(0)
  ROOT %g.2 = bf16[128]{0} all-gather(%p.1), replica_groups=mesh['a'=4,'b'=2] {'a','b'}, \
frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.3 (input: f32[128]) -> f32[16] {
  %input = f32[128]{0} parameter(0)
  %r = f32[128]{0} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %s = f32[16]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={16}
}

ENTRY %main (a: bf16[16], b: f32[128]) -> f32[16] {
  %a = bf16[16]{0} parameter(0)
  %b = f32[128]{0} parameter(1)
  %fusion = (bf16[16]{0}, bf16[128]{0}) fusion(%a), kind=kCustom, calls=%start
  %fusion.1 = bf16[128]{0} fusion(%a), kind=kCustom, calls=%done
  %permuted = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%b)
  %gathered = (f32[2]{0}, f32[8]{0}) all-gather-start(%b), replica_groups=[2,4]<=[8], dimensions={0}
  %flags = (pred[], f32[], f32[64]{0}) all-reduce(%x, %y, %z), replica_groups={}, to_apply=%and
  ROOT %fusion.2 = f32[16]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.3
}
"""


def test_what_the_compiler_of_tpus_writes():
    # One gather in the fusions that overlap with it, a reduce-scatter as an all-reduce and a
    # slice, asynchronous collectives, and several arrays in one collective.
    found = read_hlo(HLO)
    assert sorted(found) == sorted(
        [
            Collective("all-gather", "bf16", 256, 8),
            Collective("collective-permute", "f32", 16, 8),
            Collective("all-gather", "f32", 32, 4),
            Collective("all-reduce", "pred", 1, 8),
            Collective("all-reduce", "f32", 4, 8),
            Collective("all-reduce", "f32", 256, 8),
            Collective("reduce-scatter", "f32", 512, 4),
        ]
    )
    assert [one.dtype for one in found if one.is_scalar] == ["pred", "f32"]
    assert {key: value * 2**20 for key, value in collectives.table(found).items()} == {
        "all-gather bf16": 224,
        "all-gather f32": 24,
        "all-reduce f32": 448,
        "collective-permute f32": 16,
        "reduce-scatter f32": 384,
    }


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
    "batch_sharding, c=bf16, gathered once": {"all-gather bf16": 0.5, "all-reduce f32": 2},
    "batch_sharding, c=bf16, 2 micro-batches": {"all-gather bf16": 1, "all-reduce f32": 2},
    "vmap of axis_name": {"all-gather bf16": 0.5, "all-reduce f32": 2},
}


@pytest.mark.parametrize("way", JIT)
def test_what_the_partitioner_inserts(way, problem, monkeypatch):
    name = "batch_sharding, c=bf16, 2 micro-batches"
    make = fsdp.with_policy("c=bf16", groups=True, microbatches=2)
    monkeypatch.setitem(fsdp.WAYS, name, make)
    found, shares = kinds(way, "partitioner", problem)
    assert shares == pytest.approx(JIT[way], abs=0.05)
    # No larger than on one device, but for the last bits.
    assert 0 < found["gradient_error"] < 1.05 * found["error_one_device"] < 0.1
    assert (found["error_one_device"] > 1e-4) == (way != "float32")


SHARD_MAP = {
    "all_gather of bf16": {"all-gather bf16": 0.5, "reduce-scatter bf16": 0.5},
    "gather by hand": {"all-gather bf16": 0.5, "reduce-scatter f32": 1},
    "jmpx.gather, c=bf16": {"all-gather bf16": 0.5, "reduce-scatter f32": 1},
    "jmpx.gather, c=bf16,r=bf16": {"all-gather bf16": 0.5, "reduce-scatter bf16": 0.5},
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
        grad_fn = jmpx.filter_grad(loss_fn, jmpx.NoOpLossScale(), policy="c=bf16", **options)
        step = jax.jit(lambda params, x: grad_fn(params, x).grads)
        found = read_hlo(collectives.partitioned(step.lower(arrays, x))[0])
        return [
            sorted((one.kind, one.dtype, one.bytes) for one in found if one.group == size)
            for size in (2, 4)  # the sizes of the axes "model" and "data"
        ]

    (over_model, over_data), (with_groups, gradients) = of(), of(batch_sharding=batch)
    assert over_model == with_groups
    assert {(kind, dtype) for kind, dtype, _ in over_data} == {("all-reduce", "bf16")}
    assert {(kind, dtype) for kind, dtype, _ in gradients} == {("all-reduce", "f32")}
    assert sum(n for *_, n in gradients) == 2 * sum(n for *_, n in over_data) == 4 * 2 * 32 * 32
