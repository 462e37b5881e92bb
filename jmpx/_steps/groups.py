"""Gradients of the groups of a batch that `jax.jit` splits over devices, and their mean.

XLA by itself sums gradients over devices in the dtype of the backward pass. Here the share of each
device becomes a group with gradients of its own, whose mean is computed in the policy's reduce.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jmpx._base.casts import at_least_float32, cast_like
from jmpx._base.leaves import PyTree, is_array, is_floating, is_none, is_traceable, spell
from jmpx._jaxprs.rewriting import with_equations, with_values
from jmpx._jaxprs.types import Equation, Jaxpr, is_jaxpr
from jmpx._steps.arrays import split_arrays
from jmpx._steps.batches import BatchSharding, axes_of
from jmpx._steps.microbatches import Backward, of_arrays

AXIS = "jmpx_groups"  # the mapped axis of the groups


class Groups:
    """The groups that a batch is split into: as many as the mesh has devices along its axes."""

    def __init__(self, sharding: BatchSharding) -> None:
        self.axes = axes_of(sharding)
        self.mesh = _mesh_of(sharding)
        for axis in self.axes:
            _check_axis(axis, self.mesh)
        self.count = math.prod(self.mesh.shape[axis] for axis in self.axes)
        axes = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        self.explicit_axes = tuple(str(axis) for axis, kind in axes if kind == AxisType.Explicit)

    def constrain(self, array: jax.Array) -> jax.Array:
        """Returns an array of shape (groups, ...) with one group on each device of the axes."""
        others = (PartitionSpec.UNCONSTRAINED,) * (array.ndim - 1)
        mesh = jax.sharding.get_abstract_mesh() if self.explicit_axes else self.mesh
        sharding = NamedSharding(mesh, PartitionSpec(self.axes, *others))  # pyright: ignore[reportArgumentType]
        return jax.lax.with_sharding_constraint(array, sharding)

    def freed(self, jaxpr: Jaxpr) -> Jaxpr:
        """Returns a jaxpr whose shardings do not name the axes, along which a group is whole."""
        return with_equations(jaxpr, self._freed_equation)

    def _freed_equation(self, eqn: Equation) -> Equation:
        params = with_values(eqn.params, self._free)
        return eqn if params is eqn.params else eqn.replace(params=params)

    def _free(self, value: Any) -> Any:
        if is_jaxpr(value):
            return self.freed(value)
        if not isinstance(value, NamedSharding):
            return value
        spec = PartitionSpec(*map(self._free_entry, value.spec))
        is_free = spec == value.spec
        return value if is_free else NamedSharding(value.mesh, spec, memory_kind=value.memory_kind)

    def _free_entry(self, entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name not in self.axes)
        return None if entry in self.axes else entry

    def in_auto_axes(
        self, run: Callable[..., Backward], params: list[jax.Array], *others: PyTree
    ) -> Backward:
        """Calls a function of all that it reads where all axes of the mesh are `Auto`.

        Gradients come back sharded as the parameters are, and aux over the groups.
        """
        if not self.explicit_axes:
            return run(params, *others)
        arrays, merge = split_arrays((params, *others))
        run_on_arrays, put_back = of_arrays(run)

        def place(*spec: object) -> NamedSharding:
            return NamedSharding(self.mesh.abstract_mesh, PartitionSpec(*spec))

        grads = [place(*jax.typeof(param).sharding.spec) for param in params]
        places: list[PyTree] = [place(), place(self.axes), place(), grads]
        automatic = jax.sharding.auto_axes(
            lambda arrays: run_on_arrays(*merge(arrays)),
            axes=self.explicit_axes,
            out_sharding=Backward(*places),
        )
        result: Backward = automatic(arrays)  # pyright: ignore[reportAssignmentType]
        return put_back(result)

    def run(
        self, run: Callable[[Sequence[jax.Array]], Backward], arrays: Sequence[jax.Array]
    ) -> Backward:
        """Runs a function of one group's arrays, which averages over `AXIS`, for all groups."""
        run_on_arrays, put_back = of_arrays(run)

        def one(part: Sequence[jax.Array]) -> Backward:
            backward = run_on_arrays(part)
            return backward._replace(state=[_mean(x) for x in backward.state])

        axes: list[PyTree] = [None, 0, None, None]  # Aux alone differs between groups.
        mapped = jax.vmap(one, out_axes=Backward(*axes), axis_name=AXIS, spmd_axis_name=self.axes)
        try:
            return put_back(mapped([self.constrain(array) for array in arrays]))
        except ValueError as error:
            if "spmd_axis_name" not in str(error):
                raise
            raise ValueError(
                f"Cannot split an array over {self.axes}, the axes of the batch's sharding, in a "
                "derivative rule of jax.custom_vjp or jax.custom_jvp, because each group of the "
                "batch is on one device of them: leave them out of the shardings there."
            ) from error


