"""A whole loss under autocast: what is no parameter keeps its dtype where no product reads it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal
from helpers.autocast import assert_near, assert_ran, dtypes_of, under_autocast, values
from jax import lax

import jmpx


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
LOSSES = {
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


@pytest.mark.parametrize("name", LOSSES)
def test_predictions_meet_targets_in_float32(args, name):
    if name == "a target for each step":
        args = args[0], *(a.reshape(4, 2, 4) for a in args[1:])
    whole = under_autocast(LOSSES[name])
    assert_ran(whole, *args, dot_general="bfloat16", sub="float32")
    if name in ("while", "custom_jvp"):
        transform = (lambda f: f) if name == "while" else jax.grad
        assert_near(*values(args, transform(whole), transform(LOSSES[name])), 8e-2)


def attention(w, x, mask):
    scores = x @ w @ x.T + mask
    return jax.nn.softmax(scores) @ x


ON_THE_WAY = {
    "positions": lambda w, x, y: model(w, jnp.tanh(x @ w) + y).sum(),
    "an attention mask": lambda w, x, y: jnp.sum(attention(w, x, y @ y.T * 0) ** 2),
    "an attention mask that is an input": lambda w, x, y: attention(w, x[:4], y[:4]).sum(),
    "a dropout mask": lambda w, x, y: jnp.sum((jnp.tanh(x @ w) * y) @ w),
    "a jitted mask": lambda w, x, y: jnp.sum(jax.jit(jnp.multiply)(x @ w, y) @ w),
    "steps": lambda w, x, y: lax.scan(lambda c, y: ((c @ w + y) @ w, None), x[0], y)[0].sum(),
    "a second turn": lambda w, x, y: lax.fori_loop(
        0, 2, lambda _, c: ((c[1] + c[0] @ w) @ w, c[0]), (x, y)
    )[0].sum(),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_what_a_product_reads_yields_as_ever(args, name):
    whole, plain = under_autocast(ON_THE_WAY[name]), jmpx.autocast(ON_THE_WAY[name])
    assert dtypes_of(whole, *args) == dtypes_of(plain, *args)


def mlp(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(g, np.float64)) for g in jax.tree.leaves(tree)])


@pytest.mark.thorough
def test_a_whole_loss_is_as_exact_as_the_model_alone(rng):
    """The relative errors of gradients next to those of float32, the mean over draws."""
    sizes = ((8, 32), (32, 32), (32, 4))
    fast = jmpx.autocast(mlp)
    losses = {
        "float32": lambda p, x, y: mse(mlp(p, x), y),
        "alone": lambda p, x, y: mse(fast(p, x), y),
        "whole": under_autocast(lambda p, x, y: mse(mlp(p, x), y)),
        "rounded": jmpx.autocast(lambda p, x, y: mse(mlp(p, x), y)),
    }
    errors = []
    for _ in range(6):
        params = [(normal(rng, a, b) / a**0.5, normal(rng, b)) for a, b in sizes]
        x = normal(rng, 64, 8)
        y = mlp(params, x) + 0.01 * normal(rng, 64, 4)  # as late in training
        # One operation after the other: XLA fuses each program in another way.
        exact, *others = (flat(jax.grad(f)(params, x, y)) for f in losses.values())
        errors.append([np.linalg.norm(g - exact) / np.linalg.norm(exact) for g in others])
    alone, whole, rounded = np.mean(errors, axis=0)
    assert whole == pytest.approx(alone, rel=5e-3)
    assert rounded > 1.01 * alone


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
