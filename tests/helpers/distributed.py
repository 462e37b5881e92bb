"""The example on many devices, with a small network and with faults that a test plants.

Run as a script, it is `examples/haiku/train_distributed.py`. FAULTS, in the environment, is a JSON
object: `{"nan": [step, example], "kill": [step, process], "raise": [step, process], "channels": 4,
"log": folder}`. Each process writes a line a step into the folder: the step, the loss scale,
whether the step was taken, and a digest for each of its devices.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from helpers import QUICK_XLA, ROOT, start_python

FOLDER = ROOT / "examples" / "haiku"
IMAGES = 48


class Step(NamedTuple):
    """What one process noted of a step."""

    scale: float
    was_taken: bool
    digests: tuple[str, ...]


def example(name: str) -> Any:
    """Imports a file of the example that does without flags."""
    spec: Any = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start_training(*arguments: str, cache: str = "", **faults: Any) -> subprocess.Popen:
    """Starts the example with faults.

    Args:
        *arguments: its flags.
        cache: a folder for what XLA has compiled.
        **faults: as the first lines of this file say.
    """
    caching = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return start_python(
        *("-W", "error", __file__, "--mp_policy=16-mixed", "--batch_size=8", *arguments),
        xla_flags=QUICK_XLA,
        PYTHONPATH=os.pathsep.join([str(FOLDER), *sys.path]),  # also the jmpx of this process
        FAULTS=json.dumps(faults),
        **(caching if cache else {}),
    )


def read_log(folder: Path) -> dict[str, dict[int, Step]]:
    """Returns what each process noted, by its number and the step's."""
    logs: dict[str, dict[int, Step]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows = map(json.loads, file.read_text().splitlines())
        logs[file.stem] = {row[0]: Step(row[1], row[2], tuple(row[3])) for row in rows}
    return logs


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(process_ids: list[int], seconds: float = 20) -> bool:
    """Waits until processes have ended; returns whether they have."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, process_ids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def plant(faults: dict[str, Any]) -> Any:
    """Makes the example small, and plants faults into it. Returns its module."""
    import haiku as hk
    import jax
    import numpy as np
    import train
    import train_distributed
    from checkpoints import digests

    class ResNet(hk.Module):
        def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
            x = hk.Conv2D(faults.get("channels", 4), 3, 2, with_bias=False)(x)
            x = jax.nn.relu(train.batch_norm()(x, is_training))
            return hk.Linear(10)(x.mean(axis=(1, 2)))

    def load_digits() -> tuple[train.Data, train.Data]:
        rng = np.random.default_rng(0)
        images, labels = rng.random((IMAGES, 8, 8, 1), np.float32), rng.integers(10, size=IMAGES)
        return train.Data(images, labels), train.Data(images, labels)

    if "log" in faults:
        Path(faults["log"], f"{os.getpid()}.pid").write_text(str(os.getpid()))
    batch_at, stop_if_diverged = train_distributed.batch_at, train_distributed.stop_if_diverged
    positions = []

    def batch_with_faults(data: train.Data, position: int) -> train.Data:
        positions.append(position)
        if faults.get("kill") == [position, jax.process_index()]:
            os.kill(os.getpid(), signal.SIGKILL)
        if faults.get("raise") == [position, jax.process_index()]:
            raise ArithmeticError("planted")
        batch = batch_at(data, position)
        if (nan := faults.get("nan", [-1, 0]))[0] == position:
            batch.images[nan[1]] = np.nan
        return batch

    def note(state: train.TrainState) -> None:
        stop_if_diverged(state)
        if "log" in faults:
            scale, skips = state.loss_scale.loss_scale, state.opt_state
            assert isinstance(skips, train.jmpx.SkipNonfiniteState)
            row = [positions[-1], float(scale), bool(skips.grads_finite), digests(state)]
            with open(f"{faults['log']}/{jax.process_index()}.jsonl", "a") as file:
                print(json.dumps(row), file=file)

    train.ResNet, train.load_digits = ResNet, load_digits
    train_distributed.batch_at, train_distributed.stop_if_diverged = batch_with_faults, note
    return train_distributed


if __name__ == "__main__":
    from absl import app

    app.run(plant(json.loads(os.environ["FAULTS"])).main)
