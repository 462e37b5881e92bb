"""Gradients of groups of examples, and the float64 gradients of the whole batch."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from helpers import enable_x64
from helpers.training import loss_fn

EXAMPLES = 24


def make_mesh(*sizes, names=("data", "model"), axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def over(devices):
    return NamedSharding(make_mesh(devices), P("data"))


def in_float64(params, *args, loss=loss_fn):
    with enable_x64():
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, *args))
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(*wide))


def assert_near(result, reference, tolerance=2e-6):
    np.testing.assert_allclose(result.value, reference[0], rtol=tolerance)
    for got, expected in zip(*map(jax.tree.leaves, (result.grads, reference[1])), strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance / 10)
