"""Rows and shards that 16-bit operations alone read: they move in 16 bits, gradients in float32."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, normal
from helpers.autocast import LOW_DTYPES
from helpers.jaxprs import equations_of
from jax import lax
from jax.sharding import PartitionSpec as P

import jmpx
from jmpx._autocast import reads

TOKENS = np.random.default_rng(0).integers(-3, 20, size=(4, 8))


def in_carry(rows, w):
    return lax.scan(lambda h, _: (h + jnp.tanh(jnp.sin(h) @ w), None), rows, None, 2)[0]


def in_slices(rows, w):
    return lax.scan(lambda c, row: (c, jnp.tanh(row @ w)), 0.0, rows)[1]


# How rows are gathered, and what reads them. 16-bit operations alone:
GATHERS = {
    "index": lambda table: table[TOKENS],
    "take": lambda table: jnp.take(table, TOKENS, axis=0),
    "clip": lambda table: jnp.take(table, TOKENS, axis=0, mode="clip"),
    "fill": lambda table: table.at[TOKENS].get(mode="fill", fill_value=0.5),
    "promise": lambda table: table.at[abs(TOKENS)].get(mode="promise_in_bounds"),
    "vmap": lambda table: jax.vmap(lambda token: table[token])(TOKENS),
    "jit": lambda table: jax.jit(lambda table: table[TOKENS])(table),
}
LOW = {
    "product": lambda rows, w: rows @ w,
    "two products": lambda rows, w: jnp.tanh(rows @ w) @ w + rows @ w,
    "shape": lambda rows, w: rows.reshape(-1, 2, 4).swapaxes(0, 1) @ w,
    "part": lambda rows, w: rows[:, 1:3] @ w,
    "jit": lambda rows, w: jax.jit(jnp.matmul)(rows, w),
    "checkpoint": lambda rows, w: jax.checkpoint(jnp.matmul)(rows, w),
    "slices": in_slices,
}
# Something else, too:
WIDE = {
    "norm": lambda rows, w: jax.nn.standardize(rows) @ w,
    "sum": lambda rows, w: rows @ w + rows,
    "carry": in_carry,
    "result": lambda rows, w: (rows @ w, rows),
    "precision": lambda rows, w: jnp.matmul(rows, w, precision="highest"),
    "integers": lambda rows, w: (rows @ w, rows.astype(jnp.int16)),
}


def moved(fn, *args, names=("gather",)):
    """Returns the dtypes in which a function moves numbers, in their order."""
    found = [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name in names]
    return [eqn.invars[0].aval.dtype.name for eqn in found]


def embedding(read, how="index"):
    return lambda table, w: read(GATHERS[how](table), w)


def gradients(fn):
    """Returns results of a function of two arrays, its gradients and a second derivative."""

    def loss(*args):
        results = jax.tree.leaves(fn(*args))
        return sum(jnp.sin(y.astype(jnp.float32)).sum() for y in results)

    def along(args):
        return jax.grad(lambda s: jax.jvp(lambda s: loss(args[0] * s, args[1]), (s,), (s,))[1])(1.0)

    return jax.jit(lambda *args: (fn(*args), jax.grad(loss, (0, 1))(*args), along(args)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("save", [None, pytest.param("products", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [*LOW, *WIDE])
@pytest.mark.filterwarnings("ignore:No product runs in 16 bits", "ignore:save='products' leaves")
def test_rows_that_16_bit_operations_alone_read_are_gathered_in_16_bits(rng, name, save):
    cast = jmpx.autocast(embedding({**LOW, **WIDE}[name]), "c=bf16", save=save)
    is_low = "bfloat16" in moved(cast, normal(rng, 20, 4), normal(rng, 4, 4))
    assert is_low == (name in LOW)


@pytest.mark.thorough
def test_a_carry_in_16_bits_reads_rows_in_16_bits(rng):
    args = normal(rng, 20, 4), normal(rng, 4, 4)
    cast = jmpx.autocast(embedding(in_carry), "c=bf16; op.scan: bf16")
    assert "bfloat16" in moved(cast, *args)
    outside = jmpx.autocast(in_carry, "c=bf16; op.scan: bf16")
    assert_same_bits(gradients(cast)(*args), gradients(lambda t, w: outside(t[TOKENS], w))(*args))


@pytest.mark.parametrize(("rows", "dtype"), [(59, "f32"), (60, "bf16")])
def test_a_tpu_casts_a_table_that_it_reads_often_enough(rng, rows, dtype):
    tokens = rng.integers(20, size=rows)
    cast = jax.jit(jmpx.autocast(lambda table, w: table[tokens] @ w, "c=bf16"))
    traced = cast.trace(normal(rng, 20, 4), normal(rng, 4, 4))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r"stablehlo.gather.*: \(tensor<20x4x(\w+)>", text) == [dtype]


@pytest.mark.thorough
@pytest.mark.parametrize("policy", LOW_DTYPES)
@pytest.mark.parametrize("name", [*LOW, *WIDE])
@pytest.mark.filterwarnings("ignore:No product runs in 16 bits")
def test_the_bits_are_those_of_rows_that_are_gathered_outside(rng, name, policy):
    read, args = {**LOW, **WIDE}[name], (normal(rng, 20, 4), normal(rng, 4, 4))
    inside = jmpx.autocast(embedding(read), policy)
    outside = jmpx.autocast(read, policy)
    results = [gradients(fn)(*args) for fn in (inside, lambda t, w: outside(t[TOKENS], w))]
    assert_same_bits(*results)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", LOW_DTYPES)
@pytest.mark.parametrize("how", GATHERS)
def test_the_bits_are_the_same_in_each_mode(rng, how, policy):
    args = normal(rng, 20, 4), normal(rng, 4, 4)
    inside, outside = (
        jmpx.autocast(embedding(jnp.matmul, how), policy),
        jmpx.autocast(jnp.matmul, policy),
    )
    assert LOW_DTYPES[policy].name in moved(inside, *args)
    results = [gradients(fn)(*args) for fn in (inside, lambda t, w: outside(GATHERS[how](t), w))]
    assert_same_bits(*results)


def test_a_number_for_indices_out_of_bounds_that_16_bits_change_stays(rng):
    def fn(table, w):
        return table.at[TOKENS].get(mode="fill", fill_value=0.1) @ w

    assert moved(jmpx.autocast(fn, "c=bf16"), normal(rng, 20, 4), normal(rng, 4, 4)) == ["float32"]


def test_the_gradient_of_a_table_is_summed_in_float32(rng):
    table, w = normal(rng, 20, 4), jnp.eye(4)
    tokens = np.zeros(8192, np.int32)
    by_hand = jax.grad(lambda t: (t.astype(jnp.bfloat16)[tokens] @ w.astype(jnp.bfloat16)).sum())
    cast = jax.grad(lambda t: jmpx.autocast(lambda t, w: t[tokens] @ w)(t, w).sum())
    assert float(by_hand(table)[0, 0]) == 256
    assert float(cast(table)[0, 0]) == 8192


# Devices.

MOVES = ("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter")
RING = [(i, (i + 1) % 8) for i in range(8)]
PERMUTE = functools.partial(lax.ppermute, axis_name="d", perm=RING)


def ring(q, k):
    """Attention of local queries to keys, which are the values, that go around."""

    def turn(carry, _):
        out, k, v = carry
        return (out + jnp.tanh(q @ k.T) @ v, PERMUTE(k), PERMUTE(v)), None

    return lax.scan(turn, (q, k, k), None, 8)[0][0]


def unrolled_ring(q, k):
    out = jnp.tanh(q @ k.T) @ k
    for _ in range(2):
        k = PERMUTE(k)
        out += jnp.tanh(q @ k.T) @ k
    return out


# The body, the dtypes in which it moves numbers, and those in which its gradient does.
BODIES = {
    "gather": (lambda x, w: x @ lax.all_gather(w, "d", axis=1, tiled=True), ["low"], ["float32"]),
    "permute": (lambda x, w: x @ PERMUTE(w).T, ["low"], ["float32"]),
    "to all": (
        lambda x, w: x @ lax.all_to_all(w, "d", 1, 0, tiled=True).reshape(16, -1),
        *(["low"], ["float32"]),
    ),
    "ring": (ring, ["low"] * 2, ["float32"] * 2),
    "unrolled ring": (unrolled_ring, ["low"] * 2, ["float32"] * 2),
    "sum": (lambda x, w: x @ PERMUTE(w).T + PERMUTE(w).sum(), ["low", "float32"], ["float32"] * 2),
    "norm": (lambda x, w: x @ jax.nn.standardize(PERMUTE(w)).T, ["float32"], ["float32"]),
}


def on_devices(body, **options):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), **options)


def devices_args(rng):
    return normal(rng, 16, 16), normal(rng, 128, 16)


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.thorough)])
def check_vma(request):
    """Whether JAX knows which arrays differ from device to device."""
    return request.param


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BODIES)
def test_shards_that_products_alone_read_travel_in_16_bits(rng, name, check_vma):
    body, forward, backward = BODIES[name]
    forward = [dtype.replace("low", "bfloat16") for dtype in forward]
    cast = jmpx.autocast(on_devices(body, check_vma=check_vma), "c=bf16")
    grad = jax.grad(lambda *args: jnp.sin(cast(*args)).sum(), argnums=1)
    args = devices_args(rng)
    assert sorted(moved(cast, *args, names=MOVES)) == sorted(forward)
    assert sorted(moved(grad, *args, names=MOVES)) == sorted(forward + backward)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", LOW_DTYPES)
@pytest.mark.parametrize("name", BODIES)
def test_the_bits_are_those_of_shards_that_travel_in_float32(
    rng, name, policy, check_vma, monkeypatch
):
    body, args = on_devices(BODIES[name][0], check_vma=check_vma), devices_args(rng)
    narrow = gradients(jmpx.autocast(body, policy))(*args)
    monkeypatch.setattr(reads, "_MOVES", frozenset())
    assert_same_bits(narrow, gradients(jmpx.autocast(body, policy))(*args))
