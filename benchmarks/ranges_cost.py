"""Measures what `jmpx.inspect.ranges` costs beside a plain step of a transformer, as lines of JSON.

    python benchmarks/ranges_cost.py

A step is the loss and its gradient of four blocks (batch 8, sequence 128, width 256), written out
or scanned. `step_s` is the processor's time of a jitted float32 step that is compiled already;
`first` and `later` are those of calls of `jmpx.inspect.ranges`, tracing included, as multiples of
it. The first call compiles; later calls of a model that is written out compile nothing, but loops
are compiled again. Seconds are those of all threads, so that other programs on the machine count
less.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import records
from models import Transformer

import jmpx


def seconds(call: Callable[[], Any]) -> float:
    """Returns the processor's time of a call."""
    start = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - start


def measure(model: Transformer, size: int, length: int, rounds: int) -> records.Record:
    """Returns a record."""
    rng = np.random.default_rng(0)
    params, batch = model.init(rng), model.batch(rng, size, length)
    step = jax.jit(jax.value_and_grad(model.loss))
    compiling = seconds(lambda: step(params, *batch))
    plain = min(seconds(lambda: step(params, *batch)) for _ in range(rounds))
    run = functools.partial(jmpx.inspect.ranges(model.loss), params, *batch)
    first, *later = [seconds(run) for _ in range(1 + rounds)]
    return {
        "scanned": model.scanned,
        "step_s": round(plain, 3),
        "compile_s": round(compiling, 2),
        "first_s": round(first, 2),
        "later_s": round(min(later), 2),
        "later": round(min(later) / plain, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    for scanned in (False, True):
        model = Transformer(args.layers, args.width, hidden=4 * args.width, scanned=scanned)
        records.emit("ranges_cost", **measure(model, args.batch, args.length, args.rounds))


if __name__ == "__main__":
    main()
