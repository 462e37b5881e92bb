"""`low_precision_params`: 16-bit parameters that learn as float32 ones do, or do so on average."""

# Optax types states, updates and parameters as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, apply_updates, assert_same_bits, dtypes
from helpers.sixteen_bits import OPTIMIZERS, grad_of, make_optimizer, make_params, train

import jmpx

# Split masters


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", ["optimizer_update", "apply_updates", "skip_nonfinite"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_is_the_training_of_float32_masters_to_the_bit(name, way, rng):
    inner, masters = make_optimizer(name), make_params(rng)
    optimizer = jmpx.optim.low_precision_params(inner, "split")
    if way == "skip_nonfinite":
        optimizer = jmpx.skip_nonfinite(optimizer)
    state, inner_state = optimizer.init(masters), inner.init(masters)
    params, _ = jmpx.optim.split_master(masters)
    params, state = train(optimizer, params, state, 6, way != "apply_updates")
    for _ in range(6):
        updates, inner_state = inner.update(
            grad_of(jmpx.optim.split_master(masters)[0]), inner_state, masters
        )
        masters = optax.apply_updates(masters, updates)
    state = state.inner_state if way == "skip_nonfinite" else state
    assert_same_bits(params, jmpx.optim.split_master(masters)[0])
    assert_same_bits(jmpx.optim.merge_master(params, state.low), masters)
    assert_same_bits(state.inner_state, inner_state)


def test_so_it_is_in_a_compiled_scan_with_donated_buffers(rng):
    # The learning rate is a power of two: a product with it is exact, fused with the sum or not.
    inner, masters = optax.sgd(2.0**-5), make_params(rng)
    optimizer = jmpx.skip_nonfinite(jmpx.optim.low_precision_params(inner, "split"))

    def step(carry, _):
        params, state = carry
        return jmpx.optimizer_update(params, optimizer, state, grad_of(params), True), None

    def master_step(masters, _):
        updates, _ = inner.update(grad_of(jmpx.optim.split_master(masters)[0]), inner.init(masters))
        return optax.apply_updates(masters, updates), None

    scan = lambda step: lambda carry: jax.lax.scan(step, carry, length=20)[0]  # noqa: E731
    expected = jax.jit(scan(master_step))(masters)
    carry = jmpx.optim.split_master(masters)[0], optimizer.init(masters)
    params, state = jax.jit(scan(step), donate_argnums=0)(carry)
    assert_same_bits(jmpx.optim.merge_master(params, state.inner_state.low), expected)
    assert int(state.total_skipped) == 0


def test_small_steps_arrive_that_bfloat16_loses():
    masters = {"w": jnp.ones(2)}
    optimizer = jmpx.optim.low_precision_params(optax.sgd(2.0**-10), "split")
    params, state = jmpx.optim.split_master(masters)[0], optimizer.init(masters)
    for _ in range(1000):
        updates, state = jax.jit(optimizer.update)({"w": jnp.full(2, -1.0)}, state, params)
        params = apply_updates(params, updates)
    assert (jmpx.optim.merge_master(params, state.low)["w"] == 1 + 1000 * 2.0**-10).all()


# Stochastic rounding


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "exponent"), [(BF16, -10), (F16, -13)])
def test_stochastic_rounding_is_right_on_average_where_the_dtype_stalls(dtype, exponent):
    steps, count = 1000, 4096
    optimizer = jmpx.optim.low_precision_params(optax.sgd(2.0**exponent), "stochastic")
    grads = jnp.full(count, -1.0)

    @jax.jit
    def run(params):
        def step(carry, _):
            return jmpx.optimizer_update(carry[0], optimizer, carry[1], grads, True), None

        carry = params, optimizer.init(params.astype(jnp.float32))
        return jax.lax.scan(step, carry, length=steps)[0]

    params, state = run(jnp.ones(count, dtype))
    values, exact = np.asarray(params, np.float64), 1 + steps * 2.0**exponent
    assert params.dtype == dtype and int(state.count) == steps
    assert abs(values.mean() - exact) < 4 * values.std() / np.sqrt(count)
    assert 0 < values.std() < 0.1
    plain, _ = jmpx.optimizer_update(
        jnp.ones(1, dtype), optax.sgd(2.0**exponent), optax.sgd(1.0).init(params), grads[:1], True
    )
    assert (plain == 1).all()


