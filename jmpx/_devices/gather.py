"""Means over devices, and gathers of shards."""

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.axes import axis_names, check_axis, is_tracked, vary, varying_axes
from jmpx._base.contexts import note_cast
from jmpx._base.dtypes import DTypeLike, check_enabled
from jmpx._base.messages import describe
from jmpx._base.stateful import is_kept, skip_kept
from jmpx._base.trees import (
    ArrayLeaf,
    AxisName,
    PyTree,
    at_least_float32,
    is_floating,
    is_int,
    is_traceable,
    spell,
)
from jmpx._devices.shards import for_each_leaf
from jmpx._policies.policy import Policy
from jmpx._policies.strings import PolicyLike, get_policy
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

    `shards` has, for each gradient, the axes over which its parameter is a shard. In a reduce
    dtype, the scaled gradients are summed: the loss scale protects that sum, too, and an overflow
    in it reaches all devices, which skip the step together.
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

    The division comes before a sum in float16, which may overflow where the mean does not, and
    after all others, in float32 or wider, where it rounds at most once.
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


# Gathers of shards in 16 bits, whose gradients are summed in more.


T = TypeVar("T")
Pair: TypeAlias = tuple[jax.Array, jax.Array]


def gather(tree: T, axis_name: AxisName, policy: PolicyLike, *, axis: PyTree = 0) -> T:
    """Gathers sharded parameters in the compute dtype, and sums their gradients in the reduce one.

    Each device stores a part of every parameter and computes with the whole, as ZeRO-3 and FSDP do.
    Forward, a floating leaf is cast to the policy's compute dtype and then gathered. Backward, its
    gradient goes to the policy's reduce dtype, is summed over the devices and scattered, and comes
    back in the dtype in which the leaf is stored.

    As the backward pass of `jax.lax.all_gather`, this one sums: the gradient of a mean over devices
    is that sum divided by their number, which the gradient functions do. In float16, the gradients
    are divided before the sum and multiplied after it.

    Args:
        tree: any pytree, whose arrays are this device's parts. Floating leaves are cast; other
            arrays are gathered as they are. Python scalars, PRNG keys and what JAX cannot hold pass
            untouched, and so does state of NNX: each variable that is not an `nnx.Param`.
        axis_name: the name (or names) of the mapped axis.
        policy: whatever `get_policy` takes. Without `reduce`, gradients are summed in float32 or in
            the wider dtype of their leaf.
        axis: the axis of its shape along which a leaf is split: an int or None, or a pytree prefix
            of them. None is for leaves that each device has whole: they are only cast.

    Returns:
        The same tree, whose leaves are as many times as long along `axis` as there are devices,
        with the floating ones in the compute dtype.

    Raises:
        ValueError: if `axis_name` is not a mapped axis, `policy` has rules, `axis` is not a prefix
            of the tree, or a leaf has no such axis or is equal on all devices.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> shards = jnp.arange(8.0).reshape(4, 2)  # of a parameter of shape (8,), for 4 devices
        >>> def loss(w):
        ...     whole = jmpx.distributed.gather(w, "data", "c=bf16")
        ...     print(whole.shape, whole.dtype)
        ...     return whole.astype(jnp.float32).sum()
        >>> grads = jax.vmap(jax.grad(loss), axis_name="data")(shards)
        (8,) bfloat16
        >>> grads.shape, grads.dtype.name, float(grads[0, 0])
        ((4, 2), 'float32', 4.0)
    """
    chosen = get_policy(policy)
    check_axis(axis_name)
    names = axis_names(axis_name)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_kept)
    axes = _axes_of(axis, tree)
    casts = jax.tree.leaves(skip_kept(chosen.cast_to_compute)(tree), is_leaf=is_kept)
    if any(is_floating(leaf) for _, leaf in leaves):
        note_cast("jmpx.distributed.gather")
    gathered = [
        _gather_leaf(f"tree{jax.tree_util.keystr(path)}", leaf, cast, names, split, chosen)
        for (path, leaf), cast, split in zip(leaves, casts, axes, strict=True)
    ]
    return treedef.unflatten(gathered)


