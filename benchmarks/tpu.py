"""The compiler of a TPU v5e, which libtpu brings and which needs no TPU."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from records import PyTree

from jmpx._inspect.plan.chips import CHIPS, missing


def absent(chip: str, count: int) -> list[Any]:
    """Returns descriptions of chips that are not there."""
    if why := missing(CHIPS[chip]):
        print(why, file=sys.stderr)
        sys.exit(2)
    for name, value in CHIPS[chip].settings.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # else the plugin of GPUs asks the driver
    # JAX cannot load from its cache what it compiled for a chip that is not there.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    return list(topologies.get_topology_desc(**CHIPS[chip].topology(count)).devices)


@functools.cache
def devices(count: int = 8) -> list[Any]:
    """Returns descriptions of some TPU chips."""
    return absent("v5e", count)


def chip() -> Any:
    """Returns the sharding of what one chip has."""
    return jax.sharding.SingleDeviceSharding(devices()[0])


def described(arrays: PyTree, shardings: Any) -> PyTree:
    """Returns arrays as descriptions of arrays that have one sharding, or one each."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, arrays)
    kind = jax.ShapeDtypeStruct
    return jax.tree.map(lambda x, s: kind(x.shape, x.dtype, sharding=s), arrays, shardings)


def compiled(fn: Callable[..., Any], arguments: PyTree, shardings: Any = None) -> Any:
    """Returns a function compiled for one chip, or for those of the shardings of its arguments."""
    traced = jax.jit(fn).trace(*described(arguments, shardings or chip()))
    return traced.lower(lowering_platforms=("tpu",)).compile()
