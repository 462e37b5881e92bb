"""The batch of a gradient function: which arguments hold examples, and how they are split."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmpx._base.leaves import PyTree, is_int, is_traceable, spell
from jmpx._base.nnx_objects import is_whole
from jmpx._steps.arrays import split_arrays
from jmpx._steps.checks import check_whole

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
    # Parts of examples in a row would be on a few of the devices that a batch is split over. By
    # stride, each device has its share of each part already, so that nothing is sent.
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
    # A whole batch beside a part of it would broadcast in silence where the part is one example.
    # The length of the axis tells nothing: a table may have as many rows as there are examples.
    for name, value in keywords.items():
        for leaf in jax.tree.leaves(value, is_leaf=is_whole):
            if is_traceable(leaf) and leaf.ndim:
                raise ValueError(
                    f"Cannot tell whether the keyword argument {name!r} holds examples, because "
                    f"{spell(leaf)} in it has an axis, and the batch is split into micro-batches: "
                    f"pass it by position to have it split, or {_REMEDY}."
                )
