"""The index of messages has each message of the library, and a page for it."""

import importlib
import re
import sys

import pytest
from helpers import ROOT

pytest.importorskip("sphinx", reason="sphinx is in the docs extra")
sys.path.append(str(ROOT / "docs" / "_ext"))
messages = importlib.import_module("message_index")
chapters = importlib.import_module("chapters")
FOUND = messages.collect()
PRINTED = re.compile(
    r"^(\w+(?:Error|Warning)): (\w.*(?:\n(?!```|>>>|\w+(?:Error|Warning): ).+)*)", re.MULTILINE
)
OWN = re.compile("UserWarning|FloatingPointError|ValueError|TypeError|AttributeError")
# Pages whose messages are of others, or shortened.
PAGES = [page for page in (ROOT / "docs").glob("*.md") if "jmpx" in page.read_text()]


def printed():
    for page in PAGES:
        for kind, text in PRINTED.findall(page.read_text()):
            if OWN.fullmatch(kind) and "..." not in text[:60]:
                yield page.name, kind, " ".join(text.split())


@pytest.mark.parametrize(("page", "kind", "text"), list(printed()))
def test_the_index_has_what_pages_print(page, kind, text):
    assert any(kind in each.kind.split(" or ") and each.begins(text) for each in FOUND)


def test_each_file_that_raises_or_warns_is_in_the_index():
    raising = {
        str(path.relative_to(messages.ROOT).with_suffix(""))
        for path in messages.ROOT.rglob("*.py")
        if re.search(r"Error\(\s*f?\"[A-Z]|warn\(\s*f?\"", path.read_text())
    }
    assert len(raising) > 50
    assert not raising - {each.file for each in messages.Source(messages.ROOT).messages()}


# Messages that no small program is told: they need a chip's compiler or a whole search, or are for
# who changes jmpx. Tests of their own provoke them.
OF_OTHER_TESTS = (
    "Cannot watch inside of the jax.shard_map",
    "Expected a loss, which each policy casts",
    "Expected a policy that holds an error of",
    "Expected an error= that float32 can hold",
    "Expected at most as many chips as",
    "Two rules for the primitive",
    "libcst does not read it to the end",
    "… traces the function, so that arrays are lost",
    "the results in float32 are not finite",
)


def test_the_snapshot_provokes_each_message():
    files = (ROOT / "tests" / "messages").glob("*.txt")
    lines = [line for file in files for line in file.read_text().splitlines()]
    told = [line.partition(": ")[2] for line in lines if line.startswith("! ")]
    left = [each.beginning for each in FOUND if not any(map(each.begins, told))]
    assert sorted(each for each in left if not each.startswith(OF_OTHER_TESTS)) == []
    assert len(left) == len(OF_OTHER_TESTS)


def test_each_subject_has_a_page_of_the_manual():
    contents = *chapters.CHAPTERS.values(), *chapters.UNDER.values()
    pages = {page for found in contents for page in found}
    assert {each.subject[1] for each in FOUND} <= pages


LIBRARY = """
import warnings
_END = "of the program"
def _warn(message): warnings.warn(message)
def unknown(what, x): return ValueError(f"Unknown {what} {x!r}{x.at}: write another.")
def _because(x) -> str: return "is small" if x else "is large"
def f(x):
    if x > 1:
        raise unknown("dtype", x)
    raise unknown("word", x)
def g(x):
    kind = "dynamic"
    _warn(f"The value {kind} {_because(x)} {_END}: mend it.")
    error.add_note(f"In {x} " "it was so.")
    raise KeyError(x)
"""


def test_messages_are_followed_to_those_who_make_them(tmp_path):
    (tmp_path / "_base").mkdir()
    (tmp_path / "_base" / "text.py").write_text(LIBRARY)
    assert [(each.beginning, each.kind) for each in messages.collect(tmp_path)] == [
        ("In … it was so", "note"),
        ("The value dynamic … of the program", "UserWarning"),
        ("Unknown dtype …", "ValueError"),
        ("Unknown word …", "ValueError"),
    ]
