"""Measures how the time to trace grows with layers, leaves, rules and devices.

    python benchmarks/growth.py --again --only layers 96    # all ways at one size

A line has the processor milliseconds of one way at one size, the least of some turns. Nothing is
compiled. The sizes are those of

- layers: blocks that are written out, in the float16 steps of `steps.py`, and their audit;
- leaves: parameters of one entry each, in the same steps, which skip;
- modules: of an Equinox network under `by=modules`, and under autocast;
- rules: of a policy map, each for one of 100 such modules; and of its string, which is parsed;
- devices: those that share parameters and batch, in the steps of `fsdp.py`, which are lowered, too.
"""

import functools
import gc
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import records
import steps
from models import Transformer
from records import Record

import jmpx

RESULTS = records.RESULTS / "growth.jsonl"
ROUNDS, ENOUGH = 5, 60  # turns at most, and the seconds after which there is no further one

Ways = dict[str, Callable[[], Any]]  # by name: what is measured
Line = list[tuple[float, float]]  # sizes and milliseconds


def of_steps(model: Any, names: Iterable[str]) -> Ways:
    trace = lambda name: steps.trace(steps.Point(name, "float16"), model, 2)  # noqa: E731
    return {name: functools.partial(trace, name) for name in names}


def layers(number: int) -> Ways:
    model = Transformer(number, width=64, hidden=128, islands=True)
    params, batch = steps.shapes(model, 2)
    names = ("handwritten", "jmp", "jmpx", "autocast", "autocast_saved")
    audit = jmpx.inspect.audit(lambda *args: model.loss(*args))
    return {**of_steps(model, names), "audit": lambda: audit(params, *batch)}


class Leaves(Transformer):
    """Sums its parameters, of which there are as many as layers."""

    def init(self, rng: np.random.Generator) -> Any:
        return [jnp.zeros(1) for _ in range(self.layers)]

    def apply(self, params: Any, x: jax.Array) -> jax.Array:
        return sum(params) * x


def leaves(number: int) -> Ways:
    return of_steps(Leaves(number), ("handwritten", "jmp", "jmpx_where", "jmpx", "autocast"))


def network(number: int, policy: str) -> Callable[[], Any]:
    """Returns a function that traces the gradients of so many modules under a policy."""
    mlp = eqx.nn.MLP(8, 8, 8, number - 1, key=jax.random.key(0))
    x = jnp.zeros(8)

    def run() -> Any:
        loss_fn = lambda mlp, x: mlp(x).astype(jnp.float32).sum()  # noqa: E731
        scaling = jmpx.NoOpLossScale()
        return eqx.filter_jit(jmpx.value_and_grad(loss_fn, scaling, policy=policy)).lower(mlp, x)

    return run


def modules(number: int) -> Ways:
    ways = "arguments", "modules", "operations"
    return {f"by={way}": network(number, f"by={way},c=bf16") for way in ways}


def rules(number: int) -> Ways:
    text = "c=bf16" + "".join(f"; */layers/{i}: full" for i in range(number))
    tags = iter(range(1000))  # a string that is not known yet
    found: Ways = {"parse": lambda: jmpx.get_policy_map(f"{text}; */{next(tags)}: full")}
    return found | {w: network(100, f"by={w},{text}") for w in ("modules", "operations")}


def devices(number: int) -> Ways:
    model = Transformer(2, 256, 4, 256, classes=256, islands=True)
    given = fsdp.Problem(model, *steps.shapes(model, 256), None)
    names = [way for way in fsdp.WAYS if "micro" not in way and "r=" not in way]
    lower = lambda way: fsdp.prepare(way, given, jax.devices()[:number]).traced.lower()  # noqa: E731
    return {way: functools.partial(lower, way) for way in names}


AXES: dict[str, tuple[Callable[[int], Ways], tuple[int, ...]]] = {
    "layers": (layers, (6, 12, 24, 48, 96)),
    "leaves": (leaves, (80, 400, 2_000, 6_000, 20_000)),
    "modules": (modules, (6, 12, 24, 48, 96)),
    "rules": (rules, (6, 12, 25, 50, 100)),
    "devices": (devices, (8, 32, 64, 128, 256)),
}
POINTS = [{"axis": axis, "size": size} for axis, (_, sizes) in AXES.items() for size in sizes]


def seconds(run: Callable[[], Any]) -> float:
    """Returns the processor seconds of a call, without Python's collector of garbage."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    run()
    found = time.process_time() - start
    gc.enable()
    return found


def measure(axis: str, size: int, small: bool = False) -> list[Record]:
    """Measures all ways at one size, in turns."""
    ways, start = AXES[axis][0](2 if small else size), time.process_time()
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 if small else ROUNDS):
        for way, run in ways.items():
            found[way].append(seconds(run))
        if time.process_time() - start > ENOUGH:
            break
    return [{"way": way, "ms": round(1000 * min(times), 3)} for way, times in found.items()]


OTHERS = ("handwritten", "jmp", "float32", "all_gather of bf16")  # than jmpx


def line(found: list[Record], axis: str, way: str) -> Line:
    """Returns the sizes and milliseconds of a way."""
    return sorted((r["size"], r["ms"]) for r in found if (r["axis"], r["way"]) == (axis, way))


def slope(line: Line) -> float:
    """Returns the slope at the three largest sizes, both axes logarithmic: 1 is linear."""
    sizes, times = np.log(line[-3:]).T
    return float(np.polyfit(sizes, times, 1)[0])


if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=256"
    records.main(__doc__, {"growth": (POINTS, measure)}, out=RESULTS)
