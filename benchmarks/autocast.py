"""Measures what autocast saves and costs, on a transformer without casts, and `import jmpx`.

    python benchmarks/autocast.py --again
    python benchmarks/autocast.py --again --only import_time

residual_mib: what JAX hands from the forward to the backward pass of 4 blocks (batch 8, sequence
128, width 256) besides the arguments, and its ratio to float32's. It depends on JAX alone, not on
the machine.
gradient_error: the norm of the gradients' difference from float32's, relative to float32's norm.
trace_ms: processor time until the gradients of 24 layers are traced, the blocks written out or
scanned, with and without autocast in turns; medians, and `ratio`. `save_ratio` is that of save= to
a float32 model with one jax.checkpoint around it, because checkpoints are what takes the time.
Of `marked blocks`: the same of c=bf16,save=products, which casts operations, and of by=arguments
with it, over bfloat16 by hand with each block marked, where JAX traces one block and finds it
again; the least of each, without JAX's caches, as a process that traces once pays it.
Of `by hand`: the same with the model and the loss under `c=bf16`, which casts operations, over
bfloat16 by hand, whose norms and softmax are float32 islands.
first_use_ms: the same in fresh processes of which it is the first trace, so that it includes what
jmpx imports then; medians of five.
over_jax_ms: processor time of `import jmpx` after `import jax`, in fresh processes; medians. Most
is that of `jax.extend`, which jmpx imports before the first trace: see `jmpx/_jaxprs/extend.py`.
"""

import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from models import SAVEABLE, Transformer, cross_entropy
from records import PyTree, Record

import jmpx

BY_ARGUMENTS = "by=arguments,c=bf16,o=f32,save=products"
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


def trace_ms(loss_fn: Loss, params: PyTree, is_first: bool = False) -> float:
    """Returns the milliseconds of the processor until the gradients are traced."""
    if is_first:
        jax.clear_caches()
        gc.collect()
    start = time.process_time()
    # A new function, which JAX's caches do not know.
    jax.jit(jax.value_and_grad(lambda params: loss_fn(params))).trace(params)
    return 1000 * (time.process_time() - start)


def in_turns(
    ways: Iterable[Loss], params: PyTree, small: bool, by: Any = statistics.median, **options: Any
) -> list[float]:
    """Returns the milliseconds to trace each way, without its first turn."""
    turns = [[trace_ms(f, params, **options) for f in ways] for _ in range(2 if small else 8)]
    return [by(times) for times in zip(*turns[1:], strict=True)]


def narrow(layers: int, scanned: bool) -> tuple[Transformer, PyTree, Any]:
    """Returns a deep narrow model, its parameters and a batch."""
    model = Transformer(layers=layers, width=64, hidden=128, scanned=scanned)
    rng = np.random.default_rng(0)
    return model, model.init(rng), model.batch(rng, 2, 16)


def by_policy(
    layers: int, scanned: bool = False, marked: bool = False
) -> tuple[dict[str, Loss], PyTree]:
    """Returns the losses by hand and under policies of a deep narrow model, and its parameters."""
    model, params, (x, labels) = narrow(layers, scanned)
    with_islands = dataclasses.replace(model, islands=True)
    hand = dataclasses.replace(with_islands, checkpointed=marked)
    operations = jmpx.apply_policy(model.loss, "c=bf16,save=products" if marked else "c=bf16")
    arguments = jmpx.apply_policy(with_islands.loss, BY_ARGUMENTS)
    ways: dict[str, Loss] = {
        "by hand": lambda params: hand.loss(*jmpx.cast_tree((params, x), jnp.bfloat16), labels),
        "operations": lambda params: operations(params, x, labels),
    }
    more = {"arguments": lambda params: arguments(params, x, labels)} if marked else {}
    return ways | more, params


