"""The pages of the manual: their programs run, and print what the pages say."""

import re
import shlex

import pytest
from helpers import ROOT, run_jmpx, run_python_blocks
from helpers.pages import blocks, importable, modules

DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.md"))}


def with_prompts():
    """Returns the pages that have programs with prompts."""
    names = [name for name, page in PAGES.items() if ">>> " in page.read_text()]
    marks = {"checkpoints.md": [pytest.mark.filterwarnings("ignore")]}  # Orbax's own
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


@pytest.fixture
def folder(name, tmp_path):
    """The working directory, in which the modules of a page are."""
    with importable(modules(PAGES[name]), tmp_path):
        yield


@pytest.mark.sampled(37)
@pytest.mark.parametrize("name", with_prompts())
@pytest.mark.usefixtures("folder")
def test_a_page_runs_from_top_to_bottom(name):
    run_python_blocks(PAGES[name])


def test_a_page_answers_one_question():
    """A page of more words is two."""
    words = {name: len(page.read_text().split()) for name, page in PAGES.items()}
    assert {name: number for name, number in words.items() if number > 1800} == {}


def test_every_program_is_run_by_a_test():
    left = {}
    for name, page in PAGES.items():
        rest = [block for block in blocks(page, "python") if ">>> " not in block]
        rest = [block for block in rest if block not in modules(page).values()]
        if rest:
            left[name] = len(rest)
    # Two blocks are PyTorch's. tests/inspect/test_hlo.py compares those of compiled.md.
    assert left == {"coming_from_torch.md": 2, "compiled.md": 3}


# The commands of commands.md.


NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e-\d+)?")
SHOWN = r"^```sh\npython -m jmpx ([^\n]*)\n```\n\n```text\n(.*?)^```$"
COMMANDS = re.findall(SHOWN, PAGES["commands.md"].read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["commands.md"])
@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
@pytest.mark.usefixtures("folder", "standard_promotion")  # as in a reader's program
def test_a_command_prints_what_the_page_shows(name, line, shown, capsys):
    arguments = shlex.split(line)
    if arguments[0] == "migrate":
        pytest.importorskip("libcst", reason="libcst is in the migrate extra")
    assert run_jmpx(*arguments) == (arguments[0] == "first-nonfinite")
    # Numbers differ a little from one version of JAX to another.
    printed, shown = (
        " ".join(NUMBER.sub("N", text).split()) for text in (capsys.readouterr().out, shown)
    )
    assert shown in printed


def test_each_command_is_on_the_page_and_shows_what_it_prints(capsys):
    assert run_jmpx("-h") == 0
    names = re.findall(
        r"^    (\w[\w-]*)", capsys.readouterr().out.partition("\n  COMMAND\n")[2], re.MULTILINE
    )
    text = PAGES["commands.md"].read_text()
    assert len(names) == 8 and all(f"\n## {name}\n" in text for name in names)
    run = {line.partition(" ")[0] for line, _ in COMMANDS} - {names[0]}
    assert {name for name in names if name not in run} == {"explain", "doctor"}
    assert len(blocks(PAGES["commands.md"], "text")) == len(COMMANDS) + 1  # and the doctor's


def test_the_migration_tool_prints_what_its_page_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("libcst", reason="libcst is in the migrate extra")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(modules(PAGES["migrate.md"])["step"])
    assert run_jmpx("migrate", "step.py") == 0
    (shown,) = blocks(PAGES["migrate.md"], "diff")
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert printed == shown
