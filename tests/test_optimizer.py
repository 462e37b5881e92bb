import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply_updates, assert_same_bits, lenient

import jmpx

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(optax.linear_schedule(0.5, 0.1, 10), momentum=0.9),
    "adam": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "bf16 moment": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
}


def make_optimizer(name):
    return lenient(OPTIMIZERS[name]())


def make_params(rng):
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=3), jnp.bfloat16),
        # A sum with +0.0 would turn -0.0 into 0.0.
        "zero": jnp.array([-0.0, 0.0], jnp.float32),
    }
    return params


def grads_like(params, rng, bad=None):
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    if bad is not None:
        grads["w"] = grads["w"].at[1, 1].set(bad)
    return grads


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_update_skips_to_the_bit_and_then_goes_on(name, jit, bad, rng):
    optimizer, params = make_optimizer(name), make_params(rng)
    state = optimizer.init(params)

    def step(params, state, grads):
        finite = jmpx.all_finite(grads)
        return jmpx.optimizer_update(params, optimizer, state, grads, finite)

    run = jax.jit if jit else lambda f: f
    step = run(step)
    for i in range(6):
        skip = i in (0, 3)
        grads = grads_like(params, rng, bad if skip else None)
        before = params, state
        params, state = step(params, state, grads)
        if skip:
            assert_same_bits((params, state), before)
            continue
        updates, expected_state = run(optimizer.update)(grads, before[1], before[0])
        expected = run(apply_updates)(before[0], updates)
        for a, b in zip(
            jax.tree.leaves((params, state)),
            jax.tree.leaves((expected, expected_state)),
            strict=True,
        ):
            assert a.dtype == b.dtype
            # Compiled together, update and sum may be fused into one rounding.
            eps = (
                float(jnp.finfo(a.dtype).eps)
                if jit and jnp.issubdtype(a.dtype, jnp.floating)
                else 0
            )
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=4 * eps, atol=eps
            )


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_nonfinite_skips_to_the_bit_and_counts(name, given, rng):
    params = make_params(rng)
    plain = make_optimizer(name)
    plain_state = plain.init(params)
    optimizer = jmpx.skip_nonfinite(plain)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        extra = {"grads_finite": jmpx.all_finite(grads)} if given else {}
        updates, state = optimizer.update(grads, state, params, **extra)
        return updates, apply_updates(params, updates), state

    total = consecutive = 0
    for skip in (True, False, True, True, False):
        grads = grads_like(params, rng, np.inf if skip else None)
        before = params, state.inner_state
        updates, params, state = step(params, state, grads)
        total, consecutive = total + skip, (consecutive + 1) * skip
        assert (state.total_skipped, state.consecutive_skipped) == (total, consecutive)
        assert bool(state.grads_finite) != skip
        if skip:
            assert_same_bits((params, state.inner_state), before)
            for update in jax.tree.leaves(updates):
                assert (update == 0).all() and np.signbit(np.asarray(update, np.float32)).all()
        else:
            # Steps and schedules count the steps taken, not those skipped.
            _, plain_state = jax.jit(plain.update)(grads, plain_state, before[0])
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain_state)
    for a, b in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(plain_state), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            assert a == b == total - 1 == 2


def test_skip_nonfinite_takes_the_flag_that_it_is_given(rng):
    optimizer = jmpx.skip_nonfinite(optax.sgd(1.0))
    params = {"w": jnp.asarray(rng.normal(size=3), jnp.float32)}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params, grads_finite=False)
    assert (updates["w"] == 0).all() and state.total_skipped == 1
    bad = {"w": jnp.full(3, jnp.inf)}
    updates, state = optimizer.update(bad, state, params, grads_finite=True)
    assert jnp.isinf(updates["w"]).all() and state.total_skipped == 1


def test_extra_arguments_are_handed_on(rng):
    optimizer = jmpx.skip_nonfinite(
        lenient(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)))
    )
    params = {"w": jnp.asarray(rng.normal(size=3), jnp.float32)}
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params, value=1.0)
    model, state = jmpx.optimizer_update(params, optimizer, state, params, True, value=1.0)
    assert state.total_skipped == 0 and model["w"].dtype == jnp.float32
    plain = jmpx.skip_nonfinite(optax.sgd(0.1))  # takes none: not handed on
    plain.update(params, plain.init(params), params, value=1.0)


def test_optimizer_update_tells_skip_nonfinite(rng):
    optimizer, params = jmpx.skip_nonfinite(make_optimizer("adam")), make_params(rng)
    state = optimizer.init(params)
    for expected, finite in ((1, False), (2, False), (2, True)):
        before = params
        params, state = jmpx.optimizer_update(
            params, optimizer, state, grads_like(params, rng), finite
        )
        assert state.total_skipped == expected
        if not finite:
            assert_same_bits(params, before)
    assert state.consecutive_skipped == 0


def test_optimizer_update_leaves_other_leaves_alone(rng):
    w = jnp.asarray(rng.normal(size=3), jnp.float32)
    key = jax.random.key(0)
    model = {"w": w, "act": jnp.tanh, "n": jnp.arange(2), "key": key, "none": None, "p": 0.5}
    trained = {name: w if name == "w" else None for name in model}
    optimizer = make_optimizer("adam")
    new, _ = jmpx.optimizer_update(model, optimizer, optimizer.init(trained), trained, True)
    for name in ("act", "n", "key", "none", "p"):
        assert new[name] is model[name]
    assert not (new["w"] == w).any()


def test_a_float32_update_of_a_bfloat16_parameter_is_rounded_once():
    model = {"w": jnp.array([1.0], jnp.bfloat16)}
    optimizer = optax.sgd(1.0)
    step = {"w": jnp.array([-(2.0**-8 + 2.0**-9)], jnp.float32)}
    new, _ = jmpx.optimizer_update(model, optimizer, optimizer.init(model), step, True)
    assert new["w"].dtype == jnp.bfloat16 and new["w"][0] == 1 + 2.0**-7


@pytest.mark.parametrize("wrap", [lambda o: o, jmpx.skip_nonfinite])
def test_updates_work_on_numpy_parameters(wrap, rng):
    optimizer = wrap(optax.sgd(0.5))
    params = {"w": rng.normal(size=3).astype(np.float32)}
    new, _ = jmpx.optimizer_update(
        params, optimizer, optimizer.init(params), params, np.bool_(True)
    )
    np.testing.assert_allclose(new["w"], params["w"] / 2)


def test_bad_arguments():
    with pytest.raises(TypeError, match="Expected an optax gradient transformation, got 3"):
        jmpx.skip_nonfinite(3)
    optimizer = optax.sgd(1.0)
    params = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="Expected grads_finite to be a scalar bool"):
        jmpx.optimizer_update(params, optimizer, optimizer.init(params), params, 1)
    skipping = jmpx.skip_nonfinite(optimizer)
    with pytest.raises(TypeError, match="Expected grads_finite to be a scalar bool"):
        skipping.update(params, skipping.init(params), params, grads_finite=1.0)


def test_the_state_is_found_by_optax():
    state = jmpx.skip_nonfinite(optax.adam(0.1)).init({"w": jnp.ones(2)})
    assert optax.tree_utils.tree_get(state, "total_skipped") == 0
    assert optax.tree_utils.tree_get(state, "count") == 0