def check_variables(new: Sequence[jax.Array], stored: Sequence[PyTree]) -> None:
    """Refuses new variables of an NNX module, stored as None, that hold something of examples."""
    for array, old in zip(new, stored, strict=True):
        is_alike = is_array(old) and old.shape == array.shape
        if not is_alike and differs(array):
            raise ValueError(
                f"Cannot average {spell(array)} in a variable of an NNX module "
                "over the groups of the batch, because it is new or of another shape than "
                "before, as an activation of the examples is: return it by has_aux=True instead."
            )


def as_placed(new: PyTree, old: PyTree) -> PyTree:
    """Returns new model state, whose arrays are split as those that they replace."""
    # With `Explicit` axes a sharding is a part of an array's type, which the carry of a loop keeps.

    def place(new: PyTree, old: PyTree) -> PyTree:
        if not (is_traceable(new) and is_traceable(old)) or new.shape != old.shape:
            return new
        sharding = jax.typeof(old).sharding
        if sharding.spec == jax.typeof(new).sharding.spec:
            return new
        return jax.sharding.reshard(new, sharding)

    return jax.tree.map(place, new, old, is_leaf=is_none)


def _mean(array: jax.Array) -> jax.Array:
    """Returns the mean of an array of model state over the groups, the same bits if it is equal."""
    if not differs(array):
        return array
    if not is_floating(array):
        raise ValueError(
            f"Cannot average {spell(array)} of the model state over the groups "
            "of the batch, because it is not floating and depends on the examples: keep it out of "
            "the state, or use over=jmpx.Over(...) under jax.shard_map instead."
        )
    return cast_like(jax.lax.pmean(at_least_float32(array), AXIS), array)


def differs(array: jax.Array) -> bool:
    """Whether an array may differ between groups."""
    # Under `jax.vmap`, the maximum of what does not depend on the index is the same object.
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.real(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.int32)
    return jax.lax.pmax(array, AXIS) is not array


def _mesh_of(sharding: BatchSharding) -> Mesh | AbstractMesh:
    """Returns the mesh of a sharding; of the same mesh, the one whose axis types hold here."""
    here = jax.sharding.get_abstract_mesh()
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape != here.shape:
        return sharding.mesh
    return here


def _check_axis(axis: str, mesh: Mesh | AbstractMesh) -> None:
    """Refuses an axis over which nothing is split here: it is unknown, or mapped."""
    names = [str(name) for name in mesh.axis_names]
    if axis not in names:
        raise ValueError(
            f"Cannot find a mesh with the axis {axis!r} of the batch's sharding among {names}: set "
            "one by jax.set_mesh, or give a jax.sharding.NamedSharding."
        )
    kind = dict(zip(names, mesh.axis_types, strict=True))[axis]
    if kind == AxisType.Manual:
        raise ValueError(
            f"Cannot split a batch over the axis {axis!r} of its sharding, which jax.shard_map "
            f"maps here, so that it is split already: give over=jmpx.Over({axis!r}) instead."
        )
