"""A network of four frameworks in 16 bits, in which a test plants leaks.

For each leak, a function of activations and a parameter, it has a layer, a module that calls the
leak, and another layer; a shortcut goes around the three. The parameters of layers are cast by
hand, those of the planted modules stay in float32. Modules are named after their leaks.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
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

WIDTH = 8
X = jax.ShapeDtypeStruct((2, 3, WIDTH), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def loss_of(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def cast(tree, dtype, leaks):
    """The shapes of parameters in 16 bits, but for those of the planted modules."""
    names = [leak.__name__ for leak in leaks]

    def one(path, leaf):
        if any(name in jax.tree_util.keystr(path) for name in names):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


class HaikuLeak(hk.Module):
    def __init__(self, leak):
        super().__init__(name=leak.__name__)
        self.leak = leak

    def __call__(self, x):
        return self.leak(x, hk.get_parameter("w", W.shape, init=jnp.ones))


class HaikuNet(hk.Module):
    def __init__(self, leaks):
        super().__init__(name="net")
        self.leaks = leaks

    def __call__(self, x):
        for leak in self.leaks:
            y = HaikuLeak(leak)(hk.Linear(WIDTH, name="before")(x))
            x = x + hk.Linear(WIDTH, name="after")(y).astype(x.dtype)
        return x


def haiku(leaks, dtype):
    network = hk.without_apply_rng(hk.transform(lambda x: HaikuNet(leaks)(x)))
    params = cast(jax.eval_shape(network.init, jax.random.key(0), X), dtype, leaks)

    def loss(params, x, policy_map=None):
        context = jmpx.haiku.policies(policy_map) if policy_map else contextlib.nullcontext()
        with context:
            return loss_of(network.apply(params, x))

    return loss, params


class LinenLeak(nn.Module):
    leak: Any

    @nn.compact
    def __call__(self, x):
        return self.leak(x, self.param("w", lambda key: jnp.ones(W.shape)))


class LinenNet(nn.Module):
    leaks: tuple

    @nn.compact
    def __call__(self, x):
        for leak in self.leaks:
            y = LinenLeak(leak, name=leak.__name__)(nn.Dense(WIDTH)(x))
            x = x + nn.Dense(WIDTH)(y).astype(x.dtype)
        return x


def linen(leaks, dtype):
    network = LinenNet(tuple(leaks))
    params = cast(jax.eval_shape(network.init, jax.random.key(0), X), dtype, leaks)

    def loss(params, x, policy_map=None):
        context = jmpx.flax.policies(policy_map) if policy_map else contextlib.nullcontext()
        with context:
            return loss_of(network.apply(params, x))

    return loss, params


class NNXLeak(nnx.Module):
    def __init__(self, leak):
        self.leak, self.w = leak, nnx.Param(jnp.ones(W.shape))

    def __call__(self, x):
        return self.leak(x, self.w[...])


class NNXNet(nnx.Module):
    def __init__(self, leaks, dtype):
        linear = functools.partial(nnx.Linear, WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=dtype)
        self.names = tuple(leak.__name__ for leak in leaks)
        for leak in leaks:
            setattr(self, leak.__name__, NNXLeak(leak))
            setattr(self, f"before_{leak.__name__}", linear())
            setattr(self, f"after_{leak.__name__}", linear())

    def __call__(self, x):
        for name in self.names:
            y = getattr(self, name)(getattr(self, f"before_{name}")(x))
            x = x + getattr(self, f"after_{name}")(y).astype(x.dtype)
        return x


def call(with_policies, model, x, policy_map=None):
    return loss_of((with_policies(model, policy_map) if policy_map else model)(x))


def of_nnx(leaks, dtype):
    return functools.partial(call, jmpx.flax.with_policies), NNXNet(leaks, dtype)


class EquinoxLeak(eqx.Module):
    leak: Any = eqx.field(static=True)
    w: jax.Array

    def __call__(self, x):
        return self.leak(x, self.w)


class EquinoxLinear(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


class EquinoxNet(eqx.Module):
    planted: dict
    before: list
    after: list

    def __call__(self, x):
        for planted, before, after in zip(
            self.planted.values(), self.before, self.after, strict=True
        ):
            x = x + after(planted(before(x))).astype(x.dtype)
        return x


def equinox(leaks, dtype):
    linears = [EquinoxLinear(jnp.ones(W.shape, dtype)) for _ in leaks]
    planted = {leak.__name__: EquinoxLeak(leak, jnp.ones(W.shape)) for leak in leaks}
    net = EquinoxNet(planted, linears, linears)
    return functools.partial(call, jmpx.equinox.with_policies), net


# By framework: makes a loss of (parameters, inputs, policy map), and its parameters.
PLANTED: dict[str, Callable[..., Any]] = {
    "haiku": haiku,
    "linen": linen,
    "nnx": of_nnx,
    "equinox": equinox,
}
# The name of the class of its linear layers.
LINEAR = {"haiku": "Linear", "linen": "Dense", "nnx": "Linear", "equinox": "EquinoxLinear"}


def findings(fn, *args):
    return jmpx.inspect.audit(fn)(*args).findings


def shape(like, dtype):
    return jax.ShapeDtypeStruct(like.shape, dtype)


def line_of(leak):
    lines, start = inspect.getsourcelines(leak)
    (line,) = [start + i for i, text in enumerate(lines) if text.rstrip().endswith("# <-")]
    return line


def seen(file, found):
    assert all(os.path.samefile(finding.place.file, file) for finding in found), found
    return sorted((finding.place.line, finding.name) for finding in found)
