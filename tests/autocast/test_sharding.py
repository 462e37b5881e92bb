"""Meshes, shard_map, pmap and collectives; what moves between devices and in memory in 16 bits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, assert_same_bits, normal
from helpers.autocast import assert_near, assert_ran, both, check, check_sides, rows, values
from helpers.jaxprs import equations_of
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx

# Other tests are about this warning.
pytestmark = pytest.mark.filterwarnings("ignore:No product runs in 16 bits")


def make_mesh(axis_type=AxisType.Auto, size=2):
    return jax.make_mesh((size,), ("d",), axis_types=(axis_type,))


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # float32 cannot become a 16-bit result
def test_jit_with_shardings_and_donation_inside(pair):
    rows, all_of_it = (NamedSharding(make_mesh(), spec) for spec in (P("d"), P()))

    @functools.partial(
        jax.jit, in_shardings=(rows, all_of_it), out_shardings=rows, donate_argnums=0
    )
    def f(x, w):
        return lax.with_sharding_constraint(jnp.sin(x @ w), rows)

    x, w = pair
    check(lambda x, w: f(x + 0, w), x, w, dot_general="bfloat16", sin="bfloat16")
    assert jmpx.autocast(lambda x, w: f(x + 0, w))(x, w).sharding == rows
    donated = jnp.array(x)
    result = jax.jit(jmpx.autocast(lambda x, w: x @ w), donate_argnums=0)(donated, w)
    assert_near(result, x @ w)
    assert donated.is_deleted()


def test_a_mesh_of_explicit_axes(pair):
    def f(x, w, b):
        def layer(c, w):
            h = jnp.tanh(c @ w + b)
            return h - h.mean(1, keepdims=True), None

        return lax.scan(layer, x, w)[0].reshape(2, 2, 4).sum()

    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w = pair
        x = jax.device_put(x, NamedSharding(mesh, P("d")))
        w, b = (jax.device_put(v, NamedSharding(mesh, P())) for v in (jnp.stack([w, w]), w[0]))
        cast, plain = jax.grad(jmpx.autocast(f)), jax.grad(f)
        result, reference = values((x, w, b), cast, plain)
        assert_near(result, reference)
        assert result.sharding == reference.sharding
        assert_ran(cast, x, w, b, dot_general="bfloat16")
        assert_ran(jmpx.autocast(plain), x, w, b, dot_general="bfloat16")


def collect(x, w):
    h = jnp.sin(x @ w)
    gathered = lax.all_gather(h, "d").sum(0)
    moved = lax.ppermute(h, "d", [(0, 1), (1, 0)])
    scattered = lax.psum_scatter(gathered, "d", tiled=True)
    index = lax.axis_index("d").astype(F32)
    return lax.psum(h * index, "d") + lax.pmean(h, "d") + lax.pmax(h, "d"), (moved, scattered)


def sharded(out_specs, check_vma):
    """Maps a function over the rows of its first argument, on two devices."""
    specs = {"in_specs": (P("d"), P()), "out_specs": out_specs}
    return functools.partial(jax.shard_map, mesh=make_mesh(), check_vma=check_vma, **specs)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_and_its_gradients(pair, check_vma):
    def body(x, w):
        total, (moved, scattered) = collect(x, w)
        carry = lax.scan(lambda c, _: (jnp.sin(c @ w), None), moved, None, length=2)[0]
        return total[None], carry, scattered

    mapped = sharded(P("d"), check_vma)
    assert_ran(
        jmpx.autocast(mapped(body)),
        *pair,
        **{"all_gather": "bfloat16", "ppermute": "bfloat16", "sin": "bfloat16"},
    )
    if not check_vma:
        return
    check_sides(mapped, body, *pair)

    def total(x, w):
        return lax.psum((jnp.tanh(x @ w) ** 2).sum(), "d")

    check_sides(lambda f: both(sharded(P(), check_vma)(f)), total, *pair)


@pytest.mark.thorough
def test_collectives_of_vmap(pair):
    x, w = pair
    check_sides(lambda f: jax.vmap(f, (0, None), axis_name="d"), collect, x.reshape(2, 2, 4), w)


@pytest.mark.thorough
def test_sums_over_devices_run_in_float32(rng):
    """The result is rounded to the dtype of its operand: averaged gradients keep their digits."""
    specs = {"mesh": make_mesh(size=8), "in_specs": P("d"), "out_specs": P()}
    f = jax.shard_map(lambda x: lax.psum(jnp.sin(x @ x), "d"), **specs)
    f, x = jmpx.autocast(f, output=None), normal(rng, 24, 3)
    sums = [eqn for eqn in equations_of(f, x) if eqn.primitive.name.startswith("psum")]
    assert [var.aval.dtype for eqn in sums for var in eqn.invars] == [F32]
    blocks = jnp.asarray(x, BF16).reshape(8, 3, 3)
    expected = jnp.sin(blocks @ blocks).astype(F32).sum(axis=0).astype(BF16)
    assert f(x).dtype == BF16
    np.testing.assert_allclose(f(x).astype(F32), expected.astype(F32), rtol=2e-2, atol=2e-2)


# What 16-bit operations alone read moves in 16 bits: rows, shards and slices of scans.

TOKENS = np.random.default_rng(0).integers(-3, 20, size=(4, 8))


def in_carry(a, w):
    return lax.scan(lambda h, _: (h + jnp.tanh(jnp.sin(h) @ w), None), a, None, 2)[0]


# What reads a row or a slice; whether rows, and slices of a scan, move in 16 bits for it. Casts of
# slices round their cotangents, too, so that all of a slice has to be read by products.
READERS = {
    "product": (lambda a, w: a @ w, True, True),
    "two products": (lambda a, w: jnp.tanh(a @ w) @ w + a @ w, True, True),
    "shape": (lambda a, w: a.reshape(-1, 2, 4).swapaxes(0, 1) @ w, True, True),
    "part": (lambda a, w: a[:2] @ w, True, False),
    "jit": (lambda a, w: jax.jit(jnp.matmul)(a, w), True, True),
    "checkpoint": (lambda a, w: jax.checkpoint(jnp.matmul)(a, w), True, True),
    "scan": (lambda a, w: lax.scan(lambda c, row: (c, row[None] @ w), 0.0, a)[1], True, True),
    "result": (lambda a, w: (a @ w, a), False, True),  # JAX takes a copy around the loop
    "norm": (lambda a, w: jax.nn.standardize(a) @ w, False, False),
    "sum": (lambda a, w: a @ w + a, False, False),
    "carry": (in_carry, False, False),
    "precision": (lambda a, w: jnp.matmul(a, w, precision="highest"), False, False),
    "integers": (lambda a, w: (a @ w, a.astype(jnp.int16)), False, False),
    "full precision": (jmpx.full_precision(jnp.matmul), False, False),
    "scope": (jax.named_scope("router")(jnp.matmul), False, False),
    "outer product": (lambda a, w: a.reshape(-1, 1) @ w.reshape(1, -1), False, False),
    "constant": (lambda a, w: lax.scan(lambda c, row: (c, row @ a.T), 0.0, w)[1], False, False),
    "branches": (lambda a, w: lax.cond(w[0, 0] > 0, lambda: a @ w, lambda: a), False, False),
}


def moved(fn, *args, names=("gather",)):
    """Returns the dtypes in which a function moves numbers, in their order."""
    found = [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name in names]
    return [eqn.invars[0].aval.dtype.name for eqn in found]


def gradients(fn):
    """Returns results of a function of two arrays, its gradients and a second derivative."""

    def loss(*args):
        results = jax.tree.leaves(fn(*args))
        return sum(jnp.sin(y.astype(jnp.float32)).sum() for y in results)

    def along(args):
        return jax.grad(lambda s: jax.jvp(lambda s: loss(args[0] * s, args[1]), (s,), (s,))[1])(1.0)

    return jax.jit(lambda *args: (fn(*args), jax.grad(loss, (0, 1))(*args), along(args)))


@pytest.mark.filterwarnings("ignore:save= leaves .* under jax.checkpoint")
@pytest.mark.parametrize("name", READERS)
def test_what_16_bit_operations_alone_read_is_gathered_and_sliced_in_16_bits(rng, name):
    """Slices of a scan are cast once, before the loop."""
    read, is_low_row, is_low_slice = READERS[name]
    policy, w = "c=bf16; */router?: full", normal(rng, 4, 4)
    if name != "constant":  # JAX decides
        cast = jmpx.autocast(lambda table, w: read(table[TOKENS], w), policy)
        assert ("bfloat16" in moved(cast, normal(rng, 20, 4), w)) == is_low_row
    for save in (None, "products") if name in ("two products", "sum", "checkpoint") else (None,):
        cast = jmpx.autocast(scanned(read), policy, save=save)
        found = dtypes_of_slices(cast, normal(rng, 5, 4, 4), w)
        assert found == {"bfloat16" if is_low_slice else "float32"}


def test_the_bits_are_those_of_rows_that_are_gathered_outside(rng):
    def rows(table):
        return table.at[TOKENS].get(mode="fill", fill_value=0.5)

    read, _, _ = READERS["two products"]
    args = normal(rng, 20, 4), normal(rng, 4, 4)
    inside = jmpx.autocast(lambda table, w: read(rows(table), w), "c=f16")
    outside = jmpx.autocast(read, "c=f16")
    results = [gradients(fn)(*args) for fn in (inside, lambda t, w: outside(rows(t), w))]
    assert_same_bits(*results)


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


@pytest.mark.thorough
def test_the_gradient_of_a_table_is_summed_in_float32(rng):
    table, w = normal(rng, 20, 4), jnp.eye(4)
    tokens = np.zeros(8192, np.int32)
    by_hand = jax.grad(lambda t: (t.astype(jnp.bfloat16)[tokens] @ w.astype(jnp.bfloat16)).sum())
    cast = jax.grad(lambda t: jmpx.autocast(lambda t, w: t[tokens] @ w)(t, w).sum())
    assert float(by_hand(table)[0, 0]) == 256
    assert float(cast(table)[0, 0]) == 8192


# Devices.

MOVES = ("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter")


PERMUTE = functools.partial(lax.ppermute, axis_name="d", perm=[(i, (i + 1) % 8) for i in range(8)])


def on_devices(name, **options):
    specs = {"mesh": make_mesh(size=8), "in_specs": P("d"), "out_specs": P("d")}
    return jax.shard_map(BODIES[name][0], **specs, **options)


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


@pytest.mark.parametrize(
    "name, check_vma", [*((name, True) for name in BODIES), ("gather", False), ("ring", False)]
)
def test_shards_that_products_alone_read_travel_in_16_bits(rng, name, check_vma):
    _, forward, backward = BODIES[name]
    forward = [dtype.replace("low", "bfloat16") for dtype in forward]
    cast = jmpx.autocast(on_devices(name, check_vma=check_vma), "c=bf16")
    grad = jax.grad(lambda *args: jnp.sin(cast(*args)).sum(), argnums=1)
    args = normal(rng, 16, 16), normal(rng, 128, 16)
    assert sorted(moved(cast, *args, names=MOVES)) == sorted(forward)
    assert sorted(moved(grad, *args, names=MOVES)) == sorted(forward + backward)


def test_the_bits_are_those_of_shards_that_travel_in_float32(rng):
    policies = "c=f16", "by=operations,c=f16; op.all_to_all: f32"
    casts = [jmpx.autocast(on_devices("to all"), policy) for policy in policies]
    args = normal(rng, 16, 16), normal(rng, 128, 16)
    assert [moved(cast, *args, names=MOVES) for cast in casts] == [["float16"], ["float32"]]
    assert_same_bits(*(gradients(cast)(*args) for cast in casts))


# Slices of a scan that products alone read: cast once, before the loop, and to the same bits.


def scanned(read):
    return lambda ws, x: lax.scan(lambda c, w: (c, read(w, x)), 0.0, ws)[1]


def written_out(read):
    return lambda ws, x: jax.tree.map(lambda *ys: jnp.stack(ys), *(read(w, x) for w in ws))


def scans_of(fn, *args):
    return [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name == "scan"]


def dtypes_of_slices(fn, ws, x):
    """Returns the dtypes of what a scan slices."""
    atoms = [atom for eqn in scans_of(fn, ws, x) for atom in eqn.invars]
    return {atom.aval.dtype.name for atom in atoms if atom.aval.shape == ws.shape}


@pytest.mark.parametrize("save", [None, "products"])
def test_cotangents_of_weights_are_collected_in_16_bits(rng, save):
    cast = jmpx.autocast(scanned(lambda w, x: jnp.tanh(x @ w)), "c=bf16", save=save)
    ws, x = normal(rng, 5, 4, 4), normal(rng, 3, 4)
    _, backward = scans_of(jax.grad(lambda ws, x: cast(ws, x).sum()), ws, x)
    collected = [var.aval for var in backward.outvars if var.aval.shape == ws.shape]
    assert [aval.dtype for aval in collected] == [BF16]


@pytest.mark.thorough
@pytest.mark.parametrize("name", rows(["two products", "scan", "result"], "two products"))
def test_the_bits_are_those_of_a_loop_that_is_written_out(rng, name):
    read, _, _ = READERS[name]
    args = normal(rng, 5, 4, 4), normal(rng, 4, 4)

    def slopes(fn):
        def loss_fn(ws, x):
            results = jmpx.autocast(fn, "c=f16")(ws, x)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results)), results

        return jax.grad(loss_fn, has_aux=True)(*args)

    assert_same_bits(slopes(scanned(read)), slopes(written_out(read)))


def test_a_rule_for_products_decides(rng):
    args = normal(rng, 5, 4, 4), normal(rng, 3, 4)
    for policy, dtype in (
        ("c=bf16; op.dot_general: f32", "float32"),
        ("full; op.dot_general: bf16", "bfloat16"),
        ("c=f16; op.dot_general: bf16", "bfloat16"),
    ):
        cast = jmpx.autocast(scanned(lambda w, x: x @ w), policy, output=None)
        assert dtypes_of_slices(cast, *args) == {dtype}
        assert jax.eval_shape(cast, *args).dtype == dtype
