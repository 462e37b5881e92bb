"""How `collectives` reads programs: bytes, groups, loops, and which inputs and outputs travel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import partitioned
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
from jmpx._inspect.collectives.data import Collective

ROWS = P("data")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mapped(mesh, fn, spec=ROWS, out=None):
    out = spec if out is None else out
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))


def lowered(mesh, fn, *arrays, spec=ROWS, out=None):
    return mapped(mesh, fn, spec, out).lower(*(f32(*shape) for shape in arrays))


def readings(program):
    """What is read from a program as JAX wrote it, after XLA's partitioner, and compiled."""
    text, compiled = partitioned(program)
    return [jmpx.inspect.collectives(each).collectives for each in (program, text, compiled)]


# Bytes and groups.


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


@pytest.mark.parametrize("kind", SENT)
def test_the_bytes_of_a_collective(mesh, kind):
    for found in readings(lowered(mesh, lambda x: exchange(kind, x), (8192,))):
        assert {(one.kind, one.dtype, one.times) for one in found} == {(kind, "f32", 1)}
        assert sum(one.sent for one in found) == SENT[kind]  # a CPU's all-to-all has eight parts
        assert {one.group for one in found} == {8} and not any(one.is_scalar for one in found)
        place = str(found[0].place)  # older versions of JAX compile programs without functions
        assert re.fullmatch(r".*test_wire_programs\.py:\d+ \((exchange)?\)", place)


def test_a_ragged_exchange_counts_what_it_may_send(mesh):
    def step(x, into, offsets, sizes, places, received):
        return lax.ragged_all_to_all(
            x, into, offsets, sizes, places, received, axis_name="data"
        )  # fmt: skip

    sizes = [jax.ShapeDtypeStruct((64,), jnp.int32)] * 4
    program = mapped(mesh, step).lower(f32(128, 4), f32(128, 4), *sizes)
    (one,) = jmpx.inspect.collectives(program).collectives  # XLA:CPU cannot compile it
    assert one[:4] == ("ragged-all-to-all", "f32", 16 * 4 * 4, 8)
    assert one.sent == 16 * 4 * 4 * 7 / 8 and one.parameter == "x"


DTYPES = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "f8e4m3fn", "int8": "s8",
          "uint16": "u16", "bool": "pred", "complex64": "c64"}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_have_the_names_of_hlo(mesh, dtype):
    program = mapped(mesh, lambda x: lax.all_gather(x, "data", tiled=True)).lower(
        jax.ShapeDtypeStruct((64,), dtype)
    )
    ((one,), (after,)) = readings(program)[:2]
    assert one.dtype == after.dtype == DTYPES[dtype]
    assert one.bytes == after.bytes == 64 * np.dtype(dtype).itemsize


def test_groups_of_some_of_the_devices():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    for axes, size in (("data", 4), ("model", 2), (("data", "model"), 8)):
        program = lowered(mesh, lambda x, axes=axes: lax.psum(x, axes), (64,), spec=P())
        for found in readings(program):
            assert [(one.group, one.bytes) for one in found] == [(size, 256)]


# Loops, functions and branches.


def test_collectives_in_loops_and_functions_count_as_often_as_they_run(mesh):
    @jax.jit
    def called(x):
        return lax.psum(x * x, "data")

    def inner(x, _):
        return x + called(x), None

    def outer(x, _):
        x, _ = lax.scan(inner, x, length=3)
        return x + lax.all_gather(x, "data").sum(0).astype(jnp.float32), None

    def step(x):
        return lax.scan(outer, called(x), length=5)[0]

    for found in readings(lowered(mesh, step, (64,))):
        times = sorted((one.kind, one.times, one.in_while) for one in found)
        expected = [("all-gather", 5, False), ("all-reduce", 1, False), ("all-reduce", 15, False)]
        assert times == expected
        assert sum(one.sent for one in found) == 16 * 2 * 32 * 7 / 8 + 5 * 256 * 7 / 8


def counting(start, stop, step, up=True):
    """A loop that a counter ends."""

    def loop(x):
        holds = (lambda c: c[0] < stop) if up else (lambda c: stop > c[0])
        body = lambda c: (c[0] + step, lax.psum(c[1], "data") / 8)  # noqa: E731
        return lax.while_loop(holds, body, (start, x))[1]

    return loop


