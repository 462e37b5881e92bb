"""Which parameters of a gradient function are shards, and over which of the mapped axes.

A replica is a parameter of which each device has a copy: its gradient is the mean over the devices.
A shard is a part of a parameter that no other device has. The function gathers it, and the gather's
backward pass sums the gradient over the devices, so that it is divided by their number once.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax

from jmpx._axes import axis_names, is_tracked
from jmpx._leaves import PyTree, is_inexact_array
from jmpx._sharding import Gather
from jmpx._tree import AxisName

Axes = frozenset[Hashable]
_NOTHING: Axes = frozenset()


def check_mask(sharded: PyTree, axis_name: AxisName | None) -> None:
    """Refuses a mask of shards that is no pytree of bools, or that has no axis to speak of.

    Raises:
        TypeError: if a leaf of the mask is not a bool.
        ValueError: if there is a mask and no axis.
    """
    if sharded is None:
        return
    for leaf in jax.tree.leaves(sharded):
        if not isinstance(leaf, bool):
            raise TypeError(
                f"Expected sharded to be a bool or a pytree of bools, got the leaf {leaf!r}: say "
                "True for the parameters of which each device holds a shard."
            )
    if axis_name is None:
        raise ValueError(
            f"Cannot tell over which axis the parameters are shards, as sharded={sharded!r} says: "
            "give the name of the mapped axis as axis_name."
        )


class Parameters(NamedTuple):
    """What is known of the parameters before the function runs, each in a list.

    Attributes:
        paths: the names of the parameters, for error messages.
        varying: the axes along which JAX knows each of them to vary.
        sharded: what the mask says of each of them; None if there is no mask.
    """

    paths: list[str]
    varying: list[Axes]
    sharded: list[bool] | None

    def find_shards(
        self, gathers: Sequence[Gather], loss_varies_over: Axes, axis_name: AxisName
    ) -> list[Axes]:
        """Returns for each parameter the axes over which it is a shard: none for a replica.

        Where JAX tracks what varies, a parameter that is equal on all devices is a replica, because
        the mean of its gradients is right whatever the function does with it. A varying one is a
        shard if the mask says so or, without a mask, if the function gathers it. Where JAX tracks
        nothing, the mask alone decides.

        Args:
            gathers: the gathers of parameters in the function.
            loss_varies_over: the axes along which JAX knows the loss to vary.
            axis_name: the name (or names) of the mapped axis.

        Raises:
            TypeError: if a mask contradicts what JAX knows, or if it cannot be told without a mask
                what a parameter is.
        """
        axes = axis_names(axis_name)
        tracked = frozenset(axis for axis in axes if is_tracked(axis))
        gathered: list[Axes] = [_NOTHING] * len(self.paths)
        for gather in gathers:
            self._check_gather(gather, tracked)
            for index in gather.params:
                gathered[index] |= gather.axes
        return [
            self._shard_axes(index, gathered[index], loss_varies_over, axes, tracked)
            for index in range(len(self.paths))
        ]

    def _check_gather(self, gather: Gather, tracked: Axes) -> None:
        """Refuses a gather of which it is not known whether it gathers shards, or that does not."""
        if self.sharded is not None:
            return
        first = self.paths[min(gather.params)]
        over = _spell(gather.axes)
        if not gather.axes <= tracked:
            raise TypeError(
                f"Cannot tell whether the first argument's {first} is a shard, which the function "
                f"reads by {gather.operation} over {over}, because JAX does not track there which "
                "arrays vary: say which parameters are shards by sharded=, or use jax.shard_map "
                "without check_vma=False."
            )
        if not any(self.varying[index] & gather.axes for index in gather.params):
            raise TypeError(
                f"Cannot gather the first argument's {first}, which the function reads by "
                f"{gather.operation} over {over}, because it is no shard but the same on all "
                "devices: split it by in_specs of jax.shard_map, or read it without a gather."
            )

    def _shard_axes(
        self,
        index: int,
        gathered: Axes,
        loss_varies_over: Axes,
        axes: tuple[Hashable, ...],
        tracked: Axes,
    ) -> Axes:
        says = None if self.sharded is None else self.sharded[index]
        name = f"the first argument's {self.paths[index]}"
        varying = self.varying[index] & tracked
        if says is None:
            left = varying - gathered - loss_varies_over
            if left:
                raise TypeError(
                    f"Cannot tell whether {name} is a shard or a replica: it varies over "
                    f"{_spell(left)}, the function does not gather it, and the loss is the same "
                    "on all devices: say by sharded= which parameters are shards."
                )
            return varying & gathered
        if not says:
            if varying & gathered:
                raise TypeError(
                    f"Cannot average the gradient of {name} over {_spell(varying & gathered)} as "
                    "that of a replica, as sharded=False says, because the function gathers it "
                    "there as a shard: say sharded=True for it."
                )
            return _NOTHING
        if tracked == frozenset(axes):
            if not varying:
                raise TypeError(
                    f"Expected a shard, as sharded=True says, but {name} is the same on all "
                    f"devices of {_spell(tracked)}: split it by in_specs of jax.shard_map, or say "
                    "sharded=False for it."
                )
            return varying
        known = varying | gathered
        if not known and len(axes) > 1:
            raise TypeError(
                f"Cannot tell over which of the axes {_spell(axes)} {name} is a shard, as "
                "sharded=True says: give one axis_name, or use jax.shard_map without "
                "check_vma=False."
            )
        return known or frozenset(axes)


def _spell(axes: Any) -> str:
    names = sorted(map(repr, axes))
    return f"the axis {names[0]}" if len(names) == 1 else f"the axes {' and '.join(names)}"


def read_mask(sharded: PyTree, tree: PyTree) -> list[bool] | None:
    """Returns what a mask says of each differentiable array of a pytree; None without a mask.

    Args:
        sharded: a bool, or a pytree of bools whose structure is a prefix of that of `tree`.
        tree: the first argument of a gradient function.

    Raises:
        ValueError: if the mask has another structure.
    """
    if sharded is None:
        return None
    try:
        says = jax.tree.leaves(jax.tree.map(_repeated, sharded, tree), is_leaf=_is_repeated)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "Expected sharded to have the structure of the first argument, or of its first levels, "
            f"got {jax.tree.structure(sharded)} for {jax.tree.structure(tree)}: give a bool for "
            "each parameter or for several at once."
        ) from error
    return [bool(says) for repeated in says for says in repeated.values]


class _Repeated(NamedTuple):
    values: list[bool]


def _is_repeated(node: object) -> bool:
    return isinstance(node, _Repeated)


def _repeated(says: bool, tree: PyTree) -> _Repeated:
    return _Repeated([says for leaf in jax.tree.leaves(tree) if is_inexact_array(leaf)])
