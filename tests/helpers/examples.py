"""Runs the example scripts as a user runs them, and code beside their functions."""

import json
import os
import re
import sys

from helpers import QUICK_XLA, ROOT, finish, start_python

FOLDER = ROOT / "examples" / "equinox"
SMALL = ["--width=16", "--depth=1", "--heads=2"]


def start_vit(*arguments, devices=1, xla_flags=QUICK_XLA):
    return start_python(
        *("-W", "error", *arguments),
        xla_flags=f"--xla_force_host_platform_device_count={devices} {xla_flags}",
        PYTHONPATH=os.pathsep.join([str(FOLDER), *sys.path]),  # also the jmpx of this process
    )


def run_vit(*arguments, devices=1):
    return finish(start_vit(str(FOLDER / "train_vit.py"), *arguments, devices=devices))


def accuracy_of(result, epochs, scale=r"[\d.]+"):
    """Returns the accuracy that a training printed last, whose epochs skipped no step."""
    assert result.returncode == 0, result.stderr
    *lines, last = result.stdout.splitlines()
    assert len(lines) == epochs
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(
            rf"epoch +{number}  loss [\d.]+  test accuracy [\d.]+%  loss scale {scale}  "
            r"skipped steps 0",
            line,
        )
    found = re.match(r"test accuracy ([\d.]+)%, ([\d.]+) ms a step", last)
    assert found and float(found[2]) > 0
    assert "step/s" in result.stderr  # the progress bar
    return float(found[1])


def start_probe(code, *arguments, devices=1):
    """Runs code beside the script's functions, whose flags can be defined once in a process."""
    return start_vit("-c", code, *arguments, devices=devices)


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


def run_wrong_flags(path, cases):
    """Runs a script with each list of arguments in one process, which imports it once.

    Returns:
        For each list, the exit status and the output.
    """
    return answer(
        start_python(
            *("-W", "error", "-c", WRONG_FLAGS, path.stem, json.dumps(cases)),
            PYTHONPATH=str(path.parent),
        )
    )
