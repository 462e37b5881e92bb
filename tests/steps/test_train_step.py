"""Whole train steps, of a Haiku network with state: one step function for all loss scales."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply_updates, assert_same_bits, lenient, leniently
from jax.sharding import Mesh, PartitionSpec

import jmpx

SCALES = {
    "NoOp": jmpx.NoOpLossScale(),
    "Static": jmpx.StaticLossScale(2.0**8),
    "Dynamic": jmpx.DynamicLossScale(2.0**8, period=3),
    "Dynamic from float16": jmpx.DynamicLossScale(jnp.float16(2**8), period=3),
}
KINDS = ["NoOp", "Static", "Dynamic"]  # one of each class, where compiling takes long


class Net(hk.Module):
    def __call__(self, x):
        x = hk.Linear(8)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
        return hk.Linear(1)(x)[..., 0]


NETWORK = hk.transform_with_state(lambda x: Net()(x))
# Haiku's moving averages divide by a float to the power of an int32.
init_network, apply_network = leniently(NETWORK.init), leniently(NETWORK.apply)
OPTIMIZER = jmpx.skip_nonfinite(
    lenient(optax.adam(optax.exponential_decay(1e-2, transition_steps=1, decay_rate=0.9)))
)


class State(NamedTuple):
    params: Any
    model: Any
    optimizer: Any
    loss_scale: Any


@pytest.fixture(autouse=True)
def policies():
    with jmpx.push_policy(Net, "c=f16,o=f32"):
        with jmpx.push_policy(hk.BatchNorm, "p=f32,c=f32,o=f16"):
            yield


def make_state(loss_scale, x, seed=0):
    params, model = init_network(jax.random.key(seed), x)
    return State(params, model, OPTIMIZER.init(params), loss_scale)


def make_batches(rng, steps=6, bad=()):
    x = rng.normal(size=(steps, 8, 4)).astype(np.float32)
    y = rng.normal(size=(steps, 8)).astype(np.float32)
    for step in bad:
        x[step, 2, 1] = np.inf
    return x, y


def loss_fn(params, model, x, y):
    prediction, model = apply_network(params, model, None, x)
    return jnp.mean((prediction - y) ** 2), model


def average(leaf, axis_name):
    return jax.lax.pmean(leaf, axis_name) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def make_step(axis_name=None):
    def step(state, batch):
        (loss, model), loss_scale, finite, grads = jmpx.filter_value_and_grad(
            loss_fn,
            state.loss_scale,
            has_aux=True,
            policy="full",
            over=None if axis_name is None else jmpx.Over(axis_name),
        )(state.params, state.model, *batch)
        if axis_name is not None:
            model = jax.tree.map(lambda leaf: average(leaf, axis_name), model)
        updates, optimizer = OPTIMIZER.update(
            grads, state.optimizer, state.params, grads_finite=finite
        )
        params = apply_updates(state.params, updates)
        model = jmpx.select_tree(finite, model, state.model)
        return State(params, model, optimizer, loss_scale), loss

    return step


STEP = jax.jit(make_step())  # one for all tests: the policies around it are always the same


def jmp_step(state, batch):
    """The same step written out with JMP's names."""

    def scaled_loss(params):
        loss, model = loss_fn(params, state.model, *batch)
        return state.loss_scale.scale(loss), (loss, model)

    grads, (loss, model) = jax.grad(scaled_loss, has_aux=True)(state.params)
    grads = state.loss_scale.unscale(grads)
    finite = jmpx.all_finite(grads)
    updates, optimizer = OPTIMIZER.update(grads, state.optimizer, state.params, grads_finite=finite)
    params = apply_updates(state.params, updates)
    model = jmpx.select_tree(finite, model, state.model)
    return State(params, model, optimizer, state.loss_scale.adjust(finite)), loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", SCALES)
def test_one_step_function_for_all_loss_scales(kind, rng):
    batches = make_batches(rng)
    state = by_names = make_state(SCALES[kind], batches[0][0])
    jitted_jmp_step = jax.jit(jmp_step)
    for batch in zip(*batches, strict=True):
        state, loss = STEP(state, batch)
        by_names, _ = jitted_jmp_step(by_names, batch)
        assert bool(jnp.isfinite(loss))
    assert_same_bits(state, by_names)
    assert state.optimizer.total_skipped == 0
    expected = 2.0**10 if kind.startswith("Dynamic") else float(SCALES[kind].loss_scale)
    assert float(state.loss_scale.loss_scale) == expected
    for leaf in jax.tree.leaves((state.params, state.model)):
        assert leaf.dtype in (jnp.float32, jnp.int32)


