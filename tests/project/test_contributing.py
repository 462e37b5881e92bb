"""CONTRIBUTING.md, the plan of the rooms and the hooks say what is there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
ROOMS = sorted(file.parent.name for file in (ROOT / "jmpx").glob("_*/__init__.py"))


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
    assert [room for room in ROOMS if f"`jmpx/{room}/`" not in text] == []


def test_there_are_at_most_ten_floors_and_nothing_is_hidden_from_the_check():
    rooms, circles, _, reports, core = LAYERS["contracts"]
    assert len(rooms["layers"]) <= 10 and rooms["exhaustive"] and rooms["containers"] == ["jmpx"]
    assert circles["ancestors"] == ["jmpx.**"]
    allowed = {"name", "type", "layers", "containers", "exhaustive", "ancestors"}
    assert reports["source_modules"] == core["protected_modules"] == ["jmpx._inspect"]
    assert {*rooms, *circles} <= allowed and {*LAYERS} == {"root_package", "contracts"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_explains_itself(room):
    docstring = ast.get_docstring(ast.parse((ROOT / "jmpx" / room / "__init__.py").read_text()))
    assert docstring is not None
    purpose, _, way = docstring.partition("\n\n")
    assert purpose.endswith(".") and len(purpose.splitlines()) == 1
    readme = ROOT / "jmpx" / room / "README.md"
    assert 8 <= len((readme.read_text() if readme.exists() else way).splitlines()) <= 120
    floors = [layer.split(" | ") for layer in LAYERS["contracts"][0]["layers"]]
    assert sum(room in rooms for rooms in floors) == 1


def test_every_hook_is_a_stage_of_ci():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    entries = re.findall(r"entry: (.+)$", hooks, re.MULTILINE)
    assert len(entries) == 4
    for entry in entries:
        command, _, _ = entry.partition(" --")
        assert f".venv/bin/{command}" in ci, command
