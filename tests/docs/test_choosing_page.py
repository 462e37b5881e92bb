"""The walkthrough of docs/choosing.md: what its command prints, and the strings of its table."""

import re
import sys

import pytest
from helpers import ROOT

import jmpx
import jmpx.__main__

PAGE = (ROOT / "docs" / "choosing.md").read_text()
NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e-\d+)?(?![\w.]*=)")


def block(language):
    """Returns the first block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, which has the page's train.py."""
    (tmp_path / "train.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("train", None)
    yield
    sys.modules.pop("train", None)


@pytest.mark.thorough
@pytest.mark.usefixtures("folder", "standard_promotion")  # as in a reader's program
def test_the_command_prints_what_the_page_shows(capsys):
    (command,) = re.findall(r"^python -m jmpx (.*)$", block("sh"), re.MULTILINE)
    assert jmpx.__main__.main(command.split()) == 0
    printed, shown = capsys.readouterr().out, block("text")
    # Numbers differ a little from one version of JAX to another.
    assert NUMBER.sub("N", printed).split() == NUMBER.sub("N", shown).split()
    numbers = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    assert all(float(a) == pytest.approx(float(b), rel=0.2) for a, b in numbers)


def test_each_string_of_the_table_is_one_that_jmpx_reads():
    rows = re.findall(r"^\| .*\| (`.*`) \| (`.*`) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        bfloat16, float16 = (cell.strip("`").replace(r"\|", "|") for cell in row)
        found = [jmpx.get_mixed_precision(text) for text in (bfloat16, float16)]
        assert found[0].policy_map.way == found[1].policy_map.way
        assert [type(mp.loss_scale).__name__ for mp in found] == [
            "NoOpLossScale",
            "DynamicLossScale",
        ]
