"""Measures what autocast saves and costs, on a transformer without casts, and `import jmpx`.

    python benchmarks/autocast.py --again
    python benchmarks/autocast.py --again --only import_time

residual_mib: what JAX hands from the forward to the backward pass of 4 blocks (batch 8, sequence
128, width 256) besides the arguments, and its ratio to float32's. It depends on JAX alone, not on
the machine.
gradient_error: the norm of the gradients' difference from float32's, relative to float32's norm.
dots: the operands of all matrix products, forward and backward, lowered for CUDA.
trace_ms: processor time until the gradients of 24 layers are traced, the blocks written out or
scanned, with and without autocast in turns; medians, and their ratio. That of save= is to a float32
model with one jax.checkpoint around it, because checkpoints are what takes the time. Where each
block is marked by hand, JAX traces one block and finds it again.
Of `marked blocks`: the same of c=bf16,save=products, which casts operations, and of by=arguments
with it, over bfloat16 by hand with each block marked; the least of each, without JAX's caches, as a
process that traces once pays it.
Of `by hand`: the same with the model and the loss under `c=bf16`, which casts operations, over
bfloat16 by hand, whose norms and softmax are float32 islands.
first_use_ms: the same in fresh processes of which it is the first trace, so that it includes what
jmpx imports then; medians of five.
over_jax_ms: processor time of `import jmpx`, `jmp` or `mpx` (PyPI: mixed-precision-for-JAX) after
`import jax`, in fresh processes; medians. Most of jmpx's is that of `jax.extend`, which it imports
before the first trace: see `jmpx/_jaxprs/extend.py`.
"""

import dataclasses
import functools
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from compiled_step import count_dots
from models import SAVEABLE, Transformer, cross_entropy
from records import Record

import jmpx

BY_ARGUMENTS = "by=arguments,c=bf16,o=f32,save=products"
PyTree = Any
Loss = Callable[[PyTree], jax.Array]  # of the parameters


def losses(model: Transformer, batch: tuple[jax.Array, jax.Array]) -> dict[str, Loss]:
    """Returns a loss function for each way to compute."""
    x, labels = batch

    def loss_of(apply: Callable[..., jax.Array]) -> Loss:
        return lambda params: cross_entropy(apply(params, x), labels)

    def in_bfloat16(params: PyTree, x: jax.Array) -> jax.Array:
        return model.apply(*jmpx.cast_tree((params, x), jnp.bfloat16))

    with_islands = dataclasses.replace(model, islands=True)
    # As Grampax does: the operands of products are cast, and the results are cast back.
    grampax = jmpx.autocast(model.apply, "full; op.dot_general: bfloat16")
    return {
        "float32": loss_of(model.apply),
        "bfloat16": loss_of(in_bfloat16),
        "grampax": loss_of(grampax),
        "autocast": loss_of(jmpx.autocast(model.apply)),
        "autocast, save": loss_of(jmpx.autocast(model.apply, save="products")),
        "arguments, save": loss_of(jmpx.apply_policy(with_islands.apply, BY_ARGUMENTS)),
    }


def residual_bytes(loss_fn: Loss, params: PyTree) -> int:
    """Returns the bytes that the backward pass keeps, besides the parameters."""
    jaxpr = jax.make_jaxpr(lambda params: jax.vjp(loss_fn, params)[1])(params).jaxpr
    kept = {var for var in jaxpr.outvars if not hasattr(var, "val")}  # a constant has one
    kept -= {*jaxpr.invars, *jaxpr.constvars}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)


def gradients(loss_fn: Loss, params: PyTree) -> np.ndarray:
    """Returns the gradients of all parameters as one float64 vector, rounded as written."""
    grads = jax.jit(jmpx.inspect.emulate(jax.grad(loss_fn)))(params)
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(grads)])


def dot_operands(loss_fn: Loss, params: PyTree) -> dict[str, int]:
    """Returns how many matrix products have which operands, as lowered for CUDA."""
    step = jax.jit(jax.value_and_grad(loss_fn)).trace(params)
    return count_dots(step.lower(lowering_platforms=("cuda",)))


