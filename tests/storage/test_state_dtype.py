"""`with_state_dtype`: the state of any optimizer in a dtype of its own."""

# Optax types states, updates and parameters as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F32, apply_updates, assert_same_bits, dtypes, enable_x64, lenient, normal

import jmpx
from jmpx.optim import with_state_dtype

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "chain": optax.chain(optax.clip(1.0), optax.adagrad(1e-2)),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(1e-2),
    "mu_dtype": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}
ADAM = lenient(optax.adam(1e-2))


def make_params(rng, dtype=F32):
    return {"w": normal(rng, 3, 4).astype(dtype), "b": normal(rng, 4).astype(dtype)}


@pytest.mark.parametrize(
    ("name", "dtype", "params_dtype"),
    [
        ("momentum", BF16, F32),
        ("multi steps", BF16, F32),
        ("hyperparameters", F32, BF16),
        pytest.param("chain", BF16, BF16, marks=pytest.mark.thorough),
    ],
)
def test_arrays_are_stored_in_the_dtype_and_scalars_as_they_are(name, dtype, params_dtype, rng):
    optimizer = with_state_dtype(lenient(OPTIMIZERS[name]), dtype)
    params, grads = make_params(rng, params_dtype), make_params(rng, params_dtype)
    before = state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(grads, state, params)
        assert dtypes(state) == dtypes(before)  # which a scan can carry
        params = apply_updates(params, updates)
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 0]
    assert arrays and all(leaf.dtype == dtype for leaf in arrays)
    scalars = {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim == 0}
    assert scalars <= {"int32", "float32"}
    assert {u.dtype for u in updates.values()} == {np.dtype(F32)}


@pytest.mark.parametrize("name", ["momentum", "chain"])
def test_in_float32_it_is_optax_itself(name, rng):
    params, inner = make_params(rng), lenient(OPTIMIZERS[name])
    optimizer = with_state_dtype(inner, "f32")
    state, inner_state = optimizer.init(params), inner.init(params)
    for _ in range(3):
        grads = make_params(rng)
        updates, state = optimizer.update(grads, state, params)
        expected, inner_state = inner.update(grads, inner_state, params)
        assert_same_bits((updates, state.inner_state), (expected, inner_state))
    assert int(state.count) == 3


def second_moments(optimizer, grads, steps):
    params = jnp.zeros(grads.shape[-1:], grads.dtype)

    def step(state, index):
        return optimizer.update(grads[index % len(grads)], state, params)[1], None

    run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(steps))[0])
    state = run(optimizer.init(params))
    inner = state.inner_state if isinstance(state, jmpx.types.StateDtypeState) else state
    return np.asarray(inner[0].nu, np.float64)


@pytest.mark.thorough
def test_second_moments_live_where_those_of_bfloat16_die():
    # 4,000 equal gradients: the figure of the docstring.
    steps, grads = 4000, jnp.full((1, 500), 0.3, BF16)
    exact = (1 - 0.999**steps) * np.float64(grads[0, 0]) ** 2
    share = lambda optimizer: second_moments(optimizer, grads, steps) / exact  # noqa: E731
    assert 0.25 < share(ADAM).mean() < 0.5
    np.testing.assert_allclose(share(with_state_dtype(ADAM, "f32")), 1, rtol=1e-3)
    by_chance = share(with_state_dtype(ADAM, "bf16"))
    assert abs(by_chance.mean() - 1) < 4 * by_chance.std() / np.sqrt(by_chance.size) + 1e-3
    assert by_chance.std() < 0.03


def test_moments_of_random_gradients_have_the_error_of_the_docs(rng):
    grads = normal(rng, 200, 500)
    exact = second_moments(ADAM, grads, 2000)
    found = second_moments(with_state_dtype(ADAM, "bf16"), grads, 2000)
    error = found / exact - 1
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size) + 1e-3
    assert 0.02 < error.std() < 0.06


def test_a_seed_repeats_and_another_rounds_otherwise(rng):
    params, grads = make_params(rng), make_params(rng)

    def moments(seed):
        optimizer = with_state_dtype(optax.sgd(1.0, momentum=0.9), "bf16", seed=seed)
        return optimizer.update(grads, optimizer.init(params), params)[1].inner_state[0].trace

    assert_same_bits(moments(0), moments(0))
    assert not jnp.array_equal(moments(0)["w"], moments(1)["w"])


def test_a_skipped_step_leaves_it_alone(rng):
    params = make_params(rng)
    optimizer = jmpx.skip_nonfinite(with_state_dtype(OPTIMIZERS["momentum"], "bf16"))
    state = optimizer.init(params)
    grads = {**make_params(rng), "b": jnp.full(4, jnp.nan)}
    step = jax.jit(lambda p, s, g: jmpx.optimizer_update(p, optimizer, s, g, jmpx.all_finite(g)))
    new, after = step(params, state, grads)
    assert_same_bits((new, after.inner_state), (params, state.inner_state))
    new, after = step(params, state, params)
    assert int(after.inner_state.count) == 1 and not jnp.array_equal(new["w"], params["w"])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_float64_where_it_is_enabled(dtype):
    with enable_x64():
        params = {"w": jnp.ones(3, jnp.float64)}
        optimizer = with_state_dtype(ADAM, dtype)
        updates, state = optimizer.update(params, optimizer.init(params), params)
        assert state.inner_state[0].nu["w"].dtype == jmpx.get_policy(f"p={dtype}").param_dtype
        assert updates["w"].dtype == jnp.float64
