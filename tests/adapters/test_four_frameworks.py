"""One transformer in four frameworks: the same dtypes, gradients and programs as by hand."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, zoo
from helpers.by_hand import FRAMEWORKS, loss_by_hand, loss_of, loss_with

import jmpx

SIZE = 6
DENSE = ("query", "key", "value", "out", "head")
SHAPES = {name: (SIZE, SIZE) for name in DENSE} | {"norm": (SIZE,)}
SEEN = {}


# What the modules of all frameworks compute. Strict promotion refuses any mix of dtypes.


def layer(name, compute):
    def body(m, x):
        arrays = [x, m.param(name, *SHAPES[name])] if name in SHAPES else [x]
        SEEN[name] = {array.dtype.name for array in arrays}
        return compute(*arrays)

    return body


def layer_norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale


BODIES = {name: layer(name, jnp.matmul) for name in DENSE}
BODIES |= {"norm": layer("norm", layer_norm), "softmax": layer("softmax", jax.nn.softmax)}


def transformer(m, x):
    SEEN["inputs"] = {x.dtype.name}
    net = {name: m.inner(f"{name}_layer", body) for name, body in BODIES.items()}
    h = net["norm"](x)
    q, k, v = (net[name](h) for name in ("query", "key", "value"))
    x = x + net["out"](net["softmax"](q @ k.T / SIZE) @ v)
    SEEN["stream"] = {array.dtype.name for array in (h, q, x)}
    return net["head"](x)


@functools.cache
def network(framework):
    return zoo.build(framework, transformer, jnp.ones((4, SIZE)), rng=np.random.default_rng(0))


def loss_under(framework, policy_map):
    """Returns a loss of the weights by name, and of inputs, whose gradient has names, too."""
    net = network(framework)
    apply, model = net.split(net.under(policy_map and net.words(policy_map)))

    def loss(weights, x):
        def put(path, leaf):
            (name,) = [name for name in weights if f"{name}_layer" in jax.tree_util.keystr(path)]
            return weights[name].reshape(leaf.shape)

        y = apply(jax.tree_util.tree_map_with_path(put, model), x)
        SEEN["result"] = {y.dtype.name}
        return (y.astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss)


BF16, F16, F32 = "bfloat16", "float16", "float32"
ALL = ("norm", "query", "softmax", "out", "head")
# The policy map; what `ALL` compute in; what the stream between them is in; the result.
TABLE = [
    ("c=bf16,o=f32", [BF16] * 5, BF16, F32),
    (
        "c=bf16,o=f32; */norm_layer: full; */softmax*: full; */head_layer: full",
        [F32, BF16, F32, BF16, F32],
        BF16,
        F32,
    ),
    ("full; <Inner>: bf16", [BF16] * 5, F32, F32),
    ("c=bf16,o=f16; <Inner>: full; */query_layer: bf16", [F32, BF16, F32, F32, F32], BF16, F16),
    ("c=f16,o=f32; *query_layer: full; *norm*: c=f32", [F32, F32, F16, F16, F16], F16, F32),
]


@pytest.fixture
def problem(rng):
    weights = {name: normal(rng, SIZE, SIZE) / 3 for name in DENSE}
    weights["norm"] = jnp.asarray(rng.uniform(0.5, 2, size=SIZE), jnp.float32)
    return weights, normal(rng, 4, SIZE)


@pytest.mark.parametrize(("policy_map", "computes", "stream", "result"), TABLE)
def test_the_same_dtypes_in_every_layer(policy_map, computes, stream, result, problem):
    expected = dict(zip(ALL, computes, strict=True))
    expected |= {"inputs": stream, "stream": stream, "result": result}
    for framework in zoo.FRAMEWORKS:
        SEEN.clear()
        jax.eval_shape(loss_under(framework, policy_map), *problem)
        found = {name: SEEN[name] for name in expected}
        assert found == {name: {dtype} for name, dtype in expected.items()}, framework


@pytest.mark.parametrize("policy_map", [None, TABLE[1][0]])
def test_gradients_agree_to_the_last_bit(policy_map, problem):
    value, reference = jax.jit(loss_under("haiku", None))(*problem)
    expected = None
    for framework in zoo.FRAMEWORKS:
        found = jax.jit(loss_under(framework, policy_map))(*problem)
        expected = found if expected is None else expected
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_allclose(found[0], value, rtol=5e-2)
        for name, grad in found[1].items():
            assert grad.dtype == jnp.float32
            atol = 0.1 * np.abs(reference[name]).max()
            np.testing.assert_allclose(grad, reference[name], atol=atol)


# The program of a policy is that of the same model with its casts by hand: no cast too many.

WIDTH = 8
X = jnp.zeros((2, 4, WIDTH))


def operations(fn, *args):
    """Counts the operations of a function, with their types, lowered for a TPU."""
    traced = jax.jit(lambda *args: fn(*args)).trace(*args)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    lines = [re.sub(r"[%@][\w.#:]+", "", line).strip() for line in text.splitlines()]
    return collections.Counter(line for line in lines if "stablehlo" in line or "chlo" in line)


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_program_of_a_policy_is_that_of_casts_by_hand(framework):
    params, _, by_hand, with_policy = FRAMEWORKS[framework](WIDTH, X)
    found = operations(jax.value_and_grad(loss_with(with_policy)), params, X)
    assert found == operations(jax.value_and_grad(loss_by_hand(by_hand)), params, X)
    low = [n for line, n in found.items() if "dot_general" in line and "xf32" not in line]
    assert sum(low) == 23  # of six layers and the attention: all but one are three


def test_the_program_of_a_gradient_function_is_that_of_casts_by_hand():
    params, plain, _, _ = FRAMEWORKS["haiku"](WIDTH, X)

    def loss_fn(params, x):
        return loss_of(plain(params, x).astype(jnp.float32))

    def by_hand(params, x):
        return loss_fn(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x)))

    def step(params, x):
        grad_fn = jmpx.filter_value_and_grad(loss_fn, jmpx.NoOpLossScale(), policy="c=bf16")
        loss, _, _, grads = grad_fn(params, x)
        return loss, grads

    assert operations(step, params, X) == operations(jax.value_and_grad(by_hand), params, X)
