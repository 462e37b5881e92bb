"""One layer of a vision transformer in each framework: with a policy, and with casts by hand.

The model has no cast. By hand, the caller casts the parameters that do not belong to a norm, the
input and the result, and each norm runs on float32 between two casts, as `FULL_NORMS` says it.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

FULL_NORMS = "c=bf16,o=f32; LayerNorm: full"
HEADS = 2


def forward(layers, x, around_norm):
    """Returns the logits of images, given as patches, from a dict of layers."""
    x = layers["patches"](x)
    q, k, v = jnp.split(layers["qkv"](around_norm(layers["norm1"])(x)), 3, axis=-1)
    q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores).astype(q.dtype)
    x = x + layers["mix"](jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
    hidden = jax.nn.gelu(layers["up"](around_norm(layers["norm2"])(x)))
    x = x + layers["down"](hidden)
    return layers["head"](x[:, 0])


def linears(width):
    """Returns the inputs and outputs of each linear layer."""
    return {
        "patches": (width, width),
        "qkv": (width, 3 * width),
        "mix": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "head": (width, 16),
    }


NORMS = ("norm1", "norm2")


class HaikuViT(hk.Module):
    def __init__(self, width, around_norm):
        super().__init__()
        self.width, self.around_norm = width, around_norm

    def __call__(self, x):
        layers = {k: hk.Linear(n, name=k) for k, (_, n) in linears(self.width).items()}
        layers |= {k: hk.LayerNorm(-1, True, True, name=k) for k in NORMS}
        return forward(layers, x, self.around_norm)


class LinenViT(nn.Module):
    width: int
    around_norm: object

    @nn.compact
    def __call__(self, x):
        layers = {k: nn.Dense(n, name=k) for k, (_, n) in linears(self.width).items()}
        layers |= {k: nn.LayerNorm(name=k) for k in NORMS}
        return forward(layers, x, self.around_norm)


class NNXViT(nnx.Module):
    def __init__(self, width, around_norm):
        rngs = nnx.Rngs(0)
        for k, (n, m) in linears(width).items():
            setattr(self, k, nnx.Linear(n, m, rngs=rngs))
        for k in NORMS:
            setattr(self, k, nnx.LayerNorm(width, rngs=rngs))
        self.around_norm = around_norm

    def __call__(self, x):
        return forward(vars(self), x, self.around_norm)


class EquinoxViT(eqx.Module):
    linears: dict
    norms: dict

    def __init__(self, width):
        key = jax.random.key(0)
        self.linears = {k: eqx.nn.Linear(*n, key=key) for k, n in linears(width).items()}
        self.norms = {k: eqx.nn.LayerNorm(width) for k in NORMS}

    def __call__(self, x, around_norm=lambda norm: norm):
        layers = {k: jax.vmap(jax.vmap(f)) for k, f in {**self.linears, **self.norms}.items()}
        layers["head"] = jax.vmap(self.linears["head"])
        return forward(layers, x, around_norm)


def as_is(norm):
    return norm


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


# Each framework returns the parameters, the model, which makes logits of parameters and patches,
# the model with islands, and the model under `FULL_NORMS`.


def haiku(width, x):
    plain, by_hand = (
        hk.without_apply_rng(hk.transform(lambda x, around=around: HaikuViT(width, around)(x)))
        for around in (as_is, island)
    )

    def with_policy(params, x):
        with jmpx.haiku.policies(FULL_NORMS):
            return plain.apply(params, x)

    return plain.init(jax.random.key(0), x), plain.apply, by_hand.apply, with_policy


def linen(width, x):
    plain, by_hand = (LinenViT(width, around) for around in (as_is, island))

    def with_policy(params, x):
        with jmpx.flax.policies(FULL_NORMS):
            return plain.apply(params, x)

    return plain.init(jax.random.key(0), x), plain.apply, by_hand.apply, with_policy


def flax_nnx(width, x):
    (plain, params), (by_hand, _) = (nnx.split(NNXViT(width, f)) for f in (as_is, island))

    def with_policy(params, x):
        return jmpx.flax.with_policies(nnx.merge(plain, params), FULL_NORMS)(x)

    def apply(graph):
        return lambda params, x: nnx.merge(graph, params)(x)

    return params, apply(plain), apply(by_hand), with_policy


def equinox(width, x):
    params, plain = eqx.partition(EquinoxViT(width), eqx.is_array)

    def apply(around):
        return lambda params, x: eqx.combine(params, plain)(x, around)

    def with_policy(params, x):
        return jmpx.equinox.with_policies(eqx.combine(params, plain), FULL_NORMS)(x)

    return params, apply(as_is), apply(island), with_policy


FRAMEWORKS = {"haiku": haiku, "linen": linen, "nnx": flax_nnx, "equinox": equinox}
