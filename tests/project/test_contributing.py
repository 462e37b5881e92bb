"""CONTRIBUTING.md, the plan of the packages and the hooks say what is there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
PACKAGES = sorted(file.parent.name for file in (ROOT / "jmpx").glob("_*/__init__.py"))


def test_every_file_that_the_table_names_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    assert len(rows) - 2 <= 25
    named = [
        name for row in rows for cell in row for name in re.findall(r"`([\w./-]+/[\w./-]*)`", cell)
    ]
    linked = re.findall(r"\]\(([\w./]+)\)", text)
    assert len({*named, *linked}) > 30
    assert [name for name in (*named, *linked) if not (ROOT / name).exists()] == []
    assert [each for each in PACKAGES if f"`jmpx/{each}/`" not in text] == []


def test_there_are_at_most_ten_layers_and_nothing_is_hidden_from_the_check():
    layers, circles, _, reports, core = LAYERS["contracts"]
    assert len(layers["layers"]) <= 10 and layers["exhaustive"] and layers["containers"] == ["jmpx"]
    assert circles["ancestors"] == ["jmpx.**"]
    allowed = {"name", "type", "layers", "containers", "exhaustive", "ancestors"}
    assert reports["source_modules"] == core["protected_modules"] == ["jmpx._inspect"]
    assert {*layers, *circles} <= allowed and {*LAYERS} == {"root_package", "contracts"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_explains_itself(package):
    docstring = ast.get_docstring(ast.parse((ROOT / "jmpx" / package / "__init__.py").read_text()))
    assert docstring is not None
    purpose, _, way = docstring.partition("\n\n")
    assert purpose.endswith(".") and len(purpose.splitlines()) == 1
    readme = ROOT / "jmpx" / package / "README.md"
    assert 8 <= len((readme.read_text() if readme.exists() else way).splitlines()) <= 120
    layers = [layer.split(" | ") for layer in LAYERS["contracts"][0]["layers"]]
    assert sum(package in packages for packages in layers) == 1


def test_every_hook_is_a_stage_of_ci():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    entries = re.findall(r"entry: (.+)$", hooks, re.MULTILINE)
    assert len(entries) == 4
    for entry in entries:
        command, _, _ = entry.partition(" --")
        assert f".venv/bin/{command}" in ci, command
