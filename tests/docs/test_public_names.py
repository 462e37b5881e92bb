"""Each public name is in `__all__`, has a type, is in the reference, and a page explains it.

That each has a type is held by tests/typing/test_typing.py.
"""

import importlib
import inspect
import re

import pytest
from helpers import ROOT

DOCS = ROOT / "docs"
MODULES = ("jmpx", "jmpx.haiku", "jmpx.equinox", "jmpx.flax", "jmpx.flags")
NAMES = [f"{m}.{name}" for m in MODULES for name in importlib.import_module(m).__all__]
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|data):: (\S+)$", re.MULTILINE)
# Pages that name what they do not explain.
OTHERS = ("description.md", "project", "reference", "releasing.md")


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_defines_without_an_underscore_is_in_all(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == list(found.__all__)
    assert all(hasattr(found, name) for name in found.__all__)
    own = {
        name
        for name, value in vars(found).items()
        if inspect.isroutine(value) or inspect.isclass(value)
        if not name.startswith("_") and value.__module__ == module
    }
    assert own - {"adapter"} <= set(found.__all__)  # frameworks are registered by `adapter`


def test_the_reference_has_each_name_once():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(DIRECTIVE.findall(text)) == sorted(NAMES)


def test_the_first_page_of_the_reference_lists_each_name_once():
    text = (DOCS / "reference" / "index.md").read_text()
    assert sorted(re.findall(r"^   (jmpx\.\S+)$", text, re.MULTILINE)) == sorted(NAMES)


def test_a_page_of_the_manual_explains_each_name():
    pages = [p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).parts[0] not in OTHERS]
    text = "\n".join(page.read_text() for page in pages)
    unexplained = [name for name in NAMES if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert not unexplained, f"no page explains {', '.join(unexplained)}"
