"""Each public name is in `__all__`, has a type, is in the reference, and a page explains it.

tests/typing uses each name under a strict pyright, which complains about one without a type, and
asks `pyright --verifytypes` for the rest of the package.
"""

import ast
import importlib
import inspect
import re

import pytest
from helpers import ROOT

DOCS = ROOT / "docs"
PUBLIC = "haiku equinox flax flags inspect optim distributed types mpx".split()
MODULES = ("jmpx", *(f"jmpx.{name}" for name in PUBLIC))
NAMES = [f"{m}.{name}" for m in MODULES for name in importlib.import_module(m).__all__]
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|data):: (\S+)$", re.MULTILINE)
SUMMARY = re.compile(r"^   (jmpx\.\S+)$", re.MULTILINE)
# Code uses a name, and does not explain it.
CODE = re.compile(r"^ *(```+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
# Pages that name what they do not explain.
OTHERS = ("description.md", "project", "reference", "releasing.md")


def pages_of_the_manual():
    found = [p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).parts[0] not in OTHERS]
    return "\n".join(page.read_text() for page in found)


def reference():
    return "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))


def without_a_place_in_all(module):
    """What a module defines or imports as public, by `as`, and leaves out of `__all__`."""
    own = {
        name
        for name, value in vars(module).items()
        if inspect.isroutine(value) or inspect.isclass(value)
        if not name.startswith("_") and value.__module__ == module.__name__
    }
    own |= {
        alias.asname
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.module != "jmpx"  # has the modules
        for alias in node.names
        if alias.asname and not alias.asname.startswith("_")
    }
    return own - {"adapter"} - set(module.__all__)  # frameworks are registered by `adapter`


def without_a_typed_use(names, texts):
    used = {
        ast.unparse(node)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
    }
    return set(names) - used


def unexplained(names, text):
    prose = CODE.sub("", text)
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", prose)]


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_shows_is_in_all(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == list(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)
    assert not without_a_place_in_all(module)


def test_the_tests_of_types_use_each_name():
    texts = [path.read_text() for path in (ROOT / "tests" / "typing").glob("test_*.py")]
    assert not without_a_typed_use(NAMES, texts)


def test_the_reference_has_each_name_once():
    assert sorted(DIRECTIVE.findall(reference())) == sorted(NAMES)


def test_the_first_page_of_the_reference_lists_each_name_once():
    text = (DOCS / "reference" / "index.md").read_text()
    assert sorted(SUMMARY.findall(text)) == sorted(NAMES)


def test_a_page_of_the_manual_explains_each_name():
    missing = unexplained(NAMES, pages_of_the_manual())
    assert not missing, f"no page explains {', '.join(missing)}"
