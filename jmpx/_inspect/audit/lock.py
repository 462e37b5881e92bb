"""Locks: a text file of the dtypes that a program has, which a later audit compares with.

The file has a section per scope and, in it, a line per operation and its dtypes, in an order that
does not depend on the program's: code may move, and a merge of two files is a file. It ends with a
line of its own, which shows that nothing was cut off.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jmpx._base.messages import describe
from jmpx._inspect.audit.data import Entry

_NAME = "# jmpx precision lock"
_FIRST = f"{_NAME} 1"
_ABOUT = """\
# The dtypes of products, convolutions, reductions and loop carries, by scope, without counts.
# To accept those that the program has now, delete this file and write it again.
"""
_LAST = "# end of lock"
_OUTERMOST = "(outermost)"  # what has no scope
_MEND = "restore it, or delete it and write it again."

_Row: TypeAlias = tuple[str, str]  # scope, operation
# Rows -> dtypes -> where they are: a line of the lock file, or of the user's code.
_Rows: TypeAlias = dict[_Row, dict[str, str]]


class Difference(NamedTuple):
    """An operation whose dtypes are not those that a lock file has.

    Its `str` is one line that begins with the place, as a linter's.

    Attributes:
        scope: the module's path, else the named scopes; empty outside of all.
        operation: its name.
        locked: dtypes that only the file has.
        found: dtypes that only the program has.
        place: the line of the user's code that changed; where nothing replaces what was locked,
            the line of the lock file.
    """

    scope: str
    operation: str
    locked: tuple[str, ...]
    found: tuple[str, ...]
    place: str

    def __str__(self) -> str:
        locked, found = (" and ".join(each) or "nothing" for each in (self.locked, self.found))
        place = f"{self.place}: " if self.place else ""
        return f"{place}{self.scope or _OUTERMOST}: {self.operation}: locked {locked}, now {found}"


def write(entries: Iterable[Entry], path: str | os.PathLike[str]) -> None:
    """Writes a lock file; an older one stays as it is until the new one is complete."""
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text(entries), encoding="utf-8", newline="\n")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def differences(entries: Iterable[Entry], path: str | os.PathLike[str]) -> tuple[Difference, ...]:
    """Returns how a program differs from a lock file, in the order of the file.

    Raises:
        ValueError: if it is not a lock file, or damaged.
        OSError: if it cannot be read.
    """
    locked, found = _read(path), _rows(entries)
    differing = []
    for row in _sorted({*locked, *found}):
        old, now = locked.get(row, {}), found.get(row, {})
        gone, new = (sorted(set(one) - set(other)) for one, other in ((old, now), (now, old)))
        if gone or new:
            place = now[new[0]] if new else old[gone[0]]
            differing.append(Difference(*row, (*gone,), (*new,), place))
    return tuple(differing)


def text(entries: Iterable[Entry]) -> str:
    """Returns the content of a lock file."""
    lines, scope = [_FIRST, *_ABOUT.splitlines()], None
    rows = _rows(entries)
    for row in _sorted(rows):
        if row[0] != scope:
            scope = row[0]
            lines += ["", f"[{scope or _OUTERMOST}]"]
        lines += [f"{row[1]}: {dtypes}" for dtypes in sorted(rows[row])]
    return "\n".join([*lines, "", _LAST, ""])


def _rows(entries: Iterable[Entry]) -> _Rows:
    """Returns the rows of a program; of equal ones the first place counts."""
    rows: _Rows = {}
    for entry in entries:
        place = "" if entry.place is None else str(entry.place)
        scope = " ".join(entry.scope.split())  # the name of a scope may be any string
        rows.setdefault((scope, entry.operation), {}).setdefault(entry.dtypes, place)
    return rows


def _sorted(rows: Iterable[_Row]) -> list[_Row]:
    """Returns rows with `blocks/2` before `blocks/10`, and a scope before those in it."""

    def natural(name: str) -> list[list[tuple[str, int]]]:
        return [
            [(other, int(digits or 0)) for other, digits in re.findall(r"(\D*)(\d*)", part)]
            for part in name.split("/")
        ]

    return sorted(rows, key=lambda row: tuple(map(natural, row)))


def _read(path: str | os.PathLike[str]) -> _Rows:
    """Returns the rows of a lock file."""
    name = os.fspath(path)
    try:
        first, *lines = Path(path).read_text(encoding="utf-8").splitlines() or [""]
    except UnicodeDecodeError:
        raise ValueError(f"{name!r} is not a lock file of jmpx, because it is not text.") from None
    if first != _FIRST:
        is_later = re.fullmatch(rf"{_NAME} \d+", first)
        why = "is of another version of jmpx" if is_later else "is not a lock file of jmpx"
        raise ValueError(
            f"{name!r} {why}: expected the first line {_FIRST!r}, got {describe(first)}."
        )
    if not lines or lines[-1] != _LAST:
        raise ValueError(f"The lock file {name!r} is cut off before {_LAST!r}: {_MEND}")
    rows: _Rows = {}
    for number, row, dtypes in _parsed(lines[:-1], name):
        rows.setdefault(row, {}).setdefault(dtypes, f"{name}:{number}")
    return rows


def _parsed(lines: list[str], name: str | bytes) -> Iterator[tuple[int, _Row, str]]:
    """Yields the number of each line with a row, the row and its dtypes."""
    scope = None
    for number, line in enumerate(lines, 2):
        operation, _, dtypes = line.partition(": ")
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            scope = "" if line[1:-1] == _OUTERMOST else line[1:-1]
        elif scope is not None and operation and dtypes:
            yield number, (scope, operation), dtypes
        else:
            raise ValueError(
                f"Line {number} of the lock file {name!r} is {describe(line)}, and not a scope "
                f"such as '[encoder]' or a row such as 'reduce_sum: float32': {_MEND}"
            )
