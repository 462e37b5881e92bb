"""Collectives as text: how many bytes each kind sends, and the largest arrays."""

from collections.abc import Iterator, Sequence

from jmpx._inspect.collectives.data import Collective
from jmpx._inspect.hlo.tables import Tables, end_of, wrapped
from jmpx._inspect.text import bytes_text


def lines(title: str, found: Sequence[Collective], notes: Sequence[str]) -> Iterator[str]:
    """Yields the lines of a report: a title, tables of collectives, and sentences."""
    arrays = [one for one in found if not one.is_scalar]
    scalars = [one for one in found if one.is_scalar]
    tables = Tables(arrays, lambda one: one.sent, bytes_text, lambda one: 1, "collective")
    sent = f"a device sends {tables.sum(found)} a step" if found else "no collectives"
    yield f"{title}: {sent}"
    if arrays:
        header = "sent", "kind", "dtype", "array", "times", "group", "carries", "place"
        yield from ("", *tables.shares((*header[:3], "arrays"), lambda one: one[:2]))
        yield from ("", *tables.largest(header, _cells, _carried, right=(0, 3, 4, 5)))
    if scalars:
        count = tables.many(scalars)
        yield ""
        yield f"{count} of single numbers, such as a loss or a flag: {tables.sum(scalars)}"
    yield from wrapped(notes)


def _cells(one: Collective) -> Sequence[str]:
    return one.kind, one.dtype, bytes_text(one.bytes), str(one.group)


def _carried(one: Collective) -> str:
    """Returns the array that a collective carries, as far as it is known."""
    return one.parameter or end_of(one)
