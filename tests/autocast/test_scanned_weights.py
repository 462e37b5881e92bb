"""Slices of a scan that products alone read: cast once, before the loop, and to the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, assert_same_bits, normal
from helpers.autocast import LOW_DTYPES
from helpers.jaxprs import equations_of
from jax import lax

import jmpx

# Other tests are about this warning.
pytestmark = pytest.mark.filterwarnings("ignore:No product runs in 16 bits")


def in_scan(x, w):
    halves = w.reshape(2, 2, 4)
    return lax.scan(lambda c, half: (c, x[:, :2] @ half), 0.0, halves)[1]


def in_carry(x, w):
    return lax.scan(lambda c, _: (c, x @ c), w, None, 2)[1]


def in_scope(x, w):
    with jax.named_scope("router"):
        return x @ w


def in_full_precision(x, w):
    with jmpx.full_precision():
        return x @ w


def convolution(x, w):
    return lax.conv_general_dilated(x[None], w.reshape(2, 2, 4), (1,), "SAME", (1,))


# What a turn does with its slice. Products alone, so that it is cast before the loop:
LOW = {
    "product": lambda x, w: x @ w,
    "two products": lambda x, w: jnp.tanh(x @ w) @ w,
    "transposed": lambda x, w: x @ w.T,
    "einsum": lambda x, w: jnp.einsum("bi,hio->bho", x, w.reshape(2, 4, 2)),
    "jit": lambda x, w: jax.jit(jnp.matmul)(x, w),
    "checkpoint": lambda x, w: jax.checkpoint(jnp.matmul)(x, w),
    "scan": in_scan,
    "a copy": lambda x, w: (x @ w, w),  # which JAX takes around the loop
}
# Something else, too, or in float32:
WIDE = {
    "a sum": lambda x, w: x @ w + jnp.sum(w * w),
    "a bias": lambda x, w: x @ w + w[0],
    "a slice": lambda x, w: x @ w[:, :2],
    "precision": lambda x, w: jnp.matmul(x, w, precision="highest"),
    "full precision": in_full_precision,
    "scope": in_scope,
    "outer product": lambda x, w: x.reshape(-1, 1) @ w.reshape(1, -1),
    "carry": in_carry,
    "constant": lambda x, w: lax.scan(lambda c, row: (c, row @ w), 0.0, x)[1],
    "branches": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
}
POLICY = "{}; */router?: full"


def scanned(turn):
    return lambda x, ws: lax.scan(lambda c, w: (c, turn(x, w)), 0.0, ws)[1]


def written_out(turn):
    return lambda x, ws: jax.tree.map(lambda *ys: jnp.stack(ys), *(turn(x, w) for w in ws))


def scans_of(fn, *args):
    return [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name == "scan"]


def dtypes_of_slices(fn, x, ws):
    """Returns the dtypes of what a scan slices."""
    atoms = [atom for eqn in scans_of(fn, x, ws) for atom in eqn.invars]
    return {atom.aval.dtype.name for atom in atoms if atom.aval.shape == ws.shape}


@pytest.mark.filterwarnings("ignore:save='products' leaves .* under jax.checkpoint")
@pytest.mark.parametrize("save", [None, "products"])
@pytest.mark.parametrize("name", [*LOW, *WIDE])
def test_what_products_alone_read_is_cast_before_the_loop(rng, name, save):
    turn, policy = {**LOW, **WIDE}[name], POLICY.format("c=bf16")
    cast = jmpx.autocast(scanned(turn), policy, save=save)
    expected = "bfloat16" if name in LOW else "float32"
    assert dtypes_of_slices(cast, normal(rng, 3, 4), normal(rng, 5, 4, 4)) == {expected}


@pytest.mark.parametrize("save", [None, "products"])
def test_cotangents_of_weights_are_collected_in_16_bits(rng, save):
    cast = jmpx.autocast(scanned(lambda x, w: jnp.tanh(x @ w)), "c=bf16", save=save)
    x, ws = normal(rng, 3, 4), normal(rng, 5, 4, 4)
    _, backward = scans_of(jax.grad(lambda x, ws: cast(x, ws).sum(), argnums=1), x, ws)
    collected = [var.aval for var in backward.outvars if var.aval.shape == ws.shape]
    assert [aval.dtype for aval in collected] == [BF16]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*LOW, *WIDE])
def test_the_bits_are_those_of_a_loop_that_is_written_out(rng, name):
    turn, policy = {**LOW, **WIDE}[name], POLICY.format(rng.choice(list(LOW_DTYPES)))
    x, ws = normal(rng, 3, 4), normal(rng, 5, 4, 4)

    def value_and_grad(fn):
        def loss_fn(x, ws):
            results = jmpx.autocast(fn, policy)(x, ws)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results)), results

        return jax.grad(loss_fn, argnums=1, has_aux=True)(x, ws)

    results = value_and_grad(scanned(turn)), value_and_grad(written_out(turn))
    if name in LOW:
        assert_same_bits(*results)
    else:  # XLA:CPU sums a float32 product in another order in a loop
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *results)


RULES = {
    "c=bf16; op.dot_general: f32": "float32",
    "full; op.dot_general: bf16": "bfloat16",
    "c=f16; op.dot_general: bf16": "bfloat16",
}


@pytest.mark.parametrize("policy", RULES)
def test_a_rule_for_products_decides(rng, policy):
    x, ws = normal(rng, 3, 4), normal(rng, 5, 4, 4)
    cast = jmpx.autocast(scanned(lambda x, w: x @ w), policy, output=None)
    assert dtypes_of_slices(cast, x, ws) == {RULES[policy]}
    assert cast(x, ws).dtype.name == RULES[policy]
