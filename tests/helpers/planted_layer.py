"""One model in four frameworks, with a layer in its middle that a test gives it."""

import contextlib
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import jmpx.equinox
import jmpx.flax
import jmpx.haiku

WIDTH = 4


class HaikuPlant(hk.Module):
    def __init__(self, layer):
        super().__init__(name="plant")
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class LinenPlant(nn.Module):
    layer: Any

    @nn.compact
    def __call__(self, x):
        return self.layer(x)


class LinenNet(nn.Module):
    layer: Any

    @nn.compact
    def __call__(self, x):
        x = LinenPlant(self.layer, name="plant")(nn.Dense(WIDTH, name="first")(x))
        return nn.Dense(1, name="head")(x)


class NNXPlant(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class NNXNet(nnx.Module):
    def __init__(self, layer):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.plant, self.head = NNXPlant(layer), nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.plant(self.first(x)))


class EquinoxPlant(eqx.Module):
    layer: Any = eqx.field(static=True)

    def __call__(self, x):
        return self.layer(x)


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    plant: EquinoxPlant
    head: eqx.nn.Linear

    def __call__(self, x):
        x = self.plant(jax.vmap(self.first)(x))
        return jax.vmap(self.head)(x)


def _haiku(layer, x, policy):
    def net(x):
        return hk.Linear(1, name="head")(HaikuPlant(layer)(hk.Linear(WIDTH, name="first")(x)))

    transformed = hk.without_apply_rng(hk.transform(net))
    params = jax.eval_shape(transformed.init, jax.random.key(0), x)

    def loss(params, x):
        with jmpx.haiku.policies(policy) if policy else contextlib.nullcontext():
            return jnp.mean(transformed.apply(params, x))

    return loss, params


def _linen(layer, x, policy):
    net = LinenNet(layer)
    params = jax.eval_shape(net.init, jax.random.key(0), x)

    def loss(params, x):
        with jmpx.flax.policies(policy) if policy else contextlib.nullcontext():
            return jnp.mean(jnp.asarray(net.apply(params, x)))

    return loss, params


def _nnx(layer, x, policy):
    def loss(net, x):
        return jnp.mean((jmpx.flax.with_policies(net, policy) if policy else net)(x))

    return loss, NNXNet(layer)


def _equinox(layer, x, policy):
    first, head = (eqx.nn.Linear(WIDTH, n, key=jax.random.key(n)) for n in (WIDTH, 1))

    def loss(net, x):
        return jnp.mean((jmpx.equinox.with_policies(net, policy) if policy else net)(x))

    return loss, EquinoxNet(first, EquinoxPlant(layer), head)


_MAKERS = {"haiku": _haiku, "linen": _linen, "nnx": _nnx, "equinox": _equinox}
FRAMEWORKS = tuple(_MAKERS)


def planted(framework, layer, policy, rows=2):
    """A loss of a model with a layer, and its arguments.

    Args:
        framework: the framework of the model.
        layer: a function of an array [rows, WIDTH], which returns another one.
        policy: the policy map under which the model runs; None for none.
        rows: how many rows the array has.
    """
    x = jnp.ones((rows, WIDTH))
    loss, model = _MAKERS[framework](layer, x, policy)
    return loss, (model, x)


def drawn_model(model, rng):
    """A model, or its parameters, with normal numbers in place of its arrays or their shapes."""
    is_array = lambda leaf: hasattr(leaf, "shape")  # noqa: E731
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return jax.tree.map(lambda leaf: draw(leaf) if is_array(leaf) else leaf, model)
