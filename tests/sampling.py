"""The marker `sampled(k)`: the default run has each k-th case of a test, CI has all of them."""

import pytest


def pytest_itemcollected(item):
    """Marks the other cases as `thorough`, which the options in pyproject.toml leave out."""
    mark = item.get_closest_marker("sampled")
    if mark and diagonal(item) % mark.args[0]:
        item.add_marker(pytest.mark.thorough)


def diagonal(item):
    """Returns the sum of the positions that the values of a case have in their tables.

    Of two tables, the cases of equal sums are a diagonal of the product: the sample holds each
    value of a table, if the other one has `k` values or more.
    """
    if not hasattr(item, "callspec"):
        return 0
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    rows = [n.replace(" ", "").split(",") if isinstance(n, str) else n for n in names]
    same_table = {name for row in rows for name in row[1:]}
    return sum(i for name, i in item.callspec.indices.items() if name not in same_table)
