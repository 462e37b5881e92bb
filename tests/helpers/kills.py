"""Kills a float16 training and checks that the resumed one loses nothing.

The training has a dynamic loss scale that moves because steps overflow, a `skip_nonfinite` and a
random key. Its process saves a checkpoint every few steps and is killed with SIGKILL at random
steps, at any moment of the step, also while it writes. Each time it is started again and goes on
from its newest checkpoint. Every line that it has logged (step, bits of the loss, scale, counter,
skipped steps), and the final bits of its whole state, must be those of a training that was never
killed.

A checkpoint is written to a temporary file, which `os.fsync` and `os.replace` then put in place as
a whole; Orbax does the same with folders. A checkpoint that is torn nonetheless is reported, and
the one before it is used.
"""

import functools
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmpx
from helpers import ROOT, compiling_once, float16_training as training
from helpers.float16_training import State

STEPS, OVERFLOWS = 150, 9  # and how many of them are planted
SAVE_EVERY, KEPT = 5, 2
Found = tuple[dict[str, Any], list[str]]  # figures, and sentences that say what failed


# Checkpoints.


def leaves_of(state: State) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def restored(template: State, values: Any) -> State:
    leaves = [jnp.asarray(values[name]) for name in leaves_of(template)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


class Npz:
    """Checkpoints that are one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # What was being written when the process was killed.
        self.unfinished = len([path.unlink() for path in folder.glob("*.tmp")])

    def steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.npz"))

    def path(self, step: int) -> Path:
        return self.folder / f"{step:06}.npz"

    def save(self, step: int, state: State) -> None:
        temporary = self.path(step).with_suffix(".tmp")
        with temporary.open("wb") as file:
            arrays: Any = {name: np.asarray(leaf) for name, leaf in leaves_of(state).items()}
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path(step))
        for old in self.steps()[:-KEPT]:
            self.path(old).unlink()

    def load(self, step: int, template: State) -> State:
        with self.path(step).open("rb") as file, np.load(file) as arrays:
            return restored(template, arrays)

    def close(self) -> None:
        pass


class Orbax:
    """Checkpoints of Orbax, which writes them while the training goes on."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        self.unfinished = sum("tmp" in path.name for path in folder.iterdir())
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        self.args, self.manager = ocp.args, ocp.CheckpointManager(folder, options=options)

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: State) -> None:
        self.manager.save(step, args=self.args.StandardSave(leaves_of(state)))

    def load(self, step: int, template: State) -> State:
        return restored(template, self.manager.restore(step, args=self.args.StandardRestore()))

    def close(self) -> None:
        self.manager.close()


FORMATS = {"npz": Npz, "Orbax": Orbax}


def resume(checkpoints: Any, template: State) -> tuple[int, State]:
    """Returns the step of the newest complete checkpoint, and its state; reports torn ones.

    Raises:
        ValueError: if every checkpoint is torn.
    """
    torn = ""
    for step in reversed(checkpoints.steps()):
        try:
            return step, checkpoints.load(step, template)
        except Exception as error:  # each format has its own
            torn = f"The checkpoint of step {step} is torn ({type(error).__name__})"
            print(f"{torn}: the one before it is used.", file=sys.stderr, flush=True)
    if torn:
        raise ValueError(f"{torn}, and there is none before it: give an empty folder.")
    return 0, template


# The training, which runs in a process that is killed.


def init() -> State:
    return training.init(jmpx.DynamicLossScale(2.0**15, period=7))


def batch(step: int) -> np.ndarray:
    """Returns the inputs of a step; those of a planted one overflow in float16."""
    planted = np.random.default_rng(2).choice(STEPS, OVERFLOWS, replace=False)
    x = np.random.default_rng([3, step]).normal(size=(16, 8)).astype(np.float32)
    return x * (1e6 if step in planted else 1)


