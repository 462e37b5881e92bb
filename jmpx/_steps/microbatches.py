"""Gradients summed over the micro-batches of a batch, in float32."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmpx._base.axes import tracked_axes, vary, varying_axes
from jmpx._base.casts import at_least_float32
from jmpx._base.leaves import PyTree, is_floating, is_traceable


class Backward(NamedTuple):
    """What one forward and backward pass gives, or the passes of all micro-batches together.

    Attributes:
        value: the unscaled loss.
        aux: what the function returned besides its loss and its model state.
        state: the model state after the pass.
        grads: the scaled gradients, in float32 or wider.
    """

    value: jax.Array
    aux: PyTree
    state: PyTree
    grads: list[jax.Array]


Run = Callable[[PyTree, Sequence[jax.Array]], Backward]  # of a state and of the arrays of one part


def accumulate(
    run: Run, state: PyTree, parts: Sequence[jax.Array], params: Sequence[jax.Array]
) -> Backward:
    """Runs micro-batches one after the other, and averages their values and gradients.

    The loop holds the function once. It adds gradients in float32 and reduces nothing over devices.
    Each micro-batch starts from the model state that the one before it left.

    Args:
        run: runs one micro-batch.
        state: the model state before the first one; leaves that are no arrays do not change.
        parts: arrays of shape (micro-batches, examples in each, ...).
        params: the parameters, in whose shapes the gradients are.

    Returns:
        The mean value and the mean gradients, the state after the last micro-batch, and aux with a
        leading axis of micro-batches.
    """
    arrays, merge = split_arrays(state)
    rebuild: list[Callable[[Sequence[Any]], PyTree]] = []

    def body(carry: Any, part: Sequence[jax.Array]) -> Any:
        totals, arrays = carry
        one = run(merge(arrays), part)
        totals = [t + grad.astype(t.dtype) for t, grad in zip(totals, one.grads, strict=True)]
        aux, merge_aux = split_arrays(one.aux)
        rebuild[:] = [merge_aux]
        return (totals, split_arrays(one.state)[0]), (one.value, aux)

    totals = [_like(param) for param in params]
    first = [part[0] for part in parts]
    arrays = _settled(lambda arrays: body((totals, arrays), first)[0][1], arrays)
    axes = [varying_axes(array) for array in arrays]

    def step(carry: Any, part: Sequence[jax.Array]) -> Any:
        (totals, arrays), results = body(carry, part)
        return (totals, _vary_each(arrays, axes)), results

    (totals, arrays), (values, aux) = jax.lax.scan(step, (totals, arrays), list(parts))
    grads = [total / len(values) for total in totals]
    return Backward(values.mean(), rebuild[0](aux), merge(arrays), grads)


def _like(param: jax.Array) -> jax.Array:
    """Returns zeros to add the gradients of a parameter to, which vary over devices as it does."""
    dtype = param.dtype
    if is_floating(param):
        dtype = at_least_float32(jax.ShapeDtypeStruct((), dtype)).dtype
    return vary([jnp.zeros_like(param, dtype)], varying_axes(param))[0]


def _settled(
    advance: Callable[[list[jax.Array]], list[jax.Array]], arrays: list[jax.Array]
) -> list[jax.Array]:
    """Makes state vary along the axes along which a step makes it vary, as a loop demands.

    A step is traced for it where there is state and JAX tracks what varies, and nowhere else.
    """
    while arrays and tracked_axes():
        results = jax.make_jaxpr(advance)(arrays).out_avals
        before = [varying_axes(array) for array in arrays]
        after = [old | varying_axes(new) for old, new in zip(before, results, strict=True)]
        if before == after:
            break
        arrays = _vary_each(arrays, after)
    return arrays


def _vary_each(arrays: Sequence[jax.Array], axes: Sequence[Any]) -> list[jax.Array]:
    return [vary([array], over)[0] for array, over in zip(arrays, axes, strict=True)]


def split_arrays(tree: PyTree) -> tuple[list[jax.Array], Callable[[Sequence[Any]], PyTree]]:
    """Takes the arrays out of a pytree; returns them, and a function that puts such a list back."""
    leaves, treedef = jax.tree.flatten(tree)
    indices = [index for index, leaf in enumerate(leaves) if is_traceable(leaf)]

    def merge(arrays: Sequence[Any]) -> PyTree:
        merged = list(leaves)
        for index, array in zip(indices, arrays, strict=True):
            merged[index] = array
        return treedef.unflatten(merged)

    return [jnp.asarray(leaves[index]) for index in indices], merge
