"""Takes float16 steps with planted overflows, and compares each with a plain Python model.

The planted steps are drawn anew: rows of one to six steps, 64 in all. After each step the scale,
its counter and the counts of skipped steps are those of the model, a skipped step leaves parameters
and optimizer as they were to the bit, and any other step changes them. In the end the step was
traced once, and the process has as much memory as before.
"""

import gc
import random
from typing import Any

import numpy as np

import jmpx
from helpers import float16_training as training
from helpers.kills import Found

PLANTED, WARM = 64, 1_000
MOST_GROWTH = 8.0  # MiB of memory

# The loss scales: none of them gets so large that a step overflows by itself.
SCALES = {
    "factor 2": jmpx.DynamicLossScale(2.0**10, period=100, max_loss_scale=2.0**12),
    "hysteresis 3": jmpx.DynamicLossScale(2.0**10, period=50, max_loss_scale=2.0**12, hysteresis=3),
    "backoff 0.5, factor 1.1": jmpx.DynamicLossScale(
        300.0, period=20, factor=1.1, min_loss_scale=5.0, max_loss_scale=5000.0, backoff_factor=0.5
    ),
    "a floor below 1": jmpx.DynamicLossScale(
        1.0, period=30, factor=4, min_loss_scale=2.0**-6, max_loss_scale=64.0
    ),
}


class Model:
    """The scale as plain Python: what the docstring of `jmpx.DynamicLossScale` says."""

    def __init__(self, scale: jmpx.DynamicLossScale) -> None:
        self.scale, self.finite, self.row = float(scale.loss_scale), 0, 0
        self.total = self.consecutive = 0
        self.period, self.hysteresis, self.factor = scale.period, scale.hysteresis, scale.factor
        self.low, self.high = scale.min_loss_scale, scale.max_loss_scale or 2.0**126
        self.backoff = scale.backoff_factor

    def step(self, overflows: bool) -> tuple[float, int, int, int]:
        """Returns scale, counter, steps skipped in all and in a row."""
        if overflows:
            self.finite, self.row = 0, self.row + 1
            self.total, self.consecutive = self.total + 1, self.consecutive + 1
            if self.row >= self.hysteresis:
                by = self.scale / self.factor if self.backoff is None else self.scale * self.backoff
                self.scale = max(float(np.float32(by)), self.low)
        else:
            self.finite, self.row, self.consecutive = self.finite + 1, 0, 0
            if self.finite == self.period:
                grown = float(np.float32(np.float32(self.scale) * np.float32(self.factor)))
                self.finite, self.scale = 0, min(grown, self.high)
        counter = self.finite - min(self.row, self.hysteresis - 1)
        return self.scale, counter, self.total, self.consecutive


def planted(steps: int, count: int, seed: int) -> set[int]:
    """Draws rows of one to six steps, which are `count` together."""
    rng, found = random.Random(seed), set[int]()
    while len(found) < count:
        start, length = rng.randrange(steps), rng.randint(1, 6)
        row = {step for step in range(start, start + length) if step < steps} - found
        found |= set(sorted(row)[: count - len(found)])
    return found


def memory() -> float:
    """Returns the memory of this process, in MiB."""
    import psutil

    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def run(name: str, skip_by: str, steps: int, seed: int) -> Found:
    """Takes the steps with one loss scale; returns figures, and what differs from the model."""
    count = min(PLANTED, steps // 10)
    rng, overflows = np.random.default_rng(seed), planted(steps, count, seed)
    state, model = training.init(SCALES[name]), Model(SCALES[name])
    step, traces = training.make_step(skip_by)
    failures: list[str] = []
    before, skipped = 0.0, set()
    for number in range(steps):
        if number == min(WARM, steps // 2):
            before = memory()
        x = rng.normal(size=(16, 8)).astype(np.float32)
        if number in overflows:
            x[rng.integers(16), rng.integers(8)] = rng.choice([np.inf, np.nan, 1e6, -7e4])
        old, (state, _, finite) = state, step(state, x)
        if not finite:
            skipped.add(number)
        if (found := training.counts(state)) != (wanted := model.step(number in overflows)):
            failures.append(f"step {number}: wanted {wanted}, got {found}")
        same = updated_bits(old) == updated_bits(state)
        if same != (number in overflows):
            failures.append(f"step {number}: skipped {same}")
    growth = memory() - before
    if skipped != overflows:
        failures.append(f"skipped {sorted(skipped ^ overflows)} otherwise")
    if len(traces) != 1:
        failures.append(f"{len(traces)} traces")
    if growth > MOST_GROWTH:
        failures.append(f"{growth:.1f} MiB more memory")
    figures = {"planted": count, "traces": len(traces), "more": round(growth, 1)}
    return figures, [f"{name}, {skip_by}: {failure}" for failure in failures[:10]]


def updated_bits(state: training.State) -> list[bytes]:
    opt_state: Any = state.opt_state
    return training.bits((state.params, opt_state.inner_state))
