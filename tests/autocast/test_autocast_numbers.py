"""The numbers of `jmpx.autocast`: what 16 bits cannot hold, and derivatives that are set by hand.

A product of a matrix and `eye` is exact in 16 bits where the matrix is, so it makes an activation
of known numbers.
"""

import functools

import autocast as benchmark
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.scipy.special import xlogy

import jmpx

F32, F16, BF16 = (np.dtype(d) for d in (jnp.float32, jnp.float16, jnp.bfloat16))
LOW = {"c=f16": F16, "c=bf16": BF16}
LEAST = np.finfo(np.float32).min


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), F32)


def activation(numbers):
    """A matrix, and what makes an activation of it in 16 bits."""
    return jnp.asarray(np.atleast_2d(numbers), F32), lambda x: x @ jnp.eye(x.shape[1], dtype=F32)


def equations(f, *args):
    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple) else (value,):
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    return list(walk(jax.make_jaxpr(f)(*args)))


def operand_dtypes(name, f, *args):
    """The dtypes of the operands of an operation, wherever it runs in `f`."""
    found = [e.invars for e in equations(f, *args) if e.primitive.name == name]
    assert found, f"there is no {name}"
    dtypes = {atom.aval.dtype for invars in found for atom in invars}
    return {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}


def assert_near(got, expected, rtol):
    """Holds each leaf to be near next to the largest number of it."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def together(functions):
    """Results of functions without arguments, by their names, compiled together."""
    return jax.device_get(jax.jit(lambda: {name: f() for name, f in functions.items()})())


# Tangents and cotangents are cast linearly.


@jax.custom_jvp
def chosen(h, p):
    return h * p


@chosen.defjvp
def _(primals, tangents):
    (h, p), (dh, dp) = primals, tangents
    return chosen(h, p), jnp.where(h > 0, dh * p, dp) + jnp.where(h > 0, h * dp, dp)


@jax.custom_jvp
def joined(h, p):
    return jnp.concatenate([h, p])


@joined.defjvp
def _(primals, tangents):
    dh, dp = tangents
    zeros = jnp.zeros((2 * dh.shape[0], *dh.shape[1:]), dh.dtype)
    start = (dh.shape[0], 0)
    out = lax.dynamic_update_slice(jnp.pad(dh, ((0, dh.shape[0]), (0, 0))), dp, start)
    return joined(*primals), out + zeros.at[0].set(dp[0]) - zeros.at[0].set(dp[0])


BY_HAND = {
    "xlogy": xlogy,
    "hypot": jnp.hypot,
    "logaddexp": jnp.logaddexp,
    "where on tangents": chosen,
    "tangents in place": joined,
    "in jit": jax.jit(lambda h, p: jax.jit(chosen)(h, p)),
    "in scan": lambda h, p: lax.scan(lambda c, _: (xlogy(c, p) + h, c), h, None, length=2),
    "in checkpoint": jax.checkpoint(lambda h, p: chosen(xlogy(h, p), p)),
    "in cond": lambda h, p: lax.cond(h[0, 0] > -9, chosen, lambda h, p: h, h, p),
    "in vmap": jax.vmap(lambda h, p: chosen(h[None], p[None])),
}


BY_HAND_OF = [(name, "c=f16") for name in BY_HAND]
BY_HAND_OF += [(name, "c=bf16") for name in ("xlogy", "hypot", "where on tangents")]


@functools.cache
def of_rules_by_hand(policy):
    x, w, p = jnp.eye(3, dtype=F32) + 1, *normal(np.random.default_rng(4), 2, 3, 3)
    p = jnp.abs(p) + 0.5

    def forward(f):
        return lambda x, p: jax.jvp(f, (x, p), (p, x))[1]

    def both(name):
        def loss(x, p):
            leaves = jax.tree.leaves(BY_HAND[name](jnp.abs(x @ w) + 0.5, p))
            return sum((leaf**2).sum() for leaf in leaves)

        transforms = grad, forward
        sides = [jmpx.autocast(transform(loss), policy) for transform in transforms]
        sides += [transform(jmpx.autocast(loss, policy)) for transform in transforms]
        return [f(x, p) for f in (*sides, *(transform(loss) for transform in transforms))]

    names = [name for name, of_policy in BY_HAND_OF if of_policy == policy]
    return together({name: functools.partial(both, name) for name in names})


@pytest.mark.parametrize("name, policy", BY_HAND_OF)
def test_custom_jvp_of_an_activation_and_a_parameter(name, policy):
    *got, slope, tangent = of_rules_by_hand(policy)[name]
    assert_near(got, [slope, tangent] * 2, 1e-2 if policy == "c=f16" else 8e-2)


def grad(f):
    return jax.grad(f, (0, 1))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_large_tangent_overflows(wrap):
    x, h = activation([1.0, -1.0])
    f = jmpx.autocast(wrap(lambda x, p: chosen(h(x), p)), "c=f16")

    def slope(size):
        return jax.jvp(f, (x, jnp.ones_like(x)), (jnp.zeros_like(x), jnp.full_like(x, size)))[1]

    np.testing.assert_array_equal(slope(1e6), [[np.inf, np.inf]])
    np.testing.assert_array_equal(slope(1e3), [[1e3, 2e3]])


# Constants that 16 bits cannot hold: those that are added or put in place saturate.


def carried(loop):
    """A running maximum from -1e30 on, as of attention by blocks, less itself."""

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


OUT = np.array([9, 1, 2])  # beyond the rows that there are
# Functions of an activation of three rows and a large negative number, which the first row becomes.
ROADS = {
    "add": lambda h, big: h + jnp.array([[1.0], [0], [0]], F32) * big,
    "add on the left": lambda h, big: jnp.where(np.arange(3)[:, None] == 0, big, 0.0) + h,
    "sub": lambda h, big: h - jnp.where(np.arange(3)[:, None] == 0, -big, 0.0),
    "where": lambda h, big: jnp.where(np.arange(3)[:, None] == 0, big, h),
    "select": lambda h, big: lax.select(np.arange(9).reshape(3, 3) < 3, jnp.full_like(h, big), h),
    "set": lambda h, big: h.at[0].set(big),
    "set of an input": lambda h, big: jnp.full((3, 3), big).at[1:].set(h[1:]),
    "min": lambda h, big: h.at[0].min(big),
    "dynamic_update_slice": lambda h, big: lax.dynamic_update_slice(
        h, jnp.full((1, 3), big), (0, 0)
    ),
    "into a constant": lambda h, big: lax.dynamic_update_slice(
        jnp.full((3, 3), big), h[1:], (1, 0)
    ),
    "pad": lambda h, big: jnp.pad(h[1:], ((1, 0), (0, 0)), constant_values=big),
    "lax.pad": lambda h, big: lax.pad(h[1:], jnp.asarray(big, F32), ((1, 0, 0), (0, 0, 0))),
    "take": lambda h, big: jnp.take(h, OUT, axis=0, mode="fill", fill_value=big),
    "get": lambda h, big: h.at[OUT].get(mode="fill", fill_value=big),
    "concatenate": lambda h, big: jnp.concatenate([jnp.full((1, 3), big), h[1:]]),
    "stack": lambda h, big: jnp.stack([jnp.full(3, big), h[1], h[2]]),
    "cond": lambda h, big: jnp.concatenate(
        [lax.cond(h[0, 0] > -999, lambda r: jnp.full_like(r, big), jnp.tanh, h[:1]), h[1:]]
    ),
    "switch": lambda h, big: (
        lax.switch(
            (h[0, 0] > -999).astype(int), [lambda h, m: h, lambda h, m: m], h, jnp.full_like(h, big)
        )
        .at[1:]
        .set(h[1:])
    ),
    "scan": carried(by_scan),
    "while": carried(by_while),
}
RULES = {"scan": "; op.scan: f16", "while": "; op.while: f16"}


DIFFERENTIATED = {"add", "where", "set", "min", "pad", "take", "concatenate", "cond", "scan"}
SIZES = [(name, size) for name in ROADS for size in ((-1e9, -1e30) if name in RULES else (-1e9,))]


@functools.cache
def of_roads():
    """Under autocast and without it: what each road makes of each size, and gradients."""
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


@pytest.mark.parametrize("name, size", SIZES)
def test_masks_stay_finite_on_every_road(name, size):
    low, expected, slopes = of_roads()[name, size]
    assert low.dtype == F16
    assert np.isfinite(low).all() and (low[0] < -3e4).all()
    np.testing.assert_array_equal(low[1:], expected[1:])
    for slope in slopes:
        assert np.isfinite(slope).all()
        np.testing.assert_allclose(slope[1:], slopes[-1][1:], atol=2e-3)


def test_masks_of_the_least_number_stay_finite_in_bfloat16():
    x, h = activation(np.ones((3, 3)))
    roads = {
        name: functools.partial(
            jmpx.autocast(lambda x, fn=fn: fn(h(x), LEAST), "c=bf16", output=None), x
        )
        for name, fn in ROADS.items()
        if name not in RULES
    }
    for name, low in together(roads).items():
        assert low.dtype == BF16 and np.isfinite(low.astype(F32)).all(), name
        assert (low[0] < -1e38).all(), name


def test_attention_by_blocks_carries_its_maximum_in_float16(rng):
    q, k, v = (normal(rng, 8, 4) for _ in range(3))
    visible = np.arange(8) >= 4  # the first block is masked as a whole

    def attention(q, k, v):
        def block(carry, inputs):
            largest, total, out = carry
            k, v, visible = inputs
            logits = jnp.where(visible, q @ k.T, -1e30)
            new = jnp.maximum(largest, logits.max(1))
            shrink, weights = jnp.exp(largest - new), jnp.exp(logits - new[:, None])
            return (new, total * shrink + weights.sum(1), out * shrink[:, None] + weights @ v), None

        start = jnp.full(8, -1e30), jnp.zeros(8), jnp.zeros((8, 4))
        blocks = k.reshape(2, 4, 4), v.reshape(2, 4, 4), visible.reshape(2, 4)
        _, total, out = lax.scan(block, start, blocks)[0]
        return out / total[:, None]

    got = jmpx.autocast(attention, "c=f16; op.scan: f16")(q, k, v)
    expected = jax.nn.softmax(jnp.where(visible, q @ k.T, -jnp.inf)) @ v
    np.testing.assert_allclose(got, expected, atol=2e-2)


def test_an_activation_that_overflows_is_not_hidden():
    x, h = activation([60_000.0, 1.0])
    got = jmpx.autocast(lambda x, b: h(x) + b, "c=f16")(x, jnp.full(2, 60_000.0, F32))
    np.testing.assert_array_equal(got, [[np.inf, 6e4]])


# Factors and divisors that 16 bits cannot hold are applied in float32.

TABLE = np.array([[1e6, 2.0, 1e-6]], np.float32)
# name: a function of an activation and a number that is known when it runs.
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


@pytest.mark.parametrize("name, policy", FACTORS_OF)
def test_factors_and_divisors(name, policy):
    low, expected, slope, expected_slope = of_factors(policy)[name]
    assert low.dtype == LOW[policy]
    digits = jnp.finfo(LOW[policy])
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


def test_the_result_of_a_factor_is_rounded_and_its_range_kept(rng):
    """Fresh constants of all sizes against NumPy's float16."""
    x, h = activation(np.float16(rng.normal(size=16)))
    for factor in np.float32(10.0 ** rng.uniform(-12, 12, size=60) * rng.choice([-1, 1], 60)):
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


