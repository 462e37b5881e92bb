"""What must not be rounded: numbers near a bound, sides of comparisons, targets of a whole loss."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import F32, normal
from helpers.autocast import (
    LOW_DTYPES,
    activation,
    assert_near,
    assert_ran,
    both,
    dtypes_of,
    together,
    under_autocast,
    values,
)
from jax import lax

import jmpx

SATURATING = ("logistic", "tanh", "erf", "erfc")


def ran(f, *args):
    """Returns the dtypes in which saturating functions run, forward and backward."""
    found = dtypes_of(f, *args)
    return set().union(*(found.get(name, set()) for name in SATURATING))


# Losses, as public programs write them. Each takes logits.


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


@pytest.mark.thorough
def test_a_loss_outside_of_autocast():
    x, h = activation(LOGITS / 2)
    f = jax.nn.sigmoid
    cast = jmpx.autocast(lambda x: {"p": f(h(x))}, "c=f16")

    def loss_of(f):
        return lambda x: -jnp.log(2 - f(x) - f(jnp.zeros(()))).sum()

    grads = jax.grad(loss_of(lambda x: cast(x)["p"] if x.ndim else f(x)))(x)
    expected = jax.grad(loss_of(f))(x)
    np.testing.assert_allclose(grads, expected, rtol=5e-3, atol=1e-6)  # float16 has subnormals


def normalized(h):
    """A gate before a norm, whose rsqrt reads it through a product of two arrays."""
    h = jax.nn.silu(h)
    return (h - h.mean()) * lax.rsqrt(h.var() + 1e-6)


GATES = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "normalized": normalized,
    "hidden": lambda h: jnp.tanh(h) @ jnp.ones((3, 2)),
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


def test_comparisons_round_neither_side(rng):
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

    cast = jmpx.autocast(f, "c=f16")
    both, constants = jax.jit(cast)(x, jnp.asarray(sides))
    for name, function in COMPARISONS.items():
        compare = getattr(np, function)
        np.testing.assert_array_equal(both[name][0], compare(numbers, sides))
        np.testing.assert_array_equal(both[name][1], compare(sides, numbers))
        np.testing.assert_array_equal(constants[name], compare(numbers, sides)[:2])
        assert dtypes_of(cast, x, sides)[name] == {"float32"}


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


def test_gradients_of_maxima():
    x, p, w, weights = (normal(np.random.default_rng(3), 4, 3, 3)[i] for i in range(4))

    def sides_of(name):
        def loss(x, p):
            out = CHOICES[name](x @ w, p)
            return (out * (weights if out.ndim == 2 else weights[0])).sum()

        sides = both(jmpx.autocast(loss, "c=f16")), jmpx.autocast(both(loss), "c=f16"), both(loss)
        return [f(x, p) for f in sides]

    found = together({name: functools.partial(sides_of, name) for name in CHOICES})
    for *got, expected in found.values():
        assert_near(got, [expected, expected], 3e-3)


# A whole loss under autocast: what is no parameter keeps its dtype where no product reads it.


def model(w, x):
    return jnp.tanh(x @ w) @ w + w[0]


def mse(pred, y):
    return jnp.mean((pred - y) ** 2)


def branches(w, x, y):
    return lax.cond(x[0, 0] > 0, lambda: mse(model(w, x), y), lambda: mse(-model(w, x), y))


def target_per_step(w, x, y):
    def step(carry, inputs):
        h, loss = carry
        x, y = inputs
        h = jnp.tanh(h @ w + x)
        return (h, loss + mse(h @ w, y)), None

    return lax.scan(step, (x[0], 0.0), (x, y))[0][1]


def until_small(w, x, y):
    """The loop's first carry meets no product before its second turn."""

    def body(carry):
        i, a, b, loss = carry
        return i + 1, b * 0.5, a @ w, loss + jnp.sum((a @ w - y) ** 2)

    return lax.while_loop(lambda c: c[0] < 3, body, (0, x, x, 0.0))[3]


@jax.custom_jvp
def doubled(pred, y):
    return mse(pred, y)


@doubled.defjvp
def _(primals, tangents):
    (pred, y), (dpred, _) = primals, tangents
    return mse(pred, y), jnp.sum(4 * (pred - y) * dpred) / y.size


@jax.custom_vjp
def sign(pred, y):
    return mse(pred, y)


sign.defvjp(
    lambda pred, y: (mse(pred, y), (pred, y)), lambda r, g: (g * jnp.sign(r[0] - r[1]), None)
)


def noise(w, x, y):
    eps = jax.random.normal(jax.random.key(jnp.int32(y[0, 0])), x.shape)
    return mse(model(w, 0.6 * x + 0.8 * eps), eps)


# Losses of a matrix of parameters, an input and a target, in which all that is subtracted is a
# target from a prediction.
WHOLE_LOSSES = {
    "both are jitted": jax.jit(lambda w, x, y: jax.jit(mse)(jax.jit(model)(w, x), y)),
    "remat": lambda w, x, y: jax.checkpoint(lambda w: mse(model(w, x), y))(w),
    "branches": branches,
    "a target for each step": target_per_step,
    "while": until_small,
    "custom_jvp": lambda w, x, y: doubled(model(w, x), y),
    "custom_vjp": lambda w, x, y: sign(model(w, x), y),
    "vmap": lambda w, x, y: jax.vmap(lambda x, y: mse(model(w, x[None]), y))(x, y).mean(),
    "a scaled target": lambda w, x, y: mse(model(w, x), y.T.reshape(y.shape) / 3),
    "a map of targets": lambda w, x, y: lax.map(lambda p: mse(*p), (model(w, x), y)).mean(),
    "a jitted autoencoder": jax.jit(lambda w, x, y: mse(jax.jit(model)(w, x), x)),
    "noise": noise,
    "a teacher": lambda w, x, y: mse(model(w, x), lax.stop_gradient(model(y[:4], x))),
    "a regularizer": lambda w, x, y: mse(model(w, x), y) + 0.1 * jnp.sum(w**2),
}


