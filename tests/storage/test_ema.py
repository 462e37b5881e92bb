"""Moving averages: against float64, in 16 bits, over skipped steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, normal

import jmpx


def trajectory(rng, dtype, steps):
    """Parameters that wander, stored in a dtype."""
    return [{"w": normal(rng, 3).astype(dtype)} for _ in range(steps)]


def reference(params, decay, debias):
    """The average in float64: as by `optax.ema`, or beginning with the first parameters."""
    wide = [np.asarray(each["w"]).astype(np.float64) for each in params]
    total = np.zeros(3) if debias else wide[0]
    for each in wide[1:]:
        total = decay * total + (1 - decay) * each
    return total / (1 - decay ** (len(params) - 1)) if debias else total


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
    step = lambda _, state: average.update(params, state)[1]  # noqa: E731
    state = jax.jit(lambda state: jax.lax.fori_loop(0, 500, step, state))(average.init(params))
    assert_same_bits(state.average, params)


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
    # It also averages its parameters into those for evaluation.
    averaged, _ = average.update(nnx.state(model, nnx.Param), of_params, jnp.array(True))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(averaged)} == {"float32"}
    nnx.update(model, averaged)
    np.testing.assert_allclose(model.kernel[...], first * 1.5, rtol=1e-6)
