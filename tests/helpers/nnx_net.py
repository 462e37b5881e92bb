"""A network of NNX with statistics and random streams, and its state."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from helpers import assert_same_bits, normal


class Net(nnx.Module):
    """Has BatchNorm and Dropout, counts its calls, and keeps an activation as an intermediate."""

    def __init__(self, rngs, momentum=0.9):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=momentum, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)
        self.calls = 0

    def encode(self, x):
        self.calls += 1
        h = self.norm(self.inner(x))
        self.between = nnx.Intermediate(h)  # structure that is new
        return self.dropout(h)

    def __call__(self, x):
        return self.head(self.encode(x))


def make(rng, **options):
    """A model with random parameters and statistics that 16 bits would round."""
    model = Net(nnx.Rngs(0), **options)
    state = nnx.state(model, (nnx.Param, nnx.BatchStat))
    values = jax.tree.map(lambda a: jnp.abs(normal(rng, *a.shape)) + 0.5, state)
    nnx.update(model, values)
    return model


def state_of(model):
    """All variables by their paths; random keys as numbers."""
    flat = {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(nnx.state(model))}
    is_key = lambda v: jnp.issubdtype(v.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {path: jax.random.key_data(v) if is_key(v) else v for path, v in flat.items()}


def assert_same_state(a, b, exactly=True, atol=1e-6):
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys()
    if exactly:
        assert_same_bits(a, b)
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_allclose(a[path], b[path], rtol=1e-5, atol=atol, err_msg=path)


def squares(model, x):
    return (model(x) ** 2).mean()


class Average(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.mean = nnx.Variable(jnp.zeros(4))

    def __call__(self, x):
        h = self.linear(x)
        self.mean[...] = 0.999 * self.mean[...] + 0.001 * h[0]
        return h
