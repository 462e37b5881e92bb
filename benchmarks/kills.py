"""Kills a float16 training twenty times and holds that the resumed one loses nothing.

    python benchmarks/kills.py                             # npz, Equinox and Orbax
    python benchmarks/kills.py --formats npz --kills 5

The training is small: float16, a dynamic loss scale that moves because steps overflow, a
`skip_nonfinite`, a random key. Its process saves a checkpoint every few steps and is killed with
SIGKILL at random steps, at any moment of the step, also while it writes. Each time it is started
again and goes on from its newest checkpoint. Every line that it has logged (step, bits of the loss,
scale, counter, skipped steps), and the final bits of its whole state, have to be those of a
training that nobody killed.
"""

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

import killed_training
import reliability
from killed_training import FORMATS, STEPS
from tqdm import tqdm


def start(folder: Path, form: str, steps: int) -> subprocess.Popen[str]:
    """Starts the training; what the first process compiles, the others read."""
    arguments = [str(folder), f"--format={form}", f"--steps={steps}"]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, killed_training.__file__, *arguments],
        env=os.environ | cache,
        stderr=subprocess.PIPE,
        text=True,
    )


def log(folder: Path) -> str:
    path = folder / "log"
    return path.read_text() if path.exists() else ""


def lines(folder: Path) -> list[Any]:
    """Returns what was logged; a line that a kill has cut off is left out."""
    return [json.loads(line) for line in re.findall(r"^[\[{].*[\]}]$", log(folder), re.M)]


def last_step(folder: Path, starts: int) -> int:
    """Returns the last step that process number `starts` has logged, -1 before its first one."""
    *before, newest = log(folder).split('{"from"')
    found = re.findall(r"^\[(\d+),.*\]$", newest, re.M)
    return int(found[-1]) if found and len(before) == starts else -1


def kill_at(
    process: subprocess.Popen[str], folder: Path, starts: int, step: int, delay: float
) -> None:
    """Kills process number `starts` as soon as it has logged a step, or a moment later."""
    while last_step(folder, starts) < step and process.poll() is None:
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    _, error = process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"The training ended before it was killed: {error[-500:]}")


def run(form: str, kills: int, steps: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """Trains once undisturbed and once with kills; returns figures, and what differs."""
    rng = random.Random(seed)
    moments = sorted(rng.sample(range(2, steps - 100), kills))
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        for folder in (whole, killed):
            folder.mkdir()
        finish(start(whole, form, steps))
        for starts, step in enumerate(tqdm(moments, unit="kill", desc=form), 1):
            kill_at(start(killed, form, steps), killed, starts, step, rng.uniform(0, 0.03))
        finish(start(killed, form, steps))
        return compare(lines(whole), lines(killed), steps, kills)


def finish(process: subprocess.Popen[str]) -> None:
    _, error = process.communicate()
    if process.returncode:
        raise RuntimeError(f"The training failed: {error[-1000:]}")


def compare(
    whole: list[Any], killed: list[Any], steps: int, kills: int
) -> tuple[dict[str, int], list[str]]:
    """Returns figures of a run that was killed, and how it differs from one that was not."""
    expected = {line[0]: line for line in whole if isinstance(line, list)}
    found = [line for line in killed if isinstance(line, list)]
    failures = [
        f"step {line[0]}: {line} after a kill" for line in found if line != expected.get(line[0])
    ]
    if {line[0] for line in found} != set(range(steps)) or set(expected) != set(range(steps)):
        failures.append("some steps were never logged")
    ends = [[line for line in log if "final" in line] for log in (whole, killed)]
    if len(ends[0]) != 1 or ends[0] != ends[1]:
        failures.append(f"the final bits differ: {ends}")
    starts = [line for line in killed if isinstance(line, dict) and "from" in line]
    if len(starts) != kills + 1:
        failures.append(f"{len(starts)} starts after {kills} kills")
    figures = {
        "kills": kills,
        "lines": len(found),
        "repeated": len(found) - steps,
        "torn_writes": sum(line["unfinished"] for line in starts),
        "skipped": expected[steps - 1][-2] if steps - 1 in expected else -1,
        "scales": len({line[2] for line in expected.values()}),
    }
    return figures, failures


def main(arguments: list[str] | None = None) -> None:
    parser = reliability.parser(__doc__)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=[*FORMATS])
    parser.add_argument("--kills", type=int)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(arguments)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    kills = args.kills or (2 if args.small else 20)
    failed = False
    for form in args.formats:
        figures, failures = run(form, kills, args.steps, seed)
        failed |= bool(failures)
        reliability.keep(
            args.out, "kills", f"SIGKILL at random steps of a float16 training, {NAMES[form]}",
            times="{kills} kills, {torn_writes} of them while a checkpoint was written",
            outcome="all {lines} lines and the final bits equal the unbroken run's",
            figures=figures, failures=failures, seed=seed, small=args.small,
        )  # fmt: skip
    sys.exit(failed)


NAMES = {"npz": "npz", "equinox": "`eqx.tree_serialise_leaves`", "orbax": "Orbax"}


if __name__ == "__main__":
    main()
