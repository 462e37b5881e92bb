"""Meshes, shard_map, pmap and collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32, normal
from helpers.autocast import assert_near, assert_ran, both, check, check_sides, values
from helpers.jaxprs import equations_of
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx


@pytest.fixture
def mesh():
    """Returns a function from a type of axes to a mesh of two devices."""
    return lambda kind: jax.make_mesh((2,), ("d",), axis_types=(kind,))


IS_JAX_0_7 = jax.__version__.startswith("0.7.")
AXIS_TYPES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # float32 cannot become a 16-bit result
def test_jit_with_shardings_and_donation_inside(pair, mesh):
    mesh = mesh(AXIS_TYPES["auto"])
    rows, all_of_it = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    @functools.partial(
        jax.jit, in_shardings=(rows, all_of_it), out_shardings=rows, donate_argnums=0
    )
    def f(x, w):
        return lax.with_sharding_constraint(jnp.sin(x @ w), rows)

    x, w = pair
    check(lambda x, w: f(x + 0, w), x, w, dot_general="bfloat16", sin="bfloat16")
    eager = jmpx.autocast(lambda x, w: f(x + 0, w))(x, w)
    assert eager.sharding == rows
    donated = jnp.array(x)
    result = jax.jit(jmpx.autocast(lambda x, w: x @ w), donate_argnums=0)(donated, w)
    assert_near(result, x @ w)
    assert donated.is_deleted()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_meshes(pair, mesh, kind):
    def f(x, w, b):
        def layer(c, w):
            h = jnp.tanh(c @ w + b)
            return h - h.mean(1, keepdims=True), None

        return lax.scan(layer, x, w)[0].reshape(2, 2, 4).sum()

    mesh = mesh(AXIS_TYPES[kind])
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


@pytest.fixture(params=[True, False], ids=["check_vma", "no check_vma"])
def sharded(request, mesh):
    """A function that maps over the rows of its first argument, on two devices."""
    return lambda out_specs: functools.partial(
        jax.shard_map,
        mesh=mesh(AXIS_TYPES["auto"]),
        in_specs=(P("d"), P()),
        out_specs=out_specs,
        check_vma=request.param,
    )


def test_shard_map(pair, sharded):
    def body(x, w):
        total, (moved, scattered) = collect(x, w)
        carry = lax.scan(lambda c, _: (jnp.sin(c @ w), None), moved, None, length=2)[0]
        return total[None], carry, scattered

    check_sides(sharded(P("d")), body, *pair)
    cast = jmpx.autocast(sharded(P("d"))(body))
    assert_ran(cast, *pair, all_gather="bfloat16", ppermute="bfloat16", sin="bfloat16")


def test_gradients_of_shard_map(pair, sharded):
    def body(x, w):
        return lax.psum((jnp.tanh(x @ w) ** 2).sum(), "d")

    check_sides(lambda f: both(sharded(P())(f)), body, *pair)
    assert_ran(both(jmpx.autocast(sharded(P())(body))), *pair, dot_general="bfloat16")


@pytest.mark.filterwarnings("ignore:JAX cannot trace xla_pmap")  # JAX 0.7's
def test_pmap(pair):
    x, w = pair
    x = x.reshape(2, 2, 4)

    def body(x, w):
        return lax.pmean(jnp.tanh(x @ w), "i")

    def mapped(body):
        return jax.pmap(body, "i", in_axes=(0, None), devices=jax.devices()[:2])

    reference = mapped(body)(x, w)
    for cast in (mapped(jmpx.autocast(body)), jmpx.autocast(mapped(body))):
        assert_near(cast(x, w), reference)
    assert_ran(mapped(jmpx.autocast(body)), x, w, dot_general="bfloat16")
    inside = "float32" if IS_JAX_0_7 else "bfloat16"  # JAX 0.7's pmap runs as it was traced
    assert_ran(jmpx.autocast(mapped(body)), x, w, dot_general=inside)


def test_collectives_of_vmap(pair):
    x, w = pair
    check_sides(lambda f: jax.vmap(f, (0, None), axis_name="d"), collect, x.reshape(2, 2, 4), w)


def test_sums_over_devices_run_in_float32(rng):
    """The result is rounded to the dtype of its operand: averaged gradients keep their digits."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(
        lambda x: lax.psum(jnp.sin(x @ x), "d"), mesh=mesh, in_specs=spec("d"), out_specs=spec()
    )
    f, x = jmpx.autocast(f, output=None), normal(rng, 24, 3)
    sums = [eqn for eqn in equations_of(f, x) if eqn.primitive.name.startswith("psum")]
    assert [var.aval.dtype for eqn in sums for var in eqn.invars] == [F32]
    blocks = jnp.asarray(x, jnp.bfloat16).reshape(8, 3, 3)
    expected = jnp.sin(blocks @ blocks).astype(jnp.float32).sum(axis=0).astype(jnp.bfloat16)
    assert f(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(
        f(x).astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2
    )