def measure_policies(
    layers: int, scanned: bool = False, marked: bool = False, small: bool = False
) -> Record:
    ways, params = by_policy(2 if small else layers, scanned, marked)
    options: Any = {"by": min, "is_first": True} if marked else {}
    by_hand, *ours = in_turns(ways.values(), params, small, **options)
    names = ("ratio", "arguments_ratio")[: len(ours)]
    return dict(zip(names, (round(each / by_hand, 2) for each in ours), strict=True))


def measure_trace(layers: int, scanned: bool = False, small: bool = False) -> Record:
    model, params, (x, labels) = narrow(2 if small else layers, scanned)

    def checkpoint(params: PyTree) -> jax.Array:
        apply = jax.checkpoint(model.apply, policy=SAVEABLE)  # here: JAX would know it
        return cross_entropy(apply(params, x), labels)

    ways = losses(model, (x, labels)) | {"checkpoint": checkpoint}
    names = ("float32", "autocast", "checkpoint", "autocast, save")
    plain, autocast, one, save = in_turns([ways[name] for name in names], params, small)
    ratios = {"ratio": round(autocast / plain, 2), "save_ratio": round(save / one, 2)}
    return {"trace_ms": round(plain), **ratios}


def in_processes(code: str, runs: int) -> list[float]:
    """Runs code in fresh processes, and returns the number that each prints but the first.

    Installed packages have their bytecode: without it, each would compile jmpx again.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code]
    run = partial(subprocess.run, command, capture_output=True, check=True, text=True)
    return [float(run(env=environment).stdout) for _ in range(runs + 1)][1:]


FIRST = """
import autocast
ways, params = autocast.by_policy({layers})
print(autocast.trace_ms(ways[{name!r}], params))
"""
IMPORTED = """
from time import process_time
import jax
start = process_time()
import jmpx
print(1000 * (process_time() - start))
"""


def measure_first_use(layers: int, small: bool = False) -> Record:
    by_hand, ours = (
        statistics.median(in_processes(FIRST.format(layers=layers, name=n), 1 if small else 5))
        for n in ("by hand", "operations")
    )
    return {"first_use_ms": round(ours), "ratio": round(ours / by_hand, 2)}


def measure_import(library: str, small: bool = False) -> Record:
    """Measures what importing jmpx adds to `import jax`."""
    return {"over_jax_ms": round(statistics.median(in_processes(IMPORTED, 1 if small else 21)), 2)}


def measure_loss(way: str, small: bool = False) -> Record:
    model, rng = Transformer(1, 16, hidden=32) if small else Transformer(), np.random.default_rng(0)
    params, ways = model.init(rng), losses(model, model.batch(rng))
    full, kept = (residual_bytes(ways[name], params) for name in ("float32", way))
    reference, found = (gradients(ways[name], params) for name in ("float32", way))
    error = np.linalg.norm(found - reference) / np.linalg.norm(reference)
    return {
        "residual_mib": round(kept / 2**20, 1),
        "of_float32": round(kept / full, 3),
        "gradient_error": round(float(error), 5),
    }


def measure(way: str, small: bool = False) -> Record:
    return WAYS[way](small=small)


LOSSES = ("float32", "bfloat16", "grampax", "autocast", "autocast, save", "arguments, save")
WAYS: dict[str, Callable[..., Record]] = {
    **{way: partial(measure_loss, way) for way in LOSSES},
    "24 layers": partial(measure_trace, 24),
    "24 layers, scanned": partial(measure_trace, 24, scanned=True),
    **{f"{n} layers, by hand": partial(measure_policies, n) for n in (12, 24)},
    **{
        f"{n} layers, marked blocks": partial(measure_policies, n, marked=True)
        for n in (12, 48, 96)
    },
    "24 layers, scanned, marked blocks": partial(measure_policies, 24, scanned=True, marked=True),
    **{f"first use, {n} layers": partial(measure_first_use, n) for n in (4, 12)},
}
BENCHMARKS: records.Benchmarks = {
    "autocast": ([{"way": way} for way in WAYS], measure),
    "import_time": ([{"library": library} for library in ("jmpx",)], measure_import),
}

if __name__ == "__main__":
    records.main(__doc__, BENCHMARKS)
