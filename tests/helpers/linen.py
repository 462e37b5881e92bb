"""Linen modules that note the dtypes that they meet."""

import flax.linen as nn
import jax

from helpers import LOG, normal


def init(rng, model, *args):
    """Variables with random parameters, biases and scales too, that bfloat16 would round."""
    variables = model.init(jax.random.key(0), *args)
    params = jax.tree.map(lambda leaf: normal(rng, *leaf.shape), variables["params"])
    LOG.clear()
    return {**variables, "params": params}


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


class Watched(nn.Module):
    """A matrix product that notes the dtypes that it meets."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (x.shape[-1], x.shape[-1]))
        LOG.append((self.name, x.dtype.name, w.dtype.name))
        return x @ w
