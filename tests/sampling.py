"""The marker `sampled(k)`: the default run has each k-th case of a test, CI has all of them.

The sample of a test of two tables has each value of both if `k` is not longer than either of them,
and shares no divisor with their lengths.
"""

import collections

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the other cases as `thorough`, which the options in pyproject.toml leave out."""
    cases = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker(pytest.mark.thorough)
            cases[test] += 1
