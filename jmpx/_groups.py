"""Gradients of the groups of a batch that `jax.jit` splits over devices, and their mean.

XLA sums gradients over devices where the backward pass makes them, in its dtype. Here the share of
each device becomes a group with gradients of its own, so that what XLA sums over devices is their
mean, in the dtype that the policy says.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jmpx._casts import at_least_float32, cast_like
from jmpx._leaves import PyTree, is_floating
from jmpx._messages import did_you_mean
from jmpx._microbatches import Backward, split_arrays

AXIS = "jmpx_groups"  # the mapped axis of the groups
BatchSharding: TypeAlias = NamedSharding | PartitionSpec


def check_batch_sharding(batch_sharding: object, axis_name: Hashable | None) -> None:
    """Refuses anything but a sharding that splits the first axis of a batch.

    Raises:
        TypeError: if it is no `NamedSharding` and no `PartitionSpec`.
        ValueError: if it does not split the first axis, or if there is a mapped axis, too.
    """
    if batch_sharding is None:
        return
    if not isinstance(batch_sharding, NamedSharding | PartitionSpec):
        raise TypeError(
            f"Expected batch_sharding to be a jax.sharding.NamedSharding, or a PartitionSpec under "
            f"jax.set_mesh, got {batch_sharding!r}: give the sharding of the batch."
        )
    if not _axes_of(batch_sharding):
        raise ValueError(
            f"Expected batch_sharding to split the first axis of a batch, got {batch_sharding}: "
            'name a mesh axis first, as in PartitionSpec("data").'
        )
    if axis_name is not None:
        raise ValueError(
            f"Cannot average over both batch_sharding={batch_sharding} and "
            f"axis_name={axis_name!r}: batch_sharding is for jax.jit alone, and axis_name for the "
            "mapped axis of jax.shard_map, jax.pmap or jax.vmap."
        )


def _axes_of(batch_sharding: BatchSharding) -> tuple[str, ...]:
    spec = batch_sharding.spec if isinstance(batch_sharding, NamedSharding) else batch_sharding
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,)
    return tuple(axis for axis in axes if isinstance(axis, str))


class Groups:
    """The groups that a batch is split into: as many as the mesh has devices along its axes.

    Args:
        batch_sharding: the sharding of the batch.

    Raises:
        ValueError: if it is a `PartitionSpec` and there is no mesh that has its axes.
    """

    def __init__(self, batch_sharding: BatchSharding) -> None:
        self.axes = _axes_of(batch_sharding)
        if isinstance(batch_sharding, NamedSharding):
            self.mesh = batch_sharding.mesh
        else:
            self.mesh = jax.sharding.get_abstract_mesh()
            for axis in self.axes:
                _check_mesh(axis, self.mesh.axis_names)
        self.count = 1
        for axis in self.axes:
            self.count *= self.mesh.shape[axis]

    def constrain(self, array: jax.Array) -> jax.Array:
        """Returns an array of shape (groups, ...) with one group on each device of the axes."""
        others = (PartitionSpec.UNCONSTRAINED,) * (array.ndim - 1)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes, *others))  # pyright: ignore[reportArgumentType]
        return jax.lax.with_sharding_constraint(array, sharding)

    def run(
        self, run: Callable[[Sequence[jax.Array]], Backward], arrays: Sequence[jax.Array]
    ) -> Backward:
        """Runs a function of one group's arrays for all groups at once.

        Args:
            run: returns a value and gradients that are averaged over `AXIS`.
            arrays: arrays of shape (groups, examples in each, ...).

        Returns:
            The same value and gradients, aux with a leading axis of groups, and the mean of the
            model state over groups.

        Raises:
            ValueError: if an array of model state that has no mean differs between groups.
        """
        rebuild: list[Callable[[Sequence[Any]], PyTree]] = []

        def one(part: Sequence[jax.Array]) -> Any:
            backward = run(part)
            aux, merge = split_arrays(backward.aux)
            state, merge_state = split_arrays(backward.state)
            rebuild[:] = [merge, merge_state]
            return backward.value, aux, [_mean(x) for x in state], backward.grads

        mapped = jax.vmap(
            one, out_axes=(None, 0, None, None), axis_name=AXIS, spmd_axis_name=self.axes
        )
        try:
            value, aux, state, grads = mapped([self.constrain(array) for array in arrays])
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise ValueError(
                "Cannot average the model state over the groups of batch_sharding, because an "
                "array of it that is not floating depends on the examples: keep it out of the "
                "state, or use axis_name under jax.shard_map instead."
            ) from error
        return Backward(value, rebuild[0](aux), rebuild[1](state), grads)


def _mean(array: jax.Array) -> jax.Array:
    if not is_floating(array):
        return array
    return cast_like(jax.lax.pmean(at_least_float32(array), AXIS), array)


def _check_mesh(axis: str, known: Sequence[Any]) -> None:
    names = [str(name) for name in known]
    if axis in names:
        return
    if names:
        where = f"expected one of the axes {names}{did_you_mean(axis, names)}"
    else:
        where = "set one by jax.set_mesh, or give a jax.sharding.NamedSharding"
    raise ValueError(f"Cannot find a mesh with the axis {axis!r} of batch_sharding: {where}.")
