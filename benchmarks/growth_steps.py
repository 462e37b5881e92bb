"""Compares float16 gradients with float32's on the steps that change the loss scale, as JSON lines.

    python benchmarks/growth_steps.py

The gradients of a step are to be divided by the scale that its loss was multiplied by, not by the
one that the step leaves behind. The function is w . x; its gradient x and all products of x with a
power of two are exact in float16, so any ratio but 1 is an error. The scale grows every few steps
until the largest entries overflow and it shrinks; on those steps the other entries are compared.
Each line holds, for steps of each kind, the smallest and the largest ratio found, and their number.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import gpu_vit
import jax
import jax.numpy as jnp
import numpy as np

import jmpx

LARGEST = 64  # of x: at a scale of 2**10, its gradient is beyond float16's 65504
START, PERIOD = 2.0**8, 3
Update = Callable[[Any, Any, Any, Any], Any]  # w, x, scale, counter -> grads, scale, counter


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((w * x).astype(jnp.float32))


def by_jmpx() -> Update:
    def update(w: Any, x: Any, scale: Any, counter: Any) -> Any:
        scaling = jmpx.DynamicLossScale(scale, counter, PERIOD)
        grad_fn = jmpx.filter_grad(product, scaling, policy="compute=float16")
        scaling, _, grads = grad_fn(w, x)
        return grads, scaling.loss_scale, scaling.counter

    return update


def by_jmp() -> Update:
    import jmp

    cast = jmp.get_policy("params=float32,compute=float16,output=float32").cast_to_compute

    def update(w: Any, x: Any, scale: Any, counter: Any) -> Any:
        loss_scale = jmp.DynamicLossScale(scale, counter, PERIOD)
        grads = jax.grad(lambda w: loss_scale.scale(product(cast(w), cast(x))))(w)
        grads = loss_scale.unscale(grads)
        loss_scale = loss_scale.adjust(jmp.all_finite(grads))
        return grads, loss_scale.loss_scale, loss_scale.counter

    return update


def by_mpx() -> Update:
    import mpx

    def update(w: Any, x: Any, scale: Any, counter: Any) -> Any:
        mpx.set_half_precision_datatype(jnp.float16)
        one = jnp.float32(1)
        scaling = mpx.DynamicLossScaling(scale, one, period=PERIOD, counter=counter)
        scaling, _, grads = mpx.filter_grad(product, scaling)(w, x)
        return grads, scaling.loss_scaling, scaling.counter

    return update


UPDATES = {"jmpx": by_jmpx, "jmp": by_jmp, "mpx": by_mpx}


def measure(implementation: str, steps: int = 24, seed: int = 0) -> dict[str, Any]:
    """Returns the ratios of the steps that grew the scale, shrank it, and left it."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray([*rng.integers(1, LARGEST, size=30), LARGEST, 0.125], jnp.float32)
    w = jnp.zeros_like(x)
    update = jax.jit(UPDATES[implementation]())
    scale, counter = jnp.float32(START), jnp.int32(0)
    ratios: dict[str, list[Any]] = {"growth": [], "shrink": [], "steady": []}
    for _ in range(steps):
        grads, new_scale, counter = update(w, x, scale, counter)
        kind = ("shrink", "steady", "growth")[int(np.sign(new_scale - scale)) + 1]
        ratio = np.asarray(grads) / np.asarray(x)  # the gradient in float32 is x
        ratios[kind].append(ratio[np.isfinite(ratio)])
        scale = new_scale
    return {kind: summary(found) for kind, found in ratios.items()}


def summary(ratios: list[np.ndarray]) -> dict[str, Any]:
    flat = np.concatenate([np.empty(0), *ratios])
    ends = (float(flat.min()), float(flat.max())) if flat.size else (None, None)
    return {"steps": len(ratios), "smallest_ratio": ends[0], "largest_ratio": ends[1]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    steps = parser.parse_args(arguments).steps
    for name in filter(importlib.util.find_spec, UPDATES):
        where = {"benchmark": "growth_steps", **gpu_vit.surroundings(), "implementation": name}
        print(json.dumps({**where, **measure(name, steps)}))


if __name__ == "__main__":
    main()
