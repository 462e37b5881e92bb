"""The compiler of a TPU v5e, which libtpu brings and which needs no TPU."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import records
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jmpx._inspect.plan.chips import CHIPS, missing

TOPOLOGY = "v5e:2x4"
PyTree = Any


def absent(chip: str, count: int = 1, **where: str) -> list[Any]:
    """Returns descriptions of chips that are not there; `where` says what their number does not."""
    if why := missing(CHIPS[chip]):
        print(why, file=sys.stderr)
        sys.exit(2)
    for name, value in CHIPS[chip].settings.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # else the plugin of GPUs asks the driver
    # JAX cannot load from its cache what it compiled for a chip that is not there.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    where = CHIPS[chip].topology(count) | where
    return list(topologies.get_topology_desc(**where).devices)


@functools.cache
def devices(topology: str = TOPOLOGY) -> list[Any]:
    """Returns descriptions of the TPU chips of a topology, eight by default."""
    return absent("v5e", topology_name=topology)


def chip() -> Any:
    """Returns the sharding of what one chip has."""
    return jax.sharding.SingleDeviceSharding(devices()[0])


def target() -> records.Record:
    """Returns the fields of a line that say what it was compiled for, and by what."""
    return {"target": devices()[0].device_kind, "libtpu": records.version("libtpu")}


def described(arrays: PyTree, shardings: PyTree) -> PyTree:
    """Returns arrays as descriptions of arrays that are sharded."""
    kind = jax.ShapeDtypeStruct
    return jax.tree.map(lambda x, s: kind(x.shape, x.dtype, sharding=s), arrays, shardings)


def compiled(fn: Callable[..., Any], arguments: PyTree, shardings: Any = None) -> Any:
    """Returns a function compiled for one chip, or for those of the shardings of its arguments."""
    shardings = jax.tree.map(lambda _: chip(), arguments) if shardings is None else shardings
    traced = jax.jit(fn).trace(*described(arguments, shardings))
    return traced.lower(lowering_platforms=("tpu",)).compile()