def digest(state: State) -> str:
    """Returns a hash of the bits of all leaves."""
    return hashlib.sha256(b"".join(training.bits(state))).hexdigest()


def train(folder: Path, form: str, steps: int) -> None:
    """Trains on from the newest checkpoint."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    checkpoints = FORMATS[form](folder / "checkpoints")
    done, state = resume(checkpoints, init())
    train_step, _ = training.make_step()
    with (folder / "log").open("a") as log:
        say = functools.partial(print, file=log, flush=True)
        if log.tell():
            say()  # ends a line that a kill has cut off
        say(json.dumps({"from": done, "unfinished": checkpoints.unfinished}))
        for step in range(done, steps):
            state, loss, _ = train_step(state, batch(step))
            scale, *counts = training.counts(state)
            say(json.dumps([step, float(loss).hex(), scale.hex(), *counts]))
            if (step + 1) % SAVE_EVERY == 0:
                checkpoints.save(step + 1, state)
        checkpoints.close()
        say(json.dumps({"final": digest(state)}))


# The process that starts, kills and compares.


def start(folder: Path, form: str, steps: int) -> subprocess.Popen[str]:
    """Starts the training; what the first process compiles, the others read."""
    cache = compiling_once(folder.parent / "compiled")
    command = [sys.executable, "-m", "helpers.kills", str(folder), form, str(steps)]
    environment = os.environ | cache | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], status: int) -> None:
    _, error = process.communicate()
    if process.returncode != status:
        raise RuntimeError(f"The training ended with {process.returncode}: {error[-1000:]}")


def log_of(folder: Path) -> str:
    path = folder / "log"
    return path.read_text() if path.exists() else ""


def lines(folder: Path) -> list[Any]:
    """Returns what was logged; a line that a kill has cut off is left out."""
    return [json.loads(line) for line in re.findall(r"^[\[{].*[\]}]$", log_of(folder), re.M)]


def last_step(folder: Path, starts: int) -> int:
    """Returns the last step that process number `starts` has logged, -1 before its first one."""
    *before, newest = log_of(folder).split('{"from"')
    found = re.findall(r"^\[(\d+),.*\]$", newest, re.M)
    return int(found[-1]) if found and len(before) == starts else -1


def run(form: str, seed: int, kills: int = 1, steps: int = STEPS) -> Found:
    """Trains once undisturbed and once with kills; returns figures, and what differs."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        for folder in (whole, killed):
            folder.mkdir()
        end(start(whole, form, steps), 0)
        for starts, step in enumerate(sorted(rng.sample(range(2, steps - 100), kills)), 1):
            process = start(killed, form, steps)
            while last_step(killed, starts) < step and process.poll() is None:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
            end(process, -signal.SIGKILL)
        end(start(killed, form, steps), 0)
        return compare(lines(whole), lines(killed), steps, kills)


def compare(whole: list[Any], killed: list[Any], steps: int, kills: int) -> Found:
    """Returns figures of a run that was killed, and how it differs from one that was not."""
    expected = {line[0]: line for line in whole if isinstance(line, list)}
    found = [line for line in killed if isinstance(line, list)]
    wrong = [line for line in found if line != expected.get(line[0])]
    failures = [f"step {line[0]}: {line} after a kill" for line in wrong]
    if not {line[0] for line in found} == set(expected) == set(range(steps)):
        failures.append("some steps were never logged")
    # A kill may come after the last step, and the process that goes on logs the bits again.
    ends = [{line["final"] for line in log if "final" in line} for log in (whole, killed)]
    if len(ends[0]) != 1 or ends[0] != ends[1]:
        failures.append(f"the final bits differ: {ends}")
    starts = [line for line in killed if "from" in line]
    if len(starts) != kills + 1:
        failures.append(f"{len(starts)} starts after {kills} kills")
    torn = sum(line["unfinished"] for line in starts)
    return {"kills": kills, "lines": len(found), "torn_writes": torn}, failures


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
