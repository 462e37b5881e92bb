"""Moving averages: against float64, in 16 bits, over skipped steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, normal
from helpers.maps import mesh_of
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx


def trajectory(rng, dtype, steps):
    """Parameters that wander, stored in a dtype."""
    return [{"w": normal(rng, 3).astype(dtype)} for _ in range(steps)]


def reference(params, decay, debias):
    """The average in float64: that of `optax.ema`, or one that begins with the first parameters."""
    wide = [np.asarray(each["w"]).astype(np.float64) for each in params]
    total = np.zeros(3) if debias else wide[0]
    for each in wide[1:]:
        total = decay * total + (1 - decay) * each
    return total / (1 - decay ** (len(params) - 1)) if debias else total


def repeated(update, state, times):
    """The state after as many updates, compiled."""
    return jax.jit(lambda state: jax.lax.fori_loop(0, times, lambda _, s: update(s), state))(state)


@pytest.mark.parametrize(
    ("dtype", "decay", "debias"),
    [
        ("float32", 0, True),
        ("bfloat16", 0.5, False),
        ("float16", 0.9999, True),
        ("float8_e4m3fn", 1 - 2.0**-24, False),
        ("bfloat16", 1 - 2.0**-24, True),
    ],
)
def test_the_average_is_that_of_float64(dtype, decay, debias, rng):
    params = trajectory(rng, dtype, 40)
    average = jmpx.optim.ema(decay, debias)
    state, update = average.init(params[0]), jax.jit(average.update)
    for each in params[1:]:
        averaged, state = update(each, state)
    assert averaged["w"].dtype == state.average["w"].dtype == jnp.float32
    assert_same_bits(averaged, state.average)
    assert int(state.count) == 39
    np.testing.assert_allclose(averaged["w"], reference(params, decay, debias), atol=1e-5)


@pytest.mark.parametrize("debias", [False, True])
def test_the_average_of_what_does_not_change_is_that_to_the_bit(debias, rng):
    params = {"w": normal(rng, 50)}
    average = jmpx.optim.ema(0.999, debias)
    state = repeated(lambda s: average.update(params, s)[1], average.init(params), 500)
    assert_same_bits(state.average, params)


def test_a_small_step_moves_the_average_where_16_bits_lose_it():
    """From 1 towards 1.5, 2,000 steps of 0.999; the exact answer is 1.5 - 0.5 * 0.999**2000."""
    old, new = jnp.ones(2, jnp.bfloat16), jnp.full(2, 1.5, jnp.bfloat16)
    average, theirs = jmpx.optim.ema(0.999), optax.ema(0.999, debias=False)
    states = average.init(old), theirs.init(new), old

    def update(states):
        ours, of_optax, incremental = states
        incremental = optax.incremental_update(new, incremental, 0.001)
        return average.update(new, ours)[1], theirs.update(new, of_optax)[1], incremental

    ours, of_optax, incremental = repeated(update, states, 2000)
    exact = 1.5 - 0.5 * 0.999**2000
    assert np.abs(ours.average - exact).max() < 3e-5
    assert np.abs(incremental - exact).max() > 0.05
    # Without an accumulator dtype: its exact answer, from 0, is 0.865 of 1.5.
    assert jax.tree.leaves(of_optax.ema)[0].max() < 0.6 * 1.5


@pytest.mark.parametrize("traced", [False, True])
def test_a_skipped_step_leaves_the_state_alone(traced, rng):
    params = trajectory(rng, jnp.bfloat16, 6)
    taken = [True, False, True, True, False]
    average = jmpx.optim.ema(0.9, debias=True)
    update = jax.jit(average.update) if traced else average.update
    state = only_taken = average.init(params[0])
    for each, finite in zip(params[1:], taken, strict=True):
        before = state
        bad = each if finite else jax.tree.map(lambda x: x * jnp.nan, each)
        averaged, state = update(bad, state, jnp.array(finite) if traced else finite)
        if finite:
            _, only_taken = update(each, only_taken)
        else:
            assert_same_bits(state, before)
        assert_same_bits(averaged, state.average)
    assert_same_bits(state, only_taken)
    assert int(state.count) == 3


def test_a_step_may_donate_the_state_and_the_parameters(rng):
    params = {"w": normal(rng, 3)}
    average = jmpx.optim.ema(0.5)

    def plain(params, state):
        params = jax.tree.map(lambda p: p * 2, params)
        return params, *average.update(params, state)

    donating = jax.jit(plain, donate_argnums=(0, 1))
    w = np.asarray(params["w"])
    state = average.init(params)
    for _ in range(2):
        params, averaged, state = donating(params, state)
    assert averaged["w"].is_deleted() is False
    np.testing.assert_array_equal(averaged["w"], (w * 1.5 + w * 4) / 2)


def test_the_average_is_carried_by_a_scan(rng):
    params = trajectory(rng, jnp.bfloat16, 10)
    average = jmpx.optim.ema(0.9, debias=True)
    stacked = jnp.stack([each["w"] for each in params[1:]])

    def step(state, w):
        averaged, state = average.update({"w": w}, state, jnp.isfinite(w).all())
        return state, averaged

    state, averages = jax.lax.scan(step, average.init(params[0]), stacked)
    np.testing.assert_allclose(averages["w"][-1], reference(params, 0.9, True), rtol=1e-4)
    assert int(state.count) == 9


def test_shards_are_averaged_where_they_are(rng):
    mesh = mesh_of(8)
    params, new = ({"w": normal(rng, 16).astype(jnp.bfloat16)} for _ in range(2))
    average = jmpx.optim.ema(0.9, debias=True)

    def steps(params, new):
        step = lambda _, s: average.update(new, s, jnp.isfinite(jax.lax.pmax(1.0, "data")))[1]  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, average.init(params)).average

    sharded = jax.shard_map(steps, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    state, update = average.init(params), jax.jit(average.update)
    placed = jax.device_put(new, NamedSharding(mesh, P("data")))
    for _ in range(3):
        averaged, state = update(placed, state, jnp.array(True))
    assert averaged["w"].sharding.is_equivalent_to(placed["w"].sharding, 1)
    np.testing.assert_allclose(jax.jit(sharded)(params, new)["w"], averaged["w"], rtol=1e-6)


def test_what_is_not_floating_is_that_of_the_newest_parameters(key):
    model = eqx.nn.MLP(2, 2, 4, 0, key=key)
    average = jmpx.optim.ema(0.5)
    others = {"step": jnp.array(1), "key": key, "rate": 0.1, "z": jnp.array([1j])}
    state = average.init((model, others))
    new = jax.tree.map(lambda x: x * 3 if eqx.is_inexact_array(x) else x, model)
    others = {"step": jnp.array(7), "key": key, "rate": 0.2, "z": jnp.array([3j])}
    (averaged, others), state = average.update((new, others), state)
    assert averaged(jnp.ones(2)).shape == (2,)  # activations are functions still
    np.testing.assert_allclose(averaged.layers[0].weight, model.layers[0].weight * 2, rtol=1e-6)
    assert (int(others["step"]), others["rate"], others["z"][0]) == (7, 0.2, 2j)


def test_an_nnx_model_is_averaged_into_one_of_its_own():
    model = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    first = jnp.asarray(model.kernel[...], jnp.float32)
    average = jmpx.optim.ema(0.5)
    state, of_params = average.init(model), average.init(nnx.state(model, nnx.Param))
    model.kernel[...] = model.kernel[...] * 2
    averaged, _ = average.update(model, state, jnp.array(True))
    np.testing.assert_allclose(averaged.kernel[...], first * 1.5, rtol=1e-6)
    assert averaged is not model and model.kernel[...].dtype == jnp.bfloat16
    # And its parameters are averaged into those with which it evaluates.
    averaged, _ = average.update(nnx.state(model, nnx.Param), of_params, jnp.array(True))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(averaged)} == {"float32"}
    nnx.update(model, averaged)
    np.testing.assert_allclose(model.kernel[...], first * 1.5, rtol=1e-6)
