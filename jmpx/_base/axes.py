"""The mapped axes of `jax.shard_map`, `jax.pmap` and `jax.vmap`; which arrays vary along them."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jmpx._base.messages import describe, did_you_mean
from jmpx._base.trees import AxisName

T = TypeVar("T")


def axis_names(axis_name: AxisName) -> tuple[Hashable, ...]:
    """Returns the names of one mapped axis or of several; an axis of several names is a tuple."""
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def check_axis(axis_name: AxisName) -> None:
    """Refuses an axis that is not mapped where this is called."""
    for name in axis_names(axis_name):
        if is_mapped(name):
            continue
        remedy = (
            "call this inside of jax.shard_map over a mesh that has the axis, or of jax.pmap or "
            "jax.vmap that gives it as axis_name."
        )
        # JAX lists only the axes of a mesh, not those of `jax.vmap`.
        known = [str(axis) for axis in jax.sharding.get_abstract_mesh().manual_axes]
        if known:
            remedy = f"those of the mesh here are {known}{did_you_mean(str(name), known)}"
        raise ValueError(f"Cannot find the mapped axis {describe(name)}: {remedy}")


def is_mapped(name: Hashable) -> bool:
    """Whether there is a mapped axis of this name where this is called."""
    try:
        jax.lax.axis_size(name)
    except (NameError, TypeError, ValueError):  # unknown, not hashable, an int
        return False
    return True


def varying_axes(x: object) -> frozenset[Hashable]:
    """Returns the axes along which an array, or an abstract one, may differ, as far as JAX knows.

    JAX tracks them under `jax.shard_map` alone: with `check_vma=False`, and under `jax.pmap` and
    `jax.vmap`, the set is empty for every array.
    """
    abstract = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    axis_type = getattr(abstract, "manual_axis_type", None)
    # JAX 0.7 has the set itself.
    return getattr(abstract, "vma", frozenset()) if axis_type is None else axis_type.varying


def is_tracked(axis_name: AxisName) -> bool:
    """Whether JAX tracks which arrays vary along an axis, or along each of several."""
    return tracked_axes().issuperset(axis_names(axis_name))


def tracked_axes() -> frozenset[Hashable]:
    """Returns the axes along which JAX tracks here which arrays vary."""
    # Of a mesh alone: the traced `axis_index` of a `jax.vmap` in a `jax.shard_map` varies, too.
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    return frozenset(name for name in mapped if name in varying_axes(jax.lax.axis_index(name)))


def vary(arrays: Sequence[jax.Array], axes: Iterable[Hashable]) -> list[jax.Array]:
    """Returns the same arrays, marked as varying along those axes that JAX tracks.

    Under `jax.shard_map`, JAX sums the gradient of an array that does not vary along an axis at
    once, in 16 bits. The gradient of a varying array is left to the caller, who sums it in float32.
    Where JAX tracks no axes, the arrays are returned as they are.
    """
    known = tracked_axes()
    tracked = [name for name in axes if name in known]
    return [
        _as_varying(array, tuple(name for name in tracked if name not in varying_axes(array)))
        for array in arrays
    ]


def _as_varying(array: jax.Array, missing: tuple[Hashable, ...]) -> jax.Array:
    if not missing:
        return array
    lax: Any = jax.lax
    if hasattr(lax, "pcast"):
        return lax.pcast(array, missing, to="varying")
    return lax.pvary(array, missing)  # JAX 0.7


def as_whole(array: T) -> T:
    """Replicates an array of numbers if the mesh has `Explicit` axes.

    JAX cannot combine arrays that such axes split in several ways.
    """
    here = jax.sharding.get_abstract_mesh()
    is_numbers = isinstance(array, jax.Array) and not jnp.issubdtype(
        array.dtype, jax.dtypes.extended
    )
    if AxisType.Explicit not in here.axis_types or not is_numbers:
        return array
    return jax.sharding.reshard(array, PartitionSpec())
