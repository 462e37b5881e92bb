"""Measures what `jmpx.inspect.ranges` costs beside a plain step of a transformer.

    python benchmarks/ranges_cost.py --again

A step is the loss and its gradient of four blocks (batch 8, sequence 128, width 256), written out
or scanned. `step_s` is the processor's time of a jitted float32 step that is compiled already;
`first_s` and `later_s` are those of calls of `jmpx.inspect.ranges`, tracing included, and `later`
a multiple of `step_s`. The first call compiles; later calls of a model that is written out compile
nothing, but loops are compiled again. Seconds are those of all threads, so that other programs on
the machine count less.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import records
from models import Transformer

import jmpx

ROUNDS = 3


def seconds(call: Callable[..., Any], *args: Any) -> float:
    """Returns the processor's time of a call."""
    start = time.process_time()
    jax.block_until_ready(call(*args))
    return time.process_time() - start


def measure(scanned: bool, small: bool = False) -> records.Record:
    sizes: dict[str, Any] = {"layers": 1, "width": 8, "hidden": 16} if small else {}
    model, rng = Transformer(**sizes, scanned=scanned), np.random.default_rng(0)
    arguments = model.init(rng), *model.batch(rng)
    step = jax.jit(jax.value_and_grad(model.loss))
    compiling = seconds(step, *arguments)
    plain = min(seconds(step, *arguments) for _ in range(ROUNDS))
    ranges = jmpx.inspect.ranges(model.loss)
    first, *later = [seconds(ranges, *arguments) for _ in range(1 + ROUNDS)]
    return {
        "step_s": round(plain, 3),
        "compile_s": round(compiling, 2),
        "first_s": round(first, 2),
        "later_s": round(min(later), 2),
        "later": round(min(later) / plain, 1),
    }


POINTS = [{"scanned": scanned} for scanned in (False, True)]

if __name__ == "__main__":
    records.main(__doc__, {"ranges_cost": (POINTS, measure)})
