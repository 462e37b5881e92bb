"""Networks of NNX with state, and their state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jmpx.flax
from helpers import F32, LOG, assert_same_bits
from helpers.jaxprs import dots


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


class Small(nnx.Module):
    """As `Net`, but its statistics are an average, so that few operations are compiled."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(4))
        self.rngs = nnx.Rngs(0)
        self.head = nnx.Linear(4, 2, rngs=rngs)
        self.calls = 0

    def encode(self, x):
        self.calls += 1
        self.rngs.default()
        h = self.inner(x)
        self.between = nnx.Intermediate(h)
        self.mean[...] = 0.999 * self.mean[...] + 0.001 * h[0]
        return h

    def __call__(self, x):
        return self.head(self.encode(x))


class Model(nnx.Module):
    """Calls a function with itself."""

    encoder: Any
    decoder: Any
    layer: Any
    layers: Any
    head: Any

    def __init__(self, call, **parts):
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *args):
        return self.call(self, *args)


class Square(nnx.Module):
    """Reads a parameter of its own."""

    def __init__(self, cast=False):
        self.weight = nnx.Param(jnp.eye(4) + 0.3)
        self.cast = cast

    def __call__(self, x, other=None):
        LOG.append(x.dtype.name)
        y = jnp.tanh(x @ self.weight[...])
        y = y if other is None else y + other
        return y.astype(x.dtype) if self.cast else y


def make(rng, cls=Net, **options):
    """A model with random parameters and statistics that 16 bits would round."""
    graph, state = nnx.split(nnx.eval_shape(lambda: cls(nnx.Rngs(0), **options)))
    zeros = lambda a: (np if isinstance(a.dtype, np.dtype) else jnp).zeros(a.shape, a.dtype)  # noqa: E731
    return randomized(rng, nnx.merge(graph, jax.device_put(jax.tree.map(zeros, state))))


def randomized(rng, model):
    """The model with random parameters and statistics; it is changed itself."""
    state = nnx.state(model, (nnx.Param, nnx.BatchStat))
    draw = lambda a: np.asarray(abs(rng.normal(size=a.shape)) + 0.5, F32)  # noqa: E731
    nnx.update(model, jax.device_put(jax.tree.map(draw, state)))
    return model


def cast_copy(module, dtype):
    """A copy of a module with its parameters cast."""
    copy = nnx.clone(module)
    nnx.update(copy, jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(copy, nnx.Param)))
    return copy


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


def pure(run, model):
    """A function of the model's state, and that state, by which JAX can trace `run(model)`."""
    graph, state = nnx.split(model)
    return lambda state, *args: run(nnx.merge(graph, state), *args), state


def squares(model, x):
    return (model(x) ** 2).mean()


def linear(*sizes, **options):
    return nnx.Linear(*(sizes or (4, 4)), **options, rngs=nnx.Rngs(0))


def products_of(model, policy_map, *args):
    """The operands of the products of a view, in their order."""
    run, state = pure(lambda model: jmpx.flax.with_policies(model, policy_map)(*args), model)
    return dots(run, state)


def traced(model, policy_map, *args):
    """The operands of the products of a view and of its gradient."""

    def loss(model):
        y = jmpx.flax.with_policies(model, policy_map)(*args)
        return sum(leaf.astype(F32).sum() for leaf in jax.tree.leaves(y))

    run, state = pure(loss, model)
    return set(dots(jax.grad(run, allow_int=True), state))
