"""A float32 model with a part in float64, in each framework, where JAX has 64-bit types."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import enable_x64

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

MAP = "params=f32,c=f32; Solver: f64"
LARGE = 2.0**30  # float32 loses a number of about 1 beside it, float64 does not


def solve(w, x):
    """A sum in which all digits cancel that float32 has."""
    return (x @ w + LARGE) - LARGE


def named(cls):
    """Names the class of each framework as the rule does."""
    cls.__name__ = cls.__qualname__ = "Solver"
    return cls


@named
class HaikuSolver(hk.Module):
    def __call__(self, x):
        return solve(hk.get_parameter("w", (2, 2), init=hk.initializers.RandomNormal()), x)


@named
class LinenSolver(nn.Module):
    @nn.compact
    def __call__(self, x):
        return solve(self.param("w", nn.initializers.normal(1.0), (2, 2)), x)


@named
class EquinoxSolver(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return solve(self.w, x)


@named
class NNXSolver(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    def __call__(self, x):
        return solve(self.w[...], x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenSolver(name="s")(nn.Dense(2, use_bias=False, name="first")(x))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    s: EquinoxSolver

    def __call__(self, x):
        return self.s(self.first(x))


class NNXNet(nnx.Module):
    def __init__(self, w):
        self.first = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.s = NNXSolver(w)

    def __call__(self, x):
        return self.s(self.first(x))


def haiku(key, x):
    def forward(x):
        return HaikuSolver(name="s")(hk.Linear(2, with_bias=False)(x))

    network = hk.without_apply_rng(hk.transform(forward))
    with jmpx.haiku.policies(MAP):
        params = network.init(key, x)

    def apply(params, x):
        with jmpx.haiku.policies(MAP):
            return network.apply(params, x)

    return params, apply, (params["linear"]["w"], params["s"]["w"])


def linen(key, x):
    with jmpx.flax.policies(MAP):
        params = LinenNet().init(key, x)

    def apply(params, x):
        with jmpx.flax.policies(MAP):
            return LinenNet().apply(params, x)

    return params, apply, (params["params"]["first"]["kernel"], params["params"]["s"]["w"])


def equinox(key, x):
    first = eqx.nn.Linear(3, 2, use_bias=False, dtype=jnp.float32, key=key)
    net = EquinoxNet(first, EquinoxSolver(jax.random.normal(key, (2, 2), jnp.float32)))
    apply = lambda net, x: jax.vmap(jmpx.equinox.with_policies(net, MAP))(x)  # noqa: E731
    return net, apply, (first.weight.T, net.s.w)


def nnx_net(key, x):
    net = NNXNet(jax.random.normal(key, (2, 2), jnp.float32))
    apply = lambda net, x: jmpx.flax.with_policies(net, MAP)(x)  # noqa: E731
    return net, apply, (net.first.kernel[...], net.s.w[...])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", [haiku, linen, equinox, nnx_net])
def test_a_float64_island_in_a_float32_model(framework, rng):
    with enable_x64():
        x = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
        model, apply, weights = framework(jax.random.key(0), x)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(weights)} == {"float32"}
        first, second = (np.asarray(w, np.float64) for w in weights)
        exact = np.asarray(x, np.float64) @ first @ second

        def loss_fn(model, x):
            y = apply(model, x)
            assert y.dtype == jnp.float32  # what surrounds the island
            return jnp.sum(y), y

        grad_fn = jmpx.filter_value_and_grad(
            loss_fn, jmpx.NoOpLossScale(), has_aux=True, policy=jmpx.get_policy_map(MAP)
        )
        (_, y), _, _, grads = grad_fn(model, x)
        np.testing.assert_allclose(y, exact, atol=1e-5)
        ones = np.ones((4, 2))
        by_hand = (
            np.asarray(x, np.float64).T @ ones @ second.T,
            (np.asarray(x, np.float64) @ first).T @ ones,
        )
        found = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
        assert {leaf.dtype.name for leaf in found} == {"float32"}
        for expected in by_hand:
            assert any(
                np.allclose(each, expected, atol=1e-4)
                for leaf in found
                for each in (leaf, leaf.T)
                if each.shape == expected.shape
            )
        in_float32 = exact.astype(np.float32) + np.float32(LARGE) - np.float32(LARGE)
        assert not np.allclose(in_float32, exact, atol=0.1)  # it could fail