def trace_seconds(loss_fn: Loss, params: PyTree, is_first: bool = False) -> float:
    """Returns the seconds of the processor until the gradients are traced."""
    if is_first:
        jax.clear_caches()
        gc.collect()
    start = time.process_time()
    # A new function, which JAX's caches do not know.
    jax.jit(jax.value_and_grad(lambda params: loss_fn(params))).trace(params)
    return time.process_time() - start


def by_policy(
    layers: int, scanned: bool = False, save: str = "", marked: bool = False
) -> tuple[dict[str, Loss], PyTree]:
    """Returns the losses by hand and under policies of a deep narrow model, and its parameters."""
    model = Transformer(layers=layers, width=64, hidden=128, scanned=scanned)
    params = model.init(np.random.default_rng(0))
    x, labels = model.batch(np.random.default_rng(0), 2, 16)
    with_islands = dataclasses.replace(model, islands=True)
    hand = dataclasses.replace(with_islands, checkpointed=marked)
    operations = jmpx.apply_policy(model.loss, f"c=bf16{save}")
    arguments = jmpx.apply_policy(with_islands.loss, BY_ARGUMENTS)
    ways: dict[str, Loss] = {
        "by hand": lambda params: hand.loss(*jmpx.cast_tree((params, x), jnp.bfloat16), labels),
        "operations": lambda params: operations(params, x, labels),
        "arguments": lambda params: arguments(params, x, labels),
    }
    return ways, params


def in_turns(
    ways: dict[str, Loss], params: PyTree, rounds: int, is_first: bool = False
) -> Iterator[list[float]]:
    """Yields the trace times of each way in milliseconds, without its first."""
    turns = [
        [1000 * trace_seconds(loss_fn, params, is_first) for loss_fn in ways.values()]
        for _ in range(rounds + 1)
    ]
    return map(list, zip(*turns[1:], strict=True))


def ratios(by_hand: float, ours: float, names: tuple[str, ...] = ("trace_ms", "ratio")) -> Record:
    return dict(zip(names, (round(ours), round(ours / by_hand, 2)), strict=True))


def measure_over_marked(layers: int, scanned: bool, rounds: int) -> Record:
    ways, params = by_policy(layers, scanned, ",save=products", marked=True)
    by_hand, operations, arguments = map(min, in_turns(ways, params, rounds, is_first=True))
    more = ratios(by_hand, arguments, ("arguments_trace_ms", "arguments_ratio"))
    return {"by_hand_trace_ms": round(by_hand), **ratios(by_hand, operations), **more}


def measure_over_by_hand(layers: int, rounds: int) -> Record:
    ways, params = by_policy(layers)
    del ways["arguments"]
    by_hand, default = map(statistics.median, in_turns(ways, params, rounds))
    return {"by_hand_trace_ms": round(by_hand), **ratios(by_hand, default)}


