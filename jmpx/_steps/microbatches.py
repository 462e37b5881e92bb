"""Gradients summed over the micro-batches of a batch, in float32."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jmpx._base.axes import tracked_axes, vary, varying_axes
from jmpx._base.casts import at_least_float32
from jmpx._base.leaves import PyTree, is_floating
from jmpx._steps.arrays import Merge, split_arrays


class Backward(NamedTuple):
    """The result of a forward and a backward pass, or of those of all micro-batches together."""

    value: jax.Array  # the unscaled loss
    aux: PyTree  # what the function returned besides its loss and its model state
    state: PyTree  # the model state after the pass
    grads: list[jax.Array]  # the scaled gradients, in float32 or wider


BackwardT: TypeAlias = Callable[..., Backward]
Carry: TypeAlias = tuple[list[jax.Array], list[jax.Array]]  # sums of gradients, and state


def of_arrays(run: BackwardT) -> tuple[BackwardT, Callable[[Backward], Backward]]:
    """Returns a function whose aux and state are arrays alone, and what puts the rest back in."""
    merges: list[Merge] = []

    def run_on_arrays(*args: PyTree) -> Backward:
        result = run(*args)
        (aux, merge_aux), (state, merge_state) = map(split_arrays, (result.aux, result.state))
        merges[:] = [merge_aux, merge_state]
        return result._replace(aux=aux, state=state)

    def put_back(result: Backward) -> Backward:
        merge_aux, merge_state = merges
        return result._replace(aux=merge_aux(result.aux), state=merge_state(result.state))

    return run_on_arrays, put_back


def accumulate(
    run: Callable[[PyTree, Sequence[jax.Array]], Backward],
    state: PyTree,
    parts: Sequence[jax.Array],
    params: Sequence[jax.Array],
) -> Backward:
    """Runs micro-batches one after the other; returns means, the last state, and all aux.

    Gradients are added in float32, in the shapes of `params`, and reduced over no devices. Each
    part starts from the state that the one before it left, of which only arrays change.
    """
    arrays, merge = split_arrays(state)
    run, put_back = of_arrays(run)

    def body(carry: Carry, part: Sequence[jax.Array]) -> tuple[Carry, tuple[jax.Array, PyTree]]:
        totals, arrays = carry
        one = run(merge(arrays), part)
        totals = [t + grad.astype(t.dtype) for t, grad in zip(totals, one.grads, strict=True)]
        return (totals, one.state), (one.value, one.aux)

    totals = [_like(param) for param in params]
    first = [part[0] for part in parts]
    arrays = _settled(lambda arrays: body((totals, arrays), first)[0][1], arrays)
    axes = [varying_axes(array) for array in arrays]

    def step(carry: Carry, part: Sequence[jax.Array]) -> tuple[Carry, tuple[jax.Array, PyTree]]:
        (totals, arrays), results = body(carry, part)
        return (totals, _vary_each(arrays, axes)), results

    (totals, arrays), (values, aux) = jax.lax.scan(step, (totals, arrays), list(parts))
    grads = [total / len(values) for total in totals]
    return put_back(Backward(values.mean(), aux, arrays, grads))._replace(state=merge(arrays))


def _like(param: jax.Array) -> jax.Array:
    """Returns zeros to add the gradients of a parameter to, which vary over devices as it does."""
    dtype = param.dtype
    if is_floating(param):
        dtype = at_least_float32(jax.ShapeDtypeStruct((), dtype)).dtype
    return vary([jnp.zeros_like(param, dtype)], varying_axes(param))[0]


def _settled(
    advance: Callable[[list[jax.Array]], list[jax.Array]], arrays: list[jax.Array]
) -> list[jax.Array]:
    """Makes state vary along the axes along which a step makes it vary, as a loop demands."""
    while arrays and tracked_axes():
        results = jax.make_jaxpr(advance)(arrays).out_avals
        before = [varying_axes(array) for array in arrays]
        after = [old | varying_axes(new) for old, new in zip(before, results, strict=True)]
        if before == after:
            break
        arrays = _vary_each(arrays, after)
    return arrays


def _vary_each(arrays: Sequence[jax.Array], axes: Sequence[frozenset[Hashable]]) -> list[jax.Array]:
    return [vary([array], over)[0] for array, over in zip(arrays, axes, strict=True)]
