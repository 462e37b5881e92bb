"""A network of Equinox whose layers note their dtypes, and the same with casts by hand."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

import jmpx
from helpers import BF16, F32, LOG, normal


def randomized(model, rng):
    """The same model with random parameters, biases and scales too."""
    return jax.tree.map(lambda w: normal(rng, *w.shape) if eqx.is_inexact_array(w) else w, model)


class Probe(eqx.Module):
    """Notes the dtypes that it sees."""

    weight: jax.Array
    name: str = eqx.field(static=True, default="probe")

    def __call__(self, x):
        LOG.append((self.name, x.dtype.name, self.weight.dtype.name))
        return x * self.weight


class Special(Probe):
    """A subclass, for rules by a base's name."""


class Net(eqx.Module):
    """Two layers, a norm, and a head, in a list, a dict and a field."""

    layers: list
    parts: dict
    head: eqx.nn.Linear
    calls: jax.Array
    key: jax.Array
    activation: Callable
    rate: float
    name: str = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [eqx.nn.Linear(6, 6, key=keys[0]), eqx.nn.Linear(6, 6, key=keys[1])]
        self.parts = {"norm": eqx.nn.LayerNorm(6), "pair": (Probe(jnp.ones(6)), None)}
        self.head = eqx.nn.Linear(6, 2, key=keys[2])
        self.calls, self.key = jnp.arange(3), keys[3]
        self.activation, self.rate, self.name, self.scale = jax.nn.gelu, 0.5, "net", 2.0

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        x = self.parts["pair"][0](self.parts["norm"](x) * self.rate)
        return self.head(x) * self.scale


def by_hand(model, x, layers=BF16, norm=BF16, head=BF16, output=F32, around=BF16):
    """`Net` with every cast written out, from the stored parameters."""

    def run(module, x, dtype):
        return jmpx.cast_tree(module, dtype)(x.astype(dtype)).astype(around)

    x = x.astype(around)
    for layer in model.layers:
        x = jax.nn.gelu(run(layer, x, layers))
    x = run(model.parts["norm"], x, norm) * model.rate
    x = x * model.parts["pair"][0].weight.astype(around)
    return (run(model.head, x, head) * model.scale).astype(output)


class Around(eqx.Module):
    inner: Callable

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)
