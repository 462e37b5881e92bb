"""Whole train steps: one step function for all loss scales, and what a step compiles to."""

import functools
from typing import Any, NamedTuple

import compiled_step
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps
from helpers import apply_updates, assert_same_bits, lenient, leniently, versions
from models import ViT
from steps import Point

import jmpx

SCALES = {"NoOp": jmpx.NoOpLossScale(), "Dynamic": jmpx.DynamicLossScale(2.0**8, period=3)}


class Net(hk.Module):
    def __call__(self, x):
        x = hk.Linear(8)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
        return hk.Linear(1)(x)[..., 0]


NETWORK = hk.transform_with_state(lambda x: Net()(x))
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


@leniently  # Haiku's moving averages divide by a float to the power of an int32.
def loss_fn(params, model, x, y):
    prediction, model = NETWORK.apply(params, model, None, x)
    return jnp.mean((prediction - y) ** 2), model


def updated(state, loss_scale, model, finite, grads):
    updates, optimizer = OPTIMIZER.update(grads, state.optimizer, state.params, grads_finite=finite)
    params = apply_updates(state.params, updates)
    return State(params, jmpx.select_tree(finite, model, state.model), optimizer, loss_scale)


@jax.jit  # one for all tests: the policies around it are always the same
def train_step(state, batch):
    grad_fn = jmpx.value_and_grad(loss_fn, state.loss_scale, has_aux=True, policy="full")
    (loss, model), scale, finite, grads = grad_fn(state.params, state.model, *batch)
    return updated(state, scale, model, finite, grads), loss


@jax.jit
def jmp_step(state, batch):
    """The same step written out with JMP's names."""

    def scaled_loss(params):
        loss, model = loss_fn(params, state.model, *batch)
        return state.loss_scale.scale(loss), (loss, model)

    grads, (loss, model) = jax.grad(scaled_loss, has_aux=True)(state.params)
    grads = state.loss_scale.unscale(grads)
    finite = jmpx.all_finite(grads)
    return updated(state, state.loss_scale.adjust(finite), model, finite, grads), loss


@pytest.mark.parametrize("kind", SCALES)
def test_one_step_function_for_all_loss_scales_skips_a_step_and_goes_on(kind, rng):
    x, y = (rng.normal(size=(6, 8, *more)).astype(np.float32) for more in ((4,), ()))
    x[2, 2, 1] = np.inf
    is_dynamic = kind == "Dynamic"
    params, model = jax.jit(leniently(NETWORK.init))(jax.random.key(0), x[0])
    state = by_names = State(params, model, OPTIMIZER.init(params), SCALES[kind])
    for i, batch in enumerate(zip(x, y, strict=True)):
        before, (state, loss) = state, train_step(state, batch)
        if is_dynamic:
            by_names, _ = jmp_step(by_names, batch)
            assert_same_bits(state, by_names)
        if i == 2:
            kept = (before.params, before.model, before.optimizer.inner_state)
            assert_same_bits((state.params, state.model, state.optimizer.inner_state), kept)
            if is_dynamic:
                assert state.loss_scale.loss_scale == before.loss_scale.loss_scale / 2
                assert state.loss_scale.counter == 0
        else:
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state, loss)))
            pairs = zip(*map(jax.tree.leaves, (state.params, before.params)), strict=True)
            assert not all(np.array_equal(a, b) for a, b in pairs)
    expected = 2.0**8 if is_dynamic else float(SCALES[kind].loss_scale)  # halved, and grown
    assert float(state.loss_scale.loss_scale) == expected
    assert state.optimizer.total_skipped == 1
    # The schedule has counted the steps that were taken.
    counts = {int(leaf) for leaf in jax.tree.leaves(state.optimizer.inner_state) if leaf.ndim == 0}
    assert counts == {len(x) - 1}
    for leaf in jax.tree.leaves((state.params, state.model)):
        assert leaf.dtype in (jnp.float32, jnp.int32)


# What a step compiles to, counted: jmpx's may not be more than the hand-written one


MODEL = ViT(layers=1, width=16, heads=2, hidden=32, image=8, classes=10)


@functools.cache
def counts(implementation, dtype="float16"):
    with jax.numpy_dtype_promotion("standard"):  # optax promotes in its own code
        lowered = steps.trace(Point(implementation, dtype), MODEL, 2).lower()
    # What XLA hands on to LLVM is the same, whose optimizations take half of the time.
    return compiled_step.counts(lowered.compile({"xla_backend_optimization_level": 0}))


# A hand-written step that skips in the same way and checks its gradients at the same place.
@pytest.mark.parametrize(
    ("ours", "by_hand"),
    [
        versions("jmpx_where", "handwritten"),
        versions("jmpx", "handwritten_cond"),
        versions("jmpx_counting", "handwritten_cond"),
        versions("jmpx_jmp_style", "handwritten_late"),
    ],
)
def test_a_float16_step_costs_what_the_hand_written_one_does(ours, by_hand):
    forms = [counts(form) for form in (by_hand, compiled_step.DIVIDE.get(by_hand)) if form]
    ours, by_hand = counts(ours), forms[0]
    for name in ("bytes_accessed", "temp_bytes"):
        assert ours[name] <= 1.01 * min(form[name] for form in forms), name
    # A division is no part of what reads it: there are fewer instructions, but more kernels.
    assert ours["instructions"] <= 1.01 * by_hand["instructions"]
    assert ours["copies"] <= by_hand["copies"]
    # All flags together are converted and compared once: some operations a step, none a leaf.
    assert ours["converts"] <= by_hand["converts"] + 2
    assert ours["kernels"] <= min(form["kernels"] for form in forms) + 12


@pytest.mark.thorough
@pytest.mark.versions
def test_the_default_way_to_skip_is_the_smaller_one():
    cond, where = counts("jmpx"), counts("jmpx_where")
    for name in ("instructions", "copies", "bytes_accessed", "temp_bytes"):
        assert cond[name] < where[name], name


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.parametrize("ours", ["jmpx", "jmpx_jmp_style"])
def test_without_scaling_and_skipping_nothing_is_added(ours):
    assert counts(ours, "bfloat16") == counts("handwritten", "bfloat16")


@pytest.mark.parametrize("mapped", [False, versions(True)])
def test_a_step_grows_with_the_leaves_and_not_with_their_square(mapped):
    def step(params, grads):
        new = [p - jnp.tanh(g) for p, g in zip(params, grads, strict=True)]
        return jmpx.select_tree(jmpx.all_finite(grads), new, params)

    def instructions(leaves):
        arrays = [jax.ShapeDtypeStruct((2, 4), jnp.float32)] * leaves
        run = jax.jit(jax.vmap(step) if mapped else step, donate_argnums=0)
        return compiled_step.counts(run.lower(arrays, arrays).compile())["instructions"]

    few, many = instructions(20), instructions(60)
    assert many < 3.3 * few
