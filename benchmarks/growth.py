"""Measures how the time to trace grows with layers, leaves, rules and devices.

    python benchmarks/growth.py                        # what has no line yet
    python benchmarks/growth.py --again --only layers 96    # all ways at one size
    python benchmarks/pictures.py                      # the picture

A line has the processor seconds of one way at one size: the least of some turns, because nothing
makes them less. Nothing is compiled. By size, these are:

- layers: transformer blocks that are written out; the gradients of a loss, and its audit.
- leaves: parameters of two entries each; their gradients, and the skipping update by Adam.
- rules: those of a policy map, each of which matches one of 100 modules or named scopes.
- devices: those that share parameters and batch, as in `fsdp.py`; the step is lowered, too, and
  its collectives are read.

`slope` is that of the last three sizes where both axes are logarithmic: 1 is linear.
"""

import functools
import importlib.util
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import records
import steps
from models import Transformer, Zeros
from records import Record

import jmpx

RESULTS = records.RESULTS / "growth.jsonl"
ROUNDS, ENOUGH = 5, 60  # turns at most, and the seconds after which there is no further one
LOW = "c=bf16"
MODULES = 100  # of the network under rules

PyTree = Any
Ways = dict[str, Callable[[], Any]]  # by name: what is measured


def tracing(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Returns a function that traces; it is a new one each time, which JAX's caches do not know."""
    return lambda: jax.jit(lambda *args: fn(*args)).trace(*args)


def gradients(loss_fn: Callable[..., jax.Array], policy: str) -> Callable[..., Any]:
    return jmpx.filter_value_and_grad(loss_fn, jmpx.NoOpLossScale(), policy=policy)


def in_bfloat16(loss_fn: Callable[..., jax.Array], cast: Callable[[PyTree], PyTree]) -> Any:
    """Returns the gradients of a loss whose arguments are cast by hand, or by another library."""
    return jax.value_and_grad(lambda params, *batch: loss_fn(cast(params), *cast(batch)))


def casts() -> dict[str, Callable[[PyTree], PyTree]]:
    by_hand = {"by hand": functools.partial(steps.cast, dtype="bfloat16")}
    if not importlib.util.find_spec("jmp"):
        return by_hand
    import jmp

    return by_hand | {"JMP": jmp.get_policy("compute=bfloat16").cast_to_compute}


def shapes(model: Transformer, size: int, length: int) -> tuple[PyTree, Any, Any]:
    """Returns those of the parameters of a model and of a batch."""
    params = jax.eval_shape(lambda: model.init(Zeros(np.random.PCG64())))
    batch = jax.eval_shape(lambda: model.batch(np.random.default_rng(0), size, length))
    return params, *batch


# Layers.


class Block(eqx.Module):
    """A block of the transformer as a module."""

    layer: PyTree
    model: Transformer = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.model._block(self.layer, x)


class Blocks(eqx.Module):
    """A network of modules."""

    blocks: list[Block]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return (x.astype(jnp.float32) ** 2).mean()


def layers(number: int) -> Ways:
    model = Transformer(number, width=64, hidden=128, islands=True)
    plain = Transformer(number, width=64, hidden=128)
    params, *batch = given = shapes(model, 2, 16)
    network = Blocks([Block(layer, model) for layer in params["layers"]])
    saving = gradients(plain.loss, f"{LOW},by=operations,save=products")
    return {
        **{name: tracing(in_bfloat16(model.loss, cast), *given) for name, cast in casts().items()},
        "by arguments": tracing(gradients(model.loss, LOW), *given),
        "by modules": tracing(gradients(Blocks.__call__, f"{LOW},by=modules"), network, batch[0]),
        "autocast": tracing(gradients(plain.loss, f"{LOW},by=operations"), *given),
        "autocast, save": tracing(saving, *given),
        "audit": lambda: jmpx.inspect.audit(lambda *args: model.loss(*args))(*given),
    }


# Leaves.


def squares(params: PyTree) -> jax.Array:
    return sum(leaf.astype(jnp.float32).sum() for leaf in params.values())


def leaves(number: int) -> Ways:
    params = {f"w{i}": jax.ShapeDtypeStruct((2,), jnp.float32) for i in range(number)}
    state, finite = jax.eval_shape(steps.ADAM.init, params), jax.ShapeDtypeStruct((), bool)
    given = params, state, params, finite

    def by_hand(params: PyTree, state: PyTree, grads: PyTree, finite: jax.Array) -> Any:
        return steps.by_where(finite, new, grads, params, state)

    def new(grads: PyTree, *old: PyTree) -> Any:
        return steps.update(steps.ADAM, grads, *old)

    def by_jmpx(params: PyTree, state: PyTree, grads: PyTree, finite: jax.Array) -> Any:
        return jmpx.optimizer_update(params, steps.ADAM, state, grads, finite)

    return {
        **{name: tracing(in_bfloat16(squares, cast), params) for name, cast in casts().items()},
        "by arguments": tracing(gradients(squares, LOW), params),
        "autocast": tracing(gradients(squares, f"{LOW},by=operations"), params),
        "update by hand": tracing(by_hand, *given),
        "optimizer_update": tracing(by_jmpx, *given),
    }


# Rules.


class Scale(eqx.Module):
    """A module of one operation."""

    weight: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight


def rules(number: int) -> Ways:
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    network = Blocks([Scale(x) for _ in range(MODULES)])
    text = "; ".join([LOW, *(f"*/blocks/{i}: full" for i in range(number))])

    def parse() -> None:
        jmpx.get_policy_map(text.replace("/blocks/", f"/{uuid.uuid4()}/"))  # one not known yet

    return {
        "parse": parse,
        **{
            way: tracing(
                gradients(Blocks.__call__, text.replace(LOW, f"{LOW},by={way}")), network, x
            )
            for way in ("modules", "operations")
        },
    }


# Devices.


def devices(number: int) -> Ways:
    model = Transformer(2, 256, 4, 256, classes=256, islands=True)
    params, *batch = shapes(model, 256, 8)
    given = fsdp.Problem(model, params, (batch[0], batch[1]), None)

    def lower(way: str) -> None:
        lowered = fsdp.prepare(way, given, jax.devices()[:number]).traced.lower()
        if way in fsdp.UNDER_SHARD_MAP:  # under jit, JAX writes no collectives
            jmpx.inspect.collectives(lowered)

    return {words: functools.partial(lower, way) for way, words in SHARDED.items()}


# The points.

SHARDED = {  # the ways of `fsdp.py`
    "float32": "float32",
    "c=bf16": "by arguments",
    "autocast": "autocast",
    "batch_sharding, c=bf16": "batch_sharding",
    "all_gather of bf16": "by hand, gathering",
    "jmpx.distributed.gather, c=bf16": "gathering",
}
AXES: dict[str, tuple[Callable[[int], Ways], tuple[int, ...]]] = {
    "layers": (layers, (6, 12, 24, 48, 96)),
    "leaves": (leaves, (80, 400, 2_000, 6_000, 20_000)),
    "rules": (rules, (3, 12, 25, 50, 100)),
    "devices": (devices, (8, 32, 64, 128, 256)),
}


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(axis: str, size: int, small: bool = False) -> list[Record]:
    """Measures all ways at one size, in turns."""
    make, _ = AXES[axis]
    ways, start = make(2 if small else size), time.process_time()
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 if small else ROUNDS):
        for way, run in ways.items():
            found[way].append(seconds(run))
        if time.process_time() - start > ENOUGH:
            break
    return [{"way": way, "ms": round(1000 * min(times), 2)} for way, times in found.items()]


def slope(line: list[tuple[float, float]]) -> float:
    """Returns the slope of the last three points of a line, both axes logarithmic."""
    sizes, times = np.log(sorted(line)[-3:]).T
    return float(np.polyfit(sizes, times, 1)[0])


def lines(found: list[Record], axis: str) -> dict[str, list[tuple[float, float]]]:
    """Returns the sizes and milliseconds of each way."""
    by_way: dict[str, list[tuple[float, float]]] = {}
    for record in found:
        if record["axis"] == axis:
            by_way.setdefault(record["way"], []).append((record["size"], record["ms"]))
    return by_way


POINTS = [{"axis": axis, "size": size} for axis, (_, sizes) in AXES.items() for size in sizes]

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=256"
    records.main(__doc__, {"growth": (POINTS, measure)}, out=RESULTS)
