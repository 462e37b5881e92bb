"""The tests of types as a whole: pyright agrees with them, and they use every public name."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jmpx

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def pyright(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("pyright", reason="pyright is in the lint extra")
    # It asks the first python of the path where packages are.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [sys.executable, "-m", "pyright", *arguments],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_pyright_agrees() -> None:
    result = pyright(str(HERE))
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_public_symbol_has_a_type() -> None:
    result = pyright("--verifytypes", "jmpx", "--ignoreexternal", "--outputjson")
    report = json.loads(result.stdout)["typeCompleteness"]
    assert report["modules"]
    assert not [symbol["name"] for symbol in report["symbols"] if not symbol["isTypeKnown"]]


def test_every_public_name_is_used() -> None:
    nodes = [node for path in HERE.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not set(jmpx.__all__) - used
