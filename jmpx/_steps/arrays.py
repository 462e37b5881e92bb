"""The arrays of a call: taken out of pytrees, because JAX's transformations take nothing else."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jmpx._base.dtypes import DTypeLike, as_dtype, check_enabled, dtype_name
from jmpx._base.leaves import PyTree, is_array, is_floating, is_inexact_array, is_traceable, spell

Merge: TypeAlias = Callable[..., PyTree]


def split_arrays(
    tree: PyTree,
    is_wanted: Callable[[object], bool] = is_traceable,
    is_leaf: Callable[[object], bool] | None = None,
) -> tuple[list[jax.Array], Merge]:
    """Takes the arrays out of a pytree; returns them, and a function that puts such a list back.

    The other leaves are then those of the tree, or for `others=None` None.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    indices = [index for index, leaf in enumerate(leaves) if is_wanted(leaf)]

    def merge(arrays: Sequence[object], others: Sequence[object] | None = leaves) -> PyTree:
        merged: list[object] = [None] * len(leaves) if others is None else list(others)
        for index, array in zip(indices, arrays, strict=True):
            merged[index] = array
        return treedef.unflatten(merged)

    # JAX arrays have the dtype of their gradient. NumPy's float64 becomes float32 without x64.
    return [jnp.asarray(leaves[index]) for index in indices], merge


def split_parameters(args: Sequence[PyTree]) -> tuple[list[jax.Array], Merge]:
    """Takes the differentiable arrays out of the first argument of a call."""
    if not args:
        raise TypeError(
            "Expected the parameters to differentiate as the first positional argument, got none: "
            "pass them by position."
        )
    found = split_arrays(args[0], is_inexact_array)
    if not found[0]:
        first = args[0]
        got = (
            spell(first) if is_array(first) or not jax.tree.leaves(first) else type(first).__name__
        )
        raise TypeError(
            "Expected floating or complex arrays to differentiate in the first positional "
            f"argument, got {got} without any: pass the parameters first."
        )
    return found


def paths_of(tree: PyTree) -> list[str]:
    """Returns the paths of the differentiable arrays of a pytree, for error messages."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        jax.tree_util.keystr(path) or "array" for path, leaf in leaves if is_inexact_array(leaf)
    ]


def as_grad_dtype(dtype: DTypeLike | None) -> DTypeLike | None:
    """Returns the option `grad_dtype` as a dtype; None stands for that of each parameter."""
    if dtype is None:
        return None
    dtype = as_dtype(dtype, " in grad_dtype")
    if jnp.dtype(dtype).itemsize < 2:
        raise ValueError(
            f"Cannot return gradients in {dtype_name(dtype)}, as grad_dtype says, where most "
            "are 0 or NaN: write grad_dtype=jnp.float32 or grad_dtype=jnp.bfloat16."
        )
    return dtype


def widened(params: list[jax.Array], dtype: DTypeLike | None) -> list[jax.Array]:
    """Returns parameters in a dtype in which their gradients are not rounded below `dtype`."""
    # A gradient has the dtype of its parameter, so that parameters are widened, which rounds
    # nothing, before the policy casts them.
    if dtype is None:
        return params
    check_enabled(dtype)
    wanted = jnp.dtype(dtype)
    wide = max(wanted, jnp.dtype(jnp.float32), key=lambda each: each.itemsize)

    def is_narrow(param: jax.Array) -> bool:
        return param.dtype != wanted and param.dtype.itemsize <= wanted.itemsize

    return [p.astype(wide) if is_floating(p) and is_narrow(p) else p for p in params]


def cast_gradients(
    grads: Sequence[jax.Array], params: Sequence[jax.Array], dtype: DTypeLike | None
) -> list[jax.Array]:
    """Returns gradients in `dtype`; complex ones, and all for None, in their parameters' dtypes."""
    if dtype is not None:
        check_enabled(dtype)
    return [
        grad.astype(param.dtype if dtype is None or not is_floating(param) else dtype)
        for grad, param in zip(grads, params, strict=True)
    ]
