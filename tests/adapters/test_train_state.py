"""A step of Flax's TrainState in bfloat16: with jmpx the same as by hand, to the last bit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from helpers import assert_same_bits, leniently, normal

import jmpx
import jmpx.flax


def to_bfloat16(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def squared_error(apply_fn, params, x, y):
    return jnp.mean((apply_fn({"params": params}, x).reshape(-1) - y) ** 2)


def loss_after(state, x, y):
    """The loss at the new parameters, computed in bfloat16, as float32 of shape (1,)."""
    loss = squared_error(state.apply_fn, *to_bfloat16((state.params, x, y)))
    return loss.astype(jnp.float32).reshape(1)


def by_hand(state, x, y, loss_scale):
    def scaled_loss(params):
        loss = squared_error(state.apply_fn, *to_bfloat16((params, x, y)))
        return loss.astype(jnp.float32) * loss_scale

    grads = jax.grad(scaled_loss)(state.params)
    grads = jax.tree.map(lambda grad: grad.astype(jnp.float32) / loss_scale, grads)
    state = state.apply_gradients(grads=grads)
    return state, loss_after(state, x, y)


def with_gradients(state, x, y, loss_scale):
    """Everything cast by the gradient function."""

    def loss_fn(params, x, y):
        return squared_error(state.apply_fn, params, x, y)

    scaling = jmpx.StaticLossScale(loss_scale)
    _, _, grads = jmpx.filter_grad(loss_fn, scaling, policy="c=bf16")(state.params, x, y)
    state = state.apply_gradients(grads=grads)
    return state, loss_after(state, x, y)


def with_casts(state, x, y, loss_scale):
    """Casts and loss scale called one by one."""
    policy, scaling = jmpx.get_policy("c=bf16"), jmpx.StaticLossScale(loss_scale)

    def scaled_loss(params):
        loss = squared_error(state.apply_fn, *policy.cast_to_compute((params, x, y)))
        return scaling.scale(jmpx.cast_to_full(loss))

    grads = scaling.unscale(jax.grad(scaled_loss)(state.params))
    state = state.apply_gradients(grads=grads)
    return state, loss_after(state, x, y)


def with_policies(state, x, y, loss_scale):
    """The model cast by the adapter."""

    def loss_fn(params):
        with jmpx.flax.policies("c=bf16"):
            return squared_error(state.apply_fn, params, x, y.astype(jnp.bfloat16))

    scaling = jmpx.StaticLossScale(loss_scale)
    _, _, grads = jmpx.filter_grad(loss_fn, scaling, policy="full")(state.params)
    state = state.apply_gradients(grads=grads)
    return state, loss_after(state, x, y)


def first_state(rng, features, tx):
    model = nn.Dense(1)
    params = model.init(jax.random.key(0), jnp.ones((1, features)))["params"]
    params = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("step", [with_gradients, with_casts, with_policies])
@pytest.mark.parametrize(
    ("loss_scale", "jit"),
    [*((scale, True) for scale in (1.0, 64.0, 2.0**15, 1000.0)), (64.0, False)],
)
def test_the_step_is_the_hand_written_one_to_the_last_bit(rng, step, loss_scale, jit):
    n, features = rng.integers(2, 40), rng.integers(1, 9)
    x = normal(rng, n, features)
    y = normal(rng, n)
    ours = theirs = first_state(rng, features, optax.sgd(rng.uniform(0.01, 0.5)))
    run, reference = (
        leniently(jax.jit(f, static_argnums=3) if jit else f) for f in (step, by_hand)
    )
    for _ in range(3):
        ours, loss = run(ours, x, y, loss_scale)
        theirs, expected = reference(theirs, x, y, loss_scale)
        assert_same_bits(loss, expected)
        assert_same_bits(ours.params, theirs.params)
        assert loss.shape == (1,) and loss.dtype == ours.params["kernel"].dtype == jnp.float32
    assert ours.step == theirs.step == 3


def test_a_skipped_step_keeps_the_whole_state(rng):
    state = first_state(rng, 3, optax.sgd(0.1, momentum=0.9))
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), state.params)
    kept = jmpx.select_tree(jnp.array(False), state.apply_gradients(grads=grads), state)
    assert kept.step == 0 and kept.apply_fn == state.apply_fn
    assert_same_bits((kept.params, kept.opt_state), (state.params, state.opt_state))