def test_a_learned_scale_costs_no_memory(rng):
    w, x = normal(rng, 16, 16), normal(rng, 64, 16)

    def loss(params):
        h = x
        for scale in params["scales"]:
            h = jnp.tanh(scale * (h @ params["w"]))
        return (h**2).mean()

    params = {"w": w, "scales": [jnp.float32(0.5), jnp.float32(2.0)]}
    kept = benchmark.residual_bytes(jmpx.autocast(loss, "c=f16"), params)
    no_scale = benchmark.residual_bytes(
        jmpx.autocast(lambda p: loss({"w": p["w"], "scales": [0.5, 2.0]}), "c=f16"), params
    )
    # A product to scale each, in 16 bits; the numbers, spread, in 32.
    assert kept <= no_scale + 2 * x.size * (2 + 4) + 16
    got, expected = jax.grad(jmpx.autocast(loss, "c=f16"))(params), jax.grad(loss)(params)
    assert_near(got, expected, 1e-2)


# Comparisons, and what compares.

COMPARISONS = {
    f.__name__: f for f in (jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater)
} | {"greater_equal": jnp.greater_equal}


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_round_neither_side(rng, name, policy):
    numbers = np.array([1.0, 0.5, -2.0, 1.5, 0.0])
    sides = np.float32(numbers * (1 + rng.choice([-1e-4, 0, 1e-4], 5)) + rng.choice([0, 1e-9], 5))
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


