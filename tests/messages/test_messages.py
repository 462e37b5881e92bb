"""What jmpx refuses and warns of, provoked by small programs: a snapshot of each message.

A `.txt` file beside this one has programs with what they are told:

    jmpx.get_policy("c=bf17")
    ! ValueError: ...

A program ends with a blank line. Lines from `! ` on are its messages, one each: an error, with its
notes, a warning, or what is printed to the standard error. A program without them is told nothing.
The file's first program, up to the first blank line, is what all others start with. After a change
of messages, write the files anew, and read the difference:

    REWRITE_MESSAGES=1 pytest tests/messages && git diff tests/messages
"""

import contextlib
import functools
import io
import os
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import ROOT

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.txt"))
REWRITE = "REWRITE_MESSAGES" in os.environ


class Program(NamedTuple):
    """A program of a file, the line on which it begins, and its messages."""

    file: Path
    line: int
    code: str
    messages: list[str]

    def __str__(self):
        return f"{self.file.stem}:{self.line}"


def read(file: Path) -> list[Program]:
    programs, line = [], 1
    for block in re.split(r"\n{2,}", file.read_text().strip()):
        lines = block.splitlines()
        code = [each for each in lines if not each.startswith("! ")]
        said = [each[2:] for each in lines if each.startswith("! ")]
        assert lines == [*code, *(f"! {each}" for each in said)], f"{file}:{line}: code after '! '"
        programs.append(Program(file, line, "\n".join(code), said))
        line += len(lines) + 1
    return programs


@functools.cache
def beginning(file: Path) -> dict:
    """Returns the names that a file's first program defines."""
    code = read(file)[0].code
    names = {"__name__": file.stem}
    exec(compile(code, str(file), "exec"), names)
    return names


def told(program: Program) -> list[str]:
    """Runs a program, and returns what it is told."""
    code = compile("\n" * (program.line - 1) + program.code, str(program.file), "exec")
    names = dict(beginning(program.file))
    printed, found = io.StringIO(), []
    modules = dict(sys.modules)  # of which a program may hide one
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stderr(printed),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("always")
        try:
            exec(code, names)
        except SystemExit as error:
            found.append(f"SystemExit: {error.code}")
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            text = str(error) if _is_ours(last) else "(of another library)"
            found += [f"{type(error).__name__}: {text}"]
            notes = [note for note in getattr(error, "__notes__", ()) if "---" not in note]
            found += [f"note: {note}" for note in notes]
        found += [f"printed: {line}" for line in printed.getvalue().splitlines()]
        for each in caught:
            if issubclass(each.category, UserWarning):
                place = "" if Path(each.filename) == program.file else f" at {each.filename}"
                found.append(f"{each.category.__name__}{place}: {each.message}")
        found = [_plain(each) for each in found]  # where a path may be relative to the folder
    sys.modules |= modules
    return found


def _is_ours(file: str) -> bool:
    return file.startswith((str(ROOT / "jmpx"), str(FOLDER)))


def _plain(text: str) -> str:
    """Returns a message as one line, without what differs between machines and runs."""
    text = re.sub(rf"({re.escape(os.path.relpath(ROOT))}|{ROOT})/", "", text).replace("\n", "\\n")
    # The module of an object of JAX may be private, and differs between versions.
    text = re.sub(r"<(?:[\w.]+\.)?(\w+) object at 0x[0-9a-f]+>", r"<\1 object>", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text).strip()


@pytest.mark.skipif(REWRITE, reason="the files are written anew")
@pytest.mark.parametrize("program", [p for file in FILES for p in read(file)[1:]], ids=str)
def test_messages_are_those_of_the_snapshot(program):
    assert told(program) == program.messages


@pytest.mark.skipif(not REWRITE, reason="REWRITE_MESSAGES=1 writes the files anew")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_snapshot_is_written_anew(file):
    first, *others = read(file)
    blocks = [first.code]
    for program in others:
        blocks.append("\n".join([program.code, *(f"! {each}" for each in told(program))]))
    file.write_text("\n\n".join(blocks) + "\n")
