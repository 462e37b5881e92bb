"""What 16-bit operations alone read: rows, shards and slices of scans move in 16 bits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, assert_same_bits, normal
from helpers.autocast import LOW_DTYPES, rows
from helpers.jaxprs import equations_of
from jax import lax
from jax.sharding import PartitionSpec as P

import jmpx
from jmpx._autocast import reads  # no public name moves shards in float32, which is the reference

# Other tests are about this warning.
pytestmark = pytest.mark.filterwarnings("ignore:No product runs in 16 bits")
POLICIES = [*LOW_DTYPES]

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


@pytest.mark.parametrize("name", LOW | WIDE)
def test_rows_that_16_bit_operations_alone_read_are_gathered_in_16_bits(rng, name):
    cast = jmpx.autocast(embedding((LOW | WIDE)[name]), "c=bf16")
    is_low = "bfloat16" in moved(cast, normal(rng, 20, 4), normal(rng, 4, 4))
    assert is_low == (name in LOW)


READS = {
    "fill": "two products",
    "vmap": "norm",
    "index": "product",
    "take": "shape",
    "clip": "part",
    "promise": "slices",
    "jit": "carry",
}


@pytest.mark.parametrize("how", rows(READS, "fill", "vmap"))
def test_the_bits_are_those_of_rows_that_are_gathered_outside(rng, how):
    read, policy = (LOW | WIDE)[READS[how]], POLICIES[len(how) % 2]
    args = normal(rng, 20, 4), normal(rng, 4, 4)
    inside, outside = jmpx.autocast(embedding(read, how), policy), jmpx.autocast(read, policy)
    results = [gradients(fn)(*args) for fn in (inside, lambda t, w: outside(GATHERS[how](t), w))]
    assert_same_bits(*results)


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


@pytest.mark.parametrize(
    "name, check_vma", [*((name, True) for name in BODIES), ("gather", False), ("ring", False)]
)
def test_shards_that_products_alone_read_travel_in_16_bits(rng, name, check_vma):
    body, forward, backward = BODIES[name]
    forward = [dtype.replace("low", "bfloat16") for dtype in forward]
    cast = jmpx.autocast(on_devices(body, check_vma=check_vma), "c=bf16")
    grad = jax.grad(lambda *args: jnp.sin(cast(*args)).sum(), argnums=1)
    args = devices_args(rng)
    assert sorted(moved(cast, *args, names=MOVES)) == sorted(forward)
    assert sorted(moved(grad, *args, names=MOVES)) == sorted(forward + backward)


@pytest.mark.parametrize("name", rows(BODIES, "to all", "unrolled ring"))
def test_the_bits_are_those_of_shards_that_travel_in_float32(rng, name, monkeypatch):
    is_odd = len(name) % 2
    body, args = on_devices(BODIES[name][0], check_vma=not is_odd), devices_args(rng)
    narrow = gradients(jmpx.autocast(body, POLICIES[is_odd]))(*args)
    monkeypatch.setattr(reads, "_MOVES", frozenset())
    assert_same_bits(narrow, gradients(jmpx.autocast(body, POLICIES[is_odd]))(*args))


# Slices of a scan that products alone read: cast once, before the loop, and to the same bits.


def in_scan(x, w):
    halves = w.reshape(2, 2, 4)
    return lax.scan(lambda c, half: (c, x[:, :2] @ half), 0.0, halves)[1]


def through_a_scan(x, w):
    return lax.scan(lambda c, _: (c, x @ c), w, None, 2)[1]


def in_scope(x, w):
    with jax.named_scope("router"):
        return x @ w


def in_full_precision(x, w):
    with jmpx.full_precision():
        return x @ w


# What a turn does with its slice. Products alone, so that it is cast before the loop:
LOW_SLICES = {
    "product": lambda x, w: x @ w,
    "two products": lambda x, w: jnp.tanh(x @ w) @ w,
    "einsum": lambda x, w: jnp.einsum("bi,hio->bho", x, w.T.reshape(2, 4, 2)),
    "jit": lambda x, w: jax.jit(jnp.matmul)(x, w),
    "checkpoint": lambda x, w: jax.checkpoint(jnp.matmul)(x, w),
    "scan": in_scan,
    "a copy": lambda x, w: (x @ w, w),  # which JAX takes around the loop
}
# Something else, too, or in float32:
WIDE_SLICES = {
    "a bias": lambda x, w: x @ w + w[0],
    "a slice": lambda x, w: x @ w[:, :2],
    "precision": lambda x, w: jnp.matmul(x, w, precision="highest"),
    "full precision": in_full_precision,
    "scope": in_scope,
    "outer product": lambda x, w: x.reshape(-1, 1) @ w.reshape(1, -1),
    "carry": through_a_scan,
    "constant": lambda x, w: lax.scan(lambda c, row: (c, row @ w), 0.0, x)[1],
    "branches": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
}
POLICY = "{}; */router?: full"


def scanned(turn):
    return lambda x, ws: lax.scan(lambda c, w: (c, turn(x, w)), 0.0, ws)[1]


def written_out(turn):
    return lambda x, ws: jax.tree.map(lambda *ys: jnp.stack(ys), *(turn(x, w) for w in ws))


def scans_of(fn, *args):
    return [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name == "scan"]


def dtypes_of_slices(fn, x, ws):
    """Returns the dtypes of what a scan slices."""
    atoms = [atom for eqn in scans_of(fn, x, ws) for atom in eqn.invars]
    return {atom.aval.dtype.name for atom in atoms if atom.aval.shape == ws.shape}


@pytest.mark.filterwarnings("ignore:save='products' leaves .* under jax.checkpoint")
@pytest.mark.parametrize("name", LOW_SLICES | WIDE_SLICES)
def test_what_products_alone_read_is_cast_before_the_loop(rng, name):
    turn, policy = (LOW_SLICES | WIDE_SLICES)[name], POLICY.format("c=bf16")
    for save in (None, "products") if name in ("two products", "a bias", "checkpoint") else (None,):
        cast = jmpx.autocast(scanned(turn), policy, save=save)
        expected = "bfloat16" if name in LOW_SLICES else "float32"
        assert dtypes_of_slices(cast, normal(rng, 3, 4), normal(rng, 5, 4, 4)) == {expected}


@pytest.mark.parametrize("save", [None, "products"])
def test_cotangents_of_weights_are_collected_in_16_bits(rng, save):
    cast = jmpx.autocast(scanned(lambda x, w: jnp.tanh(x @ w)), "c=bf16", save=save)
    x, ws = normal(rng, 3, 4), normal(rng, 5, 4, 4)
    _, backward = scans_of(jax.grad(lambda x, ws: cast(x, ws).sum(), argnums=1), x, ws)
    collected = [var.aval for var in backward.outvars if var.aval.shape == ws.shape]
    assert [aval.dtype for aval in collected] == [BF16]


@pytest.mark.parametrize("name", rows(LOW_SLICES | WIDE_SLICES, "scan", "einsum", "a bias"))
def test_the_bits_are_those_of_a_loop_that_is_written_out(rng, name):
    turn, policy = (LOW_SLICES | WIDE_SLICES)[name], POLICY.format(POLICIES[len(name) % 2])
    x, ws = normal(rng, 3, 4), normal(rng, 5, 4, 4)

    def value_and_grad(fn):
        def loss_fn(x, ws):
            results = jmpx.autocast(fn, policy)(x, ws)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results)), results

        return jax.grad(loss_fn, argnums=1, has_aux=True)(x, ws)

    results = value_and_grad(scanned(turn)), value_and_grad(written_out(turn))
    if name in LOW_SLICES:
        assert_same_bits(*results)
    else:  # XLA:CPU sums a float32 product in another order in a loop
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *results)


@pytest.mark.parametrize(
    "policy, dtype",
    [
        ("c=bf16; op.dot_general: f32", "float32"),
        ("full; op.dot_general: bf16", "bfloat16"),
        ("c=f16; op.dot_general: bf16", "bfloat16"),
    ],
)
def test_a_rule_for_products_decides(rng, policy, dtype):
    x, ws = normal(rng, 3, 4), normal(rng, 5, 4, 4)
    cast = jmpx.autocast(scanned(lambda x, w: x @ w), policy, output=None)
    assert dtypes_of_slices(cast, x, ws) == {dtype}
    assert jax.eval_shape(cast, x, ws).dtype == dtype