@pytest.mark.parametrize("policy", LOW)
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

    def both(name):
        def loss(x, p):
            out = CHOICES[name](x @ w, p)
            return (out * (weights if out.ndim == 2 else weights[0])).sum()

        sides = grad(jmpx.autocast(loss, policy)), jmpx.autocast(grad(loss), policy), grad(loss)
        return [f(x, p) for f in sides]

    return together({name: functools.partial(both, name) for name in CHOICES})


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", CHOICES)
def test_gradients_of_maxima(name, policy):
    *got, expected = of_choices(policy)[name]
    assert_near(got, [expected, expected], 3e-3 if policy == "c=f16" else 3e-2)


# Powers.

PRE = np.float32([0.5, 1.5, -1.5, 148, -148, 300, 2_000, -2_000, 33_000, 60_000, -60_000])
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


def test_a_gelu_leaves_float16_and_keeps_no_more_than_in_bfloat16(rng):
    w, x = normal(rng, 16, 16), normal(rng, 64, 16)

    def loss(w):
        return (jax.nn.gelu(x @ w) @ w).sum()

    kept = [benchmark.residual_bytes(jmpx.autocast(loss, policy), w) for policy in LOW]
    assert kept[0] <= kept[1]
    gelu = jmpx.autocast(lambda w: jax.nn.gelu(x @ w), "c=f16", output=None)
    assert gelu(w).dtype == F16
    assert operand_dtypes("tanh", gelu, w) == {F16}
    assert operand_dtypes("integer_pow", gelu, w) == {F32}


