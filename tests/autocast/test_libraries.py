"""Modules of Haiku, Flax and Equinox under autocast, and the scopes that they make."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import normal
from helpers.autocast import assert_near, assert_ran, check, check_sides
from helpers.jaxprs import FULL, LOW, dots

import jmpx


def test_equinox(pair):
    x, _ = pair
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))

    def gradient(wrap):
        def loss_fn(model, x):
            remat = eqx.filter_checkpoint(lambda x: jnp.tanh(eqx.filter_vmap(model)(x)))
            return wrap(remat)(x).sum()

        return eqx.filter_grad(loss_fn)

    both = eqx.filter_jit(lambda *args: [gradient(w)(*args) for w in (jmpx.autocast, lambda f: f)])  # pyright: ignore[reportCallIssue]
    assert_near(*both(model, x))
    vmapped = jax.vmap(jmpx.autocast(model))
    assert_ran(vmapped, x, dot_general="bfloat16")
    assert_near(vmapped(x), jax.vmap(model)(x))


def test_haiku(pair):
    x, w = pair
    network = hk.transform_with_state(lambda x: jnp.tanh(hk.Linear(4)(x)))
    args = {"linear": {"w": w, "b": w[0]}}, {}, None, x
    check(lambda params, x: network.apply(params, {}, None, x), args[0], x)
    assert_ran(lambda x: jmpx.autocast(network.apply)(*args), x, dot_general="bfloat16")


def test_linen(pair):
    x, w = pair
    module = nn.Dense(4)
    params = {"params": {"kernel": w, "bias": w[0]}}
    check(module.apply, params, x)
    check_sides(jax.grad, lambda params: jnp.tanh(module.apply(params, x)).sum(), params)  # pyright: ignore[reportArgumentType]


def test_nnx(pair):
    x, _ = pair
    ones = nnx.initializers.ones
    graphdef, state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0), kernel_init=ones))
    check(lambda state, x: nnx.merge(graphdef, state)(x), state, x)


def test_haiku_scopes(rng):
    x = normal(rng, 2, 3)
    network = hk.transform(lambda x: hk.nets.MLP([4, 2], name="head")(hk.Linear(3, name="in")(x)))
    params = network.init(jax.random.key(0), x)
    apply = functools.partial(jmpx.autocast, network.apply)
    assert dots(apply("c=bf16; */head/*: full"), params, None, x) == [LOW, FULL, FULL]
    assert dots(apply("c=bf16; */linear_1: full"), params, None, x) == [LOW, LOW, FULL]


def test_linen_scopes(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.Dense(3)(x))

    x = normal(rng, 2, 3)
    params = Net().init(jax.random.key(0), x)
    assert dots(jmpx.autocast(Net().apply, "c=bf16; */head: full"), params, x) == [LOW, FULL]
    assert dots(jmpx.autocast(Net().init), jax.random.key(0), x) == [LOW, LOW]


def test_equinox_scopes(rng):
    x = normal(rng, 3)
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(3, 3, key=jax.random.key(0)), eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(1))]
    )
    assert dots(jmpx.autocast(model), x) == [LOW] * 3
    assert dots(jmpx.autocast(model, "c=bf16; MLP: full"), x) == [LOW, FULL, FULL]
    assert dots(jmpx.autocast(model, "c=bf16; eqx.nn.Linear: full"), x) == [FULL] * 3


def test_a_function_that_creates_haiku_parameters(rng):
    x = normal(rng, 2, 3)
    f = jmpx.autocast(lambda x: hk.Linear(2)(x))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(hk.transform(f).init)(jax.random.key(0), x)
    inner = hk.transform(lambda x: jmpx.autocast(jnp.matmul)(x, hk.Linear(2)(x)))  # creates none
    assert inner.init(jax.random.key(0), normal(rng, 2, 2))["linear"]["w"].dtype == jnp.float32