def test_the_trips_of_a_loop_that_counts(mesh, rng):
    for up in (True, False):
        start, stop, step = (int(rng.integers(*limits)) for limits in ((-9, 9), (-9, 30), (1, 5)))
        trips = len(range(start, stop, step))
        for found in readings(lowered(mesh, counting(start, stop, step, up), (64,)))[:2]:
            assert [(one.times, one.in_while) for one in found] == [(trips, False)]


UNCOUNTED = {
    "data": lambda c: c[1][0] > 0,
    "data and a counter": lambda c: (c[0] < 5) & (c[1][0] > 0),
    "a bound that is an input": lambda c: c[0] < c[1][0].astype(int),
    "downwards": lambda c: c[0] >= 5,
}


@pytest.mark.parametrize("holds", UNCOUNTED.values(), ids=UNCOUNTED)
def test_a_loop_whose_trips_are_unknown_counts_one_and_is_marked(mesh, holds):
    def loop(x):
        body = lambda c: (c[0] + 1, lax.psum(c[1], "data"))  # noqa: E731
        return lax.while_loop(holds, body, (0, x))[1]

    program = lowered(mesh, loop, (64,))
    for found in readings(program)[:2]:
        assert [(one.times, one.in_while) for one in found] == [(1, True)]
    assert "1+" in str(jmpx.inspect.collectives(program)) and "of unknown length" in str(
        jmpx.inspect.collectives(program)
    )


def test_all_branches_of_a_conditional_count_and_are_marked(mesh):
    def step(x):
        y = lax.cond(x[0] > 0, lambda x: lax.psum(x, "data"), lambda x: x, x)
        return lax.psum(y, "data")

    program = lowered(mesh, step, (64,))
    for found in readings(program)[:2]:
        assert sorted(one.in_branch for one in found) == [False, True]
    assert "All branches" in str(jmpx.inspect.collectives(program))


# What travels.


def bf16(x):
    return x.astype(jnp.bfloat16)


def gathered(x):
    return lax.all_gather(x, "data", tiled=True)


@jax.custom_vjp
def custom(x):
    return bf16(x)


custom.defvjp(lambda x: (bf16(x), None), lambda _, g: (g.astype(jnp.float32),))

