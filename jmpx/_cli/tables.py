"""The tables that `python -m jmpx explain` prints."""

from collections.abc import Sequence
from typing import NamedTuple

from jmpx._base.text import columns
from jmpx._policies.policy import ATTRIBUTES


class Row(NamedTuple):
    """A rule, a module, a scope or an operation.

    Args:
        labels: its path, its class, its rule and the like.
        fields: what holds in it: names of dtypes and of the algorithm of products, by the keys of
            policy strings.
    """

    labels: tuple[str, ...]
    fields: dict[str, str]


def table(header: tuple[str, ...], rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table; a column that is empty in all rows is left out.

    Args:
        header: the names of the labels.
        rows: the rows.
    """
    names = (*header, *ATTRIBUTES)
    cells = [(*labels, *(fields.get(key, "") for key in ATTRIBUTES)) for labels, fields in rows]
    shown = [i for i in range(len(names)) if any(row[i] for row in cells)]
    return columns([[row[i] for i in shown] for row in (names, *cells)])
