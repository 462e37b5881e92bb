"""Compares float16 gradients with float32's on steps that change the loss scale, as lines of JSON.

    python benchmarks/growth_steps.py

The gradients of a step are to be divided by the scale that its loss was multiplied by, not by the
one that the step leaves behind. The function is w . x; its gradient x and all products of x with a
power of two are exact in float16, so any ratio but 1 is an error. The scale grows every few steps
until the largest entries overflow and it shrinks; on those steps the other entries are compared.
Each line holds, for steps of each kind, the smallest and the largest ratio found, and their number.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records

import jmpx

LARGEST = 64  # of x: at a scale of 2**10, its gradient is beyond float16's 65504
START, PERIOD = 2.0**8, 3
Result = tuple[jax.Array, jax.Array, jax.Array]  # gradients, and the next scale and counter


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((w * x).astype(jnp.float32))


def by_jmpx(w: jax.Array, x: jax.Array, scale: jax.Array, counter: jax.Array) -> Result:
    scaling = jmpx.DynamicLossScale(scale, counter, PERIOD)
    scaling, _, grads = jmpx.filter_grad(product, scaling, policy="compute=float16")(w, x)
    return grads, scaling.loss_scale, scaling.counter


def by_jmp(w: jax.Array, x: jax.Array, scale: jax.Array, counter: jax.Array) -> Result:
    import jmp

    cast = jmp.get_policy("params=float32,compute=float16,output=float32").cast_to_compute
    loss_scale = jmp.DynamicLossScale(scale, counter, PERIOD)
    grads = jax.grad(lambda w: loss_scale.scale(product(cast(w), cast(x))))(w)
    grads = loss_scale.unscale(grads)
    loss_scale = loss_scale.adjust(jmp.all_finite(grads))
    return grads, loss_scale.loss_scale, loss_scale.counter


def by_mpx(w: jax.Array, x: jax.Array, scale: jax.Array, counter: jax.Array) -> Result:
    import mpx

    mpx.set_half_precision_datatype(jnp.float16)
    scaling = mpx.DynamicLossScaling(scale, jnp.float32(1), period=PERIOD, counter=counter)
    scaling, _, grads = mpx.filter_grad(product, scaling)(w, x)
    return grads, scaling.loss_scaling, scaling.counter


LIBRARIES = {"jmpx": by_jmpx, "jmp": by_jmp, "mpx": by_mpx}


def measure(library: str, steps: int = 24, seed: int = 0) -> records.Record:
    """Returns the ratios of the steps that grew the scale, shrank it, and left it."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray([*rng.integers(1, LARGEST, size=30), LARGEST, 0.125], jnp.float32)
    update = jax.jit(LIBRARIES[library])
    scale, counter = jnp.float32(START), jnp.int32(0)
    ratios: dict[str, list[Any]] = {"growth": [], "shrink": [], "steady": []}
    for _ in range(steps):
        grads, new_scale, counter = update(jnp.zeros_like(x), x, scale, counter)
        kind = ("shrink", "steady", "growth")[int(np.sign(new_scale - scale)) + 1]
        ratio = np.asarray(grads) / np.asarray(x)  # the gradient in float32 is x
        ratios[kind].append(ratio[np.isfinite(ratio)])
        scale = new_scale
    return {kind: summary(found) for kind, found in ratios.items()}


def summary(ratios: list[np.ndarray]) -> records.Record:
    flat = np.concatenate([np.empty(0), *ratios])
    ends = (float(flat.min()), float(flat.max())) if flat.size else (None, None)
    return {"steps": len(ratios), "smallest_ratio": ends[0], "largest_ratio": ends[1]}


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args(arguments)
    for library in filter(importlib.util.find_spec, LIBRARIES):
        records.emit("growth_steps", implementation=library, **measure(library, args.steps))


if __name__ == "__main__":
    main()