def in_processes(code: str, runs: int) -> list[list[float]]:
    """Runs code in fresh processes, and returns the numbers that each prints but the first.

    Installed packages have their bytecode: without it, each would compile jmpx again.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code]
    run = functools.partial(subprocess.run, command, capture_output=True, check=True, text=True)
    return [[*map(float, run(env=environment).stdout.split())] for _ in range(runs + 1)][1:]


FIRST = """
import autocast
ways, params = autocast.by_policy({layers})
print(1000 * autocast.trace_seconds(ways[{name!r}], params))
"""
IMPORTED = """
from time import process_time
start = process_time()
import jax
between = process_time()
import {library}
print(between - start, process_time() - between)
"""


def measure_first_use(layers: int, runs: int) -> Record:
    by_hand, default = (
        statistics.median(ms for (ms,) in in_processes(FIRST.format(layers=layers, name=n), runs))
        for n in ("by hand", "operations")
    )
    names = "first_use_ms", "ratio"
    return {"by_hand_first_use_ms": round(by_hand), **ratios(by_hand, default, names)}


def measure_import(library: str, small: bool = False) -> Record:
    """Measures what importing a library adds to `import jax`."""
    runs = 1 if small else 21
    times = zip(*in_processes(IMPORTED.format(library=library), runs), strict=True)
    jax_ms, library_ms = (round(1000 * statistics.median(seconds), 2) for seconds in times)
    return {"over_jax_ms": library_ms, "jax_ms": jax_ms, "runs": runs}


def measure(way: str, small: bool = False) -> Record:
    rng, rounds = np.random.default_rng(0), 1 if small else ROUNDS
    if way in BY_HAND:
        return measure_over_by_hand(1 if small else BY_HAND[way], rounds)
    if way in MARKED_BLOCKS:
        layers, scanned = MARKED_BLOCKS[way]
        return measure_over_marked(2 if small else layers, scanned, rounds)
    if way in FIRST_USE:
        return measure_first_use(FIRST_USE[way], 1 if small else 5)
    if way in SCANNED:
        return measure_trace(rng, 1 if small else 24, SCANNED[way], rounds)
    model = Transformer(1, 16, hidden=32) if small else Transformer()
    params, ways = model.init(rng), losses(model, model.batch(rng))
    full, kept = (residual_bytes(ways[name], params) for name in ("float32", way))
    reference, found = (gradients(ways[name], params) for name in ("float32", way))
    error = np.linalg.norm(found - reference) / np.linalg.norm(reference)
    return {
        "residual_mib": round(kept / 2**20, 1),
        "of_float32": round(kept / full, 3),
        "gradient_error": round(float(error), 5),
        "dots": dot_operands(ways[way], params),
    }


def measure_trace(rng: np.random.Generator, layers: int, scanned: bool, rounds: int) -> Record:
    """Returns the trace times of a deep narrow model."""
    model = Transformer(layers=layers, width=64, hidden=128, scanned=scanned)
    params, batch = model.init(rng), model.batch(rng, 2, 16)

    def checkpoint(params: PyTree) -> jax.Array:
        apply = jax.checkpoint(model.apply, policy=SAVEABLE)  # here: JAX would know it
        return cross_entropy(apply(params, batch[0]), batch[1])

    marked = losses(dataclasses.replace(model, checkpointed=True), batch)["float32"]
    ways = {**losses(model, batch), "marked": marked, "checkpoint": checkpoint}
    names = ("float32", "autocast", "checkpoint", "marked", "autocast, save")
    times = in_turns({name: ways[name] for name in names}, params, rounds)
    plain, autocast, one, marks, save = map(statistics.median, times)
    return {
        "trace_ms": round(plain),
        "autocast_trace_ms": round(autocast),
        "ratio": round(autocast / plain, 2),
        "checkpoint_trace_ms": round(one),
        "marked_trace_ms": round(marks),
        "save_trace_ms": round(save),
        "save_ratio": round(save / one, 2),
    }


ROUNDS = 7  # of the trace times
SCANNED = {"24 layers": False, "24 layers, scanned": True}
BY_HAND = {f"{layers} layers, by hand": layers for layers in (12, 24, 96)}
MARKED_BLOCKS = {f"{layers} layers, marked blocks": (layers, False) for layers in (12, 48, 96)}
MARKED_BLOCKS["24 layers, scanned, marked blocks"] = (24, True)
FIRST_USE = {f"first use, {layers} layers": layers for layers in (1, 4, 12)}
LOSSES = ("float32", "bfloat16", "grampax", "autocast", "autocast, save", "arguments, save")
WAYS = (*LOSSES, *SCANNED, *BY_HAND, *MARKED_BLOCKS, *FIRST_USE)
BENCHMARKS: records.Benchmarks = {
    "autocast": ([{"way": way} for way in WAYS], measure),
    "import_time": ([{"library": library} for library in ("jmpx", "jmp", "mpx")], measure_import),
}

if __name__ == "__main__":
    records.main(__doc__, BENCHMARKS)
