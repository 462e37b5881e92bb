"""Factors, divisors and powers that 16 bits cannot hold are applied in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32
from helpers.autocast import LEAST, LOW_DTYPES, activation, operand_dtypes, together
from jax import lax

import jmpx

TABLE = np.array([[1e6, 2.0, 1e-6]], np.float32)
# By name: a function of an activation and a number that is traced, and the activation.
FACTORS = {
    "divisor": (lambda h, n: h / 70_000, [700.0, 1, 6e4]),
    "small divisor": (lambda h, n: h / 1e-8, [0.0, 2e-4, 1e-5]),
    "subnormal divisor": (lambda h, n: h / 1e-7, [0.0, 2e-3, 1e-3]),
    "factor": (lambda h, n: h * 1e6, [1e-3, 6e-2, -1e-2]),
    "small factor": (lambda h, n: 3e-8 * h, [6e4, 6e3, -6e4]),
    "numerator": (lambda h, n: 1e6 / h, [1e3, 2e4, -6e4]),
    "broadcast": (lambda h, n: h * jnp.full((1, 3), 1e6), [1e-3, 6e-2, -1e-2]),
    "arithmetic": (lambda h, n: h * -(jnp.full((1, 3), 1e3) * 1e3), [1e-3, 6e-2, -1e-2]),
    "an integer": (lambda h, n: h / jnp.asarray(70_000).astype(F32), [700.0, 1, 6e4]),
    "reciprocal": (lambda h, n: h * (1 / jnp.asarray(1e8, F32)), [6e4, 6e3, -6e4]),
    "a table": (lambda h, n: h * TABLE, [1e-3, 6e-2, 3e4]),
    "a table as divisor": (lambda h, n: h / TABLE.reshape(3), [6e4, 6e-2, 1e-3]),
    "atan2": (lambda h, n: lax.atan2(h, jnp.full_like(h, 1e6)), [6e4, -6e4, 3e4]),
    "rem": (lambda h, n: lax.rem(h, jnp.full_like(h, 70_000.0)), [6e4, -6e4, 3.0]),
    "mod": (lambda h, n: h % 7e4, [6e4, 3e4, 3.0]),
    "clip": (lambda h, n: jnp.clip(h, -7e4, 1e5), [6e4, -6e4, 3.0]),
    "clamp": (lambda h, n: lax.clamp(-7e4, h, 1e5), [6e4, -6e4, 3.0]),
    "max": (lambda h, n: jnp.maximum(h, -1e5), [6e4, -6e4, 3.0]),
    "min": (lambda h, n: jnp.minimum(7e4, h), [6e4, -6e4, 3.0]),
    "a number": (lambda h, n: h / n, [700.0, 1, 6e4]),
    "its inverse": (lambda h, n: h * (1 / n**2), [6e4, 1e4, -6e4]),
    "a number in jit": (lambda h, n: jax.jit(lambda a, b: a / b)(h, n), [700.0, 1, 6e4]),
    "a constant in jit": (lambda h, n: jax.jit(lambda a, b: a * b)(h, 1e6), [1e-3, 6e-2, 0]),
    "numbers": (lambda h, n: h / jnp.stack([n, n * n, 1 / n]), [6e4, 6e4, 1e-2]),
    "in scan": (
        lambda h, n: lax.scan(lambda c, _: (c, h / n), 0, None, length=2)[1][0],
        [700.0, 1, 6e4],
    ),
    "in vmap": (lambda h, n: jax.vmap(lambda r: r / n)(h), [700.0, 1, 6e4]),
}


FACTORS_OF = [(name, "c=f16") for name in FACTORS]
FACTORS_OF += [(name, "c=bf16") for name in ("small divisor", "factor", "a number", "clip")]


@functools.cache
def of_factors(policy):
    def both(name):
        fn, numbers = FACTORS[name]
        x, h = activation(numbers)
        n = lax.optimization_barrier(jnp.float32(70_000))

        def f(x):
            return fn(h(x), n)

        low = jmpx.autocast(f, policy, output=None)(x)
        slope = jax.grad(lambda x: jmpx.autocast(f, policy)(x).sum())(x)
        return low, f(x), slope, jax.grad(lambda x: f(x).sum())(x)

    names = [name for name, of_policy in FACTORS_OF if of_policy == policy]
    return together({name: functools.partial(both, name) for name in names})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name, policy", FACTORS_OF)
def test_factors_and_divisors(name, policy):
    low, expected, slope, expected_slope = of_factors(policy)[name]
    assert low.dtype == LOW_DTYPES[policy]
    digits = jnp.finfo(LOW_DTYPES[policy])
    eps, smallest = float(digits.eps), float(digits.smallest_subnormal)
    np.testing.assert_allclose(low.astype(F32), expected, rtol=2 * eps, atol=smallest)
    if (np.abs(expected_slope) < float(digits.max)).all():
        np.testing.assert_allclose(slope, expected_slope, rtol=4 * eps, atol=2 * smallest)


def test_factors_of_an_array_that_was_closed_over():
    x, h = activation([1e-3, 6e-2, 3e4])
    table = jax.device_put(TABLE)
    got = jmpx.autocast(lambda x: h(x) * table, "c=f16", output=None)(x)
    assert got.dtype == F16
    np.testing.assert_allclose(got.astype(F32), x * TABLE, rtol=2e-3)


@pytest.mark.thorough
def test_the_result_of_a_factor_is_rounded_and_its_range_kept(rng):
    """Compares constants of all sizes with the results of NumPy's float16."""
    x, h = activation(np.float16(rng.normal(size=16)))
    factors = 10.0 ** rng.uniform(-12, 12, size=60) * rng.choice([-1, 1], 60)
    for factor in factors.astype(np.float32):
        for fn in (lambda a, f: a * f, lambda a, f: a / f):
            got = jmpx.autocast(lambda x, fn=fn, f=factor: fn(h(x), f), "c=f16", output=None)(x)
            with np.errstate(over="ignore"):
                expected = np.float16(fn(np.asarray(x), factor))
            assert got.dtype == F16
            np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2**-24)


