"""The tables that `python -m jmpx --model` prints, as data."""

import warnings
from typing import NamedTuple

from jmpx._policies.maps import PolicyMap

OUTERMOST = "(outermost)"  # what has no path


class Row(NamedTuple):
    """A module, a scope or an operation.

    Args:
        labels: its path, its class, its rule and the like.
        fields: what holds in it: names of dtypes and of the algorithm of products, by the keys of
            policy strings.
    """

    labels: tuple[str, ...]
    fields: dict[str, str]


class Table(NamedTuple):
    """Rows for `python -m jmpx` to print.

    Args:
        title: a line above the rows.
        header: the names of the labels.
        rows: the rows.
    """

    title: str
    header: tuple[str, ...]
    rows: list[Row]


class Report(NamedTuple):
    """What `python -m jmpx --model` prints.

    Args:
        tables: the rows.
        notes: sentences about rules that are in force nowhere, and what else there is to know.
    """

    tables: list[Table]
    notes: list[str]


def texts_of(caught: list[warnings.WarningMessage], policy_map: PolicyMap) -> list[str]:
    """Returns the messages of a user's warnings, each once, those about rules without the map."""
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    of_map = f" of policy map {str(policy_map)!r}"
    return list(dict.fromkeys(text.replace(of_map, "", 1) for text in texts))
