"""One transformer in four frameworks: the same string gives the same dtypes and gradients."""

import contextlib

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

SIZE = 6
DENSE = ("query", "key", "value", "out", "head")
SEEN = {}


# What the modules of all frameworks compute. Strict promotion refuses any mix of dtypes.


def dense(label, x, w):
    SEEN[label] = (x.dtype.name, w.dtype.name)
    return x @ w


def layer_norm(x, scale):
    SEEN["norm"] = (x.dtype.name, scale.dtype.name)
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale


def softmax(x):
    SEEN["softmax"] = (x.dtype.name,)
    return jax.nn.softmax(x, axis=-1)


def transform(net, x):
    SEEN["inputs"] = (x.dtype.name,)
    h = net.norm(x)
    q, k, v = net.query(h), net.key(h), net.value(h)
    x = x + net.out(net.softmax(q @ k.T / SIZE) @ v)
    SEEN["stream"] = (h.dtype.name, q.dtype.name, x.dtype.name)
    return net.head(x)


# Haiku


class HaikuModules:
    class Dense(hk.Module):
        def __call__(self, x):
            w = hk.get_parameter("w", (SIZE, SIZE), init=jnp.zeros)
            return dense(self.name, x, w)

    class LayerNorm(hk.Module):
        def __call__(self, x):
            return layer_norm(x, hk.get_parameter("scale", (SIZE,), init=jnp.ones))

    class Softmax(hk.Module):
        def __call__(self, x):
            return softmax(x)

    class Net(hk.Module):
        def __init__(self):
            super().__init__(name="net")
            self.norm = HaikuModules.LayerNorm("norm")
            self.softmax = HaikuModules.Softmax("softmax")
            for name in DENSE:
                setattr(self, name, HaikuModules.Dense(name))

        def __call__(self, x):
            return transform(self, x)


def run_haiku(policy_map, weights, x):
    network = hk.transform(lambda x: HaikuModules.Net()(x))
    params = {f"net/~/{name}": {"w": weights[name]} for name in DENSE}
    params["net/~/norm"] = {"scale": weights["norm"]}

    def loss(params):
        with jmpx.haiku.policies(policy_map) if policy_map else contextlib.nullcontext():
            return loss_of(network.apply(params, None, x))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    flat = {path.rpartition("/")[2]: next(iter(leaf.values())) for path, leaf in grads.items()}
    return value, flat


# Equinox


