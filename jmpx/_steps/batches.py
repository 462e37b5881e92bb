"""The batch of a gradient function: which arguments hold examples, and how they are split."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmpx._base.leaves import PyTree, is_int, is_traceable, spell
from jmpx._base.messages import describe
from jmpx._base.nnx_objects import is_whole
from jmpx._steps.arrays import split_arrays
from jmpx._steps.checks import check_whole

MICROBATCHES, GROUPS = "micro-batches", "groups"
_REMEDY = (
    "name the arguments that hold examples by argnums of jmpx.Batch, and others, such as PRNG "
    "keys, go whole"
)
BatchSharding: TypeAlias = NamedSharding | PartitionSpec


@dataclasses.dataclass(frozen=True)
class Batch:
    """How a gradient function splits the batch: into micro-batches, and over the devices of a mesh.

    The values and gradients of the parts are averaged, so that the loss has to be a mean over
    examples that count alike. jmpx cannot see that a loss compares examples, or divides by their
    weights, and is another one in parts.

    Micro-batches run one after the other, so that the memory of activations is that of one part.
    Their gradients are summed in float32, and there is one loss scale, one check, and one mean over
    devices. Aux gets a leading axis of micro-batches, and the model state goes from one part to the
    next.

    A sharding is for `jax.jit` without a mapped axis, where XLA by itself would sum gradients over
    devices in the compute dtype. With it they are summed in the policy's reduce; unset, in float32.
    The share of each device becomes a group, for which the function runs by `jax.vmap`. Aux gets a
    leading axis of groups, before that of micro-batches, and the model state is the mean over
    groups. Micro-batches of a batch that is split over devices need it, too.

    Args:
        argnums: the positions of the arguments whose arrays are split along their first axis; by
            default all but the first and that of `state_argnum`. Others go whole into each part, as
            keyword arguments do, and by default PRNG keys of shape (). Without it, an array in a
            keyword argument is refused, unless its shape is ().
        microbatches: how many parts of one size a batch is split into.
        sharding: the `jax.sharding.NamedSharding` of the batch, or its `PartitionSpec` under
            `jax.set_mesh`, whose first entry names the mesh axes that split the first axis of the
            batch; None leaves the means over devices to XLA.

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
    sharding: BatchSharding | None = None

    def __post_init__(self) -> None:
        numbers_of(self.argnums)
        check_whole(self.microbatches, "microbatches", "1 does not split a batch")
        if self.sharding is None:
            return
        if not isinstance(self.sharding, BatchSharding):
            raise TypeError(
                "Expected the sharding of a jmpx.Batch to be a jax.sharding.NamedSharding, or a "
                f"PartitionSpec under jax.set_mesh, got {describe(self.sharding)}: give the "
                "sharding of the batch."
            )
        if not axes_of(self.sharding):
            raise ValueError(
                "Expected the sharding of a jmpx.Batch to split the first axis of a batch, got "
                f'{self.sharding}: name a mesh axis first, as in PartitionSpec("data").'
            )


def axes_of(sharding: BatchSharding) -> tuple[str, ...]:
    """Returns the mesh axes by which a sharding splits the first axis of a batch."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,)
    return tuple(axis for axis in axes if isinstance(axis, str))


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
    count: int,
    what: str,
    keywords: Mapping[str, PyTree] | None = None,
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], tuple[PyTree, ...]]]:
    """Splits a batch into equal parts, which messages call `what`, in the order of its examples.

    Returns:
        Arrays of shape (parts, examples in each, ...), and a function that puts the arrays of one
        part back among the arguments.
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
    _check_arrays(found, numbers, count, what)
    if numbers is None:
        _check_keywords(keywords or {}, what)

    def merge(part: Sequence[jax.Array]) -> tuple[PyTree, ...]:
        pairs = zip(split, treedef.unflatten(part), strict=True)
        return tuple(put_back(arrays) for (_, put_back), arrays in pairs)

    if what == MICROBATCHES:
        return [
            array.reshape(array.shape[0] // count, count, *array.shape[1:]).swapaxes(0, 1)
            for array in arrays
        ], merge
    return [_split(array, count) for array in arrays], merge


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
    found: list[tuple[int, jax.Array]], numbers: tuple[int, ...] | None, count: int, what: str
) -> None:
    """Refuses arrays, each with the position of its argument, that do not make equal parts."""
    if not found:
        raise TypeError(
            f"Cannot split a batch into {count} {what}, because the positional arguments of "
            f"argnums={numbers} hold no array: pass the examples by position, and {_REMEDY}."
        )
    number, first = found[0]
    for other, leaf in found:
        if leaf.ndim == 0:
            raise TypeError(
                f"Cannot split argument {other} into {count} {what}, because it holds "
                f"{spell(leaf)}, which has no axis of examples: {_REMEDY}."
            )
        if leaf.shape[0] != first.shape[0]:
            raise ValueError(
                f"Cannot split arguments {number} and {other} into {count} {what}, because "
                f"{spell(first)} and {spell(leaf)} differ in their number of examples: {_REMEDY}."
            )
    if first.shape[0] % count:
        raise ValueError(
            f"Cannot split the {first.shape[0]} examples of argument {number}, {spell(first)}, "
            f"into {count} {what} of one size: make {count} divide them."
        )


def _split(array: jax.Array, count: int) -> jax.Array:
    """Splits the first axis of an array in two; of explicit sharding, the examples stay split."""
    shape = (count, array.shape[0] // count, *array.shape[1:])
    sharding = jax.typeof(array).sharding
    if not any(sharding.spec):
        return array.reshape(shape)
    first, *rest = sharding.spec
    names = first if isinstance(first, tuple) else (first,)
    size = math.prod(sharding.mesh.shape[name] for name in names if name is not None)
    spec = PartitionSpec(None, None if shape[1] % size else first, *rest)
    return jax.lax.reshape(array, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def _check_keywords(keywords: Mapping[str, PyTree], what: str) -> None:
    """Refuses keyword arguments with arrays that have an axis, which may be one of examples."""
    # A whole batch beside a part of it would broadcast in silence where the part is one example.
    # The length of the axis tells nothing: a table may have as many rows as there are examples.
    for name, value in keywords.items():
        for leaf in jax.tree.leaves(value, is_leaf=is_whole):
            if is_traceable(leaf) and leaf.ndim:
                raise ValueError(
                    f"Cannot tell whether the keyword argument {name!r} holds examples, because "
                    f"{spell(leaf)} in it has an axis, and the batch is split into {what}: pass it "
                    f"by position to have it split, or {_REMEDY}."
                )
