"""The pictures of the manual: each has the command that makes it, and a twin for dark pages."""

import re

import pytest
from helpers import ROOT

PAGES = [*ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"]
IMAGE = re.compile(r"^!\[([^\]]*)\]\(([^)]*)\)\n\n(.*)", re.MULTILINE)
FIGURES = [
    pytest.param(page, *found, id=f"{page.stem}: {found[1]}")
    for page in PAGES
    for found in IMAGE.findall(page.read_text())
]
DRAWINGS = {"which_way.svg", "policy_map.svg", "autocast.svg", "float16_step.svg"}  # by hand


def test_the_pattern_finds_every_picture():
    shown = [line for page in PAGES for line in re.findall(r"!\[.*\]\(", page.read_text())]
    assert len(shown) == len(FIGURES) > 10


@pytest.mark.parametrize(("page", "words", "target", "below"), FIGURES)
def test_a_picture_has_words_and_the_command_that_makes_it(page, words, target, below):
    path = (page.parent / target).resolve()
    assert path.is_file() and len(words) > 30
    if path.name not in DRAWINGS:
        command = re.match(r"\*Made by\* `python (-m jmpx \w+ )?(\S+\.py)", below)
        assert command, f"Expected the command that makes {target}, found {below!r}."
        assert (ROOT / command[2]).is_file()
        if command[2] == "benchmarks/pictures.py":
            assert path.stem in below


@pytest.mark.parametrize("folder", ["docs/images", "benchmarks/results"])
def test_plots_have_twins_for_dark_pages(folder):
    names = {path.stem for path in (ROOT / folder).glob("*.png")}
    light = {name for name in names if not name.endswith("-dark")}
    assert light and {f"{name}-dark" for name in light} == names - light


def test_a_drawing_has_colours_for_dark_pages():
    text = (ROOT / "docs" / "_ext" / "figures.py").read_text()
    known = set(re.findall(r'"(#\w{6})":', text))
    for name in DRAWINGS:
        drawn = (ROOT / "docs" / "images" / name).read_text()
        assert set(re.findall(r"#[0-9a-fA-F]{3,6}\b", drawn)) - known <= {"#head"}, name
