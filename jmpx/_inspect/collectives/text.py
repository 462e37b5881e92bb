"""Collectives as text: how many bytes each kind sends, and the largest arrays."""

import collections
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from jmpx._base.text import bytes_text, columns, count_text, share_text
from jmpx._inspect.collectives.data import Collective
from jmpx._jaxprs.places import Place

_WIDTH, _PROSE, _PLACE, _ROWS = 100, 80, 16, 20  # characters, and lines


def lines(
    title: str, devices: int, found: Sequence[Collective], notes: Sequence[str]
) -> Iterator[str]:
    """Yields the lines of a report.

    Args:
        title: the program and where it runs.
        devices: how many run it.
        found: its collectives.
        notes: sentences.
    """
    arrays = [one for one in found if not one.is_scalar]
    scalars = [one for one in found if one.is_scalar]
    if not found:
        yield f"{title}: {' '.join(notes) or 'no collectives'}"
        return
    yield _end(f"{title}: a device sends {_sent(found)} a step", _WIDTH)
    if arrays:
        yield from ("", *_by_kind(arrays), "", *_largest(arrays, devices))
    if scalars:
        what = "a single number" if len(scalars) == 1 else "single numbers"
        count = count_text(len(scalars), "collective")
        yield from ("", f"{count} of {what}, such as a loss or a flag: {_sent(scalars)}")
    for note in notes:
        wrapped = textwrap.wrap(note, _PROSE, break_long_words=False, break_on_hyphens=False)
        yield from ("", *wrapped)


def _sent(found: Iterable[Collective]) -> str:
    return bytes_text(round(sum(one.sent for one in found)))


def _by_kind(arrays: Sequence[Collective]) -> list[str]:
    groups: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
    for one in arrays:
        groups[one.kind, one.dtype].append(one)
    sums = {key: sum(one.sent for one in group) for key, group in groups.items()}
    rows = [("share", "sent", "kind", "dtype", "arrays")]
    for key in sorted(sums, key=lambda key: -sums[key]):
        share = share_text(sums[key], sum(sums.values()))
        rows.append((share, _sent(groups[key]), *key, str(len(groups[key]))))
    return columns(rows, right=(0, 1, 4))


def _largest(arrays: Sequence[Collective], devices: int) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[Collective]] = collections.defaultdict(list)
    for one in arrays:  # parameters of layers, whose names differ in numbers alone, have one row
        name = re.sub(r"\d+", "*", _carried(one))
        groups[name, one.kind, one.dtype, one.bytes, one.group, one.in_while, one.place].append(one)
    ordered = sorted(groups.values(), key=lambda group: -sum(one.sent for one in group))
    shown, others = ordered[:_ROWS], sum(ordered[_ROWS:], [])
    rows = [("sent", "kind", "dtype", "array", "times", "group")]
    for group in shown:
        one, times = group[0], sum(each.times for each in group)
        size, count = bytes_text(one.bytes), f"{times}{'+' * one.in_while}"
        rows.append((_sent(group), one.kind, one.dtype, size, count, str(one.group)))
    if all(one.group == devices for one in arrays):
        rows = [row[:-1] for row in rows]
    numbers = columns(rows, right=(0, 3, 4, 5))
    left = _WIDTH - max(map(len, numbers)) - 4
    names = [_common(list(map(_carried, group))) for group in shown]
    places = [_place(group[0].place, max(left - max(map(len, names)), _PLACE)) for group in shown]
    names = [_end(name, left - max(map(len, places))) for name in names]
    yield from columns(list(zip(numbers, ["carries", *names], ["place", *places], strict=True)))
    if others:
        more = f"and {count_text(len(others), 'collective')} more, {_sent(others)}"
        yield f"{more}: `to_json()` has them"


def _common(names: Sequence[str]) -> str:
    """Returns one name for names that differ in numbers: `params[*]['w']`."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(each[0] if len({*each}) == 1 else "*" for each in parts)


def _carried(one: Collective) -> str:
    """Returns the array that a collective carries, as far as it is known."""
    if one.parameter:
        return one.parameter
    if not one.results:
        return "in the backward pass" if one.is_backward else ""
    return f"{'grad ' * one.is_backward}-> {one.results[0]}"


def _place(place: Place | None, width: int) -> str:
    """Returns a place in at most some characters."""
    if place is None:
        return ""
    line = f"{os.path.basename(place.file)}:{place.line}"
    full = f"{line} ({place.function})" if place.function else line
    return full if len(full) <= width else _end(line, width)


def _end(text: str, width: int) -> str:
    """Returns a text in at most some characters: its end, which says most."""
    return text if len(text) <= width else f"...{text[3 - width :]}"
