"""Rules of operations and of scopes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, dtypes, enable_x64, normal
from helpers.autocast import check, named
from helpers.jaxprs import FULL, LOW, dots, equations_of
from jax import lax

import jmpx


@pytest.mark.parametrize(
    "policy",
    ["c=bf16; op.exp: bf16", "c=bf16; op.exp: full; op.exp: bf16"],  # the last rule wins
)
def test_rules_of_operations(rng, policy):
    x = normal(rng, 3, 3)
    f = jmpx.autocast(lambda x: jnp.exp(x @ x), policy, output=None)
    assert f(x).dtype == jnp.bfloat16


def test_a_rule_may_ask_for_more_precision_than_was_traced(rng):
    x = jnp.asarray(1 + rng.uniform(size=64) / 64, jnp.float32)
    f = jmpx.autocast(jnp.prod, "c=bf16; op.reduce_prod: float64")
    with enable_x64():
        got = f(x)
        assert any(v.aval.dtype == "float64" for e in equations_of(f, x) for v in e.outvars)
    assert_same_bits(got, jnp.asarray(np.prod(np.asarray(x, np.float64)), jnp.float32))


def test_grampax_semantics(rng):
    """Its default: the operands of products are cast, their results cast back."""
    w, b, x = normal(rng, 3, 2), normal(rng, 2), normal(rng, 4, 3)
    f = jmpx.autocast(lambda: jnp.tanh(x @ w + b), "full; op.dot_general: bf16")
    cast = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    assert_same_bits(f(), jnp.tanh((cast(x) @ cast(w)).astype(jnp.float32) + b))


@pytest.mark.parametrize(
    "policy, expected",
    [
        ("c=bf16", [LOW, LOW]),
        ("c=bf16; */head: full", [LOW, FULL]),
        ("c=bf16; */head/*: full", [LOW, FULL]),
        ("c=bf16; head: full", [LOW, FULL]),
        ("c=bf16; *: full; */trunk: bf16", [LOW, FULL]),
        ("c=full; */trunk: bf16", [LOW, FULL]),
        ("c=bf16; */head: full; op.dot_general: bf16", [LOW, LOW]),
        ("c=bf16; op.dot_general: full; */trunk: bf16", [LOW, FULL]),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint])
def test_rules_of_scopes(rng, policy, expected, transform):
    shape = (3, 2, 2) if transform is jax.vmap else (2, 2)
    got = dots(transform(jmpx.autocast(named, policy)), normal(rng, *shape))
    assert got[: len(expected)] == expected


def test_an_island_yields_outside(rng):
    x = normal(rng, 3, 3)

    def f(x):
        h = x @ x
        with jax.named_scope("norm"):
            n = h - h.mean()
        return n, h + n

    results = functools.partial(jmpx.autocast, f, output=None)
    assert dtypes(results("c=bf16; norm: full")(x)) == ["float32", "bfloat16"]
    assert dtypes(results("c=bf16; norm: c=f32,o=f32")(x)) == ["float32", "float32"]


def test_rules_hold_within_jit_and_scan(pair):
    @jax.jit
    def layer(x, w):
        with jax.named_scope("norm"):
            x = jnp.exp(jnp.tanh(x)) @ w
        return x @ w

    def model(x, w):
        with jax.named_scope("encoder"):
            return lax.scan(lambda c, _: (layer(c, w), None), x, None, length=2)[0]

    rules = "compute=bf16; */encoder/norm: full; op.exp: bf16"
    check(model, *pair, policy=rules, dot_general="bfloat16 float32", exp="bfloat16")
    rules = "compute=bf16; */encoder/*: full"
    check(model, *pair, policy=rules, dot_general="float32", exp="float32")
    check(layer, *pair, policy="compute=bf16; op.dot_general: f16", dot_general="float16")
