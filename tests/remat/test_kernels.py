"""Kernels and checkpoints under `save=`, and the bytes that the backward pass keeps."""

import collections
import functools
from typing import Any

import autocast as benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F16, F32, assert_same_bits, normal
from helpers.autocast import LOW_DTYPES, assert_near, assert_ran, both, check_sides, rows, values
from helpers.jaxprs import equations, equations_of, trace
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jmpx

pytestmark = pytest.mark.filterwarnings("ignore:JAX cannot trace")  # other tests are about that

# Functions with a backward pass of their own: their forward pass runs once.

runs = []


def kernel(x, w):
    """Computes tanh(x @ w) as a foreign call that notes when it runs."""

    def run(x, w):
        runs.append(x.shape)
        return np.tanh(x @ w)

    shape = jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[-1]), x.dtype)
    return jax.pure_callback(run, shape, x, w, vmap_method="sequential")


def with_backward(forward):
    """Returns tanh(x @ w) with a backward pass whose factor, 3, tells that it runs."""

    @jax.custom_vjp
    def call(x, w):
        return forward(x, w)

    def keep(x, w):
        result = forward(x, w)
        return result, (x, w, result, jnp.sum(result))

    def backward(kept, g):
        x, w, result, total = kept
        slope = 3 * g * (1 - result**2) + 0 * total
        return slope @ w.T, x.T @ slope

    call.defvjp(keep, backward)
    return call


