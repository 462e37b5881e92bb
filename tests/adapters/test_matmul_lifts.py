"""`matmul=` through the transforms of the frameworks, and where parameters are created."""

from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.products import products_of
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

POLICY = "c=bf16,o=f32; *router: c=f32,m=highest; *head: full"
OUTSIDE, INSIDE = ("f32", "DEFAULT"), ("f32", "HIGHEST")
KEY = jax.random.key(0)
X = jnp.ones((2, 3))


def made(*args):
    """An initializer with a product in it."""
    shape, dtype = args[-2:]
    return jnp.eye(3, dtype=dtype) @ jnp.ones(shape, dtype)


def twice(f, x):
    return lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0]


# Haiku


class HaikuLinear(hk.Module):
    def __call__(self, x):
        return x @ hk.get_parameter("w", (3, 3), init=made)


HAIKU = {
    "call": lambda router, x: router(x),
    "remat": lambda router, x: hk.remat(router)(x),
    "vmap": lambda router, x: hk.vmap(router, split_rng=False)(x[None])[0],
    "scan": lambda router, x: hk.scan(lambda c, _: (router(c), None), x, None, length=2)[0],
    "cond": lambda router, x: hk.cond(x[0, 0] > 0, router, lambda x: x, x),
    "fori_loop": lambda router, x: hk.fori_loop(0, 2, lambda _, x: router(x), x),
    "map": lambda router, x: hk.map(router, x[None])[0],
}


def run_haiku(lift):
    def net(x):
        router, head = HaikuLinear("router"), HaikuLinear("head")
        router(x)  # creates its parameter
        return head(HAIKU[lift](router, x))

    network = hk.transform(net)

    def init(key):
        with jmpx.haiku.policies(POLICY):
            return network.init(key, X)

    def loss(params, x):
        with jmpx.haiku.policies(POLICY):
            return (network.apply(params, None, x) ** 2).sum()

    return init, loss, {name: {"w": jnp.ones((3, 3))} for name in ("router", "head")}


# Linen


class LinenLinear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", made, (3, 3), jnp.float32)


class LinenSetup(nn.Module):
    def setup(self):
        self.w = self.param("w", made, (3, 3), jnp.float32)

    def __call__(self, x):
        return x @ self.w


class LinenStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x @ self.param("w", made, (3, 3), jnp.float32), None


def scanned(name):
    scan = nn.scan(LinenStep, variable_broadcast="params", split_rngs={"params": False}, length=2)
    return lambda x: scan(name=name)(x, None)[0]


def vmapped(name):
    vmap = nn.vmap(LinenLinear, {"params": None}, split_rngs={"params": False})
    return lambda x: vmap(name=name)(x[None])[0]


LINEN = {
    "call": lambda name: LinenLinear(name=name),
    "setup": lambda name: LinenSetup(name=name),
    "remat": lambda name: nn.remat(LinenLinear)(name=name),
    "jit": lambda name: nn.jit(LinenLinear)(name=name),
    "scan": scanned,
    "vmap": vmapped,
}


class LinenNet(nn.Module):
    lift: str

    @nn.compact
    def __call__(self, x):
        return LinenLinear(name="head")(LINEN[self.lift]("router")(x))


def run_linen(lift):
    model = LinenNet(lift)

    def init(key):
        with jmpx.flax.policies(POLICY):
            return model.init(key, X)

    def loss(params, x):
        with jmpx.flax.policies(POLICY):
            y: Any = model.apply({"params": params}, x)
            return (y**2).sum()

    return init, loss, {name: {"w": jnp.ones((3, 3))} for name in ("router", "head")}


# NNX


class NNXLinear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((3, 3)))

    def __call__(self, x):
        return x @ self.w[...]


NNX = {
    "call": lambda router, x: router(x),
    "remat": lambda router, x: nnx.remat(lambda router, x: router(x))(router, x),
    "jit": lambda router, x: nnx.jit(lambda router, x: router(x))(router, x),
    "vmap": lambda router, x: nnx.vmap(lambda r, x: r(x), in_axes=(None, 0))(router, x[None])[0],
    "scan": lambda router, x: nnx.scan(
        lambda x, r: r(x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2
    )(x, router),
    "lax.scan": twice,
}


class NNXNet(nnx.Module):
    def __init__(self, lift):
        self.lift, self.router, self.head = lift, NNXLinear(), NNXLinear()

    def __call__(self, x):
        return self.head(NNX[self.lift](self.router, x))


def run_nnx(lift):
    graph, params = nnx.split(NNXNet(lift))

    def loss(params, x):
        return (jmpx.flax.with_policies(nnx.merge(graph, params), POLICY)(x) ** 2).sum()

    return None, loss, params


# Equinox


class EquinoxLinear(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x @ self.w


def loop(kind):
    def run(router, x):
        step = lambda c: (router(c[0]), c[1] + 1)  # noqa: E731
        return eqxi.while_loop(lambda c: c[1] < 2, step, (x, 0), kind=kind, max_steps=2)[0]

    return run


EQUINOX = {
    "call": lambda router, x: router(x),
    "checkpoint": lambda router, x: eqx.filter_checkpoint(router)(x),
    "jit": lambda router, x: eqx.filter_jit(router)(x),
    "jit of a method": lambda router, x: eqx.filter_jit(router.__call__)(x),
    "vmap": lambda router, x: eqx.filter_vmap(router)(x[None])[0],
    "closure": lambda router, x: eqx.filter_closure_convert(router, x)(x),
    "lax.scan": twice,
    "bounded loop": loop("bounded"),
    "checkpointed loop": loop("checkpointed"),
}


class EquinoxNet(eqx.Module):
    router: EquinoxLinear
    head: EquinoxLinear
    lift: str = eqx.field(static=True)

    def __call__(self, x):
        return self.head(EQUINOX[self.lift](self.router, x))


def run_equinox(lift):
    def loss(net, x):
        return (jmpx.equinox.with_policies(net, POLICY)(x) ** 2).sum()

    router, head = (EquinoxLinear(jnp.ones((3, 3))) for _ in range(2))
    return None, loss, EquinoxNet(router, head, lift)


RUNS = {"haiku": run_haiku, "linen": run_linen, "nnx": run_nnx, "equinox": run_equinox}
LIFTS = {"haiku": HAIKU, "linen": LINEN, "nnx": NNX, "equinox": EQUINOX}
CASES = [(framework, lift) for framework, lifts in LIFTS.items() for lift in lifts]


def ways(f, *args):
    return [(*product.dtypes, product.how) for product in products_of(f, *args)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("framework", "lift"), CASES)
def test_a_region_holds_through_the_transforms_of_a_framework(framework, lift):
    _, loss, params = RUNS[framework](lift)
    gradient = loss if lift == "fori_loop" else jax.value_and_grad(loss, (0, 1))
    found = ways(gradient, params, X)
    each = 1 if lift == "fori_loop" else 3  # JAX has no gradient of it
    assert found.count(OUTSIDE) == each
    assert found.count(INSIDE) >= each and set(found) == {OUTSIDE, INSIDE}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("framework", "lift"), [c for c in CASES if c[0] in ("haiku", "linen")])
def test_parameters_are_created_in_the_region(framework, lift):
    init, _, _ = RUNS[framework](lift)
    found = ways(init, KEY)
    assert set(found) == {OUTSIDE, INSIDE}
    assert found.count(OUTSIDE) == 1  # made for the head; the result of its call is not read
