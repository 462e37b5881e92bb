"""Gradients of groups of examples, and the float64 gradients of the whole batch."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jmpx
import jmpx.mpx as mpx
from helpers import enable_x64
from helpers.training import loss_fn

EXAMPLES = 24


def make_mesh(*sizes, names=("data", "model"), axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def over(devices):
    return NamedSharding(make_mesh(devices), P("data"))


def value_and_grad(
    loss: Any = loss_fn, devices=8, scaling: Any = None, batch: Any = None, **options: Any
) -> Any:
    """Gradients of groups; `batch` holds arguments of `jmpx.Batch` in place of those of here."""
    batch = jmpx.Batch(**{"sharding": over(devices), **(batch or {})})
    scaling = jmpx.NoOpLossScale() if scaling is None else scaling
    options = {"policy": "c=f32", "batch": batch, **options}
    return mpx.filter_value_and_grad(loss, scaling, **options)


def jitted(*args: Any, **options: Any) -> Any:
    """The same function under `jax.jit`, for results that are arrays."""
    grad_fn = value_and_grad(*args, **options)
    return jax.jit(lambda *args, **kwargs: grad_fn(*args, **kwargs))


def in_float64(params, *args, loss=loss_fn):
    with enable_x64():
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, *args))
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(*wide))


def assert_near(result, reference, tolerance=2e-6):
    np.testing.assert_allclose(result.value, reference[0], rtol=tolerance)
    for got, expected in zip(*map(jax.tree.leaves, (result.grads, reference[1])), strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance / 10)
