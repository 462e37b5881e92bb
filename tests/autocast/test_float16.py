"""float16: what is finite in float32 stays finite, also factors, divisors and powers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, normal
from helpers.autocast import (
    LEAST,
    LOW_DTYPES,
    activation,
    assert_near,
    assert_ran,
    dtypes_of,
    together,
    values,
)
from jax import lax

import jmpx


def rms_norm(h, mean_of_squares):
    return h * lax.rsqrt(mean_of_squares(h) + 1e-6)


NORMS = {
    "power": lambda h: rms_norm(h, lambda h: jnp.mean(h**2, -1, keepdims=True)),
    "squares of differences": lambda h: rms_norm(
        h - h.mean(-1, keepdims=True), lambda d: (d * d).mean(-1, keepdims=True)
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_squares_beyond_float16(rng, name):
    x, w = normal(rng, 4, 4) * 300, normal(rng, 4, 4)

    def f(x, w):
        out = NORMS[name](x @ w)
        return (out**2 * jnp.arange(out.size, dtype=F32).reshape(out.shape)).sum(), out

    assert np.abs(np.asarray(x) @ np.asarray(w)).max() ** 2 > 65504
    cast = jmpx.autocast(f, "compute=f16")
    gradients = [jax.grad(g, (0, 1), has_aux=True) for g in (cast, f)]
    assert_near(*values((x, w), *gradients))
    assert_ran(cast, x, w, dot_general="float16")


FREQUENCIES = np.float32(1e4) ** -np.linspace(0, 0.9, 4, dtype=np.float32)
POSITIONS = {
    "arange": lambda n: jnp.arange(70_000 - n, 70_000)[:, None].astype(F32) * FREQUENCIES,
    "iota": lambda n: (lax.iota(F32, n) + 70_000)[:, None] * FREQUENCIES,
    "einsum": lambda n: jnp.einsum("i,j->ij", jnp.arange(n).astype(F32) + 4096, FREQUENCIES),
    "product of one": lambda n: (jnp.arange(n).astype(F32) + 4096)[:, None] @ FREQUENCIES[None],
    "frequencies made inside": lambda n: (
        (jnp.arange(n).astype(F32) + 4096)[:, None] / 1e4 ** (jnp.arange(4).astype(F32) / 4)
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_keep_their_digits(pair, name):
    def rotated(x, w):
        q = x @ w
        angles = POSITIONS[name](4)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return q * cos + jnp.roll(q, 2, -1) * sin, q + sin

    cast = jmpx.autocast(rotated, "compute=f16")
    assert_ran(cast, *pair, cos="float32", sin="float32")
    assert "float16" in dtypes_of(cast, *pair)["dot_general"]
    if name == "product of one":
        assert_near(*values(pair, cast, rotated))


# Constants that float16 cannot hold saturate where they are added or put in place.


def carried(loop):
    """Computes a running maximum in a loop that starts at a large negative number."""

    def f(h, big):
        start = jnp.full(h.shape[1:], big)
        largest = loop(lambda c, row: jnp.maximum(c, jnp.where(row > 100, row, big)), start, h)
        return h.at[0].set(largest)

    return f


def by_scan(step, start, rows):
    return lax.scan(lambda c, row: (step(c, row), None), start, rows)[0]


def by_while(step, start, rows):
    return lax.while_loop(
        lambda s: s[0] < len(rows),
        lambda s: (s[0] + 1, step(s[1], rows[s[0]])),
        (0, start),
    )[1]


# Functions of an activation with three rows and a large negative number, which fills the first row.
ROADS = {
    "add": lambda h, big: h + jnp.array([[1.0], [0], [0]], F32) * big,
    "sub": lambda h, big: h - jnp.where(np.arange(3)[:, None] == 0, -big, 0.0),
    "where": lambda h, big: jnp.where(np.arange(3)[:, None] == 0, big, h),
    "set": lambda h, big: h.at[0].set(big),
    "set of an input": lambda h, big: jnp.full((3, 3), big).at[1:].set(h[1:]),
    "min": lambda h, big: h.at[0].min(big),
    "pad": lambda h, big: jnp.pad(h[1:], ((1, 0), (0, 0)), constant_values=big),
    # A row beyond those that there are.
    "take": lambda h, big: jnp.take(h, np.array([9, 1, 2]), axis=0, mode="fill", fill_value=big),
    "stack": lambda h, big: jnp.stack([jnp.full(3, big), h[1], h[2]]),
    "cond": lambda h, big: jnp.concatenate(
        [lax.cond(h[0, 0] > -999, lambda r: jnp.full_like(r, big), jnp.abs, h[:1]), h[1:]]
    ),
    "scan": carried(by_scan),
    "while": carried(by_while),
}
RULES = {"scan": "; op.scan: f16", "while": "; op.while: f16"}
DIFFERENTIATED = {"set", "scan"}


@functools.cache
def of_roads():
    """Returns results and gradients of each function for each size, with autocast and without."""
    x, h = activation(np.random.default_rng(7).integers(-4, 5, size=(3, 3)) / 4)

    def both(name, size):
        policy = "c=f16" + RULES.get(name, "")

        def logits(x):
            return ROADS[name](h(x), size)

        def loss(x):
            return (jax.nn.softmax(logits(x)) ** 2).sum()

        low = jmpx.autocast(logits, policy, output=None)(x), logits(x)
        if name not in DIFFERENTIATED:
            return *low, []
        slopes = jax.grad(jmpx.autocast(loss, policy)), jmpx.autocast(jax.grad(loss), policy)
        return *low, [slope(x) for slope in (*slopes, jax.grad(loss))]

    return together({key: functools.partial(both, *key) for key in SIZES})


SIZES = [(name, -1e30 if name in RULES else -1e9) for name in ROADS]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name, size", SIZES)
def test_masks_stay_finite_on_every_road(name, size):
    low, expected, slopes = of_roads()[name, size]
    assert low.dtype == F16
    assert np.isfinite(low).all() and (low[0] < -3e4).all()
    np.testing.assert_array_equal(low[1:], expected[1:])
    for slope in slopes:
        assert np.isfinite(slope).all()
        np.testing.assert_allclose(slope[1:], slopes[-1][1:], atol=2e-3)


@pytest.mark.thorough
def test_masks_of_the_least_number_stay_finite_in_bfloat16():
    x, h = activation(np.ones((3, 3)))
    for name in ("set", "pad"):
        low = jmpx.autocast(lambda x, name=name: ROADS[name](h(x), LEAST), output=None)(x)
        assert low.dtype == BF16 and np.isfinite(low.astype(F32)).all(), name
        assert (low[0] < -1e38).all(), name


def test_an_activation_that_overflows_is_not_hidden():
    x, h = activation([60_000.0, 1.0])
    got = jmpx.autocast(lambda x, b: h(x) + b, "c=f16")(x, jnp.full(2, 60_000.0, F32))
    np.testing.assert_array_equal(got, [[np.inf, 6e4]])


# Factors, divisors and powers that 16 bits cannot hold are applied in float32.

TABLE = np.array([[1e6, 2.0, 1e-6]], np.float32)
ON_DEVICE = jax.device_put(TABLE)
# By name: a function of an activation and a number that is traced, and the activation.
FACTORS = {
    "divisor": (lambda h, n: h / 70_000, [700.0, 1, 6e4]),
    "subnormal divisor": (lambda h, n: h / 1e-7, [0.0, 2e-3, 1e-3]),
    "small factor": (lambda h, n: 3e-8 * h, [6e4, 6e3, -6e4]),
    "numerator": (lambda h, n: 1e6 / h, [1e3, 2e4, -6e4]),
    "an integer": (lambda h, n: h / jnp.asarray(70_000).astype(F32), [700.0, 1, 6e4]),
    "a table": (lambda h, n: h * TABLE, [1e-3, 6e-2, 3e4]),
    "a closed-over array": (lambda h, n: h * ON_DEVICE, [1e-3, 6e-2, 3e4]),
    "atan2": (lambda h, n: lax.atan2(h, jnp.full_like(h, 1e6)), [6e4, -6e4, 3e4]),
    "mod": (lambda h, n: h % 7e4, [6e4, 3e4, 3.0]),
    "clip": (lambda h, n: jnp.clip(h, -7e4, 1e5), [6e4, -6e4, 3.0]),
    "a number": (lambda h, n: h / n, [700.0, 1, 6e4]),
    "its inverse": (lambda h, n: h * (1 / n**2), [6e4, 1e4, -6e4]),
    "a number in jit": (lambda h, n: jax.jit(lambda a, b: a / b)(h, n), [700.0, 1, 6e4]),
    "numbers": (lambda h, n: h / jnp.stack([n, n * n, 1 / n]), [6e4, 6e4, 1e-2]),
    "in scan": (
        lambda h, n: lax.scan(lambda c, _: (c, h / n), 0, None, length=2)[1][0],
        [700.0, 1, 6e4],
    ),
}
FACTORS_OF = {"c=f16": [*FACTORS], "c=bf16": ["subnormal divisor", "small factor", "a number"]}


@pytest.mark.thorough
@pytest.mark.parametrize("policy", FACTORS_OF)
def test_factors_and_divisors(policy):
    def both(name):
        fn, numbers = FACTORS[name]
        x, h = activation(numbers)
        n = lax.optimization_barrier(jnp.float32(70_000))

        def f(x):
            return fn(h(x), n)

        low = jmpx.autocast(f, policy, output=None)(x)
        if name not in ("subnormal divisor", "clip", "a number in jit", "in scan"):
            return low, f(x), 0.0, 0.0
        slope = jax.grad(lambda x: jmpx.autocast(f, policy)(x).sum())(x)
        return low, f(x), slope, jax.grad(lambda x: f(x).sum())(x)

    found = together({name: functools.partial(both, name) for name in FACTORS_OF[policy]})
    digits = jnp.finfo(LOW_DTYPES[policy])
    eps, smallest = float(digits.eps), float(digits.smallest_subnormal)
    for name, (low, expected, slope, expected_slope) in found.items():
        assert low.dtype == LOW_DTYPES[policy], name
        np.testing.assert_allclose(low.astype(F32), expected, 2 * eps, smallest, err_msg=name)
        if (np.abs(expected_slope) < float(digits.max)).all():
            np.testing.assert_allclose(slope, expected_slope, 4 * eps, 2 * smallest, err_msg=name)


def test_only_what_does_not_fit_runs_in_float32():
    x, h = activation(np.ones((2, 2)))

    def dtypes(name, fn, policy="c=f16", *args):
        found = dtypes_of(jmpx.autocast(lambda x, *a: fn(h(x), *a), policy), x, *args)
        return {jnp.dtype(dtype) for dtype in found[name]}

    assert dtypes("mul", lambda h: h * 0.5) == {F16}
    assert dtypes("div", lambda h: h / 8) == {F16}
    assert dtypes("mul", lambda h, p: h * p, "c=f16", jnp.ones(2, F32)) == {F16}  # a parameter
    assert dtypes("mul", lambda h: h * 1e6) == {F32}
    assert dtypes("div", lambda h: h / 1e-8) == {F32}
    assert dtypes("mul", lambda h, s: h * s, "c=f16", jnp.float32(2)) == {F32}
    assert dtypes("mul", lambda h: h * 1e6, "c=bf16") == {BF16}
    assert dtypes("div", lambda h, s: h / s, "c=bf16", jnp.float32(2)) == {BF16}
    assert dtypes("mul", lambda h: h * LEAST, "c=bf16") == {F32}
    zero = jmpx.autocast(lambda x: h(x) * LEAST, "c=bf16")(jnp.zeros((2, 2), F32))
    np.testing.assert_array_equal(zero, 0)


PRE = np.array([0.5, 1.5, -1.5, 148, -148, 300, 2_000, -2_000, 33_000, 60_000, -60_000], np.float32)
POWERS = {
    "gelu": jax.nn.gelu,
    "square": lambda h: jnp.square(h) * 1e-5,
    "inverse": lambda h: h**-2,
    "third": jax.jit(lambda h: h**3 * 3e-10),
    "in scan": lambda h: lax.scan(lambda c, r: (c, r**3 * 3e-10), 0, h)[1],
}


def test_powers_in_float16_overflow_neither_forward_nor_backward():
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

    found = together({name: functools.partial(both, name) for name in POWERS})
    for name, (*sides, expected) in found.items():
        assert all((np.abs(v) < 65_504).all() for v in expected)
        for got in sides:
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=4e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("power", [2, 3, -1, 8, "square"])
def test_powers_are_float32_in_place_of_float16_and_low_in_bfloat16(power):
    x, h = activation([1.0, 2.0])

    def dtype(policy):
        fn = jnp.square if power == "square" else lambda h: h**power
        return jax.eval_shape(jmpx.autocast(lambda x: fn(h(x)), policy, output=None), x).dtype

    assert (dtype("c=f16"), dtype("c=bf16")) == (F32, BF16)
    if power != -1:  # JAX divides
        assert dtype(f"c=f16; op.{'square' if power == 'square' else 'integer_pow'}: f16") == F16
