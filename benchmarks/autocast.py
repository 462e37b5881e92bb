"""Measures what autocast saves and costs, on a transformer without casts, as lines of JSON.

    python benchmarks/autocast.py

residual_mib: what JAX hands from the forward to the backward pass of 4 blocks (batch 8, sequence
128, width 256) besides the arguments, and its ratio to float32's. It depends on JAX alone, not on
the machine.
gradient_error: the norm of the gradients' difference from float32's, relative to float32's norm.
dots: the operands of all matrix products, forward and backward, lowered for CUDA.
trace_ms: processor time until the gradients of 24 layers are traced, the blocks written out or
scanned, with and without autocast in turns; medians, and their ratio. That of save= is to a float32
model with one jax.checkpoint around it, because checkpoints are what takes the time. Where each
block is marked by hand, JAX traces one block and finds it again.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from cuda_lowering import count_dots
from models import SAVEABLE, Transformer, cross_entropy
from tqdm import tqdm

import jmpx

PyTree = Any
Loss = Callable[[PyTree], jax.Array]  # of the parameters


def losses(model: Transformer, batch: tuple[jax.Array, jax.Array]) -> dict[str, Loss]:
    """Returns a loss function for each way to compute."""
    x, labels = batch

    def loss_of(apply: Callable[..., jax.Array]) -> Loss:
        return lambda params: cross_entropy(apply(params, x), labels)

    def in_bfloat16(params: PyTree, x: jax.Array) -> jax.Array:
        return model.apply(*jmpx.cast_tree((params, x), jnp.bfloat16))

    # As Grampax does: the operands of products are cast, and the results are cast back.
    grampax = jmpx.autocast(model.apply, "full; op.dot_general: bfloat16")
    return {
        "float32": loss_of(model.apply),
        "bfloat16": loss_of(in_bfloat16),
        "grampax": loss_of(grampax),
        "autocast": loss_of(jmpx.autocast(model.apply)),
        "autocast, save": loss_of(jmpx.autocast(model.apply, save="products")),
    }


def residual_bytes(loss_fn: Loss, params: PyTree) -> int:
    """Returns the bytes that the backward pass keeps, besides the parameters."""
    jaxpr = jax.make_jaxpr(lambda params: jax.vjp(loss_fn, params)[1])(params).jaxpr
    kept = {var for var in jaxpr.outvars if not hasattr(var, "val")}  # a constant has one
    kept -= {*jaxpr.invars, *jaxpr.constvars}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)


def gradients(loss_fn: Loss, params: PyTree) -> np.ndarray:
    """Returns the gradients of all parameters as one float64 vector."""
    grads = jax.jit(jax.grad(loss_fn))(params)
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(grads)])


def dot_operands(loss_fn: Loss, params: PyTree) -> dict[str, int]:
    """Returns how many matrix products have which operands, as lowered for CUDA."""
    step = jax.jit(jax.value_and_grad(loss_fn)).trace(params)
    return count_dots(step.lower(lowering_platforms=("cuda",)).as_text())


def trace_seconds(loss_fn: Loss, params: PyTree) -> float:
    """Returns the seconds of the processor until the gradients are traced."""
    start = time.process_time()
    # A new function, which JAX's caches do not know.
    jax.jit(jax.value_and_grad(lambda params: loss_fn(params))).trace(params)
    return time.process_time() - start


def checkpointed_loss(model: Transformer, batch: tuple[jax.Array, jax.Array]) -> Loss:
    """Returns a float32 loss that keeps what `save=` keeps, with one checkpoint."""

    def loss_fn(params: PyTree) -> jax.Array:
        apply = jax.checkpoint(model.apply, policy=SAVEABLE)  # here: JAX would know it
        return cross_entropy(apply(params, batch[0]), batch[1])

    return loss_fn


def measure_counts(rng: np.random.Generator) -> Iterator[records.Record]:
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


def measure_traces(rng: np.random.Generator, rounds: int) -> Iterator[records.Record]:
    """Yields the trace times of a deep narrow model."""
    for way, scanned in {"24 layers": False, "24 layers, scanned": True}.items():
        model = Transformer(layers=24, width=64, hidden=128, scanned=scanned)
        params, batch = model.init(rng), model.batch(rng, 2, 16)
        marked = dataclasses.replace(model, checkpointed=True)
        ways = {
            **losses(model, batch),
            "marked": losses(marked, batch)["float32"],
            "checkpoint": checkpointed_loss(model, batch),
        }
        names = ("float32", "autocast", "checkpoint", "marked", "autocast, save")
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in tqdm(range(rounds + 1), desc=f"trace {way}"):
            for name, seconds in times.items():
                seconds.append(1000 * trace_seconds(ways[name], params))
        plain, autocast, checkpoint, marks, save = (statistics.median(times[n][1:]) for n in names)
        yield {
            "way": way,
            "trace_ms": round(plain),
            "autocast_trace_ms": round(autocast),
            "ratio": round(autocast / plain, 2),
            "checkpoint_trace_ms": round(checkpoint),
            "marked_trace_ms": round(marks),
            "save_trace_ms": round(save),
            "save_ratio": round(save / checkpoint, 2),
        }


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of the trace times")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rng = np.random.default_rng(args.seed)
    for found in (*measure_counts(rng), *measure_traces(rng, args.rounds)):
        records.emit("autocast", **found)


if __name__ == "__main__":
    main()
