"""Runs the example scripts as a user runs them, and code beside their functions."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from helpers import QUICK_XLA, ROOT, finish, start_python

FOLDER = ROOT / "examples" / "equinox"
SMALL = ["--width=16", "--depth=1", "--heads=2"]


def example(path: str) -> Any:
    """Imports a file of the examples that does without flags."""
    spec: Any = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "examples" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_of(folder: Path) -> dict[Path, bytes]:
    """Returns the files of a checkpoint, or of several."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start_vit(*arguments, devices=1, xla_flags=QUICK_XLA):
    return start_python(
        *("-W", "error", *arguments),
        xla_flags=f"--xla_force_host_platform_device_count={devices} {xla_flags}",
        PYTHONPATH=os.pathsep.join([str(FOLDER), *sys.path]),  # also the jmpx of this process
    )


def run_vit(*arguments, devices=1):
    return finish(start_vit(str(FOLDER / "train_vit.py"), *arguments, devices=devices))


def accuracy_of(result, epochs, scale: object = r"[\d.]+", timed=True):
    """Returns the accuracy that a training printed last, whose epochs skipped no step.

    With `timed`, it has printed the milliseconds of a step, too.
    """
    assert result.returncode == 0, result.stderr
    *lines, last = result.stdout.splitlines()
    assert len(lines) == epochs
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(
            rf"epoch +{number}  loss [\d.]+  test accuracy [\d.]+%  loss scale {scale}  "
            r"skipped steps 0",
            line,
        )
    found = re.match(r"test accuracy ([\d.]+)%(?:, ([\d.]+) ms a step)? \(", last)
    assert found and (float(found[2]) > 0 if timed else found[2] is None)
    assert "step/s" in result.stderr  # the progress bar
    return float(found[1])


def answer(process):
    """Returns the JSON that a probe printed last."""
    result = finish(process)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


WRONG_FLAGS = """
import contextlib, importlib, io, json, sys
from absl import app, flags

def run(arguments):
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    flags.FLAGS.unparse_flags()
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            app.run(script.main, argv=[script.__file__, *arguments])
    except SystemExit as exit:
        if isinstance(exit.code, str):  # Python would print it and end with 1
            return 1, output.getvalue() + exit.code
        return exit.code, output.getvalue()

script = importlib.import_module(sys.argv[1])
print(json.dumps([run(arguments) for arguments in json.loads(sys.argv[2])]))
"""


def assert_refused(path, cases):
    """Holds that a script ends with one clear line: in one process, which imports it once.

    Args:
        path: the script.
        cases: its arguments in one string, each with a part of that line.
    """
    given = json.dumps([arguments.split() for arguments, _ in cases])
    process = start_python(
        *("-W", "error", "-c", WRONG_FLAGS, path.stem, given), PYTHONPATH=str(path.parent)
    )
    for (arguments, message), (status, output) in zip(cases, answer(process), strict=True):
        assert status == 1 and "Traceback" not in output, arguments
        assert sum(message in line for line in output.splitlines()) == 1, (arguments, output)
