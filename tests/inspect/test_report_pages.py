"""The pages of docs/ that print reports of jmpx.inspect: those are what their programs print."""

import re
import sys

import pytest
from helpers import ROOT, run_python_blocks

REPORTS = {
    "audit.md": ["found"],
    "blame.md": ["report", "better.diff(report)"],
    "choose.md": ["choice"],
    "compare.md": ["report"],
    "plan.md": ["report"],
    "products.md": ["report"],
}
PAGES = {name: (ROOT / "docs" / name).read_text() for name in REPORTS}


def words(text):
    """Returns each line without its numbers, units, bars and places, which versions change."""
    place = re.compile(r"(<doctest [^>]*>|\w+\.py):\d+")
    number = re.compile(r"[-<+]*[\d.,e*%+-]+|#*\.*|[kMGT]?i?(?:FLOP|B)")
    lines = (place.sub("", line).split() for line in text.splitlines())
    return [[word for word in line if not number.fullmatch(word)] for line in lines]


def shown(name):
    """Returns the texts that a page shows as printed, without those of test_audit_page.py."""
    texts = re.findall(r"^```text\n(.*?)\n```$", PAGES[name], re.MULTILINE | re.DOTALL)
    return [text for text in texts if not text.startswith("Audit of")]


@pytest.fixture
def folder(name, tmp_path, monkeypatch):
    """The working directory, with the `model.py` of a page that shows one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for text in re.findall(r"`model.py`:\n\n```python\n(.*?)^```$", PAGES[name], re.M | re.DOTALL):
        (tmp_path / "model.py").write_text(text)
    sys.modules.pop("model", None)
    yield tmp_path
    sys.modules.pop("model", None)


@pytest.mark.thorough
@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.usefixtures("folder")
def test_the_reports_of_a_page_are_real(name):
    names = run_python_blocks(ROOT / "docs" / name)
    printed = [str(eval(expression, names)) for expression in REPORTS[name]]
    texts = shown(name)[: len(printed)]  # the rest of plan.md's need a chip's compiler
    for report, text in zip(printed, texts, strict=True):
        assert words(report) == words(text)
