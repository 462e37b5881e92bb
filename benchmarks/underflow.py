"""Counts the gradient entries that float16 loses without a loss scale and with one, as a JSON line.

    python benchmarks/underflow.py --model=desktop --batch=2 --steps=60

An entry is lost if its gradient is not zero in float32 and zero in float16. The gradients are those
of a vision transformer after some float32 steps on one random batch: they shrink as the loss falls,
and float16 loses more. A few entries are zero but for float32's rounding (softmax does not see the
bias of the keys); no scale brings these back. XLA may not keep more digits than the program says,
which it else does on a CPU.
"""

import functools
from typing import Any

import gpu_vit
import jax
import jax.numpy as jnp
import records
import steps
from models import MODELS

import jmpx

SCALE = 2.0**15


def measure(model_name: str, batch: int, count: int) -> records.Record:
    model = MODELS[model_name]
    traced = steps.trace(steps.Point("handwritten", "float32"), model, batch, gpu_vit.ADAMW)
    program = steps.Program(traced, gpu_vit.QUICK if model_name == "tiny" else None)
    program.run(count)
    params, data = program.params, traced.batch
    loss, reference = jax.jit(jax.value_and_grad(model.loss))(params, *data)

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def lost(params: Any, reference: Any, scaling: Any) -> jax.Array:
        grads = jmpx.filter_grad(model.loss, scaling, policy="compute=float16")(params, *data)[2]
        zeros = jax.tree.map(lambda a, b: jnp.sum((a != 0) & (b == 0)), reference, grads)
        return jnp.stack(jax.tree.leaves(zeros)).sum()

    nonzero = sum(int(jnp.count_nonzero(g)) for g in jax.tree.leaves(reference))
    without, scaled = (
        int(lost(params, reference, jmpx.DynamicLossScale(scale))) / nonzero
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
    parser = records.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="desktop")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="float32 steps before the count")
    args = parser.parse_args(arguments)
    records.emit("underflow", **vars(args), **measure(args.model, args.batch, args.steps))


if __name__ == "__main__":
    main()