# What is gathered, of two parameters `w`, of shape (3, 16, 8) on a device, and `v`, of (16, 8).
COPIES = {
    "as it is": lambda w, v: w,
    "converted": lambda w, v: bf16(w),
    "sliced": lambda w, v: w[1],
    "transposed": lambda w, v: bf16(w).T,
    "reshaped": lambda w, v: w.reshape(48, 8),
    "scaled by a constant": lambda w, v: (w * 4).astype(jnp.float16),
    "masked": lambda w, v: jnp.where(jnp.arange(8) < 4, w, 0),
    "in a jitted function": lambda w, v: jax.jit(bf16)(w),
    "with a custom derivative": lambda w, v: custom(w),
    "behind a barrier": lambda w, v: lax.optimization_barrier((w, v))[0],
    "copied into zeros": lambda w, v: lax.dynamic_update_index_in_dim(w * 0, w[0], 0, 0),
    "stacked by a loop": lambda w, v: lax.scan(lambda c, x: (c, bf16(x)), 0, w)[1],
    "gathered before": lambda w, v: gathered(bf16(w)),
    "chosen by a branch": lambda w, v: lax.cond(v.sum() > 0, lambda: bf16(w), lambda: bf16(w) * 2),
}
OTHERS = {
    "an activation": lambda w, v: w[0].T @ v,
    "two parameters": lambda w, v: w[0] + v,
    "the square": lambda w, v: w * w,
    "a function": lambda w, v: jnp.tanh(w),
    "a sum": lambda w, v: w.sum(0),
    "the sum of a loop": lambda w, v: lax.scan(lambda c, x: (c + x, None), v, w)[0],
    "either of two": lambda w, v: jnp.where(v > 0, w[0], v),
    "a constant": lambda w, v: jnp.ones((8, 8)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("take", [*COPIES.values(), *OTHERS.values()], ids=[*COPIES, *OTHERS])
@pytest.mark.usefixtures("standard_promotion")
def test_which_parameter_a_gather_carries(mesh, take):
    def step(params):
        whole = gathered(take(params["w"], params["b"]["v"]))
        return jnp.sum(whole.astype(jnp.float32), keepdims=True).ravel()

    params = {"w": f32(3, 128, 8), "b": {"v": f32(128, 8)}}
    specs = {"w": P(None, "data"), "b": {"v": P("data")}}
    step = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=P("data"), check_vma=False)
    program = jax.jit(step).lower(params)
    for found in readings(program)[:2]:  # the compiler may sum before it gathers
        expected = "params['w']" if take in COPIES.values() else ""
        assert [one.parameter for one in found if one.kind == "all-gather"][-1] == expected


def test_operations_that_carry_functions_or_odd_constants(mesh):
    # A sum or a sort is no copy of its operand, whatever its function does; and no value of a
    # constant may be asked for that JAX cannot return.
    def step(x):
        values = [
            jnp.sort(x, 0), lax.top_k(x, 2)[0], jnp.cumsum(x, 0), jnp.fft.fft(x) * 1j,
            lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"), x.at[0].add(1.0),
            jax.random.normal(jax.random.key(0), (3,)), lax.associative_scan(jnp.add, x),
            lax.erf_inv(x / 9), jax.pure_callback(lambda x: x, f32(4, 4), x), x.sum(0),
        ]  # fmt: skip
        return [lax.psum(value.real, "data") for value in values]

    found = jmpx.inspect.collectives(lowered(mesh, step, (32, 4))).collectives
    assert len(found) == 11
    assert {(one.kind, one.parameter) for one in found} == {("all-reduce", "")}
    assert [one.results for one in found] == [(f"result[{i}]",) for i in range(11)]


def test_parameters_are_named_also_if_others_are_unused(mesh):
    step = mapped(mesh, lambda a, b, c: gathered(c), P("data"))
    for found in readings(step.lower(f32(8), f32(8), f32(8))):
        assert [one.parameter for one in found] == ["c"]


def adam(params, state, grads):
    """One step of Adam, without its bias correction."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g * g, state["square"], grads)
    update = lambda p, m, s: p - 0.1 * m / (jnp.sqrt(s) + 1e-8)  # noqa: E731
    return jax.tree.map(update, params, mean, square), {"mean": mean, "square": square}


def test_the_outputs_that_a_gradient_becomes(mesh):
    def loss_fn(params, x):
        layer = lambda h, w: (jnp.tanh(h @ gathered(w)), None)  # noqa: E731
        h, _ = lax.scan(layer, x, params["layers"])
        return jnp.sum((h @ gathered(params["head"])) ** 2)

    def step(params, state, x):
        grads = jax.grad(loss_fn)(params, x)
        norm = jnp.sqrt(lax.psum(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)), "data"))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)  # all outputs have the norm
        return adam(params, state, grads)

    params = {"layers": f32(3, 16, 16), "head": f32(16, 24)}
    specs = {"layers": P(None, "data"), "head": P("data")}
    states = {"mean": specs, "square": specs}
    step = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, states, P("data")), out_specs=(specs, states),
        check_vma=False,
    )  # fmt: skip
    program = jax.jit(step).lower(params, {"mean": params, "square": params}, f32(64, 16))
    for given in (program, program.compile()):
        wire = jmpx.inspect.collectives(given)
        for name, times in (("layers", 3), ("head", 1)):
            outputs = (f"result[0]['{name}']", f"result[1]['mean']['{name}']",
                       f"result[1]['square']['{name}']")  # fmt: skip
            (gradient,) = (one for one in wire.collectives if one.results == outputs)
            assert gradient.kind == "reduce-scatter" and gradient.is_backward
            assert gradient.times == times and gradient.parameter == ""
            gathers = [one for one in wire.collectives if one.parameter == f"params['{name}']"]
            assert [(one.kind, one.times, one.is_backward) for one in gathers] == [
                ("all-gather", times, False)
            ]
        (norm,) = (one for one in wire.collectives if one.kind == "all-reduce")
        assert norm.is_scalar and norm.results == ()
        assert "grad -> result[0]['head']" in str(wire)


# What XLA writes for other machines.

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
    found = jmpx.inspect.collectives(HLO).collectives
    assert sorted(found) == sorted(
        [
            Collective("all-gather", "bf16", 256, 8),
            Collective("collective-permute", "f32", 16, 8),
            Collective("all-gather", "f32", 32, 4),
            Collective("all-reduce", "pred", 1, 8),
            Collective("all-reduce", "f32", 4, 8),
            Collective("all-reduce", "f32", 256, 8),
            Collective("reduce-scatter", "f32", 512, 4, results=("output 0",)),
        ]
    )
    assert [one.dtype for one in found if one.is_scalar] == ["pred", "f32"]
