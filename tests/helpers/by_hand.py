"""One layer of a vision transformer in each framework: with a policy, and with casts by hand.

The model has no cast. By hand, the caller casts the parameters that do not belong to a norm, the
input and the result, and each norm runs on float32 between two casts, as `FULL_NORMS` says it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers import zoo

FULL_NORMS = "c=bf16,o=f32; LayerNorm: full"
HEADS = 2


def vit(around_norm):
    """Returns the body of a model of logits of images, given as patches."""

    def body(m, x):
        linear, width = m.linear, x.shape[-1]
        x = linear("patches", width)(x)
        q, k, v = jnp.split(linear("qkv", 3 * width)(around_norm(m.norm("norm1"))(x)), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores).astype(q.dtype)
        x = x + linear("mix", width)(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        hidden = jax.nn.gelu(linear("up", 4 * width)(around_norm(m.norm("norm2"))(x)))
        x = x + linear("down", width)(hidden)
        return linear("head", 16)(x[:, 0])

    return body


def island(norm):
    """Runs a norm in float32, as it is done by hand."""
    return lambda x: norm(x.astype(jnp.float32)).astype(x.dtype)


def cast_by_hand(params):
    """Casts the parameters that do not belong to a norm."""

    def cast(path, leaf):
        return leaf if "norm" in jax.tree_util.keystr(path) else leaf.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(cast, params)


def loss_by_hand(apply):
    """Returns a loss with its casts by hand, given a model whose norms are islands."""

    def loss_fn(params, x):
        return loss_of(apply(cast_by_hand(params), x.astype(jnp.bfloat16)).astype(jnp.float32))

    return loss_fn


def loss_with(apply):
    """Returns a loss without casts, given a model that returns float32."""
    return lambda params, x: loss_of(apply(params, x))


def loss_of(logits):
    return jax.nn.logsumexp(logits, axis=-1).mean()


def _models(framework, width, x):
    """Returns the parameters; the model, which makes logits of them and of patches; the model with
    islands; and the model under `FULL_NORMS`."""
    assert x.shape[-1] == width
    plain, hand = (
        zoo.build(framework, vit(around), x, rng=np.random.default_rng(0))
        for around in (lambda norm: norm, island)
    )
    apply, params = plain.split()
    return params, apply, hand.split()[0], plain.split(plain.under(FULL_NORMS))[0]


FRAMEWORKS = {name: functools.partial(_models, name) for name in zoo.FRAMEWORKS}
