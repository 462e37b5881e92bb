"""The compiler of a TPU v5e, which libtpu brings and which needs no TPU."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

TOPOLOGY = "v5e:2x4"
# Else libtpu asks the network which machine of Google this is, and lets one process load it.
SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

PyTree = Any


@functools.cache
def devices() -> list[Any]:
    """Returns descriptions of eight TPU chips."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # JAX cannot load from its cache what it compiled for a chip that is not there.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    return list(topologies.get_topology_desc(TOPOLOGY, "tpu").devices)


def compiled(fn: Callable[..., Any], arguments: PyTree, shardings: Any = None) -> Any:
    """Returns a function compiled for one chip, or for those of the shardings of its arguments."""
    chip = jax.sharding.SingleDeviceSharding(devices()[0])
    arguments = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arguments,
        jax.tree.map(lambda _: chip, arguments) if shardings is None else shardings,
    )
    return jax.jit(fn).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
