"""The arguments of a gradient function that hold examples, and how they are split into parts."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmpx._leaves import PyTree, is_int, is_traceable, spell
from jmpx._nnx_objects import is_whole

MICROBATCHES, GROUPS = "micro-batches", "groups"


def check_microbatches(microbatches: object) -> None:
    """Refuses anything but a positive int.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is below 1.
    """
    if not is_int(microbatches):
        raise TypeError(
            f"Expected microbatches to be an int, got {microbatches!r}: give the number of parts "
            "that a batch is split into."
        )
    if microbatches < 1:
        raise ValueError(
            f"Expected microbatches to be at least 1, got {microbatches}: 1 does not split a batch."
        )


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
    def of(cls, argnums: Any, state_argnum: int | None) -> "BatchArguments":
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
                    f"Expected batch_argnums to be an int or several, got {argnums!r}: say which "
                    "arguments hold a batch of examples."
                )
            if number in whole:
                what = "parameters" if number == 0 else "model state"
                raise ValueError(
                    f"Cannot split argument {number}, as batch_argnums={argnums!r} says, because "
                    f"it holds the {what}: give the positions of the arguments that hold examples."
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
                word `batch_argnums`.

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
                    f"Cannot split argument {number}, as batch_argnums says, in a call with "
                    f"{count} positional arguments: count from 1, the first after the parameters."
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
                none = f"the arguments of batch_argnums={self.numbers} hold no array"
            raise TypeError(
                f"Cannot split a batch into {count} {what}, because {none}: pass the examples by "
                "position, and name their positions by batch_argnums if other arrays go whole."
            )
        number, first = found[0]
        for other, leaf in found:
            if leaf.ndim == 0:
                raise TypeError(
                    f"Cannot split argument {other} into {count} {what}, because it holds "
                    f"{spell(leaf)}, which has no axis of examples: name the arguments that "
                    "hold examples by batch_argnums, and others go whole."
                )
            if leaf.shape[0] != first.shape[0]:
                raise ValueError(
                    f"Cannot split arguments {number} and {other} into {count} {what}, because "
                    f"{spell(first)} and {spell(leaf)} differ in their number of examples: "
                    "name the arguments that hold examples by batch_argnums, and others, such as "
                    "PRNG keys and model state, go whole."
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
                    "batch_argnums, and keyword arguments go whole."
                )


class Parts(NamedTuple):
    """Arguments that are split.

    Attributes:
        arrays: the split arrays, of shape (parts, examples in each, ...).
        merge: puts the arrays of one part back among the arguments.
    """

    arrays: list[jax.Array]
    merge: Callable[[Sequence[jax.Array]], tuple[PyTree, ...]]
