"""The vision transformer that `train_vit.py` trains: plain Equinox, without a cast in it."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Softmax(eqx.Module):
    """A softmax over the last axis; it is a module so that a policy map can name it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, axis=-1)


class Attention(eqx.Module):
    """Multi-head self-attention over tokens of shape [tokens, width]."""

    heads: int = eqx.field(static=True)
    qkv: eqx.nn.Linear
    softmax: Softmax
    out: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: jax.Array):
        qkv_key, out_key = jax.random.split(key)
        self.heads = heads
        self.qkv = eqx.nn.Linear(width, 3 * width, key=qkv_key)
        self.softmax = Softmax()
        self.out = eqx.nn.Linear(width, width, key=out_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens, width = x.shape
        qkv = jax.vmap(self.qkv)(x).reshape(tokens, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, part] for part in range(3))
        scores = jnp.einsum("thd,shd->hts", q, k) * (width // self.heads) ** -0.5
        mixed = jnp.einsum("hts,shd->thd", self.softmax(scores), v)
        return jax.vmap(self.out)(mixed.reshape(tokens, width))


class Mlp(eqx.Module):
    """Two layers with a GELU between them, on one token."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(width, 4 * width, key=up_key)
        self.down = eqx.nn.Linear(4 * width, width, key=down_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(eqx.Module):
    """Attention and an MLP, each with a norm before it and a shortcut around it."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp

    def __init__(self, width: int, heads: int, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = Attention(width, heads, attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.attention_norm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class VisionTransformer(eqx.Module):
    """Logits of shape [classes] for one image of shape [side, side, channels]."""

    patch: int = eqx.field(static=True)
    embedding: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self,
        image_shape: tuple[int, ...],
        classes: int,
        *,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        key: jax.Array,
    ):
        embedding_key, positions_key, head_key, *block_keys = jax.random.split(key, 3 + depth)
        side, _, channels = image_shape
        self.patch = patch
        self.embedding = eqx.nn.Linear(patch * patch * channels, width, key=embedding_key)
        self.positions = 0.5 * jax.random.normal(positions_key, ((side // patch) ** 2, width))
        self.blocks = [Block(width, heads, block_key) for block_key in block_keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=head_key)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(patches(image, self.patch)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(axis=0))


def patches(image: jax.Array, size: int) -> jax.Array:
    """Cuts an image [side, side, channels] into patches [count, size * size * channels]."""
    side, _, channels = image.shape
    count = side // size
    grid = image.reshape(count, size, count, size, channels).swapaxes(1, 2)
    return grid.reshape(count * count, size * size * channels)
