"""What CONTRIBUTING.md says: its table names files that exist, and the hooks run what CI runs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_that_the_table_names_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    named = [name for row in rows for cell in row for name in re.findall(r"`([\w./-]+)`", cell)]
    files = {name for name in named if "/" in name or name.endswith((".py", ".toml", ".cfg"))}
    assert len(files) > 30
    for name in files:
        found = [*ROOT.glob(f"tests/*/{name}"), *ROOT.glob(f"jmpx/*/{name}")]
        assert (ROOT / name).exists() or found, name


def test_the_floors_of_the_page_are_those_that_are_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    floors = {
        name: str(number)
        for number, layer in enumerate(reversed(layers), 1)
        for name in layer.split(" | ")
    }
    text = (ROOT / "docs" / "how_it_is_built.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| (`.*?`) \|", text, re.MULTILINE)
    named = {
        name: numbers.split(", ")
        for numbers, files in rows
        for name in re.findall(r"`(\w+)(?:\.py|/)`", files)
        if name != "__init__"
    }
    assert named.keys() == floors.keys()
    assert [name for name in floors if floors[name] not in named[name]] == []


def test_every_hook_is_a_stage_of_ci():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    entries = re.findall(r"entry: (.+)$", hooks, re.MULTILINE)
    assert len(entries) == 4
    for entry in entries:
        command, _, _ = entry.partition(" --")
        assert f".venv/bin/{command}" in ci, command
