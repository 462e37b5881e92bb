"""The arrays of a call: parameters, gradients, and the micro-batches of `jmpx.Batch`."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmpx._base.axes import tracked_axes, vary, varying_axes
from jmpx._base.dtypes import DTypeLike, as_dtype, check_enabled, dtype_name
from jmpx._base.stateful import is_whole
from jmpx._base.trees import (
    PyTree,
    at_least_float32,
    is_array,
    is_floating,
    is_inexact_array,
    is_int,
    is_traceable,
    spell,
)
from jmpx._steps.checks import check_whole

Merge: TypeAlias = Callable[..., PyTree]


def split_arrays(
    tree: PyTree,
    is_wanted: Callable[[object], bool] = is_traceable,
    is_leaf: Callable[[object], bool] | None = None,
) -> tuple[list[jax.Array], Merge]:
    """Takes the arrays out of a pytree; returns them, and a function that puts such a list back.

    Other leaves are as in the tree, or None with `others=None`.
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
        first, name = args[0], type(args[0]).__name__
        got = spell(first) if is_array(first) or not jax.tree.leaves(first) else name
        raise TypeError(
            "Expected floating or complex arrays to differentiate in the first positional "
            f"argument, got {got} without any: pass the parameters first."
        )
    return found


def paths_of(tree: PyTree) -> list[str]:
    """Returns the paths of the differentiable arrays of a pytree, for error messages."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [path for path, leaf in leaves if is_inexact_array(leaf)]
    return [jax.tree_util.keystr(path) or "array" for path in paths]


def as_grad_dtype(dtype: DTypeLike | None) -> DTypeLike | None:
    """Returns the option `grad_dtype` as a dtype; None stands for the dtype of each parameter."""
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
    # A gradient has the dtype of its parameter. Widening rounds nothing, and the policy casts
    # after.
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


# The batch of a gradient function: which arguments hold examples, and how they are split.


_REMEDY = (
    "name the arguments that hold examples by argnums of jmpx.Batch, and others, such as PRNG "
    "keys, go whole"
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """How a gradient function splits the batch into micro-batches.

    The values and gradients of the parts are averaged, so that the loss has to be a mean over
    examples that count alike. jmpx cannot see that a loss compares examples, or divides by their
    weights, and is another one in parts.

    Micro-batches run one after the other, so that the memory of activations is that of one part.
    Each takes every `microbatches`-th example, so that a batch that `jax.jit` splits over devices
    stays split as it is. Their gradients are summed in float32, and there is one loss scale, one
    check, and with `over` one mean over devices. The model state goes from one part to the next.
    Aux gets a leading axis of micro-batches: `aux.swapaxes(0, 1).reshape(n, ...)` has `n` examples
    in the order of the batch.

    Args:
        argnums: the positions of the arguments whose arrays are split along their first axis; by
            default all but the first and that of `state_argnum`. Others go whole into each part, as
            keyword arguments do, and by default PRNG keys of shape (). Without it, an array in a
            keyword argument is refused, unless its shape is ().
        microbatches: how many parts of one size a batch is split into.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has no such value.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> batch = jmpx.Batch(microbatches=4)
        >>> grad_fn = jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy="bf16", batch=batch)
        >>> grad_fn(jnp.ones(3), jnp.ones((8, 3))).grads  # each part has seen two examples
        Array([6., 6., 6.], dtype=float32)
    """

    __module__ = "jmpx"

    _: dataclasses.KW_ONLY
    argnums: int | Sequence[int] | None = None
    microbatches: int = 1

    def __post_init__(self) -> None:
        numbers_of(self.argnums)
        check_whole(self.microbatches, "microbatches", "1 does not split a batch")


def numbers_of(
    argnums: int | Sequence[int] | None, state_argnum: int | None = None
) -> tuple[int, ...] | None:
    """Returns the positions that the user gave; None means all but the first."""
    if argnums is None:
        return None
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    if not numbers:
        raise ValueError(
            "Expected argnums of jmpx.Batch to name an argument, got (): give the positions of the "
            "arguments that hold examples, or leave it out for all but the first."
        )
    for number in numbers:
        if not is_int(number):
            raise TypeError(
                f"Expected argnums of jmpx.Batch to be an int or several, got {argnums!r}: say "
                "which arguments hold a batch of examples."
            )
        if number in (0, state_argnum):
            raise ValueError(
                f"Cannot split argument {number}, as argnums={argnums!r} of jmpx.Batch says, "
                f"because it holds the {'model state' if number else 'parameters'}: give the "
                "positions of the arguments that hold examples."
            )
    return numbers


def split_batch(
    batch: Batch,
    state_argnum: int | None,
    args: Sequence[PyTree],
    keywords: Mapping[str, PyTree],
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], tuple[PyTree, ...]]]:
    """Splits a batch into micro-batches of one size.

    Returns:
        Arrays of shape (micro-batches, examples in each, ...), and a function that puts the arrays
        of one micro-batch back among the arguments.
    """
    numbers = numbers_of(batch.argnums, state_argnum)
    positions = positions_of(batch, state_argnum, len(args))

    def holds_examples(leaf: object) -> bool:
        if numbers is not None or not is_traceable(leaf):
            return is_traceable(leaf)
        return leaf.ndim > 0 or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    split = [
        split_arrays(arg, holds_examples if n in positions else lambda leaf: False, is_whole)
        for n, arg in enumerate(args)
    ]
    arrays, treedef = jax.tree.flatten([arrays for arrays, _ in split])
    found = [(n, array) for n, (arrays, _) in enumerate(split) for array in arrays]
    _check_arrays(found, numbers, batch.microbatches)
    if numbers is None:
        _check_keywords(keywords)

    def merge(part: Sequence[jax.Array]) -> tuple[PyTree, ...]:
        pairs = zip(split, treedef.unflatten(part), strict=True)
        return tuple(put_back(arrays) for (_, put_back), arrays in pairs)

    return [_deal_out(array, batch.microbatches) for array in arrays], merge


def positions_of(batch: Batch, state_argnum: int | None, count: int) -> set[int]:
    """Returns the positions of the arguments that are split in a call with `count` of them."""
    numbers, whole = numbers_of(batch.argnums, state_argnum), (0, state_argnum)
    if numbers is None:
        return set(range(count)).difference(whole)
    for number in numbers:
        if not -count <= number < count or number % count in whole:
            raise ValueError(
                f"Cannot split argument {number}, as argnums of jmpx.Batch says, in a call with "
                f"{count} positional arguments: count from 1, the first after the parameters."
            )
    return {number % count for number in numbers}


def _check_arrays(
    found: list[tuple[int, jax.Array]], numbers: tuple[int, ...] | None, count: int
) -> None:
    """Refuses arrays, each with the position of its argument, that cannot be split evenly."""
    if not found:
        raise TypeError(
            f"Cannot split a batch into {count} micro-batches, because the positional arguments of "
            f"argnums={numbers} hold no array: pass the examples by position, and {_REMEDY}."
        )
    number, first = found[0]
    for other, leaf in found:
        if leaf.ndim == 0:
            raise TypeError(
                f"Cannot split argument {other} into {count} micro-batches, because it holds "
                f"{spell(leaf)}, which has no axis of examples: {_REMEDY}."
            )
        if leaf.shape[0] != first.shape[0]:
            raise ValueError(
                f"Cannot split arguments {number} and {other} into {count} micro-batches, because "
                f"{spell(first)} and {spell(leaf)} differ in their number of examples: {_REMEDY}."
            )
    if first.shape[0] % count:
        raise ValueError(
            f"Cannot split the {first.shape[0]} examples of argument {number}, {spell(first)}, "
            f"into {count} micro-batches of one size: make {count} divide them."
        )


def _deal_out(array: jax.Array, count: int) -> jax.Array:
    """Returns an array of shape (parts, examples in each, ...): every `count`-th example a part."""
    # Consecutive examples are on few of the devices that a batch is split over. By stride, each
    # device has its share of each part already, and sends nothing.
    each = array.shape[0] // count
    shape = (each, count, *array.shape[1:])
    sharding = jax.typeof(array).sharding
    if not any(sharding.spec):
        return array.reshape(shape).swapaxes(0, 1)
    first, *rest = sharding.spec  # of Explicit axes
    names = first if isinstance(first, tuple) else (first,)
    size = math.prod(sharding.mesh.shape[name] for name in names if name is not None)
    spec = PartitionSpec(None if each % size else first, None, *rest)
    dealt = jax.lax.reshape(array, shape, out_sharding=NamedSharding(sharding.mesh, spec))
    return dealt.swapaxes(0, 1)


def _check_keywords(keywords: Mapping[str, PyTree]) -> None:
    """Refuses keyword arguments with arrays that have an axis, which may be one of examples."""
    # A whole batch beside a part of one example would broadcast silently. The length of the axis
    # tells nothing: a table may have as many rows as there are examples.
    for name, value in keywords.items():
        for leaf in jax.tree.leaves(value, is_leaf=is_whole):
            if is_traceable(leaf) and leaf.ndim:
                raise ValueError(
                    f"Cannot tell whether the keyword argument {name!r} holds examples, because "
                    f"{spell(leaf)} in it has an axis, and the batch is split into micro-batches: "
                    f"pass it by position to have it split, or {_REMEDY}."
                )


# Gradients of micro-batches, summed in float32.


class Backward(NamedTuple):
    """The result of a forward and a backward pass, or of all passes over micro-batches."""

    value: jax.Array  # the unscaled loss
    aux: PyTree  # without the model state
    state: PyTree  # the model state after the pass
    grads: list[jax.Array]  # the scaled gradients, in float32 or wider


Carry: TypeAlias = tuple[list[jax.Array], list[jax.Array]]  # sums of gradients, and state


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
    merges: list[Merge] = []  # of aux; a loop returns only arrays

    def body(carry: Carry, part: Sequence[jax.Array]) -> tuple[Carry, tuple[jax.Array, PyTree]]:
        totals, arrays = carry
        one = run(merge(arrays), part)
        totals = [t + grad.astype(t.dtype) for t, grad in zip(totals, one.grads, strict=True)]
        aux, merge_aux = split_arrays(one.aux)
        merges[:] = [merge_aux]
        return (totals, split_arrays(one.state)[0]), (one.value, aux)

    totals = [_like(param) for param in params]
    first = [part[0] for part in parts]
    arrays = _settled(lambda arrays: body((totals, arrays), first)[0][1], arrays)
    axes = [varying_axes(array) for array in arrays]

    def step(carry: Carry, part: Sequence[jax.Array]) -> tuple[Carry, tuple[jax.Array, PyTree]]:
        (totals, arrays), results = body(carry, part)
        return (totals, _vary_each(arrays, axes)), results

    (totals, arrays), (values, aux) = jax.lax.scan(step, (totals, arrays), list(parts))
    grads = [total / len(values) for total in totals]
    return Backward(values.mean(), merges[0](aux), merge(arrays), grads)


def _like(param: jax.Array) -> jax.Array:
    """Returns zeros to add the gradients of a parameter to, which vary over devices as it does."""
    dtype = param.dtype
    if is_floating(param):
        dtype = at_least_float32(jax.ShapeDtypeStruct((), dtype)).dtype
    return vary([jnp.zeros_like(param, dtype)], varying_axes(param))[0]


def _settled(
    advance: Callable[[list[jax.Array]], list[jax.Array]], arrays: list[jax.Array]
) -> list[jax.Array]:
    """Makes state vary along the axes along which a step makes it vary: a loop demands that."""
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
