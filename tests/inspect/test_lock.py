"""Lock files: how they are written, read and compared."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from jmpx._inspect.audit.data import Entry
from jmpx._inspect.audit.lock import differences, text, write
from jmpx._jaxprs.places import Place


def entry(scope, operation, dtypes, place=None):
    return Entry(scope, operation, dtypes, place)


def test_a_difference_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Place(str(tmp_path / "model.py"), 12, "apply")
    write([entry("a/b", "dot_general", "x"), entry("", "carry", "y"), entry("c", "psum", "z")], "l")
    now = [entry("a/b", "dot_general", "w", place), entry("", "carry", "v", place)]
    now += [entry("", "carry", "y"), entry("", "carry", "w")]
    assert list(map(str, differences(now, "l"))) == [
        "model.py:12 (apply): (outermost): carry: locked nothing, now v and w",
        "model.py:12 (apply): a/b: dot_general: locked x, now w",
        "l:12: c: psum: locked z, now nothing",
    ]
    assert Path("l").read_text().splitlines()[11] == "psum: z"


# Files

ENTRIES = st.builds(
    entry,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
    | st.sampled_from(["a/10", "a/9"]),
    st.sampled_from(["carry", "dot_general", "dot_general, backward"]),
    st.sampled_from(["float32", "bfloat16", "bfloat16 x float32 -> float32, highest"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(ENTRIES), st.lists(ENTRIES))
def test_what_is_written_is_read(tmp_path_factory, before, now):
    path = tmp_path_factory.mktemp("locks") / "precision.lock"
    write(before, path)
    assert text(before) == text(before[::-1] + before) == path.read_text(encoding="utf-8")
    assert differences(before, path) == ()

    def plain(entries):
        return {(" ".join(each.scope.split()), *each[1:3]) for each in entries}

    found = differences(now, path)
    locked = {(each.scope, each.operation, dtypes) for each in found for dtypes in each.locked}
    new = {(each.scope, each.operation, dtypes) for each in found for dtypes in each.found}
    assert locked == plain(before) - plain(now) and new == plain(now) - plain(before)


def test_the_order_is_that_of_people():
    scopes = ["blocks/10", "blocks/9/mlp", "blocks", "head", "blocks/9", "blocks_1/up", ""]
    lines = text([entry(scope, "carry", "float32") for scope in scopes]).splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        *("[(outermost)]", "[blocks]", "[blocks/9]", "[blocks/9/mlp]", "[blocks/10]"),
        *("[blocks_1/up]", "[head]"),
    ]


@pytest.mark.parametrize("failing", ["replace"])
def test_a_file_is_written_as_a_whole_or_not_at_all(failing, tmp_path, monkeypatch):
    path = tmp_path / "precision.lock"
    write([entry("a", "carry", "float32")], path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, failing, fail)
        write([], path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["precision.lock"]
    write([], path)
    assert path.read_bytes() != before and os.listdir(tmp_path) == ["precision.lock"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("precision.lock")
    write([], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "precision.lock").read_text() == text([])


def test_a_file_that_was_cut_off_is_known(tmp_path):
    path, whole = tmp_path / "l", text([entry("a", "carry", "float32")])
    for end in range(len(whole) - 1):  # the last character is the end of the line
        path.write_text(whole[:end])
        with pytest.raises(
            ValueError, match="is not a lock file|is of another|is cut off"
        ) as error:
            differences([], path)
        assert str(error.value).count(". ") == 0 and "\n" not in str(error.value)


WRONG = {
    "no text": (b"\xff\xfe", "is not a lock file of jmpx, because it is not text."),
    "empty": (b"", "is not a lock file of jmpx: expected the first line '# jmpx precision lock 1'"),
    "foreign": (b"[tool]\nx: y\n", "got '[tool]'."),
    "later": (b"# jmpx precision lock 2\n", "is of another version of jmpx: expected"),
    "a merge": (
        text([entry("a", "carry", "x")]).replace("carry", "<<<<<<< HEAD\ncarry").encode(),
        "Line 6 of the lock file 'l' is '<<<<<<< HEAD', and not a scope such as '[encoder]' or",
    ),
    "a row of no scope": (
        text([]).replace("# end", "carry: float32\n# end").encode(),
        "Line 5 of the lock file 'l' is 'carry: float32'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_lock(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = WRONG[name]
    Path("l").write_bytes(content)
    with pytest.raises(ValueError) as error:
        differences([], "l")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_line_ends_and_comments_do_not_matter(tmp_path):
    now = [entry("a", "carry", "float32"), entry("a", "psum", "float32")]
    content = text(now).replace("psum", "# why: is it?\npsum").replace("\n", "\r\n")
    (tmp_path / "l").write_bytes(content.encode())
    assert differences(now, tmp_path / "l") == ()
