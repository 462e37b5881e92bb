"""The loss scale of a step: what it is, and the same step with a smaller one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmpx._inspect.first_nonfinite.search import silent
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation
from jmpx._jaxprs.watched import Site
from jmpx._scales.dynamic import DynamicLossScale


class Scale(NamedTuple):
    """The loss scale of a step.

    Attributes:
        number: the scale.
        floor: the smallest one that it can be.
        indices: which inputs of the program hold it; none if it is part of the program.
    """

    number: float
    floor: float
    indices: tuple[int, ...]

    def put(self, arrays: Sequence[Any], number: float) -> list[Any]:
        """Returns the inputs of the program with another scale."""
        return [
            np.asarray(number, array.dtype) if i in self.indices else array
            for i, array in enumerate(arrays)
        ]


def scale_of(tree: Any, arrays: Sequence[Any], sites: Sequence[Site]) -> Scale | None:
    """Returns the loss scale of a step; None if it has none, or several that differ.

    Args:
        tree: the arguments of the step.
        arrays: the arrays among them.
        sites: the equations of the step.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, DynamicLossScale))
    found = [leaf for leaf in leaves if isinstance(leaf, DynamicLossScale)]
    if found and np.ndim(found[0].loss_scale) == 0:
        ids = {id(scale.loss_scale) for scale in found}
        indices = tuple(i for i, array in enumerate(arrays) if id(array) in ids)
        numbers = {float(scale.loss_scale) for scale in found}
        floor = max(scale.min_loss_scale for scale in found)
        return Scale(numbers.pop(), floor, indices) if len(numbers) == 1 and indices else None
    factors = {_factor(site.equation) for site in sites} - {None}
    numbers = {number for number in factors if number is not None and number > 1}
    return Scale(numbers.pop(), 1.0, ()) if len(numbers) == 1 else None


def run_unscaled(eqn: Equation, operands: list[Any]) -> list[Any]:
    """Runs an equation; one that multiplies by a loss scale above 1 does not multiply."""
    factor = _factor(eqn)
    return operands[:1] if factor is not None and factor > 1 else silent(eqn, operands)


def _factor(eqn: Equation) -> float | None:
    """Returns the constant by which `LossScale.scale` and `unscale` multiply in an equation."""
    is_constant = is_scaling(eqn) and core.is_literal(eqn.invars[1])
    return float(eqn.invars[1].val) if is_constant else None


def is_scaling(eqn: Equation) -> bool:
    """Whether an equation is a product of `LossScale.scale` or `unscale`."""
    traceback = eqn.source_info.traceback
    if eqn.primitive.name != "mul" or traceback is None:
        return False
    return any(frame.function_name.endswith("multiply_leaf") for frame in traceback.frames)
