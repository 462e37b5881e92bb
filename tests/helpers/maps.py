"""A function over four devices, in each of the ways in which JAX maps one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from helpers import enable_x64

DEVICES, AXIS = 4, "data"
MAPS = ["shard_map", "shard_map without vma", "vmap", "pmap"]


def mesh_of(*sizes, names=(AXIS, "model"), axis_type=AxisType.Auto):
    """The first devices, as a mesh of these sizes."""
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def mapped(run, how, in_axes: Any = 0, *, names=AXIS, devices=DEVICES):
    """Maps `run` over the first axes of its arguments, and stacks its results.

    Args:
        run: a function of pytrees of arrays, which returns one.
        how: one of `MAPS`.
        in_axes: those of `jax.vmap`: 0, or None for what each device has whole.
        names: the name of the axis, or of two axes of a mesh.
        devices: their number, the length of each first axis.

    Returns:
        A jitted function, which can be lowered.
    """
    if how == "vmap":
        return jax.jit(jax.vmap(run, in_axes=in_axes, axis_name=names))
    if how == "pmap":
        chosen = jax.devices()[:devices]
        return jax.pmap(run, in_axes=in_axes, axis_name=names, devices=chosen)
    is_none = lambda axis: axis is None  # noqa: E731
    specs = jax.tree.map(lambda axis: P(names) if axis == 0 else P(), in_axes, is_leaf=is_none)

    def part(spec, tree):
        return jax.tree.map(lambda x: x[0], tree) if spec else tree

    def stacked(*args):
        of_each = (specs,) * len(args) if isinstance(specs, P) else specs
        parts = jax.tree.map(part, of_each, args, is_leaf=lambda spec: isinstance(spec, P))
        return jax.tree.map(lambda x: x[None], run(*parts))

    sizes = (2, devices // 2) if isinstance(names, tuple) else (devices,)
    mesh = mesh_of(*sizes, names=names if isinstance(names, tuple) else (names,))
    vma = how != "shard_map without vma"
    return jax.jit(
        jax.shard_map(stacked, mesh=mesh, in_specs=specs, out_specs=P(names), check_vma=vma)
    )


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
    is_spec = lambda spec: isinstance(spec, P)  # noqa: E731

    def parts(spec, tree):
        split = lambda x: x.reshape(devices, -1, *x.shape[1:]) if spec else x  # noqa: E731
        return jax.tree.map(split, tree)

    args = jax.tree.map(parts, specs, args, is_leaf=is_spec)
    axes = jax.tree.map(lambda spec: 0 if spec else None, specs, is_leaf=is_spec)
    return mapped(run, how, axes, devices=devices)(*args)


def everywhere(x, axes: str | tuple[str, ...] = AXIS):
    """As one that varies over the devices: `lax.pvary` on JAX 0.7, `lax.pcast` on later lines."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)  # pyright: ignore[reportAttributeAccessIssue]


def in_float64(loss_fn, *args):
    """The value and the gradient of a loss on one device."""
    with enable_x64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), args)
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss_fn))(*wide))
