"""The small float16 training that `kills.py` kills, and whose steps `soak.py` compares."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpx

OPTIMIZER = jmpx.skip_nonfinite(optax.adam(1e-3))
PyTree = Any


class State(NamedTuple):
    """All that the next step depends on."""

    params: PyTree
    opt_state: PyTree
    loss_scale: jmpx.DynamicLossScale
    key: jax.Array  # the bits of a random key


def init(loss_scale: jmpx.DynamicLossScale) -> State:
    rng = np.random.default_rng(0)
    shapes = {"in": (8, 16), "hidden": (16, 16), "out": (16, 1)}
    params = {
        name: jnp.asarray(rng.normal(size=s) / s[0], np.float32) for name, s in shapes.items()
    }
    # Copied to the device, so that the first step is traced with what the next ones have.
    loss_scale = jax.tree.map(jnp.asarray, loss_scale)
    return State(params, OPTIMIZER.init(params), loss_scale, jax.random.PRNGKey(1))


def loss_fn(params: PyTree, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["in"])
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)
    h = jnp.tanh(h @ params["hidden"]) @ params["out"]
    return jnp.mean((h.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def make_step(skip_by: Any = None) -> tuple[Callable[..., tuple[State, Any, Any]], list[int]]:
    """Returns a train step, and a list that gets an item each time it is traced.

    The step returns the next state, the loss, and whether the gradients are finite.
    """
    traces: list[int] = []
    skip = {} if skip_by is None else {"skip_by": skip_by}

    @jax.jit
    def step(state: State, x: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        traces.append(1)
        key, dropout = jax.random.split(state.key)
        y = jnp.sum(x, 1, keepdims=True)
        grad_fn = jmpx.value_and_grad(loss_fn, state.loss_scale, policy="c=f16,o=f32")
        loss, loss_scale, finite, grads = grad_fn(state.params, x, y, dropout)
        params, opt_state = jmpx.optimizer_update(
            state.params, OPTIMIZER, state.opt_state, grads, finite, **skip
        )
        return State(params, opt_state, loss_scale, key), loss, finite

    return step, traces


def counts(state: State) -> tuple[float, int, int, int]:
    """Returns the scale, its counter, and the steps that were skipped in all and in a row."""
    skips: Any = state.opt_state
    scale, counter = state.loss_scale.loss_scale, state.loss_scale.counter
    skipped = int(skips.total_skipped), int(skips.consecutive_skipped)
    return float(scale), int(counter), *skipped


def bits(tree: PyTree) -> list[bytes]:
    """Returns the dtypes, shapes and bits of all leaves."""
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return [f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes() for leaf in leaves]
