"""A train step of a small network under a policy, and shapes for its arguments."""

import jax
import jax.numpy as jnp
import optax

import jmpx

WIDTH, BATCH = 64, 256
ADAM = optax.adam(1e-3)


def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step_under(policy):
    def step(params, state, x):
        grads = jax.grad(jmpx.apply_policy(loss_fn, policy))(params, x)
        updates, state = ADAM.update(grads, state)
        return optax.apply_updates(params, updates), state

    return step


def shapes(width=WIDTH, batch=BATCH, layers=2):
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return params, jax.eval_shape(ADAM.init, params), x
