"""What the backward pass keeps: of kernels under `save=`, of checkpoints, and how many bytes."""

import functools
from typing import Any

import autocast as benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F16, F32, assert_same_bits, normal
from helpers.autocast import (
    LOW_DTYPES,
    assert_near,
    assert_ran,
    both,
    check_sides,
    operand_dtypes,
    rows,
    values,
)
from helpers.jaxprs import equations, equations_of, trace
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

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


def in_pallas(x, w):
    def body(x, w, out):
        out[...] = jnp.tanh(x[...] @ w[...])

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), F32)
    return pl.pallas_call(body, shape, interpret=True)(x, w)


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


@jax.custom_vjp
def nested(x, w):
    return 2 * counted(x, w)


nested.defvjp(
    lambda x, w: (2 * (y := counted(x, w)), (x, w, y)),
    lambda kept, g: ((g * kept[2]) @ kept[1].T, kept[0].T @ g),
)


def sharded(x, w):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("rows"), P()), "out_specs": P("rows")}
    # The results of a callback vary over no axis.
    return jax.shard_map(counted, mesh=mesh, **specs, check_vma=False)(x, w)


def scanned(x, w):
    return lax.scan(lambda h, _: (counted(jnp.sin(h @ w), w), None), x, None, 3)[0]


def of_integers(x, w):
    return jax.tree.leaves(with_integers(jnp.sin, jax.random.key(3), jnp.array(2), x, w))[0]


# By names, how often the forward pass runs.
CASES = {
    "of integers and a key": (of_integers, 1),
    "nested": (nested, 1),
    "in a scan": (scanned, 3),
    "in cond": (lambda x, w: lax.cond(x[0, 0] < 9, counted, lambda x, w: x, x, w), 1),
    "in vmap": (lambda x, w: jax.vmap(lambda x: counted(x[None], w)[0])(x), 4),
    "in shard_map": (sharded, 1),
    "in jit in full precision": (jmpx.full_precision(jax.jit(counted)), 1),
    "twice": (lambda x, w: counted(counted(x, w), w), 2),
}


def grads_of(fn, save, wrap=jax.jit):
    """Returns the gradients of a loss, in which what the function reads and returns is computed."""
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


@pytest.mark.parametrize("forward", [kernel, pytest.param(in_pallas, marks=pytest.mark.thorough)])
def test_gradients_have_the_same_bits(rng, forward):
    args = normal(rng, 4, 4), normal(rng, 4, 4) / 2
    plain, saved = (grads_of(with_backward(forward), save) for save in (None, "products"))
    assert_same_bits(saved(*args), plain(*args))


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
    assert saved == 2  # the result and the probabilities, and no operand


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (jnp.clip(x, -1, 1), jnp.cos(x)), lambda kept, g: (g * kept,))


def test_a_function_of_elements_is_computed_again(rng):
    args = normal(rng, 4, 4), normal(rng, 4, 4)
    assert names(grads_of(lambda x, w: clipped(x), "products"), *args)[0] == 0


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


def test_forward_mode_is_refused_as_without(rng):
    x, w = normal(rng, 4, 4), normal(rng, 4, 4)
    for save in (None, "products"):
        cast = jmpx.autocast(lambda x, save=save: counted(x @ w, w), save=save)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(cast, (x,), (x,))


def heads(q):
    return jnp.transpose(q.reshape(1, 512, 2, 128), (0, 2, 1, 3))


def flash(q, k, v):
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return flash_attention(q, k, v, causal=True)


