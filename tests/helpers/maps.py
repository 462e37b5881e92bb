"""A function over four devices, in each of the ways in which JAX maps one."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

DEVICES, AXIS = 4, "data"
MAPS = ["shard_map", "shard_map without vma", "vmap", "pmap"]


def mesh_of(*sizes, names=(AXIS,)):
    """The first devices, as a mesh of these sizes."""
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), names)


def over_devices(run, how, *args, specs=None, devices=DEVICES):
    """Calls `run` on each device with its parts of the arguments.

    Args:
        run: a function of the arguments, which returns a pytree of arrays.
        how: one of `MAPS`.
        *args: pytrees of arrays.
        specs: for each argument, a prefix of `P(AXIS)`, which splits the first axis of arrays, and
            of `P()`; by default all are split.
        devices: their number.

    Returns:
        The results, stacked along a first axis.
    """
    specs = (P(AXIS),) * len(args) if specs is None else specs
    if how.startswith("shard_map"):
        stacked = lambda *args: jax.tree.map(lambda x: x[None], run(*args))  # noqa: E731
        vma = how == "shard_map"
        mapped = jax.shard_map(
            stacked, mesh=mesh_of(devices), in_specs=specs, out_specs=P(AXIS), check_vma=vma
        )
        return jax.jit(mapped)(*args)

    def parts(spec, tree):
        split = lambda x: x.reshape(devices, -1, *x.shape[1:]) if spec else x  # noqa: E731
        return jax.tree.map(split, tree)

    is_spec = lambda spec: isinstance(spec, P)  # noqa: E731
    args = jax.tree.map(parts, specs, args, is_leaf=is_spec)
    axes = jax.tree.map(lambda spec: 0 if spec else None, specs, is_leaf=is_spec)
    if how == "vmap":
        return jax.jit(jax.vmap(run, in_axes=axes, axis_name=AXIS))(*args)
    chosen = jax.devices()[:devices]
    return jax.pmap(run, in_axes=axes, axis_name=AXIS, devices=chosen)(*args)


def everywhere(x, axes: str | tuple[str, ...] = AXIS):
    """As one that varies over the devices: `lax.pvary` on JAX 0.7, `lax.pcast` on later lines."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)  # pyright: ignore[reportAttributeAccessIssue]
