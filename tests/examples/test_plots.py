"""The plots of `examples/equinox/history.py`."""

import struct

import pytest
from helpers.examples import example


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scales", "skipped", "panels"),
    [
        ([1.0, 1.0, 1.0], [], 2),
        ([4.0, 2.0, 2.0], [0], 3),
        ([2.0, 2.0, 4.0], [], 3),
        ([8.0, 8.0, 8.0], [1], 3),  # a static scale
    ],
)
def test_the_loss_scale_is_drawn_if_it_changed_or_skipped_steps(scales, skipped, panels, tmp_path):
    script = example("equinox/history.py")
    history = script.History()
    history.losses, history.accuracies = [3.0, 2.0, 1.0], [0.5]
    history.scales, history.skipped = scales, skipped
    script.draw(history, "title", str(tmp_path / "plot.png"))
    _, height = struct.unpack(">II", (tmp_path / "plot.png").read_bytes()[16:24])
    assert height == 120 * (1 + 2 * panels)
