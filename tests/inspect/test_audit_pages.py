"""The reports that pages of docs/ show are those that their programs print."""

import importlib
import re

import jax
import pytest
from helpers import ROOT, run_python_blocks
from helpers.pages import blocks, importable, modules

import jmpx

pytestmark = [pytest.mark.thorough, pytest.mark.versions]
# The reports that each page prints, in its order.
PRINTED = {
    "ranges.md": ["found"],
    "blame.md": ["report", "better.diff(report)"],
    "choose.md": ["choice"],
    "compare.md": ["report"],
    "compiled.md": ["report"],
    "plan.md": ["report"],  # the rest of its reports need a chip's compiler
}
AUDITS = ROOT / "docs" / "audit.md"


def words(text):
    """Returns each line without its numbers, units, bars and places, which versions change."""
    place = re.compile(r"(<doctest [^>]*>|\w+\.py):\d+|_\d+(?=[:'\"])")  # also in a scope's name
    number = re.compile(r"[-<>+]*[\d.,e*%+-]+|#*\.*|[kMGT]?i?(?:FLOP|B)")
    lines = (place.sub("", line).split() for line in text.splitlines())
    return [[word for word in line if not number.fullmatch(word)] for line in lines]


@pytest.mark.parametrize("name", PRINTED)
def test_the_reports_of_a_page_are_real(name, tmp_path):
    page = ROOT / "docs" / name
    with importable(modules(page), tmp_path):
        names = run_python_blocks(page)
        reports = [str(eval(expression, names)) for expression in PRINTED[name]]
    texts = [text for text in blocks(page, "text") if not text.startswith("Audit of")]
    for report, text in zip(reports, texts[: len(reports)], strict=True):
        assert words(report) == words(text)


# The page of audits shows a model with leaks, and a patch that fixes it.


def parts(text):
    """Returns the parts that all versions of JAX agree on, and the rest without its numbers.

    Their backward passes keep other values, and have other operations outside of products.
    """
    lines = text.splitlines()
    (rest,) = (i for i, line in enumerate(lines) if line.startswith("Saved for"))
    (found,) = (i for i, line in enumerate(lines) if re.match("Findings:|No findings", line))
    (table,) = (i for i, line in enumerate(lines) if line.startswith("scope "))
    masked = map(tuple, words("\n".join([*lines[rest:found], *lines[table:]])))
    flags = {("bool",), ("int32",)}  # JAX 0.7 saves none
    return lines[:rest] + lines[found:table], {*masked} - flags


def test_the_reports_of_the_page_of_audits_are_real(tmp_path_factory):
    model, (patch,) = blocks(AUDITS, "python")[0], blocks(AUDITS, "diff")
    mended = model
    for old, new in re.findall(r"^-(.*)\n\+(.*)$", patch, re.MULTILINE):
        assert mended.count(old) == 1
        mended = mended.replace(old, new)
    shown = [text for text in blocks(AUDITS, "text") if text.startswith("Audit of")]
    for source, expected in zip((model, mended), shown, strict=True):
        with (
            importable({"model": source}, tmp_path_factory.mktemp("page")),
            jax.numpy_dtype_promotion("standard"),
        ):
            loss_fn, args = importlib.import_module("model").make()
            text = str(jmpx.inspect.audit(loss_fn)(*args))  # which reads the lines of the model
        assert parts(text) == parts(expected)
