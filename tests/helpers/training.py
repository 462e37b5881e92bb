"""A small loss, loss scales of each kind, gradients by hand and in float64, groups of examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx
from helpers import maps, normal

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


EXAMPLES = 24


def over(devices):
    return NamedSharding(maps.mesh_of(devices), P("data"))


def in_float64(params, *args, loss=loss_fn):
    return maps.in_float64(loss, params, *args)


def assert_near(result, reference, tolerance=2e-6):
    np.testing.assert_allclose(result.value, reference[0], rtol=tolerance)
    for got, expected in zip(*map(jax.tree.leaves, (result.grads, reference[1])), strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance / 10)
