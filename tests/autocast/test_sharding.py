"""Meshes, shard_map, pmap and collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, normal
from helpers.autocast import assert_near, assert_ran, both, check, check_sides, rows, values
from helpers.jaxprs import equations_of
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx

AXIS_TYPES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


def make_mesh(kind="auto", size=2):
    return jax.make_mesh((size,), ("d",), axis_types=(AXIS_TYPES[kind],))


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


@pytest.mark.parametrize("kind", rows(AXIS_TYPES, "explicit"))
def test_meshes(pair, kind):
    def f(x, w, b):
        def layer(c, w):
            h = jnp.tanh(c @ w + b)
            return h - h.mean(1, keepdims=True), None

        return lax.scan(layer, x, w)[0].reshape(2, 2, 4).sum()

    mesh = make_mesh(kind)
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
    if check_vma:
        check_sides(mapped, body, *pair)

    def total(x, w):
        return lax.psum((jnp.tanh(x @ w) ** 2).sum(), "d")

    check_sides(lambda f: both(sharded(P(), check_vma)(f)), total, *pair)


@pytest.mark.filterwarnings("ignore:JAX cannot trace xla_pmap")  # JAX 0.7's
def test_pmap(pair):
    x, w = pair
    x = x.reshape(2, 2, 4)

    def mapped(body):
        return jax.pmap(body, "i", in_axes=(0, None), devices=jax.devices()[:2])

    def body(x, w):
        return lax.pmean(jnp.tanh(x @ w), "i")

    inside, outside = mapped(jmpx.autocast(body)), jmpx.autocast(mapped(body))
    for cast in (inside, outside):
        assert_near(cast(x, w), mapped(body)(x, w))
    assert_ran(inside, x, w, dot_general="bfloat16")
    # JAX 0.7's pmap runs as it was traced.
    traced = "float32" if jax.__version__.startswith("0.7.") else "bfloat16"
    assert_ran(outside, x, w, dot_general=traced)


def test_collectives_of_vmap(pair):
    x, w = pair
    check_sides(lambda f: jax.vmap(f, (0, None), axis_name="d"), collect, x.reshape(2, 2, 4), w)


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
