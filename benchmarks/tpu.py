"""The compiler of a TPU v5e, which libtpu brings and which needs no TPU."""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import records
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

TOPOLOGY = "v5e:2x4"
INSTALL = "The compiler of TPUs is missing: pip install -e '.[bench,tpu]'"
# Without these, libtpu asks the network which Google machine this is, and one process alone can
# load it.
SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

PyTree = Any


@functools.cache
def devices(topology: str = TOPOLOGY) -> list[Any]:
    """Returns descriptions of the TPU chips of a topology, eight by default."""
    if importlib.util.find_spec("libtpu") is None:
        print(INSTALL, file=sys.stderr)
        sys.exit(2)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # JAX cannot load from its cache what it compiled for a chip that is not there.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    return list(topologies.get_topology_desc(topology, "tpu").devices)


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
