"""The programs and commands of flags.md and config_files.md: flags, quotes, Hydra."""

import re
import runpy
import shlex
import sys
import types

import pytest
from helpers import ROOT, run_python
from omegaconf import OmegaConf

import jmpx

PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("flags", "config_files"))
FILES = re.compile(
    r"`([\w/]+\.(?:py|yaml))`[^`\n]*:?\n\n```(?:python|yaml)\n(.*?)^```$", re.M | re.S
)
COMMANDS = re.findall(r"^python ((?:hydra_)?main\.py.*)$", PAGE, re.M)
PRINTED = [line for line in COMMANDS if re.search(r"# (arguments|modules|operations) ", line)]
HYDRA = [line.partition(" # ")[0] for line in COMMANDS if line.startswith("hydra_main.py")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the files that the page shows."""
    for name, text in FILES.findall(PAGE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line, folder):
    """Runs a command of the page, quoted as it is there; returns what it prints."""
    done = run_python(*shlex.split(line, comments=True), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough  # processes
@pytest.mark.parametrize("line", PRINTED)
def test_the_program_prints_what_stands_behind_the_command(line, folder):
    assert len(PRINTED) == 3
    assert run(line, folder).strip() == line.partition("# ")[2]


def test_each_policy_on_a_command_line_is_one():
    words = [word for line in COMMANDS for word in shlex.split(line, comments=True)]
    policies = [word.partition("=")[2] for word in words if word.startswith("--mp_policy=")]
    assert len(policies) == 4
    for policy in policies:
        jmpx.get_policy_map(policy)


def load(config_path, config_name, group="bf16"):
    """Makes the configuration of the page, as Hydra does."""
    config = OmegaConf.load(f"{config_path}/{config_name}.yaml")
    config.precision = OmegaConf.load(f"{config_path}/precision/{group}.yaml")
    return config


@pytest.mark.parametrize(
    ("group", "first"),
    [
        ("bf16", "c=bf16; LayerNorm: full; */head: full"),
        ("f16", "c=f16; LayerNorm: full | dynamic"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_program_for_hydra_reads_its_configuration(group, first, monkeypatch, capsys):
    def main(version_base, config_path, config_name):
        return lambda f: lambda: f(load(config_path, config_name, group))

    hydra = types.SimpleNamespace(main=main)  # a small part of it
    monkeypatch.setitem(sys.modules, "hydra", hydra)
    runpy.run_path("hydra_main.py", run_name="__main__")
    expected = map(jmpx.get_mixed_precision, (first, "c=bf16; LayerNorm: full"))
    assert capsys.readouterr().out.splitlines() == [str(mp) for mp in expected]


@pytest.mark.slow
@pytest.mark.parametrize("line", HYDRA)
def test_hydra_takes_the_overrides(line, folder):
    pytest.importorskip("hydra", reason="hydra-core is in the test extra")
    assert len(HYDRA) == 8
    assert run(line, folder).count("params=float32") >= 2