# Arguments of NumPy.

NUMPY = {
    "one_hot": (lambda i: jax.nn.one_hot(i, 3, dtype=F32), [np.array([0, 2])]),
    "take": (lambda x, i: jnp.take(x, i, axis=0), [np.eye(3), np.array([1, 0])]),
    "relu": (jax.nn.relu, [np.linspace(-1, 1, 5)]),
    "matmul": (lambda x, w: x @ w, [np.eye(3), np.full((3, 3), 0.5, np.float32).astype(float)]),
    "with float32": (lambda x, n: x * n.astype(x.dtype), [np.float32([1, 2]), np.array([3, 4])]),
    "uint64": (lambda x: x + x, [np.array([2**40 + 1, 7], np.uint64)]),
    "complex128": (lambda x: x * x, [np.array([1j, 2.0])]),
    "numpy.int64": (lambda n: n * n, [np.int64(7)]),
    "numpy.float64": (lambda x: jnp.tanh(x), [np.float64(0.5)]),
    "numpy.bool": (lambda b: ~b, [np.bool_(True)]),
    "untouched": (lambda x: x, [np.arange(3)]),
    "in a tree": (lambda tree: tree["i"] + 1, [{"i": np.arange(3), "name": "a", "n": 3}]),
    "under grad": (
        lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x),
        [np.arange(3.0), np.array([0, 2])],
    ),
}


@pytest.mark.parametrize("policy", ["c=bf16", "c=full"])
@pytest.mark.parametrize("name", NUMPY)
def test_arguments_of_numpy_are_as_wide_as_jax_makes_them(name, policy):
    fn, args = NUMPY[name]
    for x64 in (False, True):
        with enable_x64() if x64 else jax.numpy_dtype_promotion("strict"):
            arrays = [jax.tree.map(lambda a: a if isinstance(a, str) else jnp.asarray(a), args)]
            expected = fn(*arrays[0])
            got = jmpx.autocast(fn, policy)(*args)
            assert got.dtype == expected.dtype
            np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-2)
            if policy == "c=full":
                np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("policy", ["c=bf16", "c=full"])
