"""What a policy costs over a program that is cast by hand, by the compiler of an H100."""

import jax
import numpy as np
import over_by_hand
import pytest
from helpers.compilers import MISSING
from models import Zeros

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
needs_compiler = pytest.mark.skipif(MISSING["h100"] != "", reason=MISSING["h100"])


def test_the_resnet_50_has_its_size():
    _, resnet, _ = over_by_hand.ARCHITECTURES["ResNet-50"]
    params = jax.eval_shape(lambda: resnet.init(Zeros(np.random.PCG64())))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 25_557_032


@pytest.mark.slow  # a compiler of its own
@needs_compiler
def test_norms_of_a_convnet_cost_what_they_cost_by_hand():
    ways = "by hand", "c=bf16"
    by_hand, ours = (over_by_hand.measure("H100", "ResNet-50", way, small=True) for way in ways)
    assert ours["peak_mib"] <= 1.01 * by_hand["peak_mib"]
    assert ours["estimate_ms"] <= 1.05 * by_hand["estimate_ms"]
    assert ours["products"] == by_hand["products"]
