"""A network of four frameworks in 16 bits, with a layer in which a test plants what it likes.

The network has a layer, the planted one and two more layers. The layers' parameters are cast by
hand; those of the planted one stay in float32.
"""

import contextlib

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import jmpx.equinox
import jmpx.flax
import jmpx.haiku

WIDTH = 8
X = jnp.ones((2, 3, WIDTH))
INIT = jnp.full((WIDTH, WIDTH), 0.1, jnp.float32)


def loss_of(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def cast(tree, dtype, is_planted):
    """The same parameters in 16 bits, but for those of the planted layer."""

    def one(path, leaf):
        planted = is_planted in jax.tree_util.keystr(path)
        return leaf if planted or not eqx.is_inexact_array(leaf) else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


class HaikuPlanted(hk.Module):
    def __init__(self, leak):
        super().__init__(name="planted")
        self.leak = leak

    def __call__(self, x):
        w = hk.get_parameter("w", INIT.shape, init=hk.initializers.Constant(0.1))
        return self.leak(x, w)


class HaikuNet(hk.Module):
    def __init__(self, leak):
        super().__init__(name="net")
        self.leak = leak

    def __call__(self, x):
        x = HaikuPlanted(self.leak)(hk.Linear(WIDTH)(x))
        return hk.Linear(WIDTH)(jnp.tanh(hk.Linear(WIDTH)(x)))


def haiku(leak, dtype):
    network = hk.without_apply_rng(hk.transform(lambda x: HaikuNet(leak)(x)))
    params = cast(network.init(jax.random.key(0), X), dtype, "planted")

    def loss(params, x, rules=None):
        with jmpx.haiku.policies(rules) if rules else contextlib.nullcontext():
            return loss_of(network.apply(params, x))

    return loss, params


class LinenPlanted(nn.Module):
    leak: object

    @nn.compact
    def __call__(self, x):
        return self.leak(x, self.param("w", lambda key: INIT))  # type: ignore


class LinenNet(nn.Module):
    leak: object

    @nn.compact
    def __call__(self, x):
        x = LinenPlanted(self.leak, name="planted")(nn.Dense(WIDTH)(x))
        return nn.Dense(WIDTH)(jnp.tanh(nn.Dense(WIDTH)(x)))


def linen(leak, dtype):
    network = LinenNet(leak)
    params = cast(network.init(jax.random.key(0), X), dtype, "planted")

    def loss(params, x, rules=None):
        with jmpx.flax.policies(rules) if rules else contextlib.nullcontext():
            return loss_of(network.apply(params, x))

    return loss, params


class NNXPlanted(nnx.Module):
    def __init__(self, leak):
        self.leak, self.w = leak, nnx.Param(INIT)

    def __call__(self, x):
        return self.leak(x, self.w[...])


class NNXNet(nnx.Module):
    def __init__(self, leak, dtype, rngs):
        linear = lambda: nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=dtype)  # noqa: E731
        self.first, self.planted = linear(), NNXPlanted(leak)
        self.second, self.third = linear(), linear()

    def __call__(self, x):
        return self.third(jnp.tanh(self.second(self.planted(self.first(x)))))


def call_nnx(model, x, rules=None):
    return loss_of((jmpx.flax.with_policies(model, rules) if rules else model)(x))


def of_nnx(leak, dtype):
    return call_nnx, NNXNet(leak, dtype, nnx.Rngs(0))


class EquinoxPlanted(eqx.Module):
    leak: object = eqx.field(static=True)
    w: jax.Array

    def __call__(self, x):
        return self.leak(x, self.w)  # type: ignore


class EquinoxLinear(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


class EquinoxNet(eqx.Module):
    first: EquinoxLinear
    planted: EquinoxPlanted
    second: EquinoxLinear
    third: EquinoxLinear

    def __call__(self, x):
        return self.third(jnp.tanh(self.second(self.planted(self.first(x)))))


def call_equinox(model, x, rules=None):
    return loss_of((jmpx.equinox.with_policies(model, rules) if rules else model)(x))


def equinox(leak, dtype):
    linear = EquinoxLinear(INIT)
    model = EquinoxNet(linear, EquinoxPlanted(leak, INIT), linear, linear)
    return call_equinox, cast(model, dtype, "planted")


# By framework: makes a loss of (parameters, inputs, rules of a policy map), and the parameters.
PLANTED = {"haiku": haiku, "linen": linen, "nnx": of_nnx, "equinox": equinox}