class EquinoxModules:
    class Dense(eqx.Module):
        w: jax.Array
        label: str

        def __call__(self, x):
            return dense(self.label, x, self.w)

    class LayerNorm(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return layer_norm(x, self.scale)

    class Softmax(eqx.Module):
        def __call__(self, x):
            return softmax(x)

    class Net(eqx.Module):
        norm: eqx.Module
        softmax: eqx.Module
        query: eqx.Module
        key: eqx.Module
        value: eqx.Module
        out: eqx.Module
        head: eqx.Module

        def __call__(self, x):
            return transform(self, x)


def run_equinox(policy_map, weights, x):
    modules = EquinoxModules
    denses = {name: modules.Dense(weights[name], name) for name in DENSE}
    model = modules.Net(modules.LayerNorm(weights["norm"]), modules.Softmax(), **denses)

    def loss(model):
        view = jmpx.equinox.with_policies(model, policy_map) if policy_map else model
        return loss_of(view(x))

    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    flat = {name: getattr(grads, name).w for name in DENSE}
    return value, {**flat, "norm": grads.norm.scale}


# Linen


class LinenModules:
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return dense(self.name, x, self.param("w", nn.initializers.zeros, (SIZE, SIZE)))

    class LayerNorm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layer_norm(x, self.param("scale", nn.initializers.ones, (SIZE,)))

    class Softmax(nn.Module):
        def __call__(self, x):
            return softmax(x)

    class Net(nn.Module):
        def setup(self):
            self.norm = LinenModules.LayerNorm()
            self.softmax = LinenModules.Softmax()
            for name in DENSE:
                setattr(self, name, LinenModules.Dense())

        def __call__(self, x):
            return transform(self, x)


def run_linen(policy_map, weights, x):
    params = {name: {"w": weights[name]} for name in DENSE}
    params["norm"] = {"scale": weights["norm"]}

    def loss(params):
        with jmpx.flax.policies(policy_map) if policy_map else contextlib.nullcontext():
            return loss_of(LinenModules.Net().apply({"params": params}, x))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, {name: next(iter(leaf.values())) for name, leaf in grads.items()}


# NNX


class NNXModules:
    class Dense(nnx.Module):
        def __init__(self, w, label):
            self.w = nnx.Param(w)
            self.label = label

        def __call__(self, x):
            return dense(self.label, x, self.w[...])

    class LayerNorm(nnx.Module):
        def __init__(self, scale):
            self.scale = nnx.Param(scale)

        def __call__(self, x):
            return layer_norm(x, self.scale[...])

    class Softmax(nnx.Module):
        def __call__(self, x):
            return softmax(x)

    class Net(nnx.Module):
        def __init__(self, weights):
            self.norm = NNXModules.LayerNorm(weights["norm"])
            self.softmax = NNXModules.Softmax()
            for name in DENSE:
                setattr(self, name, NNXModules.Dense(weights[name], name))

        def __call__(self, x):
            return transform(self, x)


def run_nnx(policy_map, weights, x):
    def loss(model):
        view = jmpx.flax.with_policies(model, policy_map) if policy_map else model
        return loss_of(view(x))

    value, grads = nnx.jit(nnx.value_and_grad(loss))(NNXModules.Net(weights))
    flat = {name: grads[name]["w"][...] for name in DENSE}
    return value, {**flat, "norm": grads["norm"]["scale"][...]}


def loss_of(y):
    SEEN["result"] = (y.dtype.name,)
    return (y.astype(jnp.float32) ** 2).mean()


RUNS = {"haiku": run_haiku, "equinox": run_equinox, "linen": run_linen, "nnx": run_nnx}
BF16, F16, F32 = "bfloat16", "float16", "float32"
ALL = ("norm", "query", "softmax", "out", "head")
# The policy map; what `ALL` compute in; what the stream between them is in; the result.
TABLE = [
    ("c=bf16,o=f32", [BF16] * 5, BF16, F32),
    (
        "c=bf16,o=f32; LayerNorm: full; Softmax: full; */head: full",
        [F32, BF16, F32, BF16, F32],
        BF16,
        F32,
    ),
    ("full; Dense: bf16", [F32, BF16, F32, BF16, BF16], F32, F32),
    ("c=bf16,o=f16; Dense: full; */query: bf16", [BF16, BF16, BF16, F32, F32], BF16, F16),
    ("c=f16,o=f32; *query: full; *norm*: c=f32", [F32, F32, F16, F16, F16], F16, F32),
]


@pytest.fixture
def problem(rng):
    weights = {name: rng.normal(size=(SIZE, SIZE)) / 3 for name in DENSE}
    weights["norm"] = rng.uniform(0.5, 2, size=SIZE)
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
    return weights, normal(rng, 4, SIZE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("policy_map", "computes", "stream", "result"), TABLE)
def test_the_same_dtypes_in_every_layer_and_agreeing_gradients(
    policy_map, computes, stream, result, problem
):
    values, gradients = {}, {}
    for framework, run in RUNS.items():
        SEEN.clear()
        values[framework], gradients[framework] = run(policy_map, *problem)
        for name, dtype in zip(ALL, computes, strict=True):
            assert set(SEEN[name]) == {dtype}, (framework, name)
        assert SEEN["inputs"] == (stream,) and set(SEEN["stream"]) == {stream}, framework
        assert SEEN["result"] == (result,), framework
    reference_value, reference = run_haiku(None, *problem)
    for framework in RUNS:
        # The same operations in the same dtypes, so the frameworks agree to the bit.
        assert values[framework] == values["haiku"], framework
        np.testing.assert_allclose(values[framework], reference_value, rtol=5e-2)
        for name, expected in reference.items():
            grad = gradients[framework][name]
            assert grad.dtype == jnp.float32, (framework, name)
            np.testing.assert_array_equal(grad, gradients["haiku"][name], err_msg=framework)
            scale = np.abs(expected).max()
            np.testing.assert_allclose(grad, expected, atol=0.1 * scale, err_msg=framework)


@pytest.mark.parametrize("framework", RUNS)
def test_without_a_policy_map_all_frameworks_compute_the_same(framework, problem):
    value, grads = RUNS[framework](None, *problem)
    expected_value, expected = run_haiku(None, *problem)
    np.testing.assert_array_equal(value, expected_value)
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, expected[name])
        assert set(SEEN["norm"]) == {"float32"}


@pytest.mark.parametrize("framework", RUNS)
def test_an_unused_rule_is_warned_of_in_every_framework(framework, problem):
    with pytest.warns(UserWarning, match="did you mean 'LayerNorm'"):
        RUNS[framework]("c=bf16; LayerNrm: full", *problem)


def test_policies_are_registered_by_class_in_every_framework(problem):
    frameworks = (HaikuModules, EquinoxModules, LinenModules, NNXModules)
    for modules, name in zip(frameworks, RUNS, strict=True):
        with jmpx.push_policy(modules.Dense, "p=f32,c=f16,o=bf16"):
            SEEN.clear()
            RUNS[name]("c=bf16,o=f32; */head: full", *problem)
            assert SEEN["query"] == (F16, F16) and SEEN["head"] == (F32, F32), name
            assert jmpx.policy_of(modules.Dense) == jmpx.get_policy("p=f32,c=f16,o=bf16")