def test_a_seed_repeats_and_each_step_and_leaf_draw_anew():
    def rounded(seed, steps=1):
        optimizer = jmpx.optim.low_precision_params(optax.sgd(1.0), "stochastic", seed=seed)
        grads = {"a": jnp.full(64, 2.0**-9), "b": jnp.full(64, 2.0**-9)}
        state = optimizer.init(grads)
        for _ in range(steps):
            params = jax.tree.map(lambda g: jnp.full(64, -1, BF16), grads)
            params, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
        return params

    first = rounded(0)
    assert_same_bits(first, rounded(0))
    different = [first["a"], first["b"], rounded(1)["a"], rounded(0, steps=2)["a"]]
    assert len({np.asarray(x).tobytes() for x in different}) == 4


def test_no_gradient_moves_nothing(rng):
    params = jmpx.cast_tree(make_params(rng), jnp.bfloat16)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    params["w"] = params["w"].at[0].set(-0.0)
    optimizer = jmpx.optim.low_precision_params(optax.sgd(0.1), "stochastic")
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert_same_bits(apply_updates(params, updates), params)


# The updates


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rounding", "dtype", "factor"),
    [("split", BF16, 2**15), ("stochastic", BF16, 2**15), ("stochastic", F16, 2**12)],
)
def test_what_is_returned_adds_up_to_the_new_parameters(rounding, dtype, factor, rng):
    size, spread = 20_000, 12 if dtype == F16 else 60
    old = (rng.normal(size=size) * 2.0 ** rng.uniform(-spread, spread, size)).astype(dtype)
    # Half of them nearly cancel: the new parameter is a tiny part of the old one.
    near = -old.astype(F32) * (1 + rng.normal(size=size) * 2.0 ** rng.uniform(-24, 0, size))
    far = rng.normal(size=size) * 2.0 ** rng.uniform(-spread, spread, size)
    change = np.where(rng.random(size) < 0.5, near, far).astype(F32)
    optimizer = jmpx.optim.low_precision_params(optax.sgd(-1.0), rounding)
    state = optimizer.init(jnp.asarray(old, F32))
    new, _ = jmpx.optimizer_update(jnp.asarray(old), optimizer, state, change, True)

    @jax.jit  # in which XLA could keep a sum in float32
    def by_hand(params):
        updates, _ = optimizer.update(change, state, params)
        assert updates.dtype == F32
        return apply_updates(params, updates)

    found = np.asarray(by_hand(jnp.asarray(old)), np.float64)
    new, old = np.asarray(new, np.float64), old.astype(np.float64)
    finite = np.isfinite(new)
    np.testing.assert_array_equal(found[~finite], new[~finite])
    found, new, old = found[finite], new[finite], old[finite]
    exact = np.abs(old) <= factor * np.abs(new)
    assert 0.5 < exact.mean() < 1
    np.testing.assert_array_equal(found[exact], new[exact])
    assert (np.abs(found - new) <= 2.0**-24 * np.abs(old)).all()


def test_parameters_that_stayed_float32_are_updated_as_usual(rng):
    masters, inner = make_params(rng), make_optimizer("adam")
    grads = grad_of(masters)
    for rounding in ("split", "stochastic"):
        optimizer = jmpx.optim.low_precision_params(inner, rounding)
        params = {**jmpx.optim.split_master(masters)[0], "w": masters["w"]}
        for by_optimizer_update in (True, False):
            got, state = train(optimizer, params, optimizer.init(masters), 1, by_optimizer_update)
            assert dtypes(got) == dtypes(params)
            expected, _ = inner.update(grads, inner.init(masters), masters)
            assert_same_bits(got["w"], masters["w"] + expected["w"])
            assert dtypes(state) == dtypes(optimizer.init(masters))


# Steps that are skipped


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skip_by", ["cond", "where"])
@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_nan_in_one_leaf_skips_everything(rounding, skip_by, rng):
    masters = make_params(rng)
    low = jmpx.optim.low_precision_params(make_optimizer("adam"), rounding)
    params, _ = jmpx.optim.split_master(masters)
    grads = grad_of(params)
    grads["layers"][1] = jnp.float32(jnp.nan)

    def by_hand(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state

    def by_us(params, state, grads):
        finite = jmpx.all_finite(grads)
        return jmpx.optimizer_update(params, optimizer, state, grads, finite, skip_by=skip_by)

    for optimizer, step in (
        (low, by_us),
        (jmpx.skip_nonfinite(low, skip_by=skip_by), by_us),
        (jmpx.skip_nonfinite(low, skip_by=skip_by), by_hand),
    ):
        state = optimizer.init(masters)
        new, after = jax.jit(step)(params, state, grads)
        assert_same_bits(new, params)
        taken, _ = jax.jit(step)(params, state, grad_of(params))
        assert not jnp.array_equal(taken["w"], params["w"])
        if optimizer is not low:
            assert int(after.total_skipped) == 1
            after, state = after.inner_state, state.inner_state
        assert_same_bits(after, state)
