"""docs/audit.md: its reports are real, its table has every finding."""

import contextlib
import importlib
import linecache
import re
import sys
import types
from typing import Any

import jax
import pytest
from helpers import ROOT

import jmpx
from jmpx._inspect.audit.data import SEVERITIES
from jmpx._inspect.audit.findings import KINDS

PAGE = ROOT / "docs" / "audit.md"
TEXT = PAGE.read_text()
MODEL, *BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
REPORTS = re.findall(r"^```text\n(Audit of.*?)\n```$", TEXT, re.MULTILINE | re.DOTALL)

FLAGS = {("bool",), ("int32",)}  # JAX 0.7 saves none


def mended():
    """Returns the model after the page's patch."""
    (patch,) = re.findall(r"^```diff\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    source = MODEL
    for old, new in re.findall(r"^-(.*)\n\+(.*)\n", patch, re.MULTILINE):
        assert source.count(old) == 1
        source = source.replace(old, new)
    assert source != MODEL
    return source


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working directory, from which `import model` finds the model."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("page")
        patch.chdir(path)
        patch.syspath_prepend(path)
        yield path


@pytest.fixture(scope="module")
def reports(folder):
    """The reports of the model, and of the mended one."""
    found = []
    for source in (mended(), MODEL):  # the latter stays
        (folder / "model.py").write_text(source)
        sys.modules.pop("model", None)
        linecache.clearcache()
        importlib.invalidate_caches()
        with jax.numpy_dtype_promotion("standard"):
            loss_fn, args = importlib.import_module("model").make()
            found.insert(0, jmpx.inspect.audit(loss_fn)(*args))
    yield found
    del sys.modules["model"]


def parts(text):
    """Returns what all versions of JAX agree on, and the rest without its numbers.

    Their backward passes keep other values, and have other operations outside of products.
    """
    lines = text.splitlines()
    (rest,) = (i for i, line in enumerate(lines) if line.startswith("Saved for"))
    (found,) = (i for i, line in enumerate(lines) if re.match("Findings:|No findings", line))
    (table,) = (i for i, line in enumerate(lines) if line.startswith("scope "))
    masked = {masked_words(line) for line in (*lines[rest:found], *lines[table:])}
    return lines[:rest] + lines[found:table], masked


def masked_words(line):
    """Returns the words of a line without numbers, units and bars."""
    words = tuple(line.split())
    return tuple(w for w in words if not re.fullmatch(r"[\d.,%<>]+|#*\.*|[kMGKi]*(FLOP|B)", w))


@pytest.mark.thorough
def test_its_reports_are_real(reports):
    for report, shown in zip(reports, REPORTS, strict=True):
        exact, masked = parts(str(report))
        exact_shown, masked_shown = parts(shown)
        assert exact == exact_shown
        assert masked - FLAGS == masked_shown - FLAGS


def test_its_test_fails_for_the_leaks_and_passes_when_they_are_mended(reports):
    (block,) = (block for block in BLOCKS if "def test_precision" in block)
    model = types.SimpleNamespace(make=lambda: (None, ()))
    for report, fails in zip(reports, (True, False), strict=True):
        names: dict[str, Any] = {
            "model": model,
            "jmpx": types.SimpleNamespace(
                inspect=types.SimpleNamespace(audit=lambda fn, r=report: lambda: r)
            ),
        }
        exec(re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE), names)
        expected = pytest.raises(AssertionError, match="97.04 % of the FLOPs")
        with expected if fails else contextlib.nullcontext():
            names["test_precision"]()


def test_its_table_has_every_finding():
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \|$", TEXT, re.MULTILINE)
    assert [name for name, *_ in rows] == list(KINDS)
    assert all(len(what) > 10 and len(advice) > 20 for _, what, advice in rows)


def test_findings_have_a_name_and_a_severity_of_the_table(reports):
    for finding in (finding for report in reports for finding in report.findings):
        assert finding.name in KINDS and finding.severity in SEVERITIES
