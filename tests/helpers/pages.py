"""What pages of the manual show: blocks of code, and modules that programs of theirs import."""

import contextlib
import linecache
import re
import sys

import pytest


def blocks(page, language):
    """Returns the blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def modules(page):
    """Returns the modules that a page shows, by name: the block after "`train.py`:" is train.py."""
    shown = r"`(\w+)\.py`[^`\n]*:\n\n```python\n(.*?)^```$"
    return dict(re.findall(shown, page.read_text(), re.MULTILINE | re.DOTALL))


@contextlib.contextmanager
def importable(texts, folder):
    """Changes to a folder with modules, which are imported from there while the context lasts."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
    linecache.clearcache()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield
    for name in texts:
        sys.modules.pop(name, None)