def test_an_embedding_of_numpy_integers(policy):
    module, tokens = nn.Embed(5, 2), np.array([[1, 4], [0, 1]])
    params = module.init(jax.random.key(0), tokens)
    got = jmpx.autocast(module.apply, policy)(params, tokens)
    np.testing.assert_allclose(got, module.apply(params, tokens), rtol=1e-2)


# Symbolic zeros.

SEEN: list = []  # per call of a rule, which tangents are symbolic zeros


def is_zero(tangent):
    return type(tangent) is SymbolicZero


@jax.custom_jvp
def scaled(x, y, n):
    return x * y * n.astype(F32), x + 1, n + 1


def scaled_rule(primals, tangents):
    SEEN.append(["scaled", *map(is_zero, tangents)])
    (x, y, n), (dx, dy, _) = primals, tangents
    terms = [t * other for t, other in ((dx, y), (dy, x)) if not is_zero(t)]
    second = zero_from_primal(x, symbolic_zeros=True) if is_zero(dx) else dx
    integer = np.zeros(n.shape, jax.dtypes.float0)
    return scaled(*primals), (sum(terms) * n.astype(F32), second, integer)


scaled.defjvp(scaled_rule, symbolic_zeros=True)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


def sine_rule(primals, tangents):
    SEEN.append(["sine", is_zero(tangents[0])])
    return sine(*primals), 3 * jnp.cos(primals[0]) * tangents[0]  # 3: it is this rule that is used


sine.defjvp(sine_rule, symbolic_zeros=True)


@eqx.filter_custom_jvp
def filtered(x, y, factor, *, nothing=None):
    return x * y * factor


@filtered.def_jvp
def _(primals, tangents, *, nothing=None):
    SEEN.append(["filtered", *(t is None for t in tangents)])
    (x, y, factor), (dx, dy, _) = primals, tangents
    terms = [t * other for t, other in ((dx, y), (dy, x)) if t is not None]
    return x * y * factor, sum(terms) * factor


def of_rules(x, y):
    h = x @ jnp.eye(2, dtype=F32)
    first, second, n = scaled(h, y, jnp.array(2))
    return (first + sine(second) + filtered(h, y, 3.0, nothing=None) + n.astype(F32)).sum()


SYMBOLIC = {
    "x": jax.grad,
    "y": lambda f: jax.grad(f, 1),
    "both": grad,
    "neither": lambda f: jax.grad(lambda x, y: f(lax.stop_gradient(x), y), 0),
    "jvp": lambda f: lambda x, y: jax.jvp(lambda y: f(x, y), (y,), (x,)),
    "jit": lambda f: jax.grad(lambda x, y: jax.jit(lambda x, y: f(x, y))(x, y), 1),
    "vmap": lambda f: lambda x, y: jax.vmap(jax.grad(f, 1))(x[None], y[None]),
    "checkpoint": lambda f: jax.grad(lambda x, y: jax.checkpoint(f)(x, y), 1),
    "scan": lambda f: jax.grad(
        lambda x, y: lax.scan(lambda c, _: (c + f(x, y), None), F32.type(0), None, length=2)[0], 1
    ),
    "jvp of grad": lambda f: lambda x, y: jax.jvp(lambda y: jax.grad(f, 1)(x, y), (y,), (x,)),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_zeros_reach_the_rules(name):
    x, y = jnp.full((2, 2), 0.5, F32), jnp.full((2, 2), 0.25, F32)

    def results(wrap_f=lambda f: f, wrap_g=lambda f: f):
        SEEN.clear()
        f = SYMBOLIC[name](wrap_f(lambda x, y: of_rules(x, y)))
        out = jax.jit(wrap_g(lambda x, y: f(x, y)))(x, y)
        return out, list(SEEN)

    expected, seen = results()
    assert len(seen) > 0 or name == "neither"
    for sides in ({"wrap_f": jmpx.autocast}, {"wrap_g": jmpx.autocast}):
        got, found = results(**sides)
        assert found == seen
        assert_near(got, expected, 2e-2)
