"""Moving averages: against float64, in 16 bits, over skipped steps."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, normal
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jmpx

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)


def trajectory(rng, dtype, steps=40):
    """Parameters that wander, stored in a dtype."""
    return [{"w": normal(rng, 3).astype(dtype)} for _ in range(steps)]


def reference(params, decay, debias):
    """The average in float64: that of `optax.ema`, or one that begins with the first parameters."""
    wide = [np.asarray(each["w"]).astype(np.float64) for each in params]
    total = np.zeros(3) if debias else wide[0]
    for each in wide[1:]:
        total = decay * total + (1 - decay) * each
    return total / (1 - decay ** (len(params) - 1)) if debias else total


def steps_of(average, first, params):
    """The average, step by step outside of a trace."""
    state = average.init(first)
    for each in params:
        _, state = average.update(each, state)
    return state.average


@pytest.mark.sampled(5)
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("decay", [0, 0.5, 0.9999, 1 - 2.0**-24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_average_is_that_of_float64(dtype, decay, debias, rng):
    params = trajectory(rng, dtype)
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
    state = jax.lax.fori_loop(
        0, 500, lambda _, s: average.update(params, s)[1], average.init(params)
    )
    assert_same_bits(state.average, params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_small_step_moves_the_average_where_16_bits_lose_it(dtype):
    """From 1 towards 1.5, 2,000 steps of 0.999; the exact answer is 1.5 - 0.5 * 0.999**2000."""
    old, new = jnp.ones(2, dtype), jnp.full(2, 1.5, dtype)
    average = jmpx.optim.ema(0.999)
    state = jax.lax.fori_loop(0, 2000, lambda _, s: average.update(new, s)[1], average.init(old))
    exact = 1.5 - 0.5 * 0.999**2000
    assert np.abs(state.average - exact).max() < 3e-5
    optax_step = lambda _, a: optax.incremental_update(new, a, 0.001)  # noqa: E731
    assert np.abs(jax.lax.fori_loop(0, 2000, optax_step, old) - exact).max() > 0.05


def test_the_average_of_optax_stalls_without_an_accumulator_dtype():
    new = jnp.ones(2, jnp.bfloat16)
    theirs = optax.ema(0.999, debias=False)
    state = jax.lax.fori_loop(0, 2000, lambda _, s: theirs.update(new, s)[1], theirs.init(new))
    assert jax.tree.leaves(state.ema)[0].max() < 0.6  # exact: 0.865


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

    @jax.jit
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
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "d"), P("d"))
    params = jax.device_put({"w": normal(rng, 16).astype(jnp.bfloat16)}, sharding)
    average = jmpx.optim.ema(0.9)
    averaged, _ = jax.jit(average.update)(params, average.init(params), jnp.array(True))
    assert averaged["w"].sharding.is_equivalent_to(sharding, 1)


def test_the_average_under_shard_map_is_that_of_each_shard(rng):
    mesh = Mesh(np.array(jax.devices()), "d")
    params, new = ({"w": normal(rng, 16).astype(jnp.bfloat16)} for _ in range(2))
    average = jmpx.optim.ema(0.9, debias=True)

    def steps(params, new):
        step = lambda _, s: average.update(new, s, jnp.isfinite(jax.lax.pmax(1.0, "d")))[1]  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, average.init(params)).average

    sharded = jax.shard_map(steps, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    expected = steps_of(average, params, [new] * 3)
    np.testing.assert_allclose(jax.jit(sharded)(params, new)["w"], expected["w"], rtol=1e-6)


def test_what_is_not_floating_is_that_of_the_newest_parameters(key):
    model = eqx.nn.MLP(2, 2, 4, 1, key=key)
    average = jmpx.optim.ema(0.5)
    state = average.init(
        (model, {"step": jnp.array(1), "key": key, "rate": 0.1, "z": jnp.array([1j])})
    )
    new = jax.tree.map(lambda x: x * 3 if eqx.is_inexact_array(x) else x, model)
    (averaged, others), state = average.update(
        (new, {"step": jnp.array(7), "key": key, "rate": 0.2, "z": jnp.array([3j])}), state
    )
    assert averaged(jnp.ones(2)).shape == (2,)  # activations are functions still
    np.testing.assert_allclose(averaged.layers[0].weight, model.layers[0].weight * 2, rtol=1e-6)
    assert (int(others["step"]), others["rate"], others["z"][0]) == (7, 0.2, 2j)


def test_an_nnx_model_is_averaged_into_one_of_its_own():
    model = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    first = jnp.asarray(model.kernel[...], jnp.float32)
    average = jmpx.optim.ema(0.5)
    state = average.init(model)
    model.kernel[...] = model.kernel[...] * 2
    averaged, _ = average.update(model, state, jnp.array(True))
    np.testing.assert_allclose(averaged.kernel[...], first * 1.5, rtol=1e-6)
    assert averaged is not model and model.kernel[...].dtype == jnp.bfloat16


def test_the_parameters_of_an_nnx_model():
    model = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    average = jmpx.optim.ema(0.5)
    params = nnx.state(model, nnx.Param)
    averaged, _ = average.update(params, average.init(params), jnp.array(True))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(averaged)} == {"float32"}
    nnx.update(model, averaged)  # evaluates with the average
    assert model(jnp.ones((1, 2))).shape == (1, 2)


def a_state(dtype=jnp.float32):
    state = jmpx.optim.ema(0.9).init({"w": jnp.ones(2)})
    return state._replace(average=jmpx.cast_tree(state.average, dtype))


ema: Any = jmpx.optim.ema  # which is given what its types do not allow
BAD = {
    "decay of a percentage": (lambda: ema(99.9), ValueError, "at most 1 - 2.*got 99.9"),
    "decay below 0": (lambda: ema(-0.1), ValueError, "got -0.1: give"),
    "decay of 1": (lambda: ema(True), ValueError, "got 1.0: give"),
    "bfloat16's 0.999": (lambda: ema(jnp.bfloat16(0.999)), ValueError, "got 1"),
    "NaN": (lambda: ema(float("nan")), ValueError, "got nan"),
    "structure": (lambda: ema(0.9).update({"v": 1}, a_state()), ValueError, "."),
    "shape": (
        lambda: ema(0.9).update({"w": jnp.ones((1, 2))}, a_state()),
        ValueError,
        r"average of float32\[1, 2\] in float32 and of its shape, got float32\[2\]: make",
    ),
    "average of 16 bits": (
        lambda: ema(0.9).update({"w": jnp.ones(2)}, a_state(jnp.bfloat16)),
        ValueError,
        r"average of float32\[2\] in float32 .* got bfloat16\[2\]: make",
    ),
    "flag": (
        lambda: ema(0.9).update({"w": jnp.ones(2)}, a_state(), 1),
        TypeError,
        "grads_finite",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_one_sentence(name):
    call, error, match = BAD[name]
    with pytest.raises(error, match=match) as caught:
        call()
    assert str(caught.value).count(". ") == 0
