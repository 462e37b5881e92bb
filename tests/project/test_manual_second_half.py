"""What docs/flags.md shows of the commands is what they print."""

import re
import sys

import jax
import pytest
from helpers import ROOT

from jmpx.__main__ import main

TEXT = (ROOT / "docs" / "flags.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The page's program, in the working directory; JAX's promotion is a user's."""
    (program,) = (block for block in blocks("python") if ">>>" not in block)
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("train", None)
    with jax.numpy_dtype_promotion("standard"):
        yield
    sys.modules.pop("train", None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["explain", "c=bf16,o=f32; LayerNorm: full"], 0),
        (["audit", "train:make"], 0),
        (["ranges", "train:make", "--dtype", "float16"], 0),
        (["first-nonfinite", "train:make"], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_prints_what_the_page_shows(train, arguments, code, capsys):
    assert main(arguments) == code
    printed = capsys.readouterr().out
    assert [block for block in blocks("text") if block in printed], printed


def test_each_text_is_that_of_a_command():
    assert len(blocks("text")) == 4
