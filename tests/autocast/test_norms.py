"""Norms run in float32, and what reads their result reads it rounded, once."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32, exactly, leniently, normal
from helpers.autocast import PRODUCTS
from helpers.jaxprs import trace
from helpers.op_by_op import one_by_one
from jax import lax

import jmpx
from jmpx._jaxprs.equations import PICKS, RESHAPES

# Private: they say how an equation runs what it holds, in all versions of JAX.
from jmpx._jaxprs.inner import inner_of, walk

SHAPE = (4, 6, 6, 8)  # an image


def by_hand(axes, running=False):
    """A norm as users write it."""

    def norm(h, s, b, mean, var):
        if not running:
            mean = h.mean(axes, keepdims=True)
            var = ((h - mean) ** 2).mean(axes, keepdims=True)
        return (h - mean) * lax.rsqrt(var + 1e-5) * s + b

    return norm


def rms(h, s, *_):
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) * s


def haiku(make, **running):
    @leniently
    def norm(h, s, *_):
        init, _ = hk.transform_with_state(lambda h: make()(h, **dict.fromkeys(running, True)))
        _, apply = hk.transform_with_state(lambda h: make()(h, **running))
        given = jax.tree.map(
            lambda leaf: s.reshape(leaf.shape) if leaf.size == s.size else jnp.zeros_like(leaf),
            init(None, h),
        )
        return apply(*given, None, h)[0]

    return norm


def linen(make):
    def norm(h, s, b, mean, var):
        variables = {"params": {"scale": s, "bias": b}, "batch_stats": {"mean": mean, "var": var}}
        return make().apply(variables, h, mutable=["batch_stats"])[0]

    return norm


def of_nnx(make):
    def norm(h, s, b, mean, var):
        module = make(nnx.Rngs(0))
        given = {"scale": s, "bias": b, "mean": mean, "var": var}
        for name, vector in given.items():
            variable = getattr(module, name, None)
            if isinstance(variable, nnx.Variable):
                variable[...] = vector
        return module(h)

    return norm


def equinox(make):
    def norm(h, s, b, *_):
        module = eqx.tree_at(
            lambda m: (m.weight, m.bias), make(), (s, b), is_leaf=lambda x: x is None
        )
        for _ in range(3):
            module = jax.vmap(module)
        return module(h)

    return norm


def equinox_groups(h, s, b, *_):
    module = eqx.nn.GroupNorm(2, 8)
    module = eqx.tree_at(lambda m: (m.weight, m.bias), module, (s, b))
    return jnp.moveaxis(jax.vmap(module)(jnp.moveaxis(h, -1, 1)), 1, -1)


def equinox_batch(is_training):
    def norm(h, s, b, mean, var):
        module, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="ema")
        module = eqx.tree_at(lambda m: (m.weight, m.bias), module, (s, b))
        state = state.set(module.ema_state_index, (mean, var))
        state = state.set(module.ema_first_time_index, jnp.array(False))
        module = eqx.nn.inference_mode(module, not is_training)
        run = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return jnp.moveaxis(run(jnp.moveaxis(h, -1, 1), state)[0], 1, -1)

    return norm


NORMS = {
    "layer": by_hand(-1),
    "batch": by_hand((0, 1, 2)),
    "running": by_hand((), running=True),
    "rms": rms,
    "haiku LayerNorm": haiku(lambda: hk.LayerNorm(-1, True, True)),
    "haiku RMSNorm": haiku(lambda: hk.RMSNorm(-1)),
    "haiku GroupNorm": haiku(lambda: hk.GroupNorm(2)),
    "haiku BatchNorm": haiku(lambda: hk.BatchNorm(True, True, 0.9), is_training=True),
    "haiku BatchNorm, running": haiku(lambda: hk.BatchNorm(True, True, 0.9), is_training=False),
    "linen LayerNorm": linen(nn.LayerNorm),
    "linen RMSNorm": linen(nn.RMSNorm),
    "linen GroupNorm": linen(lambda: nn.GroupNorm(2)),
    "linen BatchNorm": linen(lambda: nn.BatchNorm(use_running_average=False)),
    "linen BatchNorm, running": linen(lambda: nn.BatchNorm(use_running_average=True)),
    "nnx LayerNorm": of_nnx(lambda rngs: nnx.LayerNorm(8, rngs=rngs)),
    "nnx RMSNorm": of_nnx(lambda rngs: nnx.RMSNorm(8, rngs=rngs)),
    "nnx GroupNorm": of_nnx(lambda rngs: nnx.GroupNorm(8, 2, rngs=rngs)),
    "nnx BatchNorm": of_nnx(lambda rngs: nnx.BatchNorm(8, rngs=rngs)),
    "nnx BatchNorm, running": of_nnx(
        lambda rngs: nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
    ),
    "equinox LayerNorm": equinox(lambda: eqx.nn.LayerNorm(8)),
    "equinox RMSNorm": equinox(lambda: eqx.nn.RMSNorm(8)),
    "equinox GroupNorm": equinox_groups,
    "equinox BatchNorm": equinox_batch(True),
    "equinox BatchNorm, running": equinox_batch(False),
}
READERS = {
    "relu": lambda y, h: jax.nn.relu(y),
    "silu": lambda y, h: jax.nn.silu(y),
    "gelu": lambda y, h: jax.nn.gelu(y),
    "residual": lambda y, h: y + h,
    "slice": lambda y, h: y[:, ::2],
    "transpose": lambda y, h: y.swapaxes(0, 1),
    "maximum": lambda y, h: jnp.maximum(y, 0),
    "jit": lambda y, h: jax.jit(jnp.abs)(y),
    "checkpoint": lambda y, h: jax.checkpoint(lambda y: jax.nn.silu(y))(y),
    "branch": lambda y, h: lax.cond(h[0, 0, 0, 0] > 0, jax.nn.relu, jax.nn.silu, y),
    "scan": lambda y, h: lax.scan(lambda c, y: (c, jax.nn.silu(y)), None, y)[1],
}


def arguments(rng):
    x, w = normal(rng, *SHAPE), normal(rng, 8, 8) / 3
    scale, bias, mean = 1 + normal(rng, 8) / 4, normal(rng, 8), normal(rng, 8)
    return x, w, scale, bias, mean, normal(rng, 8) ** 2 + 0.5


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_runs_in_float32_and_is_rounded_once(rng, norm):
    x, w, *given = arguments(rng)

    def f(x, w, *given):
        h = x @ w
        y = NORMS[norm](h, *given)
        results = {name: reader(y, h) for name, reader in READERS.items()}
        return h, results, [result @ w for result in results.values()]

    h, results, _ = jax.eval_shape(jmpx.autocast(f, output=None), x, w, *given)
    assert h.dtype == BF16
    assert {name for name, result in results.items() if result.dtype == F32} == set()
    h, result, _ = jmpx.autocast(
        lambda *args: (
            *(h := args[0] @ args[1],),
            y := NORMS[norm](h, *args[2:])[::2],
            y @ args[1],
        ),
        output=None,
    )(x, w, *given)
    expected = NORMS[norm](h.astype(F32), *given)[::2]
    error = np.abs(np.asarray(result, F32) - expected)
    # Half of a bfloat16's last digit, and what sums in another order make of it.
    assert (error <= 0.00391 * np.abs(expected) + 1e-5).all(), error.max()


def squared_distances(h, w):
    return (h * h).sum(-1, keepdims=True) - 2 * (h @ w) + (w * w).sum(0)


def sinkhorn(h, w):
    shares = jnp.exp(h / 0.3)
    for _ in range(2):
        shares = shares / shares.sum(0)
        shares = shares / shares.sum(1, keepdims=True)
    return shares @ w


def sinkhorn_of_logarithms(h, w):
    for _ in range(2):
        h = h - jax.nn.logsumexp(h, 0, keepdims=True)
        h = h - jax.nn.logsumexp(h, 1, keepdims=True)
    return jnp.exp(jnp.where(h > -9, h, -9)) @ w


def router(h, w):
    shares, _ = lax.top_k(jax.nn.softmax(h), 2)
    shares = shares / shares.sum(-1, keepdims=True)
    experts = h @ jnp.stack([w, 2 * w])
    return (shares.T[:, :, None] * experts).sum(0) @ w


def vicreg(h, w):
    centered = layer_norm(h, 0)
    spread = jnp.sqrt((centered**2).mean(0) + 1e-4)
    return ((centered.T @ centered / 8) ** 2).sum() + jax.nn.relu(1 - spread).mean()


def layer_norm(h, axis=-1):
    h = h - h.mean(axis, keepdims=True)
    return h * lax.rsqrt((h**2).mean(axis, keepdims=True) + 1e-5)


def unit(h):
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def beside_a_product(h, w):
    y = layer_norm(h)
    return jnp.abs(y - 0.3).mean() + (y @ w).sum()


def log_softmax(h, w):
    h = layer_norm(h) @ w
    h = h - jnp.log(jnp.exp(h).sum(-1, keepdims=True))
    return jnp.exp(jnp.where(jnp.tri(8) > 0, h, -9)) @ w


def linear_attention(h, w):
    q, k = jax.nn.relu(h) + 1, jax.nn.relu(-h) + 1
    return (q @ (k.T @ h) / (q * k.sum(0)).sum(-1, keepdims=True)) @ w


def rotated(h, w):
    angles = jnp.arange(8.0)[:, None] * 10 ** -jnp.linspace(0, 1, 4)
    a, b = jnp.split(h, 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b, a * jnp.sin(angles) + b], -1) @ w


# Programs without a norm in front of an activation. They take an activation and a weight.
NOT_ROUNDED = {
    "softmax": lambda h, w: jax.nn.softmax(h) @ w,
    "softmax of a norm": lambda h, w: jax.nn.softmax(layer_norm(h)) @ w,
    "masked log-softmax": lambda h, w: (
        jnp.exp(jnp.where(jnp.tri(8) > 0, h - jax.nn.logsumexp(h, -1, keepdims=True), -9)) @ w
    ),
    "log-softmax without a shift": log_softmax,
    "cross entropy": lambda h, w: -jax.nn.log_softmax(layer_norm(h) @ w)[:, 0].mean(),
    "squared error of a norm": lambda h, w: ((layer_norm(h) - 0.3) ** 2).mean() + (h @ w).sum(),
    "absolute error of a norm": lambda h, w: jnp.abs(layer_norm(h) - h).mean() + (h @ w).sum(),
    "beside a product": beside_a_product,
    "sum of products": lambda h, w: jax.nn.relu((h[:, :, None] * w).sum(1) + h) @ w,
    "vicreg": vicreg,
    "cosine": lambda h, w: unit(h) @ unit(h @ w).T,
    "cosine by a sum": lambda h, w: (unit(h) * unit(h @ w)).sum(-1, keepdims=True) * h @ w,
    "temperature": lambda h, w: jax.nn.softmax(unit(h) @ w * jnp.exp(w[0, 0])) @ w,
    "gate": lambda h, w: h * jax.nn.softmax(h)[:, :1] @ w,
    "squeezed": lambda h, w: h * jax.nn.sigmoid(h.mean(0) @ w) @ w,
    "rotated": rotated,
    "moving average": lambda h, w: (h - (0.9 * w[0] + 0.1 * h.mean(0))) @ w,
    "cumulative sum": lambda h, w: (jnp.cumsum(h, 0) / 8) @ w,
    "weight norm": lambda h, w: h @ (w / jnp.linalg.norm(w, axis=0)),
    "linear attention": linear_attention,
    "router": router,
    "sinkhorn": sinkhorn,
    "sinkhorn of logarithms": sinkhorn_of_logarithms,
    "nearest": lambda h, w: jax.nn.one_hot(squared_distances(h, w).argmin(-1), 8) @ w,
    "nearest two": lambda h, w: -lax.top_k(-squared_distances(h, w), 2)[0] @ w[:2],
}


def readers_of_rounded(jaxpr):
    """Names of operations other than products and moves that read rounded numbers.

    Those of parameters, which reach no product before they are rounded, are left out.
    """
    found = set()

    def step(eqn, inputs):
        name, inner = eqn.primitive.name, inner_of(eqn)
        if inner is not None:
            return [
                *map(
                    max, *(walk(j, inputs[inner.first :], step, constant) for j in inner.jaxprs * 2)
                )
            ]
        kind = max(inputs, default=0)
        if name == "convert_element_type":
            is_rounded = (
                kind and eqn.invars[0].aval.dtype == F32 and eqn.outvars[0].aval.dtype == BF16
            )
            return [2 if is_rounded else kind]
        if name in PRODUCTS:
            kind = 1
        elif name not in RESHAPES | PICKS and kind == 2:
            found.add(name)
            kind = 1
        return [kind] * len(eqn.outvars)

    def constant(*_):
        return 0

    walk(jaxpr, [0] * len(jaxpr.in_avals), step, constant)
    return found


@pytest.mark.parametrize("name", NOT_ROUNDED)
def test_nothing_but_products_reads_rounded_numbers(rng, name):
    f = NOT_ROUNDED[name]
    jaxpr = trace(jmpx.autocast(lambda x, w: f(x @ w, w)), normal(rng, 8, 8), normal(rng, 8, 8))
    assert readers_of_rounded(jaxpr) == set()


def test_what_reads_rounded_numbers_is_found(rng):
    f = jmpx.autocast(lambda x, w: jax.nn.silu(layer_norm(x @ w)) @ w)
    jaxpr = trace(f, normal(rng, 8, 8), normal(rng, 8, 8))
    assert readers_of_rounded(jaxpr) == {"logistic", "mul"}


def network(norm, dtype=F32):
    """A loss of layers with norms of a scale and a bias between them."""

    def loss_fn(layers, x):
        for w, scale, bias in layers:
            x = jnp.tanh(norm((x.astype(dtype) @ w.astype(dtype)), scale, bias))
        return x.astype(F32).mean()

    return loss_fn


def affine(h, scale, bias):
    return layer_norm(h) * scale + bias


def rounded_after(h, scale, bias):
    return affine(h.astype(F32), scale, bias).astype(BF16)


def rounded_before(h, scale, bias):
    return layer_norm(h.astype(F32)).astype(BF16) * scale.astype(BF16) + bias.astype(BF16)


def test_gradients_are_those_of_a_norm_that_is_rounded_after_its_scale_and_bias(rng):
    def layer():
        return normal(rng, 32, 32) / 5, 1 + normal(rng, 32), 2 + normal(rng, 32)

    layers, x = [layer() for _ in range(4)], normal(rng, 64, 32)
    losses = {
        "float32": network(affine),
        "autocast": jmpx.apply_policy(network(affine), "by=operations,c=bf16"),
        "after": network(rounded_after, BF16),
        "before": network(rounded_before, BF16),
    }
    gradients = exactly(lambda *args: {k: jax.grad(f)(*args) for k, f in losses.items()})(layers, x)
    flat = {k: jax.flatten_util.ravel_pytree(each)[0] for k, each in gradients.items()}
    errors = {k: float(jnp.linalg.norm(each - flat["float32"])) for k, each in flat.items()}
    assert errors["autocast"] < 1.02 * errors["after"] < 0.95 * errors["before"], errors


LAYERS = {
    "dense": (lambda x, w: x + jax.nn.relu(x @ w) @ w, [2, 2, 3, 2]),
    "attention": (lambda x, w: x + jax.nn.softmax(x @ (x @ w).T) @ x, [2, 2, 3, 2]),
    "norm first": (lambda x, w: x + jax.nn.relu(layer_norm(x) @ w) @ w, [3, 3, 3, 3]),
    "norm last": (lambda x, w: layer_norm(x + jax.nn.relu(x @ w) @ w), [3, 3, 3, 3]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_alike_are_traced_as_often_as_without_norms(rng, name):
    # The first one reads an input. In the others, what reaches no product may differ.
    function, counts = LAYERS[name]
    layer = jax.jit(lambda x, w: function(x, w))

    def net(weights, x):
        for w in weights:
            x = layer(x, w)
        return x

    def with_head(weights, x):
        return net(weights, x) @ weights[0]

    def traced(f):
        jaxpr = trace(f, [normal(rng, 8, 8) for _ in range(5)], normal(rng, 8, 8))
        return len({id(eqn.params["jaxpr"]) for eqn in jaxpr.eqns if "jaxpr" in eqn.params})

    losses = [lambda *args, f=f: jnp.sin(f(*args)).sum() for f in (net, with_head)]
    found = [traced(jmpx.autocast(f)) for f in (net, with_head)]
    assert found + [traced(jmpx.apply_policy(f, "by=operations,c=bf16")) for f in losses] == counts


@pytest.mark.parametrize("reader", [jax.nn.silu, jax.nn.relu, lambda y: y - y[::-1]])
def test_in_float16_a_norm_may_exceed_what_float16_holds(rng, reader):
    w, x = normal(rng, 8, 8), normal(rng, 4, 8)

    def f(w, x, scale):
        y = layer_norm(x @ w) * scale
        return (reader(y) / scale) @ w

    result, expected = (g(w, x, jnp.float32(1e6)) for g in (jmpx.autocast(f, "c=f16"), f))
    np.testing.assert_allclose(result, expected, atol=0.02 * np.abs(expected).max())


def in_later_pieces(w, x):
    h = jnp.sin(x @ w)
    skip = layer_norm(h) * w[0]
    for _ in range(20):
        h = jnp.sin(h @ w)
    h = jnp.concatenate([h, jax.nn.silu(skip)], 1) @ jnp.concatenate([w, w])
    return (jnp.sin(jnp.sin(h) @ w) @ w).sum()


def in_checkpoints(w, x):
    y = jax.checkpoint(layer_norm)(jnp.sin(x @ w))
    return jax.checkpoint(lambda w, y: (jax.nn.silu(y) @ w + y) @ w)(w, y).sum()


@pytest.mark.parametrize(
    "loss_fn, more", [(in_later_pieces, ",save=products"), (in_checkpoints, "")]
)
def test_a_checkpoint_saves_a_norm_rounded(rng, loss_fn, more):
    w, x = normal(rng, 8, 8), normal(rng, 256, 8)
    saving = jmpx.apply_policy(loss_fn, f"by=operations,c=bf16{more}")
    jaxpr = trace(lambda *args: jax.tree.leaves(jax.vjp(saving, *args)[1]), w, x)
    saved = {var.aval for var in jaxpr.jaxpr.outvars if var not in jaxpr.jaxpr.invars}
    assert {aval.dtype for aval in saved if aval.size >= x.size} == {BF16}
    if more:
        plain = jmpx.apply_policy(loss_fn, "by=operations,c=bf16")
        # Alike parts sum the cotangents of the weight that they share before others do.
        grads, expected = (one_by_one(jax.grad(f), w, x) for f in (plain, saving))
        np.testing.assert_allclose(grads, expected, atol=0.02 * np.abs(expected).max())
