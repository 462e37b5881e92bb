"""Comparisons do not round their operands, and maxima have the gradients of float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32, normal
from helpers.autocast import LOW_DTYPES, activation, assert_near, both, operand_dtypes, together
from jax import lax

import jmpx

COMPARISONS = {
    f.__name__: f for f in (jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater)
} | {"greater_equal": jnp.greater_equal}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", LOW_DTYPES)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_round_neither_side(rng, name, policy):
    numbers = np.array([1.0, 0.5, -2.0, 1.5, 0.0])
    sides = numbers * (1 + rng.choice([-1e-4, 0, 1e-4], 5)) + rng.choice([0, 1e-9], 5)
    sides = sides.astype(np.float32)
    x, h = activation(numbers)
    compare = COMPARISONS[name]

    def f(x, side):
        constants = [compare(h(x)[0, i], float(side)) for i, side in enumerate(sides)]
        return compare(h(x), side), compare(side, h(x)), jnp.stack(constants)

    got = jax.jit(jmpx.autocast(f, policy))(x, jnp.asarray(sides))
    expected = compare(numbers, sides), compare(sides, numbers), compare(numbers, sides)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.ravel(a), b)
    primitive = {"equal": "eq", "not_equal": "ne"}.get(name, name[0] + name[-5:][0][:0] + "t")
    if name.endswith("_equal") and name != "not_equal":
        primitive = name[0] + "e"
    assert operand_dtypes(primitive, jmpx.autocast(f, policy), x, sides) == {F32}


@pytest.mark.parametrize("policy", LOW_DTYPES)
def test_draws_with_probability_one_are_true(policy):
    x, h = activation([[1.0, 0.0]])

    def draw(x, key):
        return jax.random.bernoulli(key, h(x), (20_000, 2))

    got = jax.jit(jmpx.autocast(draw, policy))(x, jax.random.key(0))
    np.testing.assert_array_equal(got.mean(0, dtype=F32), [1, 0])


CHOICES = {
    "maximum": jnp.maximum,
    "minimum": lambda h, p: jnp.minimum(p, h),
    "clip": lambda h, p: jnp.clip(h, p - 0.5, p + 0.5),
    "of a row": lambda h, p: jnp.maximum(h, p[0]),
    "scatter_max": lambda h, p: h.at[np.array([2, 0])].max(p[:2]),
    "scatter_min": lambda h, p: p.at[np.array([2, 0])].min(h[:2]),
    "reduce": lambda h, p: jnp.max(h * p, 0),
    "ties": lambda h, p: jnp.maximum(h, jnp.where(p > 0, h, p)),
    "in jit": jax.jit(lambda h, p: jax.jit(jnp.maximum)(h, p)),
    "in scan": lambda h, p: lax.scan(lambda c, r: (c, jnp.maximum(r, p[0])), 0, h)[1],
    "in checkpoint": jax.checkpoint(jnp.minimum),
}


@functools.cache
def of_choices(policy):
    x, p, w, weights = (normal(np.random.default_rng(3), 4, 3, 3)[i] for i in range(4))

    def sides_of(name):
        def loss(x, p):
            out = CHOICES[name](x @ w, p)
            return (out * (weights if out.ndim == 2 else weights[0])).sum()

        sides = both(jmpx.autocast(loss, policy)), jmpx.autocast(both(loss), policy), both(loss)
        return [f(x, p) for f in sides]

    return together({name: functools.partial(sides_of, name) for name in CHOICES})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", LOW_DTYPES)
@pytest.mark.parametrize("name", CHOICES)
def test_gradients_of_maxima(name, policy):
    *got, expected = of_choices(policy)[name]
    assert_near(got, [expected, expected], 3e-3 if policy == "c=f16" else 3e-2)
