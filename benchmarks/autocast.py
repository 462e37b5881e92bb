"""Measures what autocast saves and costs, on a transformer, one JSON line a measure.

    python benchmarks/autocast.py

residuals: bytes that the backward pass of 4 blocks keeps (batch 8, sequence 128, width 256) besides
the arguments, and their ratio to float32's. They depend on JAX alone, not on the machine.
gradient_error: norm of the gradients' difference from float32's, relative to these.
dots: the operands of all matrix products of the train step, forward and backward, lowered for CUDA.
trace: seconds until the gradients of 24 layers are traced, the blocks written out or scanned, in
rounds that take turns; medians, and their ratio to no autocast.
"""

import argparse
import collections
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

import jmpx


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A causal transformer in plain `jax.numpy`, without a cast."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    hidden: int = 1024
    classes: int = 64
    scanned: bool = False

    def init(self, rng: np.random.Generator) -> Any:
        """Returns float32 parameters."""
        layers = [self._layer(rng) for _ in range(self.layers)]
        if self.scanned:
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return {
            "layers": layers,
            "norm": self._norm(),
            "head": _linear(rng, self.width, self.classes),
        }

    def batch(self, rng: np.random.Generator, size: int = 8, length: int = 128) -> Any:
        """Returns inputs of shape (size, length, width) and labels of shape (size, length)."""
        x = rng.normal(size=(size, length, self.width))
        return jnp.asarray(x, jnp.float32), jnp.asarray(
            rng.integers(self.classes, size=x.shape[:2])
        )

    def apply(self, params: Any, x: jax.Array) -> jax.Array:
        """Returns logits."""
        if self.scanned:
            x, _ = lax.scan(lambda x, layer: (self._block(layer, x), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = self._block(layer, x)
        return _affine(params["head"], _normalized(params["norm"], x))

    def _norm(self) -> Any:
        return {"scale": jnp.ones(self.width), "bias": jnp.zeros(self.width)}

    def _layer(self, rng: np.random.Generator) -> Any:
        return {
            "norm1": self._norm(),
            "qkv": _linear(rng, self.width, 3 * self.width),
            "out": _linear(rng, self.width, self.width),
            "norm2": self._norm(),
            "up": _linear(rng, self.width, self.hidden),
            "down": _linear(rng, self.hidden, self.width),
        }

    def _block(self, layer: Any, x: jax.Array) -> jax.Array:
        x = x + self._attention(layer, _normalized(layer["norm1"], x))
        hidden = jax.nn.gelu(_affine(layer["up"], _normalized(layer["norm2"], x)))
        return x + _affine(layer["down"], hidden)

    def _attention(self, layer: Any, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], self.heads, self.width // self.heads)
        q, k, v = (part.reshape(shape) for part in jnp.split(_affine(layer["qkv"], x), 3, axis=-1))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / shape[-1] ** 0.5
        causal = jnp.tril(jnp.ones((shape[1], shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(causal, logits, -1e9))
        return _affine(layer["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


def _linear(rng: np.random.Generator, inputs: int, outputs: int) -> Any:
    weight = rng.normal(size=(inputs, outputs)) / inputs**0.5
    return {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.zeros(outputs)}


def _affine(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["weight"] + layer["bias"]


def _normalized(norm: Any, x: jax.Array) -> jax.Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -chosen.mean()


def losses(model: Transformer, batch: Any) -> dict[str, Callable[[Any], jax.Array]]:
    """Returns loss functions of the parameters, one for each way to compute."""
    x, labels = batch

    def loss_of(apply: Callable[..., jax.Array]) -> Callable[[Any], jax.Array]:
        return lambda params: cross_entropy(apply(params, x), labels)

    def in_bfloat16(params: Any, x: jax.Array) -> jax.Array:
        return model.apply(*jmpx.cast_to_bfloat16((params, x))).astype(jnp.float32)

    # What Grampax does: the operands of products are cast, and the results cast back.
    grampax = jmpx.autocast(model.apply, "full", rules={lax.dot_general_p: jnp.bfloat16})
    autocast = loss_of(jmpx.autocast(model.apply))
    return {
        "float32": loss_of(model.apply),
        "bfloat16": loss_of(in_bfloat16),
        "grampax": loss_of(grampax),
        "autocast": autocast,
        "autocast, save_low_precision": jax.checkpoint(autocast, policy=jmpx.save_low_precision),
    }


def residual_bytes(loss_fn: Callable[[Any], Any], params: Any) -> int:
    """Returns the bytes that the backward pass keeps, besides the parameters."""
    jaxpr = jax.make_jaxpr(lambda params: jax.vjp(loss_fn, params)[1])(params).jaxpr
    kept = {var for var in jaxpr.outvars if not hasattr(var, "val")}  # a constant has one
    kept -= {*jaxpr.invars, *jaxpr.constvars}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)


def gradients(loss_fn: Callable[[Any], Any], params: Any) -> np.ndarray:
    """Returns the gradients of all parameters as one float64 vector."""
    grads = jax.jit(jax.grad(loss_fn))(params)
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(grads)])


def dot_operands(loss_fn: Callable[[Any], Any], params: Any) -> dict[str, int]:
    """Returns how many matrix products have which operands, as lowered for CUDA."""
    step = jax.jit(jax.value_and_grad(loss_fn)).trace(params)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    dots = re.findall(r"stablehlo\.dot_general.*: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)
    return dict(collections.Counter(" x ".join(t.rpartition("x")[2] for t in dot) for dot in dots))


def trace_seconds(loss_fn: Callable[[Any], Any], params: Any) -> float:
    """Returns the seconds until the gradients are traced."""
    start = time.process_time()
    jax.jit(jax.value_and_grad(lambda params: loss_fn(params))).trace(params)  # made anew: no cache
    return time.process_time() - start


def measure_counts(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yields residuals, gradient errors and operands of products."""
    model = Transformer()
    params, ways = model.init(rng), losses(model, model.batch(rng))
    full = residual_bytes(ways["float32"], params)
    reference = gradients(ways["float32"], params)
    for way, loss_fn in tqdm(ways.items(), desc="counts"):
        kept = residual_bytes(loss_fn, params)
        error = np.linalg.norm(gradients(loss_fn, params) - reference) / np.linalg.norm(reference)
        yield {
            "way": way,
            "residual_mib": round(kept / 2**20, 1),
            "of_float32": round(kept / full, 3),
            "gradient_error": round(float(error), 5),
            "dots": dot_operands(loss_fn, params),
        }


def measure_traces(rng: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields the trace times of a deep narrow model."""
    for scanned in (False, True):
        model = Transformer(layers=24, width=64, hidden=128, scanned=scanned)
        params, ways = model.init(rng), losses(model, model.batch(rng, 2, 16))
        times: dict[str, list[float]] = {"float32": [], "autocast": []}
        for _ in tqdm(range(rounds + 1), desc="trace, scanned" if scanned else "trace"):
            for way, seconds in times.items():
                seconds.append(trace_seconds(ways[way], params))
        plain, autocast = (statistics.median(seconds[1:]) for seconds in times.values())
        yield {
            "way": "24 layers, scanned" if scanned else "24 layers",
            "trace_ms": round(1000 * plain),
            "autocast_trace_ms": round(1000 * autocast),
            "ratio": round(autocast / plain, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="of the trace times")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    for record in (*measure_counts(rng), *measure_traces(rng, args.rounds)):
        print(json.dumps({"benchmark": "autocast", **record, "jax": jax.__version__}))


if __name__ == "__main__":
    main()
