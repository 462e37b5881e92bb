"""The walkthrough of docs/choosing.md: what its command prints, and the strings of its table."""

import re

import pytest
from helpers import ROOT, run_jmpx
from helpers.pages import blocks, importable, modules

import jmpx

PAGE = ROOT / "docs" / "choosing.md"
NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e-\d+)?(?![\w.]*=)")


@pytest.mark.thorough
@pytest.mark.usefixtures("standard_promotion")  # as in a reader's program
def test_the_command_prints_what_the_page_shows(tmp_path, capsys):
    (command,) = re.findall(r"^python -m jmpx (.*)$", blocks(PAGE, "sh")[0], re.MULTILINE)
    with importable(modules(PAGE), tmp_path):
        assert run_jmpx(*command.split()) == 0
    printed, shown = capsys.readouterr().out, blocks(PAGE, "text")[0]
    # Numbers differ a little from one version of JAX to another.
    assert NUMBER.sub("N", printed).split() == NUMBER.sub("N", shown).split()
    numbers = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    assert all(float(a) == pytest.approx(float(b), rel=0.2) for a, b in numbers)


def test_each_string_of_the_table_is_one_that_jmpx_reads():
    rows = re.findall(r"^\| .*\| (`.*`) \| (`.*`) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        bfloat16, float16 = (cell.strip("`").replace(r"\|", "|") for cell in row)
        found = [jmpx.get_mixed_precision(text) for text in (bfloat16, float16)]
        assert found[0].policy_map.way == found[1].policy_map.way
        assert [type(mp.loss_scale).__name__ for mp in found] == [
            "NoOpLossScale",
            "DynamicLossScale",
        ]