def _axes_of(axis: PyTree, tree: PyTree) -> list[int | None]:
    """Returns the axis of each leaf of a tree, from a prefix of it."""
    with contextlib.suppress(ValueError):
        if all(map(is_int, jax.tree.leaves(axis))):
            return for_each_leaf(axis, tree, lambda leaf: True, is_kept)
    raise ValueError(
        "Expected axis to be a prefix of the tree that is gathered, of ints and None, got "
        f"{describe(axis)}: write one int or None for all leaves, or a tree with one for each "
        "branch, such as {'w': 0, 'b': None}."
    )


def _gather_leaf(
    name: str, leaf: Any, cast: Any, names: tuple[Hashable, ...], axis: int | None, policy: Policy
) -> Any:
    """Gathers one leaf: `leaf` as it is stored, `cast` as the policy casts it."""
    if not is_traceable(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    equal_along = [a for a in names if is_tracked(a) and a not in varying_axes(leaf)]
    if axis is None and not (equal_along and is_floating(leaf)):
        return cast
    if axis is not None:
        _check_shard(name, leaf, axis, equal_along)
        axis = int(axis) % leaf.ndim
    if not is_floating(leaf):
        return _spread(jnp.asarray(cast), names, axis)
    reduce_dtype = policy.reduce_dtype
    if reduce_dtype is None:
        reduce_dtype = jnp.float32 if leaf.dtype.itemsize < 4 else leaf.dtype
    check_enabled(reduce_dtype)
    over = tuple(equal_along) if axis is None else names
    arrays = jnp.asarray(leaf), jnp.asarray(cast)
    return _with_wide_sum(*arrays, over, axis, jnp.dtype(reduce_dtype))


def _check_shard(name: str, leaf: ArrayLeaf, axis: int, equal_along: list[Hashable]) -> None:
    reason = f"JAX knows it to be equal over {equal_along}" if equal_along else ""
    if not -leaf.ndim <= axis < leaf.ndim:
        reason = f"it has no axis {axis}"
    if reason:
        raise ValueError(
            f"Cannot gather {name}, {spell(leaf)}, because {reason}: pass its parts, by in_specs "
            "of jax.shard_map, with the axis along which it is split, or None in axis= if each "
            "device has all of it, as axis={'w': 0, 'b': None}."
        )


def _spread(array: jax.Array, names: tuple[Hashable, ...], axis: int | None) -> jax.Array:
    """Gathers an array; a whole one is made to vary, so that JAX sums its gradient here."""
    if axis is None:
        return vary([array], names)[0]
    return jax.lax.all_gather(array, names, axis=axis, tiled=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _with_wide_sum(
    leaf: jax.Array,
    cast: jax.Array,
    names: tuple[Hashable, ...],
    axis: int | None,
    reduce_dtype: np.dtype,
) -> jax.Array:
    """Returns the cast leaf, gathered, with the derivative of the stored leaf.

    The tangent is gathered in the reduce dtype, then cast. JAX transposes this: the backward pass
    casts the gradient first, then sums and scatters it in the reduce dtype.
    """
    return _spread(cast, names, axis)


@_with_wide_sum.defjvp
def _wide_sum(
    names: tuple[Hashable, ...], axis: int | None, dtype: np.dtype, primals: Pair, tangents: Pair
) -> Pair:
    (leaf, cast), (tangent, _) = primals, tangents
    if dtype == jnp.float16:
        # The transpose runs this backwards: divide in float32, sum, multiply in float32.
        size = jax.lax.axis_size(names)
        narrow = (at_least_float32(tangent) * size).astype(dtype)
        total = at_least_float32(_spread(narrow, names, axis)) / size
    else:
        total = _spread(tangent.astype(dtype), names, axis)
    return _with_wide_sum(leaf, cast, names, axis, dtype), total.astype(cast.dtype)
