"""The README: its Python runs, its commands are the ones that CI runs."""

import re

from helpers import ROOT, run_python, run_python_blocks

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_from_top_to_bottom():
    assert len(BLOCKS) >= 5 and all(block.startswith(">>> ") for block in BLOCKS)
    run_python_blocks(ROOT / "README.md")


def test_the_commands_are_single_lines_that_name_what_exists():
    commands = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(commands) >= 2
    for command in commands:
        for line in command.strip().splitlines():
            assert not line.endswith("\\")
            for path in re.findall(r"\S+\.py", line):
                assert (ROOT / path).exists(), path


def test_ci_takes_the_test_command_from_the_readme():
    shown = run_python(str(ROOT / ".ci" / "readme_command.py"), "pytest").stdout.strip()
    assert shown in README and "pip install" in shown and "pytest" in shown
