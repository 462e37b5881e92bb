"""`examples/haiku/train_distributed.py` with a small network, few images, and planted faults.

FAULTS, in the environment, is a JSON object that holds "log" and may hold the others:

    "nan": [step, example]      an image of that step's batch, which one device reads
    "kill": [step, process]     the process ends by SIGKILL before the step
    "saved": path               it waits until that checkpoint is whole before it does
    "raise": [step, process]    the process raises an exception before the step
    "channels": 5               of the network's convolution; else 4
    "log": folder               where each process writes its id, and a line a step: the step, the
                                loss scale, whether it was taken, and a digest for each device;
                                process 0 writes the step's StableHLO, too
"""

import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import numpy as np
from absl import app

FAULTS: dict[str, Any] = json.loads(os.environ["FAULTS"])
IMAGES = 48

# Found on the path that the test sets: pyright does not know them.
train: Any = importlib.import_module("train")
train_distributed: Any = importlib.import_module("train_distributed")
make_step, batch_at = train_distributed.make_step, train_distributed.batch_at
end_if_diverged = train_distributed.end_if_diverged
position = 0


def run_network(x: jax.Array, is_training: bool) -> jax.Array:
    x = hk.Conv2D(FAULTS.get("channels", 4), 3, 2, with_bias=False)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
    return hk.Linear(10)(x.mean(axis=(1, 2)))


def load_digits() -> Any:
    rng = np.random.default_rng(0)
    images, labels = rng.random((IMAGES, 8, 8, 1), np.float32), rng.integers(10, size=IMAGES)
    return train.Data(images, labels), train.Data(images, labels)


def batch_with_faults(data: Any, step: int) -> Any:
    global position
    position = step
    here = [step, jax.process_index()]
    if FAULTS.get("kill") == here:
        while "saved" in FAULTS and not os.path.exists(FAULTS["saved"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULTS.get("raise") == here:
        raise ArithmeticError("planted")
    batch = batch_at(data, step)
    nan_at, example = FAULTS.get("nan", [-1, 0])
    if nan_at == step:
        batch.images[example] = np.nan
    return batch


def make_noted_step(*arguments: Any) -> Any:
    step = make_step(*arguments)
    text = Path(FAULTS["log"], "step.mlir")

    def noted_step(*arguments: Any) -> Any:
        if jax.process_index() == 0 and not text.exists():
            text.write_text(step.lower(*arguments).as_text())
        return step(*arguments)

    return noted_step


def note(state: Any) -> None:
    end_if_diverged(state)
    scale, was_taken = float(state.loss_scale.loss_scale), bool(state.opt_state.grads_finite)
    row = [position, scale, was_taken, train_distributed.digests(state)]
    with open(f"{FAULTS['log']}/{jax.process_index()}.jsonl", "a") as file:
        print(json.dumps(row), file=file)


if __name__ == "__main__":
    train.network, train.load_digits = hk.transform_with_state(run_network), load_digits
    train_distributed.batch_at = batch_with_faults
    Path(FAULTS["log"], f"{os.getpid()}.pid").write_text(str(os.getpid()))
    train_distributed.make_step, train_distributed.end_if_diverged = make_noted_step, note
    app.run(train_distributed.main)