def test_only_what_does_not_fit_runs_in_float32():
    x, h = activation(np.ones((2, 2)))

    def dtypes_of(name, fn, policy="c=f16", *args):
        return operand_dtypes(name, jmpx.autocast(lambda x, *a: fn(h(x), *a), policy), x, *args)

    assert dtypes_of("mul", lambda h: h * 0.5) == {F16}
    assert dtypes_of("div", lambda h: h / 8) == {F16}
    assert dtypes_of("mul", lambda h, p: h * p, "c=f16", jnp.ones(2, F32)) == {F16}  # a parameter
    assert dtypes_of("mul", lambda h: h * 1e6) == {F32}
    assert dtypes_of("div", lambda h: h / 1e-8) == {F32}
    assert dtypes_of("mul", lambda h, s: h * s, "c=f16", jnp.float32(2)) == {F32}
    assert dtypes_of("mul", lambda h: h * 1e6, "c=bf16") == {BF16}
    assert dtypes_of("div", lambda h, s: h / s, "c=bf16", jnp.float32(2)) == {BF16}
    assert dtypes_of("mul", lambda h: h * LEAST, "c=bf16") == {F32}
    zero = jmpx.autocast(lambda x: h(x) * LEAST, "c=bf16")(jnp.zeros((2, 2), F32))
    np.testing.assert_array_equal(zero, 0)


# Powers.

PRE = np.array([0.5, 1.5, -1.5, 148, -148, 300, 2_000, -2_000, 33_000, 60_000, -60_000], np.float32)
POWERS = {
    "gelu": jax.nn.gelu,
    "gelu by erf": lambda h: jax.nn.gelu(h, approximate=False),
    "silu": jax.nn.silu,
    "square": lambda h: jnp.square(h) * 1e-5,
    "second": lambda h: h**2 * 1e-5,
    "third": lambda h: h**3 * 3e-10,
    "fourth": lambda h: h**4 * 4e-15,
    "inverse": lambda h: h**-2,
    "seventh": lambda h: (h / 4096) ** 7 * 1e-4,
    "polynomial": lambda h: 1e-10 * h**3 + 1e-5 * h**2 - h / 2,
    "in jit": jax.jit(lambda h: jax.jit(lambda h: h**3)(h) * 3e-10),
    "in scan": lambda h: lax.scan(lambda c, r: (c, r**3 * 3e-10), 0, h)[1],
    "in checkpoint": jax.checkpoint(jax.nn.gelu),
}


@functools.cache
def of_powers():
    x, h = activation(PRE)

    def cast(f):
        return jmpx.autocast(f, "c=f16")

    def both(name):
        def f(x):
            return POWERS[name](h(x))

        def value_and_slope(f):
            return lambda x: (f(x), jax.grad(lambda x: f(x).sum())(x))

        sides = value_and_slope(cast(f)), cast(value_and_slope(f)), value_and_slope(f)
        return [side(x) for side in sides]

    return together({name: functools.partial(both, name) for name in POWERS})


@pytest.mark.parametrize("name", POWERS)
def test_powers_in_float16_overflow_neither_forward_nor_backward(name):
    *sides, expected = of_powers()[name]
    assert all((np.abs(v) < 65_504).all() for v in expected)
    for got in sides:
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("power", [2, 3, -1, 8, "square"])
def test_powers_are_float32_in_place_of_float16_and_low_in_bfloat16(power):
    x, h = activation([1.0, 2.0])

    def f(x):
        return jnp.square(h(x)) if power == "square" else h(x) ** power

    assert jmpx.autocast(f, "c=f16", output=None)(x).dtype == F32
    assert jmpx.autocast(f, "c=bf16", output=None)(x).dtype == BF16
    rule = "c=f16; op.square: f16" if power == "square" else "c=f16; op.integer_pow: f16"
    if power != -1:  # JAX divides
        assert jmpx.autocast(f, rule, output=None)(x).dtype == F16
