"""What was found in a program as tables: those that are alike in one row, the largest first."""

import collections
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jmpx._inspect.text import columns, count_text, share_text

_WIDTH, _NAME, _ROWS = 100, 36, 20  # characters, and rows
Key = Callable[[Any], Sequence[str]]


class Tables(NamedTuple):
    """Tables of what was found, by an amount."""

    found: Sequence[Any]
    amount: Callable[[Any], int | float]
    text: Callable[[int], str]  # of an amount
    count: Callable[[Any], int]  # how many one counts as
    noun: str

    def sum(self, found: Iterable[Any]) -> str:
        """Returns the sum of the amounts."""
        return self.text(round(sum(map(self.amount, found))))

    def many(self, found: Iterable[Any]) -> str:
        """Returns how many there are."""
        return count_text(sum(map(self.count, found)), self.noun)

    def _groups(self, key: Callable[[Any], object]) -> list[list[Any]]:
        """Returns what has the same key together, those with the largest amount first."""
        groups: dict[object, list[Any]] = collections.defaultdict(list)
        for one in self.found:
            groups[key(one)].append(one)
        return sorted(groups.values(), key=lambda group: -sum(map(self.amount, group)))

    def shares(self, header: Sequence[str], key: Key) -> list[str]:
        """Returns a table with a row for each key, whose cells it is, between sum and number."""
        rows, whole = [("share", *header)], sum(map(self.amount, self.found))
        for group in self._groups(key):
            share = share_text(sum(map(self.amount, group)), whole)
            number = str(sum(map(self.count, group)))
            rows.append((share, self.sum(group), *key(group[0]), number))
        return columns(rows, right=(0, 1, len(header)))

    def largest(
        self, header: Sequence[str], key: Key, name: Callable[[Any], str], right: Sequence[int]
    ) -> Iterator[str]:
        """Yields a table: sum, key, name and place, with `times` where the header has it.

        Layers whose names differ in numbers alone share a row.
        """

        def alike(one: Any) -> object:
            return re.sub(r"\d+", "*", name(one)), key(one), one.in_while, one.place

        groups, rows = self._groups(alike), [tuple(header)]
        for group in groups[:_ROWS]:
            one, cells = group[0], [self.sum(group), *key(group[0])]
            times = f"{sum(each.times for each in group)}{'+' * one.in_while}"
            cells.insert(header.index("times"), times)
            called = name(one) if len(group) == 1 else re.sub(r"\d+", "*", name(one))
            called = called if len(called) <= _NAME else f"...{called[3 - _NAME :]}"
            place = f"{os.path.basename(one.place.file)}:{one.place.line}" if one.place else ""
            rows.append((*cells, called, place))
        yield from columns(rows, right=right)
        if others := sum(groups[_ROWS:], []):
            yield f"and {self.many(others)} more, {self.sum(others)}: `to_json()` has them"


def wrapped(notes: Iterable[str]) -> Iterator[str]:
    """Yields sentences as paragraphs."""
    for note in notes:
        yield from ("", *textwrap.wrap(note, _WIDTH))


def end_of(one: Any) -> str:
    """Returns the output that something found becomes, as far as it is known."""
    if not one.results:
        return "in the backward pass" if one.is_backward else ""
    return f"{'grad ' * one.is_backward}-> {one.results[0]}"
