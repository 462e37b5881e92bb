"""The benchmark of what grows: every way runs at the smallest size; nothing is timed."""

import growth
import pytest

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program


@pytest.mark.thorough
@pytest.mark.parametrize("axis", growth.AXES)
def test_every_way_is_measured(axis):
    found = growth.measure(axis, 96, small=True)
    assert len(found) >= 3 and all(line["ms"] > 0 for line in found)
    assert len({line["way"] for line in found}) == len(found)


def test_a_slope_is_that_of_the_three_largest_sizes():
    found = [{"axis": "a", "way": "b", "size": n, "ms": 3.0 * n**2} for n in (8, 4, 2)]
    found += [{"axis": "a", "way": "b", "size": 1, "ms": 100.0}]
    assert growth.slope(growth.line(found, "a", "b")) == pytest.approx(2)
