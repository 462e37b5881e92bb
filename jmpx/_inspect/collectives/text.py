"""Collectives as text: how many bytes each kind sends, and the largest arrays."""

import collections
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from jmpx._base.text import bytes_text, columns, count_text, share_text
from jmpx._inspect.collectives.data import Collective

_WIDTH, _NAME, _ROWS = 100, 36, 20  # characters, and rows


def lines(title: str, found: Sequence[Collective], notes: Sequence[str]) -> Iterator[str]:
    """Yields the lines of a report: a title, tables of collectives, and sentences."""
    arrays = [one for one in found if not one.is_scalar]
    scalars = [one for one in found if one.is_scalar]
    yield f"{title}: a device sends {_sent(found)} a step" if found else f"{title}: no collectives"
    if arrays:
        yield from ("", *_by_kind(arrays), "", *_largest(arrays))
    if scalars:
        count = count_text(len(scalars), "collective")
        yield from ("", f"{count} of single numbers, such as a loss or a flag: {_sent(scalars)}")
    for note in notes:
        yield from ("", *textwrap.wrap(note, _WIDTH))


def _sent(found: Iterable[Collective]) -> str:
    return bytes_text(round(sum(one.sent for one in found)))


def _grouped(
    arrays: Iterable[Collective], key: Callable[[Collective], object]
) -> list[list[Collective]]:
    """Returns the collectives with the same key together, those that send most first."""
    groups: dict[object, list[Collective]] = collections.defaultdict(list)
    for one in arrays:
        groups[key(one)].append(one)
    return sorted(groups.values(), key=lambda group: -sum(one.sent for one in group))


def _by_kind(arrays: Sequence[Collective]) -> list[str]:
    total = sum(one.sent for one in arrays)
    rows = [("share", "sent", "kind", "dtype", "arrays")]
    for group in _grouped(arrays, lambda one: one[:2]):
        share = share_text(sum(one.sent for one in group), total)
        rows.append((share, _sent(group), group[0].kind, group[0].dtype, str(len(group))))
    return columns(rows, right=(0, 1, 4))


def _largest(arrays: Sequence[Collective]) -> Iterator[str]:
    """Yields a table. Arrays of layers, whose names differ in numbers alone, share a row."""
    groups = _grouped(arrays, lambda one: (_layer(one), one[:4], one.in_while, one.place))
    rows = [("sent", "kind", "dtype", "array", "times", "group", "carries", "place")]
    for group in groups[:_ROWS]:
        one, times = group[0], sum(each.times for each in group)
        count = f"{times}{'+' * one.in_while}"
        carried = _carried(one) if len(group) == 1 else _layer(one)
        name = carried if len(carried) <= _NAME else f"...{carried[3 - _NAME :]}"
        place = f"{os.path.basename(one.place.file)}:{one.place.line}" if one.place else ""
        size, devices = bytes_text(one.bytes), str(one.group)
        rows.append((_sent(group), one.kind, one.dtype, size, count, devices, name, place))
    yield from columns(rows, right=(0, 3, 4, 5))
    if others := sum(groups[_ROWS:], []):
        more = f"and {count_text(len(others), 'collective')} more, {_sent(others)}"
        yield f"{more}: `to_json()` has them"


def _layer(one: Collective) -> str:
    return re.sub(r"\d+", "*", _carried(one))


def _carried(one: Collective) -> str:
    """Returns the array that a collective carries, as far as it is known."""
    if one.parameter:
        return one.parameter
    if not one.results:
        return "in the backward pass" if one.is_backward else ""
    return f"{'grad ' * one.is_backward}-> {one.results[0]}"
