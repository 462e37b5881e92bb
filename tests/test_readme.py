"""The README: its Python runs, its commands are the ones that CI runs."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def python_only(text):
    """Blanks every line outside of Python blocks, so that line numbers hold."""
    inside, lines = False, []
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append("" if fence or not inside else line)
        inside = line == "```python" if fence else inside
    return "\n".join(lines) + "\n"


def test_python_blocks_run_from_top_to_bottom():
    assert len(BLOCKS) >= 5 and README.count("```python") == len(BLOCKS)
    assert all(block.startswith(">>> ") for block in BLOCKS)
    test = doctest.DocTestParser().get_doctest(python_only(README), {}, "README", "README.md", 0)
    assert len(test.examples) == README.count(">>> ")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report = []
    with jax.numpy_dtype_promotion("standard"):  # as in a reader's program
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_the_commands_are_single_lines_that_name_what_exists():
    commands = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(commands) >= 2
    for command in commands:
        for line in command.strip().splitlines():
            assert not line.endswith("\\")
            for path in re.findall(r"\S+\.py", line):
                assert (ROOT / path).exists(), path


def test_ci_takes_the_test_command_from_the_readme():
    shown = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "readme_command.py"), "pytest"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert shown in README and "pip install" in shown and "pytest" in shown
