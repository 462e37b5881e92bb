"""The mean of a loss and of its gradients over devices, in the dtype that a policy sets."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from jmpx._base.axes import axis_names
from jmpx._base.casts import at_least_float32
from jmpx._base.dtypes import DTypeLike, check_enabled
from jmpx._base.leaves import is_floating
from jmpx._base.trees import AxisName
from jmpx._scales.kinds import LossScale


def unscaled_mean(
    value: jax.Array,
    grads: list[jax.Array],
    scale: LossScale,
    axis_name: AxisName | None,
    reduce_dtype: DTypeLike | None,
    shards: Sequence[frozenset[Hashable]],
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns a loss and its gradients, averaged over an axis, the gradients unscaled.

    `shards` has, for each gradient, the axes over which its parameter is a shard. In a dtype that
    a policy sets, the scaled gradients are summed: there the loss scale protects the sum, too, and
    an overflow in it reaches all devices, which skip the step together.
    """
    if axis_name is None:
        return value, scale.unscale(grads)
    names = axis_names(axis_name)
    if reduce_dtype is None:
        grads = scale.unscale(grads)
    else:
        check_enabled(reduce_dtype)
    sizes = [math.prod(jax.lax.axis_size(name) for name in split) for split in shards]
    grads = [grad / size if size > 1 else grad for grad, size in zip(grads, sizes, strict=True)]
    together = defaultdict(list)  # the indices of the gradients that are summed over the same axes
    for index, split in enumerate(shards):
        together[tuple(name for name in names if name not in split)].append(index)
    means: dict[int, jax.Array] = {}
    for over, indices in together.items():
        chosen = [grads[index] for index in indices]
        if over:
            chosen = _mean_in(reduce_dtype, chosen, over)
        means.update(zip(indices, chosen, strict=True))
    grads = [means[index] for index in range(len(grads))]
    value = jax.lax.pmean(value, names)
    return value, grads if reduce_dtype is None else scale.unscale(grads)


def _mean_in(
    dtype: DTypeLike | None, arrays: Sequence[jax.Array], axis_name: AxisName
) -> list[jax.Array]:
    """Averages arrays whose floating ones are summed in a dtype; complex ones keep their own.

    A sum over many devices may overflow float16 though the mean does not: the division goes before
    a sum in float16, and after all others, in float32 or wider, where it rounds at most once.
    """
    if dtype is None:
        return jax.lax.pmean(list(arrays), axis_name)
    size = jax.lax.psum(1, axis_name)
    divides_first = jnp.dtype(dtype) == jnp.float16

    def narrow(array: jax.Array) -> jax.Array:
        if not is_floating(array):
            return array
        return (array / size if divides_first else array).astype(dtype)

    def widen(total: jax.Array, array: jax.Array) -> jax.Array:
        if not is_floating(array):
            return total / size
        total = at_least_float32(total)
        return (total if divides_first else total / size).astype(array.dtype)

    totals = jax.lax.psum([narrow(array) for array in arrays], axis_name)
    return [widen(total, array) for total, array in zip(totals, arrays, strict=True)]
