"""Which parameters of a gradient function are shards, and over which of the mapped axes.

Each device has a copy of a replica, whose gradient is the mean over the devices. The backward pass
of the gather has summed the gradient of a shard already: it is divided by their number once. So is
the gradient of an own part, as in tensor and expert parallelism.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Literal, NamedTuple, TypeAlias

import jax

from jmpx._base.axes import axis_names, tracked_axes
from jmpx._base.leaves import PyTree, is_inexact_array, is_none
from jmpx._base.messages import describe
from jmpx._base.trees import AxisName
from jmpx._devices.exchanges import Gather, Source

Axes = frozenset[Hashable]
_NO_AXES: Axes = frozenset()

# What a mask says of a parameter: True of a shard, False of a replica, "own" of an own part.
Says: TypeAlias = bool | Literal["own"]


@dataclasses.dataclass(frozen=True)
class Over:
    """A mapped axis over which a gradient function averages, and which parameters are its shards.

    It is the option `over` of `value_and_grad` and `grad` under `jax.shard_map`,
    `jax.pmap` and `jax.vmap`. The value is averaged in float32, the gradients in the policy's
    reduce; unset, in float32 or the wider dtype of a parameter. The flag and the loss scale are the
    same on the whole axis.

    Each device may hold a copy of a parameter, or a shard of it that the function gathers, by
    `jmpx.distributed.gather` or by `lax.all_gather`. Where `jax.shard_map` tracks which arrays
    vary, `sharded` is needed for few parameters; with `check_vma=False`, and under `jax.pmap` and
    `jax.vmap`, it has to tell what a gathered parameter is, and all others are averaged. The page
    on many devices has the rules.

    Args:
        axis_name: the name of the mapped axis, or a tuple of several.
        sharded: True for a shard that the function gathers, False for a copy, "own" for a part that
            no device gathers, such as an expert or a part of a tensor, whose activations travel; or
            a pytree of these that is a prefix of the first argument.

    Raises:
        TypeError: if `axis_name` is None, or a leaf of `sharded` neither a bool nor "own".

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> noop = jmpx.NoOpLossScale()
        >>> grad_fn = jmpx.grad(loss_fn, noop, policy="c=bf16,r=f32", over=jmpx.Over("data"))
        >>> batch = jnp.stack([jnp.zeros((2, 3)), jnp.ones((2, 3))])  # of two devices
        >>> jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")(jnp.ones(3), batch).grads
        Array([[3., 3., 3.],
               [3., 3., 3.]], dtype=float32)
    """

    __module__ = "jmpx"

    axis_name: AxisName
    sharded: PyTree = None

    def __post_init__(self) -> None:
        if self.axis_name is None or not axis_names(self.axis_name):
            raise TypeError(
                "Expected axis_name of jmpx.Over to be the name of a mapped axis, got "
                f'{self.axis_name!r}: give it, as in jmpx.Over("data"), or leave over out where '
                "nothing is averaged."
            )
        for leaf in jax.tree.leaves(self.sharded):
            if not (isinstance(leaf, bool) or (isinstance(leaf, str) and leaf == "own")):
                raise TypeError(
                    "Expected sharded of jmpx.Over to be a bool or a pytree of bools, got the leaf "
                    f"{describe(leaf)}: say True for parameters whose shards the function gathers, "
                    'and "own" for a part that no device gathers.'
                )


class Parameters(NamedTuple):
    """What is known of the parameters before the function runs, each in a list."""

    paths: list[str]  # for error messages
    varying: list[Axes]  # the axes along which JAX knows each of them to vary
    sharded: list[Says] | None  # what the mask says of each of them, if there is one

    def find_shards(self, loss: Source, axis_name: AxisName) -> list[Axes]:
        """Returns for each parameter the axes over which it is a shard: none for a replica.

        Where JAX tracks what varies, a parameter that is equal on all devices is a replica, because
        the mean of its gradients is right whatever the function does with it. A varying one is what
        the mask says; without a mask it is a shard if the function gathers it, and a replica if the
        loss of a device depends on that device's parameter alone. Anything else is refused.
        """
        axes = axis_names(axis_name)
        tracked = tracked_axes().intersection(axes)
        for gather in sorted(loss.gathers, key=lambda gather: min(gather.params)):
            self._check_gather(gather, tracked)
        return [self._axes_of_shard(i, loss, axes, tracked) for i in range(len(self.paths))]

    def _check_gather(self, gather: Gather, tracked: Axes) -> None:
        """Refuses a gather that does not gather shards, or may not."""
        name = f"the first argument's {self.paths[min(gather.params)]}"
        reads = f"which the function reads by {gather.operation} over {_spell(gather.axes)}"
        is_tracked, masked = gather.axes <= tracked, self.sharded is not None
        of_copies = self.sharded is not None and not any(self.sharded[i] for i in gather.params)
        sums_nothing = gather.operation.startswith("all_gather_invariant") and not is_tracked
        in_groups = gather.in_groups and not of_copies
        if sums_nothing or in_groups or not (masked or is_tracked):
            raise TypeError(
                f"Cannot tell whether {name} is a shard, {reads}: say which parameters are shards "
                "by sharded= of jmpx.Over, or use jax.shard_map without check_vma=False, and "
                "gather by jax.lax.all_gather along a mesh axis, without axis_index_groups."
            )
        if not masked and not any(self.varying[index] & gather.axes for index in gather.params):
            raise TypeError(
                f"Cannot gather {name}, {reads}, because it is the same on all devices: split it "
                "by in_specs of jax.shard_map, or say sharded=False for it."
            )

    def _axes_of_shard(
        self, index: int, loss: Source, axes: tuple[Hashable, ...], tracked: Axes
    ) -> Axes:
        name = f"the first argument's {self.paths[index]}"
        varying = self.varying[index] & tracked
        gathers = [gather for gather in loss.gathers if index in gather.params]
        gathered = _NO_AXES.union(*(gather.axes for gather in gathers))
        exchanges = [e for e in loss.exchanges if e.param == index and e.axis not in gathered]
        if self.sharded is None:
            if unsure := [e for e in exchanges if e.axis in varying]:
                exchange = min(unsure, key=str)
                raise TypeError(
                    f"Cannot tell whether {name} is a shard or a replica, because it differs along "
                    f"{_spell([exchange.axis])} and the function does not gather it, but the loss "
                    f"of each device depends on those of others, by {exchange.operation}: say by "
                    'sharded= of jmpx.Over which parameters are shards, and "own" for a part that '
                    "no device gathers."
                )
            return varying & gathered
        says = self.sharded[index]
        if says is False:
            may_vary = varying.union(*(g.axes - tracked for g in gathers if not g.by_place))
            if may_vary & gathered:
                raise TypeError(
                    f"Cannot average the gradient of {name} over {_spell(may_vary & gathered)} as "
                    "that of a replica, as sharded=False says, because the function gathers it "
                    "there as a shard: say sharded=True for it."
                )
            return _NO_AXES
        untracked = frozenset(axes) - tracked
        is_gathered = gathered or says == "own" or index not in loss.params - loss.hidden
        if not (varying or untracked) or not is_gathered:
            raise TypeError(
                f"Expected a shard, as sharded={says!r} says, but {name} is the same on all "
                f"devices of {_spell(axes)}, or the function does not gather it: say sharded=False "
                'for a copy, and sharded="own" for a part with which its device alone computes, '
                "such as an expert."
            )
        unknown = [e.axis for e in exchanges if e.axis in untracked]
        known = varying | (gathered & untracked)
        if len(axes) > 1 and untracked and (unknown or not known):
            raise TypeError(
                f"Cannot tell over which of {_spell(axes)} {name} is a shard, as sharded={says!r} "
                "says, because JAX does not track there which arrays vary: give jmpx.Over one "
                "axis, or use jax.shard_map without check_vma=False."
            )
        return known if len(axes) > 1 else varying | untracked


def _spell(axes: Iterable[Hashable]) -> str:
    names = sorted(map(repr, axes))
    return f"the axis {names[0]}" if len(names) == 1 else f"the axes {' and '.join(names)}"


def read_mask(sharded: PyTree, tree: PyTree) -> list[Says] | None:
    """Returns what a mask says of each differentiable array of a pytree; None without a mask."""
    if sharded is None:
        return None
    says: list[PyTree]
    try:
        says = for_each_leaf(sharded, tree, is_inexact_array)
    except (ValueError, TypeError, KeyError):
        says = [None]
    if None in says:
        raise ValueError(
            "Expected sharded to have the structure of the first argument, or of its first levels, "
            f"got {describe(sharded)} for {jax.tree.structure(tree)}: give a bool for each "
            "parameter, or for several at once."
        )
    return says


def for_each_leaf(
    prefix: PyTree,
    tree: PyTree,
    is_wanted: Callable[[object], bool],
    is_leaf: Callable[[object], bool] | None = None,
) -> list[PyTree]:
    """Returns the value that a prefix of a pytree has for each of the wanted leaves."""
    values: list[PyTree] = []

    def add(value: PyTree, subtree: PyTree) -> None:
        values.extend(value for leaf in jax.tree.leaves(subtree, is_leaf) if is_wanted(leaf))

    jax.tree.map(add, prefix, tree, is_leaf=is_none)
    return values
