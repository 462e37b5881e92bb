"""What must not be rounded: probabilities and constants near a bound, sides of comparisons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32, normal
from helpers.autocast import (
    LOW_DTYPES,
    activation,
    assert_near,
    both,
    dtypes_of,
    operand_dtypes,
    rows,
    together,
)
from jax import lax

import jmpx

SATURATING = ("logistic", "tanh", "erf", "erfc")


def ran(f, *args):
    """Returns the dtypes in which saturating functions run, forward and backward."""
    found = dtypes_of(f, *args)
    return set().union(*(found.get(name, set()) for name in SATURATING))


# Losses, as public programs write them. Each takes logits.


def cross_entropy(h):
    p = jax.nn.sigmoid(h)
    labels = (jnp.arange(h.size) % 2).reshape(h.shape).astype(h.dtype)
    return -(labels * jnp.log(p) + (1 - labels) * jnp.log(1 - p)).sum()


def squashed_log_prob(h):
    return (-(h**2) / 2 - jnp.log(1 - jnp.tanh(h) ** 2 + 1e-6)).sum()


def by_carry(loss):
    """Gives the loss what another turn of a loop computed."""

    def f(h):
        p = lax.fori_loop(0, 3, lambda i, p: jnp.where(i == 0, jax.nn.sigmoid(h), p), h)
        return loss(jnp.log(p) - jnp.log(1 - p))

    return f


def by_rule(loss):
    @jax.custom_jvp
    def f(h):
        return loss(h)

    f.defjvp(functools.partial(jax.jvp, loss))
    return f


def focal(h):
    p = jax.nn.sigmoid(h)
    return -(0.25 * (1 - p) ** 2 * jnp.log(p) + 0.75 * p**2 * jnp.log(1 - p)).sum()


def deviation(h):
    p = jax.nn.sigmoid(h)
    return lax.rsqrt(p - p**2).sum() + jnp.sqrt(1 - p).sum()


def odds(h):
    p = jnp.where(h > 0, jax.nn.sigmoid(h), 0.5)
    return (p / (1 - p)).mean()


def undone(h):
    return (jnp.arctanh(0.99 * jnp.tanh(h)) ** 2).sum()


def surest(h):
    return -jnp.log(1 - jnp.max(jax.nn.sigmoid(h), axis=-1)).sum()


def change_of_variables(h):
    return jnp.log1p(-jnp.square(jnp.tanh(h))).sum()


LOSSES = {
    "cross_entropy": (cross_entropy, "c=f16"),
    "focal": (jax.checkpoint(focal), "c=bf16"),
    "squashed_log_prob": (
        lambda h: lax.scan(lambda c, row: (c + squashed_log_prob(row), None), 0.0, h)[0],
        "c=f16",
    ),
    "change": (lambda h: jax.vmap(change_of_variables, 1)(h[:, None]).sum(), "c=bf16"),
    "undone": (lambda h: lax.cond(h[0, 0] < 99, undone, lambda h: h.sum(), h), "c=f16"),
    "probit": (jax.jit(lambda h: -jnp.log(jax.scipy.stats.norm.cdf(-h)).sum()), "c=bf16"),
    "surest": (by_rule(surest), "c=bf16"),
    "odds": (by_carry(odds), "c=bf16"),
    "deviation": (deviation, "c=f16"),
    "quantile": (lambda h: (lax.erf_inv(2 * jax.nn.sigmoid(h) - 1) ** 2).sum(), "c=f16"),
}
LOGITS = np.array([[-7.0, -2.5, 0.5], [6.5, 7.0, 5.0]], np.float32)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_probabilities_and_their_gradients(name):
    x, h = activation(LOGITS)
    loss, policy = LOSSES[name]
    cast = jmpx.autocast(lambda x: loss(h(x)), policy)
    assert "float32" in ran(cast, x)
    if name not in ("squashed_log_prob", "undone", "surest", "odds"):
        return
    both = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in (loss, cast)])
    (value, grad), (got, got_grad) = both(x)
    assert np.isfinite(value) and np.isfinite(grad).all()
    np.testing.assert_allclose(got, value, rtol=5e-3)
    np.testing.assert_allclose(got_grad, grad, rtol=2e-2, atol=2e-2 * np.abs(grad).max())


@pytest.mark.parametrize(
    "f, policy",
    [
        (jax.nn.sigmoid, "c=f16"),
        pytest.param(lax.erfc, "c=bf16", marks=pytest.mark.thorough),
    ],
)
def test_a_loss_outside_of_autocast(f, policy):
    x, h = activation(LOGITS / 2)
    cast = jmpx.autocast(lambda x: {"p": f(h(x))}, policy)

    def loss_of(f):
        return lambda x: -jnp.log(2 - f(x) - f(jnp.zeros(()))).sum()

    grads = jax.grad(loss_of(lambda x: cast(x)["p"] if x.ndim else f(x)))(x)
    expected = jax.grad(loss_of(f))(x)
    np.testing.assert_allclose(grads, expected, rtol=5e-3, atol=1e-6)  # float16 has subnormals


def lstm(x):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ jnp.ones((6, 12)) / 9, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (jnp.zeros(3), jnp.zeros(3)), x)


def normalized(h):
    """A gate before a norm, whose rsqrt reads it through a product of two arrays."""
    h = jax.nn.silu(h)
    return (h - h.mean()) * lax.rsqrt(h.var() + 1e-6)


GATES = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "glu": lambda h: jax.nn.glu(jnp.concatenate([h, h], -1)),
    "normalized": normalized,
    "hidden": lambda h: jnp.tanh(h) @ jnp.ones((3, 2)),
    "jit": jax.jit(lambda h: jax.jit(jax.nn.sigmoid)(h) * h),
    "squeeze": lambda h: h * jax.nn.sigmoid(h.mean(0) @ jnp.ones((3, 3))),
    "scan": lambda h: lax.scan(lambda c, row: (c, jax.nn.silu(row)), 0.0, h)[1],
    "exponential": lambda h: jax.nn.softmax(30 * jnp.tanh(h / 30)) @ h.T,
}


@pytest.mark.parametrize("name", GATES)
def test_gates_stay_in_16_bits(name):
    x, h = activation(LOGITS)
    policy = [*LOW_DTYPES][len(name) % 2]
    f = jmpx.autocast(lambda x: GATES[name](h(x)), policy)
    low = {LOW_DTYPES[policy].name}
    assert ran(f, x) == low
    assert ran(jax.grad(lambda x: f(x).sum()), x) == low


def test_an_lstm_stays_in_16_bits(rng):
    found = dtypes_of(jmpx.autocast(lstm), normal(rng, 5, 3))
    # What a loop carries stays float32, and so does the cell, of which one tanh is taken.
    assert found["logistic"] == {"bfloat16"}
    assert found["tanh"] == {"bfloat16", "float32"}


def test_a_rule_goes_before(rng):
    w, x = normal(rng, 3, 3), normal(rng, 3, 3)
    f = jmpx.autocast(lambda x: jax.nn.sigmoid(x @ w), "c=bf16; op.logistic: bf16")
    assert ran(f, x) == {"bfloat16"}


# Constants.

EPSILON = jnp.float32(1e-7)


def below_one(kind):
    """Returns 1 - 1e-7 as programs have it."""
    return {
        "number": 1 - 1e-7,
        "NumPy": np.float32(1 - 1e-7),
        "array": np.array([1 - 1e-7, 0.5, 1 - 1e-7, 0.999], np.float32),
        "computed": 1 - EPSILON,
        "filled": jnp.full(4, 1 - 1e-7),
        "negated": -jnp.float32(-1 + 1e-7),
    }[kind]


CLAMPS = {
    "clip": lambda h, top: jnp.clip(h, np.finfo(np.float32).tiny, top),
    "clamp": lambda h, top: lax.clamp(jnp.full_like(h, 1e-9), h, jnp.broadcast_to(top, h.shape)),
    "min": lambda h, top: jnp.minimum(jnp.maximum(h, 1e-9), top),
    "where": lambda h, top: jnp.where(h < 0.5, jnp.maximum(h, 1e-9), jnp.where(h > top, top, h)),
    "sum": lambda h, top: (h + 1e-9) + (top - 1.5 * h) / 2,
}


PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda h: lax.scan(lambda c, row: (c, f(row)), 0.0, h)[1],
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
}


def test_constants_that_would_become_a_bound():
    x, h = activation(np.array([[0, 1, 0.5, 1], [1, 0.25, 0, 1]], np.float32))

    def both(clamp, kind, place, policy):
        def log_of(h):
            p = CLAMPS[clamp](h, below_one(kind))
            return jnp.log(p) + jnp.log(1 - p)

        f = PLACES[place](log_of)
        return jmpx.autocast(lambda x: f(h(x)), policy)(x), f(x)

    cases = [
        ("clip", "number", "plain", "c=f16"),
        ("clamp", "NumPy", "jit", "c=bf16"),
        ("min", "array", "vmap", "c=f16"),
        ("where", "computed", "plain", "c=bf16"),
        ("sum", "filled", "checkpoint", "c=f16"),
        ("clip", "negated", "scan", "c=bf16"),
    ]
    for case, (got, expected) in together({c: functools.partial(both, *c) for c in cases}).items():
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(got, expected, rtol=3e-4, err_msg=str(case))


@pytest.mark.parametrize("policy, constant", [("c=bf16", 0.999), ("c=f16", 1e-8)])
def test_clamps_by_other_constants_stay_in_16_bits(policy, constant):
    x, h = activation(LOGITS)
    low = [
        jax.nn.relu6,
        lambda h: jnp.clip(h, -1, 1),
        lambda h: jnp.clip(h, -20, 2),
        lambda h: jnp.maximum(h, 0.99),
        lambda h: (h + constant) * h,  # an epsilon is lost here, as the docstring says
    ]
    for f in (*low, lambda h: jnp.maximum(h, constant)):
        cast = jmpx.autocast(lambda x, f=f: f(h(x)), policy, output=None)
        assert jax.eval_shape(cast, x).dtype == (LOW_DTYPES[policy] if f in low else F32)


# Comparisons, and maxima, which have the gradients of float32.

COMPARISONS = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}
COMPARISONS |= {"gt": "greater", "ge": "greater_equal"}


@pytest.mark.parametrize("policy", rows(LOW_DTYPES, "c=f16"))
def test_comparisons_round_neither_side(rng, policy):
    numbers = np.array([1.0, 0.5, -2.0, 1.5, 0.0])
    sides = numbers * (1 + rng.choice([-1e-4, 0, 1e-4], 5)) + rng.choice([0, 1e-9], 5)
    sides = sides.astype(np.float32)
    x, h = activation(numbers)

    def f(x, traced):
        compare = {name: getattr(jnp, function) for name, function in COMPARISONS.items()}
        both = {name: (c(h(x)[0], traced), c(traced, h(x)[0])) for name, c in compare.items()}
        constants = {
            name: jnp.stack([c(h(x)[0, i], float(side)) for i, side in enumerate(sides[:2])])
            for name, c in compare.items()
        }
        return both, constants

    both, constants = jax.jit(jmpx.autocast(f, policy))(x, jnp.asarray(sides))
    for name, function in COMPARISONS.items():
        compare = getattr(np, function)
        np.testing.assert_array_equal(both[name][0], compare(numbers, sides))
        np.testing.assert_array_equal(both[name][1], compare(sides, numbers))
        np.testing.assert_array_equal(constants[name], compare(numbers, sides)[:2])
        assert operand_dtypes(name, jmpx.autocast(f, policy), x, sides) == {F32}


def test_draws_with_probability_one_are_true():
    x, h = activation([[1.0, 0.0]])
    draw = jmpx.autocast(lambda x, key: jax.random.bernoulli(key, h(x), (20_000, 2)))
    got = jax.jit(draw)(x, jax.random.key(0))
    np.testing.assert_array_equal(got.mean(0, dtype=F32), [1, 0])


CHOICES = {
    "minimum": lambda h, p: jnp.minimum(p, h),
    "scatter_max": lambda h, p: h.at[np.array([2, 0])].max(p[:2]),
    "reduce": lambda h, p: jnp.max(h * p, 0),
    "ties": lambda h, p: jnp.maximum(h, jnp.where(p > 0, h, p)),
    "in scan": lambda h, p: lax.scan(lambda c, r: (c, jnp.maximum(r, p[0])), 0, h)[1],
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


@pytest.mark.parametrize("policy", rows(LOW_DTYPES, "c=f16"))
def test_gradients_of_maxima(policy):
    for name, (*got, expected) in of_choices(policy).items():
        assert_near(got, [expected, expected], 3e-3 if policy == "c=f16" else 3e-2), name
