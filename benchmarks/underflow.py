"""Counts the gradient entries that float16 loses without a loss scale and with one, as a JSON line.

    python benchmarks/underflow.py --model=desktop --batch=2 --steps=60

An entry is lost if its gradient in float32 is not zero and in float16 is. The gradients are those
of a vision transformer of `gpu_vit.py` after some float32 steps on one random batch: they shrink as
the loss falls, and float16 loses more. A few entries are zero but for float32's rounding (softmax
does not see the bias of the keys); no scale brings these back. XLA may not keep more digits than
the program says, which it else does on a CPU.
"""

import argparse
import functools
import json
from typing import Any

import gpu_vit
import jax
import jax.numpy as jnp

import jmpx

SCALE = 2.0**15


def measure(model: gpu_vit.ViT, batch: int, steps: int, seed: int = 0) -> dict[str, Any]:
    state, data = gpu_vit.new_state(model.init(seed)), model.batch(batch, seed + 1)

    @jax.jit
    def train_step(state: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(state[0], *data)
        return loss, grads, gpu_vit.take_step(state, grads)

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def lost(params: Any, reference: Any, scaling: Any) -> jax.Array:
        grads = jmpx.filter_grad(model.loss, scaling, policy="compute=float16")(params, *data)[2]
        zeros = jax.tree.map(lambda a, b: jnp.sum((a != 0) & (b == 0)), reference, grads)
        return sum(jax.tree.leaves(zeros))

    for _ in range(steps):
        _, _, state = train_step(state)
    loss, reference, _ = train_step(state)
    nonzero = sum(int(jnp.count_nonzero(g)) for g in jax.tree.leaves(reference))
    without, scaled = (
        int(lost(state[0], reference, jmpx.DynamicLossScale(scale))) / nonzero
        for scale in (1.0, SCALE)
    )
    return {
        "loss": float(loss),
        "nonzero_entries": nonzero,
        "lost_without_scaling": without,
        "lost_with_scaling": scaled,
        "scale": SCALE,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(gpu_vit.MODELS), default="desktop")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="float32 steps before the count")
    args = parser.parse_args(arguments)
    found = {"model": args.model, "batch": args.batch, "steps": args.steps}
    found |= measure(gpu_vit.MODELS[args.model], args.batch, args.steps)
    print(json.dumps({"benchmark": "underflow", **gpu_vit.surroundings(), **found}))


if __name__ == "__main__":
    main()