counted = with_backward(kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_integers(function, key, n, x, w):
    return function(kernel(x, w)) * n.astype(F32), n + 1


with_integers.defvjp(
    lambda function, key, n, x, w: (
        (function(y := kernel(x, w)) * n.astype(F32), n + 1),
        (key, x, w, y),
    ),
    lambda function, kept, g: (
        None,
        None,
        (g := g[0] * jax.random.uniform(kept[0], g[0].shape) * kept[3]) @ kept[2].T,
        kept[1].T @ g,
    ),
)


def scanned(x, w):
    return lax.scan(lambda h, _: (counted(jnp.sin(h @ w), w), None), x, None, 3)[0]


def of_integers(x, w):
    return jax.tree.leaves(with_integers(jnp.sin, jax.random.key(3), jnp.array(2), x, w))[0]


# Name -> how often the forward pass runs.
CASES = {
    "of integers and a key": (of_integers, 1),
    "in a scan": (scanned, 3),
    "in vmap": (lambda x, w: jax.vmap(lambda x: counted(x[None], w)[0])(x), 4),
    "in jit in full precision": (jmpx.full_precision(jax.jit(counted)), 1),
}


def grads_of(fn, save, wrap=jax.jit):
    """Returns the gradients of a loss with computations before and after the function."""
    cast = jmpx.autocast(lambda x, w: jnp.sin(fn(jnp.tanh(x @ w), w)) @ w, save=save)
    return wrap(jax.grad(lambda x, w: (cast(x, w).astype(F32) ** 2).sum(), (0, 1)))


def runs_of(fn, *args):
    runs.clear()
    results = jax.block_until_ready(fn(*args))
    return results, len(runs)


@pytest.mark.parametrize("name", rows(CASES, "of integers and a key"))
def test_the_forward_pass_runs_once(rng, name):
    fn, times = CASES[name]
    args = normal(rng, 4, 4), normal(rng, 4, 4) / 2
    plain, saved = (runs_of(grads_of(fn, save), *args) for save in (None, "products"))
    assert (plain[1], saved[1]) == (times, times)
    for a, b in zip(plain[0], saved[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)
    assert np.abs(saved[0][0]).max() > 0


def test_gradients_have_the_same_bits(rng):
    args = normal(rng, 4, 4), normal(rng, 4, 4) / 2
    plain, saved = (grads_of(counted, save)(*args) for save in (None, "products"))
    assert_same_bits(saved[0], plain[0])
    np.testing.assert_allclose(saved[1], plain[1], rtol=1e-5, atol=1e-5)  # another order of sums


def names(fn, *args):
    """Returns how many results are saved by their names, and how many products there are."""
    found = [eqn.primitive.name for eqn in equations(trace(fn, *args))]
    return found.count("name"), found.count("dot_general")


@jax.custom_vjp
def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


attention.defvjp(
    lambda q, k, v: ((p := jax.nn.softmax(q @ k.T)) @ v, (q, k, v, p)),
    lambda kept, g: (g @ kept[2].T @ kept[1], (g @ kept[2].T).T @ kept[0], kept[3].T @ g),
)


def test_products_of_a_function_with_a_backward_pass_run_once(rng):
    args = normal(rng, 4, 4), normal(rng, 4, 4)
    of = [
        grads_of(lambda x, w: jax.vmap(attention)(*[x[None]] * 3)[0], s) for s in (None, "products")
    ]
    (_, plain), (saved, products) = (names(fn, *args) for fn in of)
    assert products == plain
    assert saved == 2 + 2  # two products, the result and the probabilities, and no operand


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (jnp.clip(x, -1, 1), jnp.cos(x)), lambda kept, g: (g * kept,))


def test_a_function_of_elements_is_computed_again(rng):
    args = normal(rng, 4, 4), normal(rng, 4, 4)
    assert names(grads_of(lambda x, w: clipped(x), "products"), *args)[0] == 2  # two products


@jax.custom_vjp
def on_variables(x, w):
    return x @ w


def _keep_variables(x, w):
    assert (x.perturbed, w.perturbed) == (True, False)
    return x.value @ w.value, w.value


on_variables.defvjp(_keep_variables, lambda w, g: (5 * g @ w.T, None), symbolic_zeros=True)


def test_a_function_that_asks_which_operands_vary_is_told(rng):
    x, w = normal(rng, 4, 4), normal(rng, 4, 4)

    def slope(save: Any):
        cast = jmpx.autocast(lambda x: on_variables(x @ w, w), save=save)
        return jax.grad(lambda x: cast(x).sum())(x)

    assert_same_bits(slope("products"), slope(None))


@pytest.mark.thorough
def test_second_derivatives(rng):
    args = normal(rng, 4, 4), normal(rng, 4, 4) / 2

    def second(save):
        grads = grads_of(with_backward(lambda x, w: jnp.tanh(x @ w)), save, wrap=lambda f: f)
        return jax.jit(jax.grad(lambda x, w: sum(jnp.sin(g).sum() for g in grads(x, w))))(*args)

    np.testing.assert_allclose(second("products"), second(None), rtol=0.05, atol=0.05)


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.usefixtures("standard_promotion")  # the kernels mix dtypes
@pytest.mark.parametrize("save", [None, "products"])
def test_flash_attention_has_three_kernels_on_a_tpu(save):
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    def layer(w, x):
        q, k, v = (x @ w).reshape(1, 512, 3, 2, 128).transpose(2, 0, 3, 1, 4).astype(jnp.bfloat16)
        out = flash_attention(q, k, v, causal=True).astype(F32)
        return out.transpose(0, 2, 1, 3).reshape(x.shape) @ w[:, :256]

    cast = jmpx.autocast(layer, save=save)
    x, w = jax.ShapeDtypeStruct((1, 512, 256), F32), jax.ShapeDtypeStruct((256, 768), F32)
    traced = jax.jit(jax.grad(lambda w, x: cast(w, x).sum())).trace(w, x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3


# Residuals, and how exact gradients are.

SAVED = "autocast, save"


@pytest.fixture(scope="module")
def transformer():
    rng = np.random.default_rng(5)
    model = benchmark.Transformer()
    return model.init(rng), benchmark.losses(model, model.batch(rng))


@pytest.mark.thorough
def test_residuals(transformer):
    """Holds the benchmark's figures, which do not depend on the machine, to the project's bars."""
    params, ways = transformer
    names = "float32", "autocast", SAVED
    kept = {way: benchmark.residual_bytes(ways[way], params) for way in names}
    ratios = {way: bytes_ / kept["float32"] for way, bytes_ in kept.items()}
    assert ratios["autocast"] < 0.66
    assert ratios[SAVED] < 0.16
    # For each block, the two activations between pieces, and the results of the first products of
    # its halves; for the head, the scores, which the loss reads in float32, and the labels.
    tokens, width = 8 * 128, 256
    blocks, head = 4 * tokens * (2 + 3 + 4) * width * 2, tokens * 64 * 4 + tokens * 4
    assert blocks <= kept[SAVED] <= blocks + head + 20 * tokens


def dot_operands(loss_fn, params):
    step = jax.jit(jax.value_and_grad(loss_fn)).trace(params)
    program = jmpx.inspect.compiled(step.lower(lowering_platforms=("cuda",)))
    return collections.Counter(one.operands for one in program.products)


@pytest.mark.thorough
def test_products_as_lowered_for_cuda(transformer):
    params, ways = transformer
    assert dot_operands(ways["autocast"], params) == {("bf16", "bf16"): 75}
    head = lambda p, x: x @ p  # noqa: E731
    f = jmpx.autocast(lambda p: jmpx.full_precision(head)(jnp.tanh(p @ p), p).sum())
    assert dot_operands(f, jnp.eye(4)) == {("bf16", "bf16"): 3, ("f32", "f32"): 3}


# Checkpoints.

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("h"),
    "all but names": jax.checkpoint_policies.save_anything_except_these_names("h"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_checkpoint_policies_are_followed(pair, name):
    def f(x, w):
        h = checkpoint_name(jnp.sin(x @ w), "h")
        return jnp.sin(h @ w).sum()

    def products(f):
        return sum(e.primitive.name == "dot_general" for e in equations_of(f, *pair))

    remat = functools.partial(jax.checkpoint, policy=POLICIES[name])
    inside, outside = both(jmpx.autocast(remat(f))), both(remat(jmpx.autocast(f)))
    around, plain = jmpx.autocast(both(remat(f))), both(remat(f))
    for cast in (inside, outside, around):
        assert_ran(cast, *pair, dot_general="bfloat16")
    if name == "names":
        assert_near(*values(pair, inside, plain))
    assert products(around) == products(plain) >= products(both(f))
    assert products(inside) == products(outside) == products(plain)


def test_a_checkpoint_that_captured_a_constant(pair):
    x, w = (np.asarray(v) for v in pair)
    check_sides(jax.grad, jax.checkpoint(lambda x: jnp.tanh(x @ w + w[0]).sum()), x)


def test_a_gelu_leaves_float16_and_keeps_no_more_than_in_bfloat16(rng):
    w, x = normal(rng, 16, 16), normal(rng, 64, 16)

    def loss(w):
        return (jax.nn.gelu(x @ w) @ w).sum()

    kept = [benchmark.residual_bytes(jmpx.autocast(loss, policy), w) for policy in LOW_DTYPES]
    assert kept[0] <= kept[1]
    gelu = jmpx.autocast(lambda w: jax.nn.gelu(x @ w), "c=f16", output=None)
    assert gelu(w).dtype == F16
    assert_ran(gelu, w, tanh="float16", integer_pow="float32")
