"""The README: it is short, its Python runs, its links lead to files, CI runs its two commands."""

import re
from pathlib import Path

from helpers import ROOT, run_python, run_python_blocks

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
LINKS = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", PROSE)


def test_it_is_short():
    assert len(README.splitlines()) <= 90
    assert len(re.sub(r"\]\([^)]*\)", "]", PROSE).split()) <= 500


def test_python_blocks_run_from_top_to_bottom():
    assert len(BLOCKS) == 3 and all(block.startswith(">>> ") for block in BLOCKS)
    run_python_blocks(ROOT / "README.md")


def test_it_has_two_commands_in_single_lines_that_name_what_exists():
    assert len(COMMANDS) == 2
    for line in COMMANDS:
        assert "\n" not in line and not line.endswith("\\")
    shown = [*COMMANDS, *re.findall(r"`([^`]*)`", PROSE)]
    files = {file for line in shown for file in re.findall(r"[\w/]+\.(?:py|sh)\b", line)}
    assert files == {"examples/haiku/train.py"} and (ROOT / "examples/haiku/train.py").exists()


def test_ci_takes_both_commands_from_the_readme():
    for word, command in zip(("examples/haiku/train.py", "pytest"), COMMANDS, strict=True):
        shown = run_python(str(ROOT / ".ci" / "readme_command.py"), word).stdout.strip()
        assert shown == command and "pip install" in shown


def test_the_description_for_the_package_index_begins_as_it_does():
    texts = (README, (ROOT / "docs" / "description.md").read_text())
    first, description = (text.split("\n\n")[1].split() for text in texts)
    assert first == description and len(first) > 25


def anchors(page):
    """Returns what the headings of a page are called in links, on GitHub and on the site."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_its_links_lead_to_files_and_headings_that_exist():
    broken = []
    for _, target in LINKS:
        name, _, heading = target.partition("#")
        path = ROOT / name
        there = target.startswith("https://") or path.is_file()
        if there and heading:
            there = heading in anchors(path)
        if not there:
            broken.append(target)
    assert broken == []


def test_it_shows_pictures_and_leads_to_the_manual():
    pictures = {Path(target).name for image, target in LINKS if image}
    drawn = {path.name for path in (ROOT / "benchmarks" / "results").glob("peak_memory.png")}
    assert pictures == drawn and len(drawn) == 1
    pages = {target.partition("#")[0] for _, target in LINKS if target.startswith("docs/")}
    assert {"docs/start.md", "docs/cost.md", "docs/reliability.md", "docs/index.md"} <= pages
