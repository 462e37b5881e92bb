"""Runs the Haiku example on many devices, with a small network and with planted faults."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from helpers import QUICK_XLA, ROOT, compiling_once, start_python

FOLDER = ROOT / "examples" / "haiku"
SCRIPT = ROOT / "tests" / "helpers" / "faults.py"


class Step(NamedTuple):
    """What one process noted of a step."""

    scale: float
    was_taken: bool
    digests: tuple[str, ...]


def start_training(*arguments: str, cache: Path, **faults: Any) -> subprocess.Popen:
    """Starts the example with faults.

    Args:
        *arguments: its flags.
        cache: a folder for what XLA has compiled.
        **faults: as `faults.py` says.
    """
    return start_python(
        *("-W", "error", str(SCRIPT), "--mp_policy=16-mixed", "--batch_size=8", *arguments),
        xla_flags=QUICK_XLA,
        PYTHONPATH=os.pathsep.join([str(FOLDER), *sys.path]),  # also the jmpx of this process
        FAULTS=json.dumps(faults),
        **compiling_once(cache),
    )


def read_log(folder: Path) -> dict[str, dict[int, Step]]:
    """Returns what each process noted, by its number and the step's."""
    logs: dict[str, dict[int, Step]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows = map(json.loads, file.read_text().splitlines())
        logs[file.stem] = {row[0]: Step(row[1], row[2], tuple(row[3])) for row in rows}
    return logs


def summed_dtypes(folder: Path) -> set[str]:
    """Returns the dtypes in which the devices sum, as the lowered step of process 0 says."""
    pattern = r'"stablehlo\.all_reduce"\(.*?\}\) : \(tensor<(?:[0-9x]+x)?(\w+)>'
    return set(re.findall(pattern, (folder / "step.mlir").read_text(), re.DOTALL))


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
