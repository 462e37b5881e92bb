"""MPX's words (arXiv 2507.03312): `import jmpx.mpx as mpx` is all that its users change."""

from typing import TypeVar

import jax.numpy as jnp

from jmpx._casts import (
    cast_to_full as cast_to_float32,
    cast_to_full as cast_to_full_precision,
    cast_to_half as cast_to_half_precision,
    cast_tree as cast_tree,
)
from jmpx._function_casts import (
    cast_function as cast_function,
    force_full_precision as force_full_precision,
)
from jmpx._loss_scale import DynamicLossScaling as DynamicLossScaling
from jmpx._mpx import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
)
from jmpx._optimizer import optimizer_update as optimizer_update
from jmpx._tree import all_finite as all_finite, select_tree as select_tree

T = TypeVar("T")

__all__ = (
    "DynamicLossScaling",
    "all_finite",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "optimizer_update",
    "select_tree",
)


def cast_to_float16(tree: T) -> T:
    """Casts the floating leaves of a pytree to float16; values above 65504 become inf."""
    return cast_tree(tree, jnp.float16)


def cast_to_bfloat16(tree: T) -> T:
    """Casts the floating leaves of a pytree to bfloat16."""
    return cast_tree(tree, jnp.bfloat16)
