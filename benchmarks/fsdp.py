"""Measures what train steps send between eight devices that shard the parameters, as FSDP does.

    python benchmarks/fsdp.py --again --only fsdp_partitioner  # after XLA's partitioner; and errors
    python benchmarks/fsdp.py --again --only fsdp_stablehlo    # under shard_map, as JAX writes them
    python benchmarks/fsdp.py --again --only tpu_fsdp          # for eight TPU v5e; needs libtpu

A transformer of 3.27 MiB in float32 is trained with AdamW. Each device stores an eighth of every
parameter and of the optimizer's state, and reads an eighth of the batch. A line has the MiB that a
device sends in a step, by kind and dtype, as `compiled_step.py` counts them, without those of
scalars, which are losses and flags. `gradient_error` is the norm of the gradients' difference from
float64's, relative to float64's norm, and `error_one_device` that of the same step on one device.
Both are computed on CPUs, rounded where the program says so (`jmpx.inspect.emulate`); but sums over
devices are in float32 there.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import compiled_step
import jax
import numpy as np
import optax
import records
import tpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import Transformer
from records import PyTree, Record

import jmpx

DEVICES = 8
MODEL = Transformer(layers=4, width=128, hidden=512, classes=496, islands=True)
OPTIMIZER = optax.adamw(1e-3)
ROWS, WHOLE = P("data"), P()  # shardings

Gradients = tuple[jax.Array, PyTree]  # a loss, and its gradients
Way = Callable[..., Gradients]  # of the model, the mesh, the parameters and the batch

cast = jmpx.mpx.cast_to_bfloat16


def with_jmpx(loss_fn: Callable[..., jax.Array], policy: str, **options: Any) -> Way:
    scale = jmpx.NoOpLossScale()
    grad_fn = jmpx.value_and_grad(loss_fn, scale, policy=f"by=arguments,{policy}", **options)

    def value_and_grad(*args: Any) -> Gradients:
        result = grad_fn(*args)
        return result.value, result.grads

    return value_and_grad


# Ways to compute gradients under jit, where XLA inserts the collectives.


def with_policy(policy: str, microbatches: int = 1) -> Way:
    options = {"microbatches": microbatches}
    return lambda model, mesh, *args: with_jmpx(model.loss, policy, **options)(*args)


def with_autocast(model: Transformer, mesh: Mesh, *args: Any) -> Gradients:
    without_casts = dataclasses.replace(model, islands=False)
    return jax.value_and_grad(jmpx.autocast(without_casts.loss))(*args)


# Ways under shard_map, where the program gathers the parameters.


def under_shard_map(value_and_grad: Way, mesh: Mesh) -> Way:
    specs: Any = {"in_specs": ROWS, "out_specs": (WHOLE, ROWS)}
    return jax.shard_map(value_and_grad, mesh=mesh, **specs)


def gathered_by_hand(model: Transformer, mesh: Mesh, *args: Any) -> Gradients:
    def loss_fn(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
        whole = jax.tree.map(lambda x: jax.lax.all_gather(cast(x), "data", tiled=True), params)
        return model.loss(whole, cast(x), labels) / mesh.size

    def value_and_grad(*args: Any) -> Gradients:
        loss, grads = jax.value_and_grad(loss_fn)(*args)
        return jax.lax.psum(loss, "data"), grads

    return under_shard_map(value_and_grad, mesh)(*args)


def gathered_by_jmpx(policy: str, microbatches: int = 1) -> Way:
    def way(model: Transformer, mesh: Mesh, *args: Any) -> Gradients:
        def loss_fn(params: PyTree, *batch: jax.Array) -> jax.Array:
            return model.loss(jmpx.distributed.gather(params, "data", policy), *batch)

        options: Any = {"microbatches": microbatches, "over": "data", "uncast": 0}
        return under_shard_map(with_jmpx(loss_fn, policy, **options), mesh)(*args)

    return way


GATHER = "jmpx.distributed.gather"
WAYS: dict[str, Way] = {
    "float32": lambda model, mesh, *args: jax.value_and_grad(model.loss)(*args),
    "c=bf16": with_policy("c=bf16"),
    "autocast": with_autocast,
    "c=bf16,r=f32": with_policy("c=bf16,r=f32"),
    "c=bf16, 4 micro-batches": with_policy("c=bf16", microbatches=4),
    "c=bf16,r=f32, 4 micro-batches": with_policy("c=bf16,r=f32", microbatches=4),
    "all_gather of bf16": gathered_by_hand,
    f"{GATHER}, c=bf16": gathered_by_jmpx("c=bf16"),
    f"{GATHER}, c=bf16,r=bf16": gathered_by_jmpx("c=bf16,r=bf16"),
    f"{GATHER}, c=bf16, 4 micro-batches": gathered_by_jmpx("c=bf16", microbatches=4),
}
UNDER_SHARD_MAP = [way for way in WAYS if "gather" in way]


# --- The step, and what is read from it ---


class Problem(NamedTuple):
    """What is trained on what: a model, its parameters, and a batch of inputs and labels."""

    model: Transformer
    params: PyTree
    batch: tuple[jax.Array, jax.Array]
    float64_gradients: PyTree


@functools.cache
def problem(model: Transformer = MODEL, sequences: int = 64, length: int = 64) -> Problem:
    rng = np.random.default_rng(0)
    params, (x, labels) = model.init(rng), model.batch(rng, sequences, length)
    with enable_x64():
        wide = jax.tree.map(lambda array: np.asarray(array, np.float64), (params, x))
        grads = jax.device_get(jax.jit(jax.grad(model.loss))(*wide, np.asarray(labels)))
    return Problem(model, params, (x, labels), grads)


def enable_x64() -> Any:
    if hasattr(jax, "enable_x64"):  # since JAX 0.8
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # pyright: ignore[reportAttributeAccessIssue]


class Prepared(NamedTuple):
    """A step that is ready to be compiled, and what to call it with."""

    traced: Any  # what `jax.jit(...).trace` returns
    arguments: tuple[PyTree, ...]
    shardings: tuple[PyTree, ...]


def prepare(way: str, given: Problem, devices: list[Any], emulated: bool = False) -> Prepared:
    """Traces a step, which returns its gradients, too, for CPUs or for those of `tpu.devices`."""
    mesh = Mesh(np.array(devices), ("data",))
    whole, rows = NamedSharding(mesh, WHOLE), NamedSharding(mesh, ROWS)

    def step(params: PyTree, state: PyTree, *batch: jax.Array) -> Any:
        loss, grads = WAYS[way](given.model, mesh, params, *batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    arguments = (given.params, OPTIMIZER.init(given.params), *given.batch)
    shardings = jax.tree.map(lambda array: rows if array.ndim else whole, arguments)
    params, state, *_ = shardings
    run = jmpx.inspect.emulate(step) if emulated else step
    jitted = jax.jit(run, out_shardings=(params, state, whole, params))
    return Prepared(jitted.trace(*tpu.described(arguments, shardings)), arguments, shardings)


def measure(way: str, compiler: str, given: Problem, devices: list[Any]) -> Record:
    """Compiles a step for some devices and reads its collectives.

    Args:
        way: one of WAYS.
        compiler: `partitioner`, `stablehlo` or `tpu`.
        given: what is trained.
        devices: those that share the step.
    """
    traced, errors = prepare(way, given, devices).traced, {}
    if compiler == "stablehlo":
        program = traced.lower()
    elif compiler == "tpu":
        program = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    else:
        program, _ = compiled_step.partitioned(traced.lower())
        errors["gradient_error"] = gradient_error(way, given, devices)
        errors["error_one_device"] = gradient_error(way, given, devices[:1])
    found = compiled_step.sends(program)
    sent = {"sent_mib": compiled_step.mib(found), "by_kind": compiled_step.mib_by_kind(found)}
    return sent | errors


def gradient_error(way: str, given: Problem, devices: list[Any]) -> float:
    """Returns the error of the gradients of a step, relative to the norm of float64's."""
    prepared = prepare(way, given, devices, emulated=True)
    program = prepared.traced.lower().compile()
    found = program(*jax.device_put(prepared.arguments, prepared.shardings))[-1]
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    difference = jax.tree.map(np.subtract, found, given.float64_gradients)
    return norm(difference) / norm(given.float64_gradients)


def norm(tree: PyTree) -> float:
    return sum(float(np.sum(leaf**2)) for leaf in jax.tree.leaves(tree)) ** 0.5


def measure_by(compiler: str, way: str, small: bool = False) -> Record:
    devices = tpu.devices() if compiler == "tpu" else jax.devices()
    tiny = Transformer(1, 32, 2, 64, classes=24, islands=True)
    return measure(way, compiler, problem(tiny, 16, 8) if small else problem(), devices)


BENCHMARKS: records.Benchmarks = {
    "fsdp_partitioner": (
        [{"way": way} for way in WAYS],
        functools.partial(measure_by, "partitioner"),
    ),
    "fsdp_stablehlo": (
        [{"way": way} for way in UNDER_SHARD_MAP],
        functools.partial(measure_by, "stablehlo"),
    ),
    "tpu_fsdp": ([{"way": way} for way in WAYS], functools.partial(measure_by, "tpu")),
}

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}"
    records.main(__doc__, BENCHMARKS)