def test_powers_of_two_do_not_change_the_training(rng):
    batches = make_batches(rng)
    finals = []
    for kind in ("Static", "Dynamic"):
        state = make_state(SCALES[kind], batches[0][0])
        for batch in zip(*batches, strict=True):
            state, _ = STEP(state, batch)
        finals.append((state.params, state.model))
    for a, b in zip(*map(jax.tree.leaves, finals), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", SCALES)
def test_a_skipped_step_leaves_everything_and_the_next_one_works(kind, rng):
    batches = make_batches(rng, bad=(2,))
    state = make_state(SCALES[kind], batches[0][0])
    for i, batch in enumerate(zip(*batches, strict=True)):
        before = state
        state, _ = STEP(state, batch)
        kept = (before.params, before.model, before.optimizer.inner_state)
        if i == 2:
            assert_same_bits((state.params, state.model, state.optimizer.inner_state), kept)
            if kind.startswith("Dynamic"):
                assert state.loss_scale.loss_scale == before.loss_scale.loss_scale / 2
                assert state.loss_scale.counter == 0
        else:
            assert jmpx.all_finite(state)
            changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, before.params)
            assert any(jax.tree.leaves(changed))
    assert state.optimizer.total_skipped == 1
    # The schedule has counted the steps that were taken.
    counts = {int(leaf) for leaf in jax.tree.leaves(state.optimizer.inner_state) if leaf.ndim == 0}
    assert counts == {len(batches[0]) - 1}


def test_a_scale_that_starts_too_high_settles(rng):
    batches = make_batches(rng, steps=30)
    state = make_state(jmpx.DynamicLossScale(2.0**24), batches[0][0])
    state, _ = jax.lax.scan(make_step(), state, batches)
    assert 0 < state.optimizer.total_skipped < 20 and state.optimizer.consecutive_skipped == 0
    assert state.loss_scale.loss_scale == 2.0 ** (24 - int(state.optimizer.total_skipped))
    assert jmpx.all_finite(state)


def run_by_loop(state, batches):
    losses = []
    for batch in zip(*batches, strict=True):
        state, loss = STEP(state, batch)
        losses.append(loss)
    return state, jnp.stack(losses)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_scan_over_steps(kind, rng):
    batches = make_batches(rng, bad=(1,))
    state = make_state(SCALES[kind], batches[0][0])
    expected, losses = run_by_loop(state, batches)
    final, scanned = jax.jit(lambda s, b: jax.lax.scan(make_step(), s, b))(state, batches)
    assert final.optimizer.total_skipped == 1
    np.testing.assert_allclose(scanned, losses, rtol=2e-2, atol=1e-3)
    assert_close(final, expected)


def assert_close(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_seeds(kind, rng):
    x, y = make_batches(rng, steps=3, bad=(1,))
    states = [make_state(SCALES[kind], x[0], seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    step = jax.jit(jax.vmap(make_step()))  # each seed has a batch of its own: the second is bad
    final, _ = step(stacked, (x, y))
    np.testing.assert_array_equal(final.optimizer.total_skipped, [0, 1, 0])
    for seed, state in enumerate(states):
        expected, _ = STEP(state, (x[seed], y[seed]))
        assert_close(jax.tree.map(lambda leaf, seed=seed: leaf[seed], final), expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("pmap", "Dynamic"),
        ("shard_map", "NoOp"),
        ("shard_map", "Dynamic"),
        ("shard_map without vma", "Dynamic"),
    ],
)
# JAX 0.10 announces the end of pmap with a DeprecationWarning.
@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_data_parallel_replicas_agree(how, kind, rng):
    x, y = make_batches(rng, steps=4, bad=(2,))
    # Only one of the four replicas sees the inf: all are to skip.
    finite = np.where(np.isinf(x), 0, x)
    x, y = np.concatenate([x, finite, finite, finite], axis=1), np.concatenate([y] * 4, axis=1)
    state = make_state(SCALES[kind], x[0])
    if how == "pmap":
        devices = jax.devices()[:4]
        step = jax.pmap(make_step("data"), axis_name="data", devices=devices)
        running = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
        x, y = x.reshape(4, 4, -1, x.shape[-1]), y.reshape(4, 4, -1)
    else:
        all_of, part_of = PartitionSpec(), PartitionSpec("data")
        step = jax.jit(
            jax.shard_map(
                make_step("data"),
                mesh=Mesh(jax.devices()[:4], "data"),
                in_specs=(all_of, part_of),
                out_specs=(all_of, all_of),
                check_vma=how == "shard_map",
            )
        )
        running = state
    for batch in zip(x, y, strict=True):
        running, _ = step(running, batch)
    for leaf in jax.tree.leaves(running):
        replicas = leaf if how == "pmap" else [s.data for s in leaf.addressable_shards]
        for replica in replicas:
            assert np.asarray(replica).tobytes() == np.asarray(replicas[0]).tobytes()
    assert (running.optimizer.total_skipped == 1).all()
    assert jmpx.all_finite(running)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_donation_and_lowering(kind, rng):
    batches = make_batches(rng, steps=2)
    state = make_state(SCALES[kind], batches[0][0])
    batch = (batches[0][0], batches[1][0])
    expected, _ = STEP(state, batch)
    step = jax.jit(make_step(), donate_argnums=0)
    compiled = step.lower(state, batch).compile()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    step.lower(shapes, batch)
    assert jax.tree.structure(jax.eval_shape(step, state, batch)[0]) == jax.tree.structure(state)
    donated = jax.tree.map(jnp.copy, state)
    final, _ = compiled(donated, batch)
    assert_same_bits(final, expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated.params))
    final, _ = step(final, batch)
    assert jmpx.all_finite(final)
