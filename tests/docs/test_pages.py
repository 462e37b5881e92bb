"""The pages of the manual: their programs run, and print what the pages say."""

import re
import sys

import pytest
from helpers import ROOT, run_python_blocks

import jmpx.__main__

DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.md"))}
FILE = re.compile(r"`(\w+)\.py`[^`\n]*:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name, language):
    text = PAGES[name].read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def files(name):
    """Returns the modules that a page shows, by name: the block after "`train.py`:" is train.py."""
    return dict(FILE.findall(PAGES[name].read_text()))


def with_prompts():
    """Returns the pages that have programs with prompts."""
    names = [name for name, page in PAGES.items() if ">>> " in page.read_text()]
    marks = {"checkpoints.md": [pytest.mark.filterwarnings("ignore")]}  # Orbax's own
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


@pytest.fixture
def folder(name, tmp_path, monkeypatch):
    """The working directory, in which the modules of a page are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module, text in files(name).items():
        (tmp_path / f"{module}.py").write_text(text)
        sys.modules.pop(module, None)
    yield tmp_path
    for module in files(name):
        sys.modules.pop(module, None)


@pytest.mark.sampled(37)
@pytest.mark.parametrize("name", with_prompts())
@pytest.mark.usefixtures("folder")
def test_a_page_runs_from_top_to_bottom(name):
    run_python_blocks(PAGES[name])


def test_every_program_is_run_by_a_test():
    left = {}
    for name in PAGES:
        rest = [block for block in blocks(name, "python") if ">>> " not in block]
        rest = [block for block in rest if block not in files(name).values()]
        if rest:
            left[name] = len(rest)
    # Two blocks are PyTorch's. tests/inspect/test_wire.py compares those of collectives.md.
    assert left == {"coming_from_torch.md": 2, "collectives.md": 3}


# The commands of flags.md.


@pytest.mark.parametrize("name", ["flags.md"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["explain", "c=bf16,o=f32; LayerNorm: full"], 0),
        (["audit", "train:make"], 0),
        (["ranges", "train:make"], 0),
        (["first-nonfinite", "train:make"], 1),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("folder", "standard_promotion")  # as in a reader's program
def test_a_command_prints_what_the_page_shows(name, arguments, code, capsys):
    assert jmpx.__main__.main(arguments) == code
    printed = capsys.readouterr().out
    assert [block for block in blocks(name, "text") if block in printed], printed


def test_each_text_of_the_page_is_that_of_a_command():
    assert len(blocks("flags.md", "text")) == 4


def test_the_migration_tool_prints_what_its_page_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("libcst", reason="libcst is in the migrate extra")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(files("migrate.md")["step"])
    assert jmpx.__main__.main(["migrate", "step.py"]) == 0
    (shown,) = blocks("migrate.md", "diff")
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert printed == shown
