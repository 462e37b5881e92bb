"""The batch of a gradient function: which arguments hold examples, and how they are split."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmpx._base.leaves import PyTree, is_int, is_traceable, spell
from jmpx._base.messages import describe
from jmpx._base.nnx_objects import is_whole

MICROBATCHES, GROUPS = "micro-batches", "groups"


BatchSharding: TypeAlias = NamedSharding | PartitionSpec


@dataclasses.dataclass(frozen=True)
class Batch:
    """How a gradient function splits the batch: into micro-batches, and over the devices of a mesh.

    It is the option `batch` of `filter_value_and_grad` and `filter_grad`. The loss has to be a mean
    over examples that count alike, because the values and gradients of the parts are averaged: a
    sum comes out divided by their number, and a loss that compares examples or divides by their
    weights is another loss in parts, which cannot be seen.

    Micro-batches run one after the other, so that the memory of activations is that of one part.
    Their gradients are summed in float32, and there is one loss scale, one check, and one mean over
    devices; what the function gathers, it gathers in each part. Aux gets a leading axis of
    micro-batches, and the model state goes from one part to the next.

    A sharding is for `jax.jit` without a mapped axis. There XLA by itself sums gradients over
    devices in the compute dtype. By this they are summed in the policy's reduce; unset, in float32.
    The share of each device becomes a group, for which the function runs by `jax.vmap`. Aux gets a
    leading axis of groups, before that of micro-batches, and the model state is the mean over
    groups. Micro-batches of a batch that is split over devices need it, too.

    Args:
        argnums: the positions of the arguments whose arrays are split along their first axis; by
            default all but the first and that of `state_argnum`. Others go whole, into each part,
            as keyword arguments do, and by default PRNG keys of shape (), from which each part
            draws the same. Without it, an array in a keyword argument is refused, unless its shape
            is ().
        microbatches: how many parts of one size a batch is split into.
        sharding: the `jax.sharding.NamedSharding` of the batch, or its `PartitionSpec` under
            `jax.set_mesh`, whose first entry names the mesh axes that split the first axis of the
            batch; None leaves the means over devices to XLA.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `argnums` holds 0, the position of the parameters, `microbatches` is below 1,
            or `sharding` does not split the first axis.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x @ w) ** 2), x.shape
        >>> grad_fn = jmpx.filter_grad(
        ...     loss_fn, jmpx.NoOpLossScale(), True, policy="bf16", batch=jmpx.Batch(microbatches=4)
        ... )
        >>> result = grad_fn(jnp.ones(3), jnp.ones((8, 3)))
        >>> result.grads, result.aux  # each part has seen two examples
        (Array([6., 6., 6.], dtype=float32), (2, 3))
    """

    __module__ = "jmpx"

    argnums: int | Sequence[int] | None = None
    microbatches: int = 1
    sharding: BatchSharding | None = None

    def __post_init__(self) -> None:
        BatchArguments.of(self.argnums)
        _check_microbatches(self.microbatches)
        _check_sharding(self.sharding)


def as_batch(batch: object) -> Batch:
    """Returns the option `batch` of a gradient function, for None a batch in one part.

    Raises:
        TypeError: if it is something else than a `Batch`.
    """
    if batch is None:
        return Batch()
    if isinstance(batch, Batch):
        return batch
    example = "microbatches=8"
    if is_int(batch):
        example = f"microbatches={batch}"
    elif isinstance(batch, BatchSharding):
        example = "sharding=..."
    raise TypeError(
        f"Expected batch to be a jmpx.Batch, got {describe(batch)}: write "
        f"batch=jmpx.Batch({example})."
    )


def _check_microbatches(microbatches: object) -> None:
    if not is_int(microbatches):
        raise TypeError(
            f"Expected microbatches to be an int, got {microbatches!r}: give the number of parts "
            "that a batch is split into."
        )
    if microbatches < 1:
        raise ValueError(
            f"Expected microbatches to be at least 1, got {microbatches}: 1 does not split a batch."
        )


def _check_sharding(sharding: object) -> None:
    """Refuses anything but a sharding that splits the first axis of a batch."""
    if sharding is None:
        return
    if not isinstance(sharding, BatchSharding):
        raise TypeError(
            "Expected the sharding of a jmpx.Batch to be a jax.sharding.NamedSharding, or a "
            f"PartitionSpec under jax.set_mesh, got {describe(sharding)}: give the sharding of the "
            "batch."
        )
    if not axes_of(sharding):
        raise ValueError(
            "Expected the sharding of a jmpx.Batch to split the first axis of a batch, got "
            f'{sharding}: name a mesh axis first, as in PartitionSpec("data").'
        )


def axes_of(sharding: BatchSharding) -> tuple[str, ...]:
    """Returns the mesh axes by which a sharding splits the first axis of a batch."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,)
    return tuple(axis for axis in axes if isinstance(axis, str))


