"""A model of two linear layers, traced under a policy map in each framework."""

import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import numpy as np
import pytest
from flax import nnx

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

X = np.ones((2, 3), np.float32)


def shape_of(function, x=X):
    return jax.eval_shape(lambda x: function(x), x)


def run_haiku(text):
    network = hk.transform(lambda x: hk.nets.MLP([4, 2], name="mlp")(x))
    with jmpx.haiku.policies(text):
        return shape_of(lambda x: network.apply(network.init(jax.random.key(0), x), None, x))


def run_linen(text):
    model = nn.Sequential([nn.Dense(4), nn.Dense(2)])
    with jmpx.flax.policies(text):
        return shape_of(lambda x: model.apply(model.init(jax.random.key(0), x), x))


def run_nnx(text):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs))
    return shape_of(jmpx.flax.with_policies(model, text))


def run_equinox(text):
    view = jmpx.equinox.with_policies(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), text)
    return shape_of(jax.vmap(view))


ADAPTERS = {"haiku": run_haiku, "linen": run_linen, "nnx": run_nnx, "equinox": run_equinox}
LAYERS = {"haiku": "Linear", "linen": "Dense", "nnx": "Linear", "equinox": "Linear"}
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS)


def warnings_of(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in caught]
