"""The pages of the manual: their programs run, and print what the pages say."""

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


# The commands of flags.md.


@pytest.mark.parametrize("name", ["flags.md"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["explain", "c=bf16; LayerNorm: full"], 0),
        (["audit", "train:make"], 0),
        (["ranges", "train:make"], 0),
        (["first-nonfinite", "train:make"], 1),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("folder", "standard_promotion")  # as in a reader's program
def test_a_command_prints_what_the_page_shows(name, arguments, code, capsys):
    assert run_jmpx(*arguments) == code
    printed = capsys.readouterr().out
    assert [block for block in blocks(PAGES[name], "text") if block in printed], printed


def test_each_text_of_the_page_is_that_of_a_command():
    assert len(blocks(PAGES["flags.md"], "text")) == 4


def test_the_migration_tool_prints_what_its_page_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("libcst", reason="libcst is in the migrate extra")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(modules(PAGES["migrate.md"])["step"])
    assert run_jmpx("migrate", "step.py") == 0
    (shown,) = blocks(PAGES["migrate.md"], "diff")
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert printed == shown