def kernels_of(save):
    """Returns how many kernels a layer's gradient has, lowered for a TPU."""
    x, w = jax.ShapeDtypeStruct((1, 512, 256), F32), jax.ShapeDtypeStruct((256, 768), F32)

    def layer(w, x):
        q, k, v = (heads(a).astype(jnp.bfloat16) for a in jnp.split(x @ w, 3, axis=-1))
        out = flash(q, k, v).astype(F32)
        return jnp.transpose(out, (0, 2, 1, 3)).reshape(x.shape) @ w

    cast = jmpx.autocast(layer, save=save)
    traced = jax.jit(jax.grad(lambda w, x: cast(w, x).astype(F32).sum())).trace(w, x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    return text.count("@tpu_custom_call")


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.usefixtures("standard_promotion")  # the kernels mix dtypes
def test_flash_attention_has_three_kernels_on_a_tpu():
    assert [kernels_of(save) for save in (None, "products")] == [3, 3]


# Residuals, and how exact gradients are.

SAVED = "autocast, save"


@pytest.fixture(scope="module")
def transformer():
    rng = np.random.default_rng(5)
    model = benchmark.Transformer()
    return model.init(rng), benchmark.losses(model, model.batch(rng))


def test_residuals(transformer):
    """Holds the benchmark's figures, which do not depend on the machine, to the project's bars."""
    params, ways = transformer
    names = "float32", "autocast", SAVED
    kept = {way: benchmark.residual_bytes(ways[way], params) for way in names}
    ratios = {way: bytes_ / kept["float32"] for way, bytes_ in kept.items()}
    assert ratios["autocast"] < 0.66
    assert ratios[SAVED] < 0.16
    # Of each block the two activations between pieces, and what the first products of its halves
    # made; of the head the scores, which the loss reads in float32, and the labels.
    tokens, width = 8 * 128, 256
    blocks, head = 4 * tokens * (2 + 3 + 4) * width * 2, tokens * 64 * 4 + tokens * 4
    assert blocks <= kept[SAVED] <= blocks + head + 20 * tokens


def test_products_as_lowered_for_cuda(transformer):
    params, ways = transformer
    assert benchmark.dot_operands(ways["autocast"], params) == {"bf16 x bf16": 75}
    head = lambda p, x: x @ p  # noqa: E731
    f = jmpx.autocast(lambda p: jmpx.full_precision(head)(jnp.tanh(p @ p), p).sum())
    assert benchmark.dot_operands(f, jnp.eye(4)) == {"bf16 x bf16": 3, "f32 x f32": 3}


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


@pytest.mark.thorough
def test_a_learned_scale_costs_no_memory(rng):
    w, x = normal(rng, 16, 16), normal(rng, 64, 16)

    def loss(params):
        h = functools.reduce(lambda h, s: jnp.tanh(s * (h @ params["w"])), params["scales"], x)
        return (h**2).mean()

    params = {"w": w, "scales": [jnp.float32(0.5), jnp.float32(2.0)]}
    kept, no_scale = (
        benchmark.residual_bytes(jmpx.autocast(f, "c=f16"), params)
        for f in (loss, lambda params: loss({"w": params["w"], "scales": [0.5, 2.0]}))
    )
    # For each scale: the product to be scaled, in 16 bits, and the scale, broadcast, in 32 bits.
    assert kept <= no_scale + 2 * x.size * (2 + 4) + 16
    got, expected = jax.grad(jmpx.autocast(loss, "c=f16"))(params), jax.grad(loss)(params)
    assert_near(got, expected, 1e-2)


def test_a_gelu_leaves_float16_and_keeps_no_more_than_in_bfloat16(rng):
    w, x = normal(rng, 16, 16), normal(rng, 64, 16)

    def loss(w):
        return (jax.nn.gelu(x @ w) @ w).sum()

    kept = [benchmark.residual_bytes(jmpx.autocast(loss, policy), w) for policy in LOW_DTYPES]
    assert kept[0] <= kept[1]
    gelu = jmpx.autocast(lambda w: jax.nn.gelu(x @ w), "c=f16", output=None)
    assert gelu(w).dtype == F16
    assert operand_dtypes("tanh", gelu, w) == {F16}
    assert operand_dtypes("integer_pow", gelu, w) == {F32}