@dataclasses.dataclass(frozen=True)
class BatchArguments:
    """Which positional arguments hold a batch of examples along the first axis of their arrays.

    Args:
        numbers: their positions; None means all but the first.
        whole: positions that are never split.
    """

    numbers: tuple[int, ...] | None = None
    whole: tuple[int, ...] = ()

    @classmethod
    def of(cls, argnums: Any, state_argnum: int | None = None) -> "BatchArguments":
        """Checks the positions that the user gave.

        Raises:
            TypeError: if one of them is no int.
            ValueError: if one of them is that of the parameters or of the model state.
        """
        whole = (0,) if state_argnum is None else (0, state_argnum)
        if argnums is None:
            return cls(None, whole)
        numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
        for number in numbers:
            if not is_int(number):
                raise TypeError(
                    f"Expected argnums of jmpx.Batch to be an int or several, got {argnums!r}: say "
                    "which arguments hold a batch of examples."
                )
            if number in whole:
                what = "parameters" if number == 0 else "model state"
                raise ValueError(
                    f"Cannot split argument {number}, as argnums={argnums!r} of jmpx.Batch says, "
                    f"because it holds the {what}: give the positions of the arguments that hold "
                    "examples."
                )
        return cls(numbers, whole)

    def split(
        self,
        args: Sequence[PyTree],
        count: int,
        what: str,
        keywords: Mapping[str, PyTree] | None = None,
    ) -> "Parts":
        """Splits the arrays of these arguments into equal parts, along a new first axis.

        An array of shape (examples, ...) becomes one of shape (count, examples / count, ...), the
        parts in the order of the examples. Objects of NNX, numbers, and by default PRNG keys of
        shape () go whole, into each part.

        Args:
            args: all positional arguments of a call.
            count: the number of parts.
            what: the name of the parts, for error messages.
            keywords: the keyword arguments of the call, which go whole. Their arrays need the
                word `argnums`.

        Raises:
            TypeError: if an array has no axis to split, or nothing is left to be split.
            ValueError: if there is no such argument, if arrays differ in their number of examples,
                if `count` does not divide it, or if a keyword argument may hold examples.
        """
        leaves, treedef = jax.tree.flatten(args, is_leaf=is_whole)
        owners = [
            number
            for number, arg in enumerate(args)
            for _ in jax.tree.leaves(arg, is_leaf=is_whole)
        ]
        positions = self._positions(len(args))
        indices = [
            index
            for index, (leaf, owner) in enumerate(zip(leaves, owners, strict=True))
            if owner in positions and is_traceable(leaf) and not self._goes_whole(leaf)
        ]
        self._check([(owners[index], leaves[index]) for index in indices], count, what)
        if self.numbers is None:
            _check_keywords(keywords or {}, what)
        arrays = [_split(jnp.asarray(leaves[index]), count) for index in indices]

        def merge(parts: Sequence[jax.Array]) -> tuple[PyTree, ...]:
            merged = list(leaves)
            for index, part in zip(indices, parts, strict=True):
                merged[index] = part
            return tuple(treedef.unflatten(merged))

        return Parts(arrays, merge)

    def _positions(self, count: int) -> set[int]:
        """Returns the positions of these arguments in a call with `count` of them."""
        if self.numbers is None:
            return set(range(count)) - set(self.whole)
        for number in self.numbers:
            if not -count <= number < count or number % count in self.whole:
                raise ValueError(
                    f"Cannot split argument {number}, as argnums of jmpx.Batch says, in a call "
                    f"with {count} positional arguments: count from 1, the first after the "
                    "parameters."
                )
        return {number % count for number in self.numbers}

    def _goes_whole(self, leaf: Any) -> bool:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return is_key and leaf.ndim == 0 and self.numbers is None

    def _check(self, found: list[tuple[int, Any]], count: int, what: str) -> None:
        """Refuses arrays that cannot be split into `count` parts.

        Args:
            found: the arrays, each with the position of its argument.
            count: the number of parts.
            what: the name of the parts.
        """
        if not found:
            none = "no positional argument but the first holds an array of examples"
            if self.numbers is not None:
                none = f"the arguments of argnums={self.numbers} hold no array"
            raise TypeError(
                f"Cannot split a batch into {count} {what}, because {none}: pass the examples by "
                "position, and name their positions by argnums of jmpx.Batch if other arrays go "
                "whole."
            )
        number, first = found[0]
        for other, leaf in found:
            if leaf.ndim == 0:
                raise TypeError(
                    f"Cannot split argument {other} into {count} {what}, because it holds "
                    f"{spell(leaf)}, which has no axis of examples: name the arguments that "
                    "hold examples by argnums of jmpx.Batch, and others go whole."
                )
            if leaf.shape[0] != first.shape[0]:
                raise ValueError(
                    f"Cannot split arguments {number} and {other} into {count} {what}, because "
                    f"{spell(first)} and {spell(leaf)} differ in their number of examples: "
                    "name the arguments that hold examples by argnums of jmpx.Batch, and others, "
                    "such as PRNG keys and model state, go whole."
                )
        if first.shape[0] % count:
            raise ValueError(
                f"Cannot split the {first.shape[0]} examples of argument {number}, "
                f"{spell(first)}, into {count} {what} of one size: make {count} divide them."
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
    """Refuses keyword arguments with arrays that have an axis: whether it is of examples is unsaid.

    A batch beside a part of it would broadcast in silence where the part is one example. How long
    the axis is says nothing: a table may have as many rows as one batch, and others than the next.
    """
    for name, value in keywords.items():
        for leaf in jax.tree.leaves(value, is_leaf=is_whole):
            if is_traceable(leaf) and leaf.ndim:
                raise ValueError(
                    f"Cannot tell whether the keyword argument {name!r} holds examples, because "
                    f"{spell(leaf)} in it has an axis, and the batch is split into {what}: pass it "
                    "by position if it is to be split, or name the arguments that hold examples by "
                    "argnums of jmpx.Batch, and keyword arguments go whole."
                )


class Parts(NamedTuple):
    """Arguments that are split.

    Attributes:
        arrays: the split arrays, of shape (parts, examples in each, ...).
        merge: puts the arrays of one part back among the arguments.
    """

    arrays: list[jax.Array]
    merge: Callable[[Sequence[jax.Array]], tuple[PyTree, ...]]
