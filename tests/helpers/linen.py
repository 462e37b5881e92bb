"""Linen modules that note the dtypes that they meet."""

import flax.linen as nn
import jax
import numpy as np

import jmpx.flax
from helpers import LOG, normal


def init(rng, model, *args):
    """Variables with random parameters that 16 bits would round; in other collections are ones."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *args))
    LOG.clear()
    variables = jax.device_put(jax.tree.map(lambda a: np.ones(a.shape, a.dtype), shapes))
    params = jax.tree.map(lambda leaf: normal(rng, *leaf.shape), shapes["params"])
    return {**variables, "params": params}


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def under(policy_map, model, *args, **kwargs):
    """Returns a function of variables that applies a model in a context."""

    def run(variables):
        with jmpx.flax.policies(policy_map):
            return model.apply(variables, *args, **kwargs)

    return run


class Watched(nn.Module):
    """A matrix product that notes the dtypes that it meets."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (x.shape[-1], x.shape[-1]))
        LOG.append((self.name, x.dtype.name, w.dtype.name))
        return x @ w
