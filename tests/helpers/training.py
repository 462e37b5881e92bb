"""A small loss, loss scales of each kind, gradients by hand."""

import functools

import jax
import jax.numpy as jnp

import jmpx
from helpers import normal

LOSS_SCALES = {
    "NoOp": jmpx.NoOpLossScale,
    "Static": lambda: jmpx.StaticLossScale(2.0**10),
    "Dynamic": lambda: jmpx.DynamicLossScale(2.0**10),
}
POLICIES = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}


def make_params(rng):
    return {"w": normal(rng, 6, 3), "b": normal(rng, 3)}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(hidden.astype(jnp.float32) ** 2)


def by_hand(params, x, dtype):
    """The float32 gradient of the computation in `dtype`, unscaled: the reference."""
    cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(dtype))
    return jax.value_and_grad(lambda p: loss_fn(cast(p), cast(x)))(params)


LEAST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


def value(loss_scale):
    return float(loss_scale.loss_scale)
