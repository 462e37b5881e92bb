"""A vision transformer in plain `jax.numpy`, which the benchmarks train.

Its parameters are nested dicts: 12 arrays a layer and 8 more, 152 of them in 12 layers. In the
sizes of ViT-Tiny for 32 x 32 images, 4 x 4 patches and 100 classes these are 5.38 M numbers.
It computes in the dtype of its parameters and images, with float32 islands where one wants them:
LayerNorm, the attention's softmax and the loss.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ViT:
    """The sizes of a vision transformer, its parameters and its loss."""

    layers: int = 12
    width: int = 192
    heads: int = 3
    hidden: int = 768
    image: int = 32
    patch: int = 4
    classes: int = 100

    def init(self, seed: int = 0) -> dict[str, Any]:
        """Returns float32 parameters, as JAX arrays."""
        rng = np.random.default_rng(seed)
        tokens = (self.image // self.patch) ** 2
        params = {
            "patches": _linear(rng, 3 * self.patch**2, self.width),
            "class": _normal(rng, 1, self.width),
            "positions": _normal(rng, tokens + 1, self.width),
            "layers": [self._layer(rng) for _ in range(self.layers)],
            "norm": _norm(self.width),
            "head": _linear(rng, self.width, self.classes),
        }
        return jax.tree.map(jnp.asarray, params)

    def _layer(self, rng: np.random.Generator) -> dict[str, Any]:
        return {
            "norm1": _norm(self.width),
            "qkv": _linear(rng, self.width, 3 * self.width),
            "attention": _linear(rng, self.width, self.width),
            "norm2": _norm(self.width),
            "mlp1": _linear(rng, self.width, self.hidden),
            "mlp2": _linear(rng, self.hidden, self.width),
        }

    def batch(self, size: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """Returns random images of shape (size, image, image, 3) and their labels."""
        rng = np.random.default_rng(seed)
        images = rng.normal(size=(size, self.image, self.image, 3)).astype(np.float32)
        return jnp.asarray(images), jnp.asarray(rng.integers(self.classes, size=size), jnp.int32)

    def loss(self, params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy in float32."""
        logits = self.logits(params, images).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        """Returns the scores of the classes, of shape (size, classes)."""
        x = _apply_linear(params["patches"], self._patches(images))
        first = jnp.broadcast_to(params["class"], (x.shape[0], 1, self.width))
        x = jnp.concatenate([first, x], axis=1) + params["positions"]
        for layer in params["layers"]:
            x = x + self._attention(layer, _apply_norm(layer["norm1"], x))
            hidden = jax.nn.gelu(_apply_linear(layer["mlp1"], _apply_norm(layer["norm2"], x)))
            x = x + _apply_linear(layer["mlp2"], hidden)
        return _apply_linear(params["head"], _apply_norm(params["norm"], x[:, 0]))

    def _patches(self, images: jax.Array) -> jax.Array:
        size, side = images.shape[0], self.image // self.patch
        x = images.reshape(size, side, self.patch, side, self.patch, 3)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(size, side**2, 3 * self.patch**2)

    def _attention(self, layer: Any, x: jax.Array) -> jax.Array:
        qkv = _apply_linear(layer["qkv"], x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return _apply_linear(layer["attention"], mixed)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return 0.02 * rng.normal(size=shape).astype(np.float32)


def _linear(rng: np.random.Generator, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    weight = rng.normal(size=(inputs, outputs)).astype(np.float32) / np.float32(inputs**0.5)
    return {"w": weight, "b": np.zeros(outputs, np.float32)}


def _norm(width: int) -> dict[str, np.ndarray]:
    return {"scale": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}


def _apply_linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def _apply_norm(params: Any, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    normal = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return normal.astype(x.dtype) * params["scale"] + params["bias"]