@pytest.fixture
def args(rng):
    return normal(rng, 4, 4), normal(rng, 8, 4), normal(rng, 8, 4)


@pytest.mark.parametrize("name", WHOLE_LOSSES)
def test_predictions_meet_targets_in_float32(args, name):
    if name == "a target for each step":
        args = args[0], *(a.reshape(4, 2, 4) for a in args[1:])
    whole = under_autocast(WHOLE_LOSSES[name])
    assert_ran(whole, *args, dot_general="bfloat16", sub="float32")
    if name in ("while", "custom_jvp"):
        transform = (lambda f: f) if name == "while" else jax.grad
        found, expected = values(args, transform(whole), transform(WHOLE_LOSSES[name]))
        assert_near(found, expected, 8e-2)


def attention(w, x, mask):
    scores = x @ w @ x.T + mask
    return jax.nn.softmax(scores) @ x


ON_THE_WAY = {
    "positions": lambda w, x, y: model(w, jnp.tanh(x @ w) + y).sum(),
    "an attention mask": lambda w, x, y: jnp.sum(attention(w, x, y @ y.T * 0) ** 2),
    "a dropout mask": lambda w, x, y: jnp.sum((jnp.tanh(x @ w) * y) @ w),
    "steps": lambda w, x, y: lax.scan(lambda c, y: ((c @ w + y) @ w, None), x[0], y)[0].sum(),
    "a second turn": lambda w, x, y: lax.fori_loop(
        0, 2, lambda _, c: ((c[1] + c[0] @ w) @ w, c[0]), (x, y)
    )[0].sum(),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_what_a_product_reads_yields_as_ever(args, name):
    whole, plain = under_autocast(ON_THE_WAY[name]), jmpx.autocast(ON_THE_WAY[name])
    assert dtypes_of(whole, *args) == dtypes_of(plain, *args)


def test_the_backward_pass_keeps_no_more(rng):
    """A transformer's loss: its masks and positions are inputs, and yield as before."""

    def loss_fn(w, batch):
        x = batch["x"] + batch["positions"]
        for _ in range(2):
            x = x + attention(w, x, batch["mask"]) * batch["drop"]
            x = x + jax.nn.gelu(x @ w) @ w
        return jnp.sum(mse(x @ w, batch["y"]) * batch["weights"])

    batch = {name: normal(rng, 16, 16) for name in ("x", "positions", "mask", "drop", "y")}
    batch["weights"] = normal(rng, 16)
    w = normal(rng, 16, 16)

    def kept(f):
        pullback = jax.eval_shape(lambda w: jax.vjp(lambda w: f(w, batch), w)[1], w)
        return sum(y.size * y.dtype.itemsize for y in jax.tree.leaves(pullback))

    assert kept(under_autocast(loss_fn)) <= kept(jmpx.autocast(loss_fn)) + batch["y"].nbytes
    assert kept(under_autocast(loss_fn)) < 0.8 * kept(loss_fn)


def test_what_is_closed_over_and_what_is_of_numpy(args):
    w, x, y = args
    assert_ran(under_autocast(lambda w: mse(model(w, x), y)), w, sub="float32")
    assert_ran(under_autocast(lambda w: mse(model(w, x), 3.0)), w, sub="bfloat16")
    given = np.asarray(y, np.float64)
    assert_ran(under_autocast(lambda w, y: mse(model(w, x), y)), w, given, sub="float32")
    jitted = jax.jit(lambda w, x, y: under_autocast(lambda w: mse(model(w, x), y))(w))
    assert_ran(jitted, w, x, y, sub="float32")


def test_a_target_may_be_the_array_of_the_parameters(rng):
    w = normal(rng, 4, 4)
    whole = under_autocast(lambda w, target, x: mse(x @ w, target))
    np.testing.assert_array_equal(whole(w, w, w), whole(w, w.copy(), w.copy()))
    assert_ran(lambda w: whole(w, w, w), w, sub="float32")
    assert_ran(lambda _: whole(w, w, w), w, sub="float32")


def test_saving_changes_no_dtype(args):
    whole = under_autocast(lambda w, x, y: mse(model(w, x), x), ",save=products")
    assert_ran(whole, *args, dot_general="bfloat16", sub="float32")


def test_modules(rng):
    """Parameters of NNX and Equinox yield in the end, too: a bias leaves 16 bits as they are."""
    x, y = normal(rng, 8, 4), normal(rng, 8, 3)
    whole = under_autocast(lambda model, x, y: mse(jnp.abs(jax.vmap(model)(x)), y))
    linears = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), eqx.nn.Linear(4, 3, key=jax.random.key(0))
    for linear in linears:
        run = lambda x, y, linear=linear: whole(linear, x, y)  # noqa: E731
        assert_ran(run, x, y, dot_general="bfloat16", abs="bfloat16", sub="float32")
