"""Parameters that are sharded or replicated, and the gradients of the mean loss of all devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.mpx as mpx
from helpers import enable_x64, normal
from helpers.maps import AXIS


def gradients(loss_fn, scaling=None, *, axis_name: Any = AXIS, sharded: Any = None, **options: Any):
    scaling = jmpx.StaticLossScale(8) if scaling is None else scaling
    over = None if axis_name is None else jmpx.Over(axis_name, sharded)
    options = {"policy": "full", "over": over, **options}
    grad_fn: Any = mpx.filter_value_and_grad(loss_fn, scaling, **options)
    return lambda *args: tuple(grad_fn(*args))


def gather(w, axis_name=AXIS):
    return jax.lax.all_gather(w, axis_name, tiled=True)


@jax.custom_vjp
def gather_with_float32_sum(w):
    return gather(w)


def _float32_sum(_, g):
    return (jax.lax.psum_scatter(g.astype(jnp.float32), AXIS, tiled=True).astype(g.dtype),)


gather_with_float32_sum.defvjp(lambda w: (gather(w), None), _float32_sum)

# Ways to read a whole parameter of shape (8, 4); of the last two, each device has a copy.
READS = {
    "tiled": gather,
    "untiled": lambda w: jax.lax.all_gather(w, AXIS).reshape(-1, *w.shape[1:]),
    "own": gather_with_float32_sum,
    "jmpx": lambda w: jmpx.distributed.gather(w, AXIS, "full"),
    "replica": lambda w: w,
    "cast": lambda w: w,
}
# Which of them are split over the devices.
SPECS = {name: P() if name in ("replica", "cast") else P(AXIS) for name in READS}
MASK = {name: bool(spec) for name, spec in SPECS.items()}


def make_weights(rng, rows=8):
    return {name: normal(rng, rows, 4) / 2 for name in READS}


def network(params, x, reads=None):
    """The mean over examples of what a network with all of these parameters gives."""
    total = jnp.zeros((len(x), 4), x.dtype)
    for name, w in params.items():
        total = total + jnp.tanh(x @ (reads[name](w) if reads else w))
    return jnp.mean(total.astype(jnp.float32) ** 2)


def in_float64(loss_fn, params, batch):
    """The gradient of the mean loss over the whole batch, on one device."""
    with enable_x64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (params, batch))
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss_fn))(*wide))


def whole(name, grad):
    """The gradient of a whole parameter from those of all devices."""
    if SPECS[name]:
        return np.concatenate(grad)
    assert (grad == grad[:1]).all()
    return grad[0]


def flag_reductions(text):
    """The number of reductions of one integer or bool over devices, in StableHLO."""
    found = re.findall(r'"stablehlo.all_reduce"\(.*?\) : \(tensor<(\S+)>\)', text, re.DOTALL)
    return sum(each in ("i32", "i1") for each in found)
