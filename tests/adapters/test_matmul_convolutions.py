"""`matmul=` and convolutions: JAX ignores dot algorithms for them, which jmpx warns of."""

import contextlib
import threading
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import warns_once
from helpers.products import products_of

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

X = jnp.ones((2, 8, 3))
KEY = jax.random.key(0)
IGNORED = "BF16_BF16_F32_X3 does not hold for convolutions"


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
        ("c=bf16,m=BF16_BF16_F32_X3", "bf16", "DEFAULT"),  # a region in 16 bits: no warning
        ("p=f32,m=BF16_BF16_F32_X3; *: m=highest", "f32", "HIGHEST"),
    ],
)
def test_convolutions_use_the_words(run, policy_map, dtype, how):
    found = run(policy_map)
    assert len(found) == 3  # forward, and backward by the kernel and the input
    assert {product.operation for product in found} == {"convolution"}
    assert {(*product.dtypes, product.how) for product in found} == {(dtype, how)}


@every_convolution
def test_a_dot_algorithm_is_warned_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run("p=f32,m=BF16_BF16_F32_X3")
    assert {product.how for product in found} == {"DEFAULT"}  # which is why
    (warning,) = caught
    assert IGNORED in str(warning.message) and "matmul=highest" in str(warning.message)
    assert warning.filename == __file__


def test_a_float32_region_of_a_model_in_16_bits_is_warned_of_once():
    run = haiku_run(lambda: hk.Sequential([hk.Conv1D(4, 3, name=f"conv_{i}") for i in range(3)]))
    with warns_once(__file__, IGNORED + ".*'conv_1'"):
        run("c=bf16,m=BF16_BF16_F32_X3; *conv_1: full; *conv_2: full")


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


# Class policies outside of a policy map: Haiku casts, and jmpx sets the algorithm.


class Net(hk.Module):
    def __call__(self, x):
        return hk.Conv1D(4, 3, name="second")(hk.Conv1D(3, 3, name="first")(x))


@pytest.mark.parametrize("cls", [Net, hk.Conv1D])
@pytest.mark.parametrize("is_pushed", [True, False])
def test_a_class_policy_of_haiku_warns_once(cls, is_pushed):
    network = hk.transform(lambda x: Net()(x))
    params = network.init(KEY, X)
    policy = "p=f32,m=BF16_BF16_F32_X3"
    with contextlib.ExitStack() as stack:
        if is_pushed:
            stack.enter_context(jmpx.push_policy(cls, policy))
        else:
            jmpx.set_policy(cls, policy)
            stack.callback(jmpx.clear_policy, cls)
        with warns_once(__file__, IGNORED + ".*'(net/~/)?.*first'"):
            network.apply(params, None, X)
        network.apply(params, None, X)  # warned of already
        network.apply(params, None, X)


# Where Haiku's interceptors are: jmpx's stays as long as its thread.


def set_highest():
    jmpx.set_policy(hk.Linear, "p=f32,m=highest")


def ways_of_linear(before_call=lambda: None):
    def net(x):
        linear = hk.Linear(4)
        before_call()
        return linear(x)

    network = hk.transform(net)
    params = {"linear": {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}}
    return [p.how for p in products_of(lambda x: network.apply(params, None, x), X)]


def test_a_policy_set_inside_a_context_of_jmpx_outlives_it():
    def body():
        with jmpx.push_policy(Net, "full"), jmpx.haiku.policies("full"):
            set_highest()
            assert ways_of_linear() == ["HIGHEST"]
        assert ways_of_linear() == ["HIGHEST"]
        with jmpx.haiku.policies("full; Linear: m=high"):  # a rule goes before it, at once
            assert ways_of_linear() == ["HIGH"]
        with jmpx.haiku.policies("full; Linear: full"):
            assert ways_of_linear(before_call=set_highest) == ["DEFAULT"]
        with hk.intercept_methods(lambda f, args, kwargs, context: f(*args, **kwargs)):
            assert ways_of_linear() == ["HIGHEST"]
            jmpx.clear_policy(hk.Linear)
            assert ways_of_linear() == ["DEFAULT"]
        jmpx.set_policy(hk.Linear, "p=f32,m=high")
        assert ways_of_linear() == ["HIGH"]
        jmpx.clear_policy(hk.Linear)
        done.append(True)

    done = []
    thread = threading.Thread(target=body)  # whose stack of interceptors is empty
    thread.start()
    thread.join()
    assert done and ways_of_linear() == ["DEFAULT"]
