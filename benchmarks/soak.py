"""Takes 20,000 float16 steps with planted overflows, and compares each with a plain Python model.

    python benchmarks/soak.py
    python benchmarks/soak.py --small

The planted steps are drawn anew: rows of one to six steps, 64 in all. After each step the scale,
its counter and the counts of skipped steps are those of the model, a skipped step leaves parameters
and optimizer as they were to the bit, and any other step changes them. In the end the step was
traced once, and the process has as much memory as before.
"""

import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reliability
from tqdm import tqdm

import jmpx

STEPS, PLANTED, WARM = 20_000, 64, 1_000
MEBIBYTE = 2**20
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


class State(NamedTuple):
    params: Any
    opt_state: Any
    loss_scale: jmpx.DynamicLossScale


OPTIMIZER = jmpx.skip_nonfinite(optax.adam(1e-4))


def init(loss_scale: jmpx.DynamicLossScale) -> State:
    rng = np.random.default_rng(0)
    params = {
        "in": jnp.asarray(rng.normal(size=(8, 8)) / 8, np.float32),
        "out": jnp.asarray(rng.normal(size=(8,)) / 8, np.float32),
    }
    # Copied to the device, so that the first step is traced with what the next ones have.
    return State(params, OPTIMIZER.init(params), jax.tree.map(jnp.asarray, loss_scale))


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    out = jnp.tanh(x @ params["in"]) @ params["out"]
    return jnp.mean((out.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def make_step(skip_by: Any) -> tuple[Callable[..., tuple[State, jax.Array]], list[int]]:
    """Returns a train step and a list that gets an item each time it is traced."""
    traces: list[int] = []

    @jax.jit
    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        traces.append(1)
        grad_fn = jmpx.filter_value_and_grad(loss_fn, state.loss_scale, policy="c=f16,o=f32")
        _, loss_scale, finite, grads = grad_fn(state.params, x, y)
        params, opt_state = jmpx.optimizer_update(
            state.params, OPTIMIZER, state.opt_state, grads, finite, skip_by=skip_by
        )
        return State(params, opt_state, loss_scale), finite

    return step, traces


def memory() -> float:
    """Returns the memory of this process, in MiB."""
    import psutil

    gc.collect()
    return psutil.Process().memory_info().rss / MEBIBYTE


def bits(state: State) -> list[bytes]:
    """Returns the parameters and the state of the wrapped optimizer."""
    opt_state: Any = state.opt_state
    return [
        np.asarray(leaf).tobytes()
        for leaf in jax.tree.leaves((state.params, opt_state.inner_state))
    ]


def run(
    name: str, skip_by: str, steps: int, count: int, seed: int
) -> tuple[dict[str, Any], list[str]]:
    """Takes the steps; returns figures, and what was other than in the model."""
    rng, overflows = np.random.default_rng(seed), planted(steps, count, seed)
    state, model = init(SCALES[name]), Model(SCALES[name])
    step, traces = make_step(skip_by)
    failures: list[str] = []
    before, seen, skipped = 0.0, set(), set()
    for number in tqdm(range(steps), unit="step", desc=f"{name}, {skip_by}", mininterval=1):
        if number == min(WARM, steps // 2):
            before = round(memory(), 1)
        x = rng.normal(size=(4, 8)).astype(np.float32)
        if number in overflows:
            x[rng.integers(4), rng.integers(8)] = rng.choice([np.inf, np.nan, 1e6, -7e4])
        old, (state, finite) = state, step(state, x, x.sum(1))
        skips: Any = state.opt_state
        counts = skips.total_skipped, skips.consecutive_skipped
        leaves = *jax.tree.leaves(state.loss_scale), *counts
        found = tuple(np.asarray(leaf).item() for leaf in leaves)
        if not finite:
            skipped.add(number)
        if found != (wanted := model.step(number in overflows)) and len(failures) < 10:
            failures.append(f"{name}, {skip_by}, step {number}: wanted {wanted}, got {found}")
        if (bits(old) == bits(state)) != (number in overflows) and len(failures) < 10:
            failures.append(f"{name}, {skip_by}, step {number}: skipped {number not in overflows}")
        seen.add(found[0])
    after = round(memory(), 1)
    if skipped != overflows:
        failures.append(f"{name}, {skip_by}: skipped {sorted(skipped ^ overflows)} otherwise")
    if len(traces) != 1:
        failures.append(f"{name}, {skip_by}: {len(traces)} traces")
    if after - before > MOST_GROWTH:
        failures.append(f"{name}, {skip_by}: {after - before:.1f} MiB more memory")
    figures = {"planted": count, "skipped": len(skipped), "traces": len(traces)}
    return figures | {"scales": len(seen), "before": before, "after": after}, failures


def main(arguments: list[str] | None = None) -> None:
    parser = reliability.parser(__doc__)
    parser.add_argument("--scales", nargs="+", choices=list(SCALES), default=[*SCALES])
    parser.add_argument("--steps", type=int)
    args = parser.parse_args(arguments)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    steps = args.steps or (300 if args.small else STEPS)
    failed = False
    for skip_by in ("cond", "where"):
        runs = {
            name: run(name, skip_by, steps, min(PLANTED, steps // 10), seed) for name in args.scales
        }
        failures = [failure for _, found in runs.values() for failure in found]
        failed |= bool(failures)
        each = [figures for figures, _ in runs.values()]
        reliability.keep(
            args.out,
            "soak",
            f'float16 steps with planted overflows, `skip_by="{skip_by}"`',
            times="{steps} steps with each of {loss_scales} loss scales, {planted} planted",
            outcome="exactly these skipped; scale and counts those of a plain Python model after "
            "each step; {traces} trace; at most {more} MiB more memory",
            figures={
                "steps": steps,
                "loss_scales": len(runs),
                "planted": sum(figures["planted"] for figures in each),
                "traces": max(figures["traces"] for figures in each),
                "more": round(max(figures["after"] - figures["before"] for figures in each), 1),
            },
            failures=failures,
            runs={name: figures for name, (figures, _) in runs.items()},
            seed=seed,
            small=args.small,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
