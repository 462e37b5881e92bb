"""Float32 masters, optimizers of them, and gradients that do not depend on the dtype."""

import jax
import jax.numpy as jnp
import optax

import jmpx
from helpers import apply_updates, lenient, normal

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
}


def make_optimizer(name):
    return lenient(OPTIMIZERS[name]())


def make_params(rng):
    return {"w": normal(rng, 3, 4), "layers": [normal(rng, 4), normal(rng)]}


def grad_of(params):
    """The float32 gradients at parameters of any dtype."""
    loss = lambda p: sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(p))  # noqa: E731
    return jax.grad(loss)(jmpx.cast_to_full(params))


def train(optimizer, params, state, steps, by_optimizer_update=True):
    """Trains 16-bit parameters; each step in Python, and so each operation compiled alone."""
    for _ in range(steps):
        grads = grad_of(params)
        if by_optimizer_update:
            params, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
        else:
            updates, state = optimizer.update(grads, state, params)
            params = apply_updates(params, updates)
    return params, state
