"""The dynamic loss scale among the arguments of a step, and the arguments with a smaller one."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jmpx._base.leaves import PyTree
from jmpx._jaxprs.types import Array
from jmpx._scales.dynamic import DynamicLossScale


class Scale(NamedTuple):
    """The loss scale of a step."""

    number: float  # the scale
    floor: float  # the smallest one that it can be
    indices: tuple[int, ...]  # the inputs of the program that hold it

    def put(self, arrays: Sequence[Array], number: float) -> list[Array]:
        """Returns the inputs of the program with another scale."""
        return [
            np.asarray(number, array.dtype) if i in self.indices else array
            for i, array in enumerate(arrays)
        ]


def scale_of(tree: PyTree, arrays: Sequence[Array]) -> Scale | None:
    """Returns the loss scale among the arguments of a step; None without one that is unique.

    Args:
        tree: the arguments.
        arrays: the arrays among them, the inputs of the program.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, DynamicLossScale))
    found = [
        leaf
        for leaf in leaves
        if isinstance(leaf, DynamicLossScale) and np.ndim(leaf.loss_scale) == 0
    ]
    ids = {id(scale.loss_scale) for scale in found}
    indices = tuple(i for i, array in enumerate(arrays) if id(array) in ids)
    numbers = {float(scale.loss_scale) for scale in found}
    if len(numbers) != 1 or not indices:
        return None
    return Scale(numbers.pop(), max(scale.min_loss_scale for scale in found), indices)
