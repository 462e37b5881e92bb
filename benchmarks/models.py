"""The transformer that all benchmarks train, in plain `jax.numpy`, and its sizes.

Parameters are nested dicts of 12 arrays a layer. The model computes in the dtype of its parameters
and inputs. With `islands`, LayerNorm and the attention's softmax are cast to float32 by hand;
without them the model has no cast, as a user of `jmpx.autocast` writes it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = Any  # nested dicts and lists of arrays
SAVEABLE = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class Zeros(np.random.Generator):
    """Draws zeros: what `jax.eval_shape` calls then needs neither time nor memory."""

    def normal(self, *, size: Any) -> Any:
        return jnp.zeros(size)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A causal transformer on sequences of vectors, which labels every position."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    hidden: int = 1024
    classes: int = 64
    causal: bool = True
    islands: bool = False
    scaled_low: bool = False  # scales attention scores before their island, not in it
    scanned: bool = False
    checkpointed: bool = False  # each block keeps the results of its weight products alone
    saveable: Any = SAVEABLE  # which results that is; with None, each block keeps its input alone
    deviation: float | None = None  # of the first weights; default: 1 / sqrt(inputs)

    def init(self, rng: np.random.Generator) -> Params:
        """Returns float32 parameters."""
        layers = [self._layer(rng) for _ in range(self.layers)]
        if self.scanned:
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return {
            "layers": layers,
            "norm": self._norm(),
            "head": self._linear(rng, self.width, self.classes),
        }

    def batch(
        self, rng: np.random.Generator, size: int = 8, length: int = 128
    ) -> tuple[jax.Array, jax.Array]:
        """Returns inputs of shape (size, length, width) and labels of shape (size, length)."""
        return normal(rng, size, length, self.width), integers(rng, self.classes, size, length)

    def loss(self, params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy, in float32."""
        return cross_entropy(self.apply(params, x), labels)

    def apply(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns the scores of the classes, of shape (size, length, classes)."""
        return self._classify(params, self._blocks(params, x))

    def _blocks(self, params: Params, x: jax.Array) -> jax.Array:
        block = self._block
        if self.checkpointed:
            # A scan is a barrier by itself.
            block = jax.checkpoint(block, policy=self.saveable, prevent_cse=not self.scanned)

        def body(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
            return block(layer, x), None

        if self.scanned:
            return lax.scan(body, x, params["layers"])[0]
        for layer in params["layers"]:
            x = block(layer, x)
        return x

    def _classify(self, params: Params, x: jax.Array) -> jax.Array:
        return affine(params["head"], self.normalized(params["norm"], x))

    def _norm(self) -> Params:
        return norm_of(self.width)

    def _linear(self, rng: np.random.Generator, inputs: int, outputs: int) -> Params:
        return linear(rng, inputs, outputs, self.deviation)

    def _layer(self, rng: np.random.Generator) -> Params:
        return {
            "norm1": self._norm(),
            "qkv": self._linear(rng, self.width, 3 * self.width),
            "attention": self._linear(rng, self.width, self.width),
            "norm2": self._norm(),
            "mlp1": self._linear(rng, self.width, self.hidden),
            "mlp2": self._linear(rng, self.hidden, self.width),
        }

    def _block(self, layer: Params, x: jax.Array) -> jax.Array:
        x = x + self._attention(layer, self.normalized(layer["norm1"], x))
        hidden = self.normalized(layer["norm2"], x)
        with jax.named_scope("mlp"):  # rules select it: `*/mlp`
            hidden = affine(layer["mlp2"], jax.nn.gelu(affine(layer["mlp1"], hidden)))
        return x + hidden

    def _attention(self, layer: Params, x: jax.Array) -> jax.Array:
        qkv = affine(layer["qkv"], x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores, scale = jnp.einsum("bqhd,bkhd->bhqk", q, k), q.shape[-1] ** -0.5
        low = self.scaled_low
        scores = self._island(scores * scale) if low else self._island(scores) * scale
        if self.causal:
            scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return affine(layer["attention"], mixed)

    def normalized(self, norm: Params, x: jax.Array) -> jax.Array:
        """Returns LayerNorm of the last axis."""
        x32 = self._island(x)
        centered = x32 - x32.mean(axis=-1, keepdims=True)
        normal = centered * lax.rsqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-6)
        return normal.astype(x.dtype) * norm["scale"] + norm["bias"]

    def _island(self, x: jax.Array) -> jax.Array:
        return wide(x) if self.islands else x


@dataclasses.dataclass(frozen=True)
class ViT(Transformer):
    """A vision transformer; the defaults are ViT-Tiny's for images of 32 x 32."""

    layers: int = 12
    width: int = 192
    heads: int = 3
    hidden: int = 768
    classes: int = 100
    causal: bool = False
    islands: bool = True
    deviation: float | None = 0.02
    image: int = 32
    patch: int = 4
    norm_first: bool = False  # normalizes all tokens, before the one is taken that is classified

    def init(self, rng: np.random.Generator) -> Params:
        """Returns float32 parameters: 8 arrays besides those of the layers."""
        tokens = (self.image // self.patch) ** 2
        return super().init(rng) | {
            "patches": self._linear(rng, 3 * self.patch**2, self.width),
            "class": self._linear(rng, 1, self.width)["w"],
            "positions": self._linear(rng, tokens + 1, self.width)["w"],
        }

    def batch(self, rng: np.random.Generator, size: int = 8) -> tuple[jax.Array, jax.Array]:
        """Returns images of shape (size, image, image, 3) and labels of shape (size,)."""
        return normal(rng, size, self.image, self.image, 3), integers(rng, self.classes, size)

    def apply(self, params: Params, images: jax.Array) -> jax.Array:
        """Returns the scores of the classes, of shape (size, classes)."""
        x = affine(params["patches"], self._patches(images))
        first = jnp.broadcast_to(params["class"], (len(x), 1, self.width))
        x = jnp.concatenate([first, x], axis=1) + params["positions"]
        x = self._blocks(params, x)
        if self.norm_first:
            return affine(params["head"], self.normalized(params["norm"], x)[:, 0])
        return self._classify(params, x[:, 0])

    def _patches(self, images: jax.Array) -> jax.Array:
        side = self.image // self.patch
        x = images.reshape(len(images), side, self.patch, side, self.patch, 3)
        return x.swapaxes(2, 3).reshape(len(images), side**2, 3 * self.patch**2)


@dataclasses.dataclass(frozen=True)
class LanguageModel(Transformer):
    """A decoder-only language model of GPT-2's width, with half of its layers."""

    layers: int = 6
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    classes: int = 32_000  # tokens that there are
    islands: bool = True
    length: int = 512
    sums_wide: bool = False  # sums the embedding's gradient in float32

    def init(self, rng: np.random.Generator) -> Params:
        """Returns float32 parameters: 2 arrays besides those of the transformer."""
        return super().init(rng) | {
            "tokens": self._linear(rng, self.classes, self.width)["w"],
            "positions": self._linear(rng, self.length, self.width)["w"],
        }

    def batch(self, rng: np.random.Generator, size: int = 8) -> tuple[jax.Array, jax.Array]:
        """Returns tokens and the ones that follow them, both of shape (size, length)."""
        text = integers(rng, self.classes, size, self.length + 1)
        return text[:, :-1], text[:, 1:]

    def apply(self, params: Params, text: jax.Array) -> jax.Array:
        """Returns the scores of the next tokens, of shape (size, length, classes)."""
        tokens = params["tokens"]
        rows = (wide(tokens) if self.sums_wide else tokens)[text]
        x = rows.astype(tokens.dtype) + params["positions"]
        return self._classify(params, self._blocks(params, x))


def normal(rng: np.random.Generator, *shape: int, deviation: float = 1) -> jax.Array:
    return jnp.asarray(deviation * rng.normal(size=shape), jnp.float32)


def integers(rng: np.random.Generator, classes: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(classes, size=shape), jnp.int32)


def norm_of(width: int) -> Params:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def linear(
    rng: np.random.Generator, inputs: int, outputs: int, deviation: float | None = None
) -> Params:
    weight = normal(rng, inputs, outputs, deviation=deviation or inputs**-0.5)
    return {"w": weight, "b": jnp.zeros(outputs)}


def affine(params: Params, x: jax.Array) -> jax.Array:
    """Multiplies by weights and adds a bias, or multiplies by an array."""
    return x @ params["w"] + params["b"] if isinstance(params, dict) else x @ params


def wide(x: jax.Array) -> jax.Array:
    """Returns an array in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def cross_entropy(logits: jax.Array, labels: jax.Array, by_mask: bool = False) -> jax.Array:
    """Returns the mean cross-entropy, in float32 or wider.

    A mask selects the scores of labels as MaxText does: where a chip has one sequence, the TPU's
    compiler scatters the cotangents of gathered scores, into float32 arrays of the scores' size.
    """
    logits = wide(logits)
    if by_mask:
        is_label = labels[..., None] == jnp.arange(logits.shape[-1])
        chosen = jnp.where(is_label, logits, 0).sum(axis=-1)
    else:
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
