"""The tests of types as a whole: pyright agrees with them, and they use every public name."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jmpx

HERE = Path(__file__).parent


def test_pyright_agrees() -> None:
    pytest.importorskip("pyright", reason="pyright is in the lint extra")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(HERE)]
    result = subprocess.run(
        command, cwd=HERE.parent.parent, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_public_name_is_used() -> None:
    nodes = [node for path in HERE.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not set(jmpx.__all__) - used
