"""The pages of docs/ that print reports of jmpx.inspect: those are what their programs print."""

import contextlib
import importlib
import linecache
import re
import sys
import types

import jax
import pytest
from helpers import ROOT, run_python_blocks

import jmpx

pytestmark = [pytest.mark.thorough, pytest.mark.versions]
# What each page prints, in its order.
PRINTED = {
    "audit.md": ["found"],
    "blame.md": ["report", "better.diff(report)"],
    "choose.md": ["choice"],
    "compare.md": ["report"],
    "plan.md": ["report"],  # the rest of its reports need a chip's compiler
    "products.md": ["report"],
}
PAGES = {name: (ROOT / "docs" / name).read_text() for name in PRINTED}


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)\n```$", PAGES[name], re.MULTILINE | re.DOTALL)


def words(text):
    """Returns each line without its numbers, units, bars and places, which versions change."""
    place = re.compile(r"(<doctest [^>]*>|\w+\.py):\d+")
    number = re.compile(r"[-<>+]*[\d.,e*%+-]+|#*\.*|[kMGT]?i?(?:FLOP|B)")
    lines = (place.sub("", line).split() for line in text.splitlines())
    return [[word for word in line if not number.fullmatch(word)] for line in lines]


@contextlib.contextmanager
def importable(folder, source):
    """Changes to a folder with a `model.py`, which is imported from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        (folder / "model.py").write_text(source)
        sys.modules.pop("model", None)
        linecache.clearcache()
        importlib.invalidate_caches()
        yield
        sys.modules.pop("model", None)


@pytest.mark.parametrize("name", PRINTED)
def test_the_reports_of_a_page_are_real(name, tmp_path):
    shown = re.findall(r"`model.py`:\n\n```python\n(.*?)^```$", PAGES[name], re.M | re.DOTALL)
    with importable(tmp_path, "".join(shown)):
        names = run_python_blocks(ROOT / "docs" / name)
        reports = [str(eval(expression, names)) for expression in PRINTED[name]]
    texts = [text for text in blocks(name, "text") if not text.startswith("Audit of")]
    for report, text in zip(reports, texts[: len(reports)], strict=True):
        assert words(report) == words(text)


# The page of audits shows a model with leaks, a patch that mends it, and a test.


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of the model, and of the mended one."""
    model, (patch,) = blocks("audit.md", "python")[0] + "\n", blocks("audit.md", "diff")
    mended = model
    for old, new in re.findall(r"^-(.*)\n\+(.*)$", patch, re.MULTILINE):
        assert mended.count(old) == 1
        mended = mended.replace(old, new)
    assert mended != model
    found = []
    for source in (model, mended):
        with importable(tmp_path_factory.mktemp("page"), source):
            with jax.numpy_dtype_promotion("standard"):
                loss_fn, args = importlib.import_module("model").make()
                report = jmpx.inspect.audit(loss_fn)(*args)
            found.append((report, str(report)))  # which reads the lines of the model
    return found


def parts(text):
    """Returns what all versions of JAX agree on, and the rest without its numbers.

    Their backward passes keep other values, and have other operations outside of products.
    """
    lines = text.splitlines()
    (rest,) = (i for i, line in enumerate(lines) if line.startswith("Saved for"))
    (found,) = (i for i, line in enumerate(lines) if re.match("Findings:|No findings", line))
    (table,) = (i for i, line in enumerate(lines) if line.startswith("scope "))
    masked = map(tuple, words("\n".join([*lines[rest:found], *lines[table:]])))
    flags = {("bool",), ("int32",)}  # JAX 0.7 saves none
    return lines[:rest] + lines[found:table], {*masked} - flags


def test_the_reports_of_the_page_of_audits_are_real(reports):
    shown = [text for text in blocks("audit.md", "text") if text.startswith("Audit of")]
    for (_, text), expected in zip(reports, shown, strict=True):
        assert parts(text) == parts(expected)


def test_the_test_of_the_page_fails_for_the_leaks_and_passes_when_they_are_mended(reports):
    (block,) = (block for block in blocks("audit.md", "python") if "def test_precision" in block)
    code = re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE)
    for (report, _), fails in zip(reports, (True, False), strict=True):
        audit = types.SimpleNamespace(audit=lambda fn, r=report: lambda: r)
        names = {
            "model": types.SimpleNamespace(make=lambda: (None, ())),
            "jmpx": types.SimpleNamespace(inspect=audit),
        }
        exec(code, names)
        expected = pytest.raises(AssertionError, match="97.04 % of the FLOPs")
        with expected if fails else contextlib.nullcontext():
            names["test_precision"]()
