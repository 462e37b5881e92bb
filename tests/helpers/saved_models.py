"""Small models of every make, for what `jmpx.autocast(save=)` must leave equal."""

import autocast as benchmark
import jax
import jax.numpy as jnp
from jax import lax

import jmpx
from helpers import normal
from helpers.autocast import eleven, seven


def _transformer(rng):
    model = benchmark.Transformer(2, 8, 2, 16, classes=4, scanned=True)
    x, labels = model.batch(rng, 2, 6)
    return model.apply, model.init(rng), x, labels


def _mlp(step, layers=3, width=8):
    """Makes a model of residual blocks `step(x, w1, w2, i)`."""

    def make(rng):
        params = [(normal(rng, width, 16) / 3, normal(rng, 16, width) / 4) for _ in range(layers)]

        def apply(params, x):
            for i, (w1, w2) in enumerate(params):
                x = step(x, w1, w2, i)
            return x

        return apply, params, normal(rng, 4, width), jnp.arange(4) % width

    return make


def _block(x, w1, w2, _):
    return x + jax.nn.gelu(x @ w1) @ w2


def _integers(x, w1, w2, _):
    """Chooses activations by their own indices, and adds a float32 statistic that is fixed."""
    h = x @ w1
    best = jnp.argmax(h, axis=-1)
    mask = jax.nn.one_hot(best, h.shape[-1], dtype=bool)
    with jmpx.full_precision():
        norm = jnp.sqrt((x @ jnp.ones((x.shape[1], 1))) ** 2 + 1e-8)
    return x + jnp.where(mask, h, 0.1) @ w2 / (1 + norm)


def _custom(x, w1, w2, i):
    return x + jnp.tanh((seven, eleven)[i % 2](x, w1)) @ w2


def _branches(x, w1, w2, i):
    def deep(x):
        return _block(_block(x, w1, w2, i), w1, w2, i)

    return lax.cond(x[0, 0] > 0, deep, lambda x: x @ w1 @ w2, x)


def _printing(x, w1, w2, _):
    h = x @ w1
    jax.debug.callback(lambda _: None, h[0, 0])
    return x + jnp.tanh(h) @ w2


def _recurrence(x, w1, w2, _):
    def body(h, _):
        h = jnp.tanh(h @ w1 @ w2)
        return h, h.sum(axis=-1)

    h, sums = lax.scan(body, x, None, 2)
    return x + h * sums.mean(axis=0)[:, None]


def _images(rng):
    """Convolutions, norms of the batch that are returned, too, and a skip connection."""
    params = [(normal(rng, 3, 3, c, 4) / 4, jnp.ones(4)) for c in (3, 4, 4)]
    head = normal(rng, 4, 5)

    def apply(params, x):
        layers, head = params
        means = []
        for i, (kernel, scale) in enumerate(layers):
            h = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            mean = h.mean(axis=(0, 1, 2))
            means.append(0.9 + 0.1 * mean)
            var = ((h - mean) ** 2).mean(axis=(0, 1, 2))
            h = jax.nn.relu((h - mean) * lax.rsqrt(var + 1e-5) * scale)
            x = h if i == 0 else x + h
        return x.mean(axis=(1, 2)) @ head + jnp.stack(means).sum()

    return apply, (params, head), normal(rng, 2, 6, 6, 3), jnp.arange(2)


MODELS = {
    "transformer": _transformer,
    "jitted layers": _mlp(jax.jit(_block, static_argnums=3)),
    "integers": _mlp(_integers),
    "custom": _mlp(_custom),
    "branches": _mlp(_branches, 2),
    "printing": _mlp(_printing),
    "recurrence": _mlp(_recurrence, 2),
    "images": _images,
}
