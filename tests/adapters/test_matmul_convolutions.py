"""`matmul=` and convolutions: they follow the words, and JAX ignores dot algorithms for them."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.products import products_of

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

X = jnp.ones((2, 8, 3))
KEY = jax.random.key(0)


def haiku_run(make):
    network = hk.transform(lambda x: make()(x))

    def run(policy_map):
        def loss(params, x):
            with jmpx.haiku.policies(policy_map):
                return (network.apply(params, None, x).astype(jnp.float32) ** 2).sum()

        return products_of(jax.grad(loss, (0, 1)), network.init(KEY, X), X)

    return run


def linen_run(make):
    model = make()

    def run(policy_map):
        def loss(params, x):
            with jmpx.flax.policies(policy_map):
                return (model.apply(params, x).astype(jnp.float32) ** 2).sum()

        return products_of(jax.grad(loss, (0, 1)), model.init(KEY, X), X)

    return run


def nnx_run(make):
    graph, params = nnx.split(make(nnx.Rngs(0)))

    def run(policy_map):
        def loss(params, x):
            view = jmpx.flax.with_policies(nnx.merge(graph, params), policy_map)
            return (view(x).astype(jnp.float32) ** 2).sum()

        return products_of(jax.grad(loss, (0, 1)), params, X)

    return run


def equinox_run(make):
    params, static = eqx.partition(make(KEY), eqx.is_array)

    def run(policy_map):
        def loss(params, x):
            view = jmpx.equinox.with_policies(eqx.combine(params, static), policy_map)
            return (jax.vmap(view)(x).astype(jnp.float32) ** 2).sum()

        return products_of(jax.grad(loss, (0, 1)), params, jnp.swapaxes(X, 1, 2))

    return run


CONVOLUTIONS = {
    "haiku": haiku_run(lambda: hk.Conv1D(4, 3)),
    "haiku transposed": haiku_run(lambda: hk.Conv1DTranspose(4, 3)),
    "haiku depthwise": haiku_run(lambda: hk.DepthwiseConv1D(2, 3)),
    "linen": linen_run(lambda: nn.Conv(4, (3,))),
    "linen transposed": linen_run(lambda: nn.ConvTranspose(4, (3,))),
    "nnx": nnx_run(lambda rngs: nnx.Conv(3, 4, (3,), rngs=rngs)),
    "nnx transposed": nnx_run(lambda rngs: nnx.ConvTranspose(3, 4, (3,), rngs=rngs)),
    "equinox": equinox_run(lambda key: eqx.nn.Conv1d(3, 4, 3, key=key)),
    "equinox transposed": equinox_run(lambda key: eqx.nn.ConvTranspose1d(3, 4, 3, key=key)),
    "equinox in a container": equinox_run(
        lambda key: eqx.nn.Sequential([eqx.nn.Conv1d(3, 4, 3, key=key)])
    ),
}
every_convolution = pytest.mark.parametrize("run", CONVOLUTIONS.values(), ids=CONVOLUTIONS)


@pytest.mark.sampled(7)
@every_convolution
@pytest.mark.parametrize(
    ("policy_map", "dtype", "how"),
    [
        ("full", "f32", "DEFAULT"),
        ("p=f32,m=highest", "f32", "HIGHEST"),
        ("c=bf16,m=high", "bf16", "HIGH"),
        ("c=bf16,m=BF16_BF16_F32_X3", "bf16", "DEFAULT"),
        ("p=f32,m=BF16_BF16_F32_X3", "f32", "DEFAULT"),
        ("p=f32,m=BF16_BF16_F32_X3; *: m=highest", "f32", "HIGHEST"),
    ],
)
def test_convolutions_use_the_words(run, policy_map, dtype, how):
    found = run(policy_map)
    assert len(found) == 3  # forward, and backward by the kernel and the input
    assert {product.operation for product in found} == {"convolution"}
    assert {(*product.dtypes, product.how) for product in found} == {(dtype, how)}


@pytest.mark.parametrize(
    "run",
    [
        haiku_run(lambda: lambda x: hk.Conv1D(4, 3)(x, precision="high")),
        linen_run(lambda: nn.Conv(4, (3,), precision="high")),
        nnx_run(lambda rngs: nnx.Conv(3, 4, (3,), precision="high", rngs=rngs)),
    ],
    ids=["haiku", "linen", "nnx"],
)
def test_a_convolution_with_a_precision_of_its_own_keeps_it(run):
    assert {product.how for product in run("p=f32,m=BF16_BF16_F32_X3")} == {"HIGH"}
