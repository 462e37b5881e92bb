"""What all wrappers of optax optimizers share: which they take, in which dtype these compute."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jmpx._base.casts import at_least_float32
from jmpx._base.leaves import PyTree, is_floating
from jmpx._base.messages import describe
from jmpx._base.nnx_objects import is_object

if TYPE_CHECKING:
    import optax


def is_optimizer(optimizer: object) -> bool:
    """Whether `optimizer` has the two functions of an optax gradient transformation."""
    return hasattr(optimizer, "init") and hasattr(optimizer, "update")


def name_of(value: object) -> str:
    """Returns a value as errors name it; an object of NNX, whose text is long, by its type."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__name__}" if is_object(value) else describe(value)


def in_place_of_optimizer(value: object, otherwise: str) -> str:
    """Returns the remedy for a wrong optimizer: an `nnx.Optimizer` holds the right one."""
    if not (is_object(value) and hasattr(value, "tx")):
        return otherwise
    return "wrap the optax optimizer that it is made of, and make the nnx.Optimizer of the result"


def with_extra_args(optimizer: PyTree) -> "optax.GradientTransformationExtraArgs":
    """Returns an optax optimizer, or an `optax.MultiSteps`, as one that takes extra arguments."""
    import optax

    if not is_optimizer(optimizer):
        raise TypeError(
            f"Expected an optax gradient transformation, got {name_of(optimizer)}: "
            f"{in_place_of_optimizer(optimizer, 'pass for example optax.adam(1e-3)')}."
        )
    if isinstance(optimizer, optax.MultiSteps):  # It takes extra arguments, and does not say so.
        multi_steps: PyTree = optimizer
        optimizer = optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update)
    return optax.with_extra_args_support(optimizer)


def widen(tree: PyTree) -> PyTree:
    """Returns a tree with its leaves of 8 and 16 bits in float32, which is exact."""
    return jax.tree.map(lambda x: at_least_float32(x) if is_floating(x) else x, tree)


def apply_update(update: PyTree, leaf: PyTree) -> PyTree:
    """Returns a parameter plus its update, in the dtype of the parameter."""
    if update is None:
        return leaf
    leaf = jnp.asarray(leaf)
    with jax.numpy_dtype_promotion("standard"):  # The update of a bfloat16 leaf may be float32.
        return jnp.asarray(leaf + update, leaf.dtype)


def step_key(seed: int, stream: int, count: jax.Array) -> jax.Array:
    """Returns the key of a step; `stream` tells apart what is rounded in the same one."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), count)
