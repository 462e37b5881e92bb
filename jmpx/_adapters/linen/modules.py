"""What a Linen module is in a call: its `dtype` field, what it holds itself, what lifted it."""

from collections.abc import Mapping

import jax
import numpy as np
from flax import linen as nn

from jmpx._adapters.boundaries import widest
from jmpx._adapters.proxies import is_public
from jmpx._base.leaves import is_floating
from jmpx._jaxprs.marks import Module
from jmpx._policies.policy import Policy


def module_of(module: nn.Module) -> Module:
    """Returns a module as the class that the user wrote, and its path."""
    cls = type(module)
    while cls.__module__ == nn.remat.__module__:  # made by `nn.scan`, `nn.remat` or the like
        cls = cls.__bases__[0]
    return Module(cls, "/".join(module.path))


def is_public_method(cls: type, name: str) -> bool:
    """Whether a method is public. Bodies of lifted functions run as methods of no class."""
    return name != "setup" and is_public(name) and hasattr(cls, name)


def own(module: nn.Module, collection: str) -> list[jax.Array]:
    """Returns the floating arrays of a collection that a module itself holds."""
    variables = {} if module.scope is None else module.scope.variables().get(collection, {})
    held = [value for value in variables.values() if not isinstance(value, Mapping)]
    return list(filter(is_floating, jax.tree.leaves(held)))


def reads(module: nn.Module) -> bool:
    """Whether a module itself reads parameters or running statistics."""
    return bool(own(module, "params") or own(module, "batch_stats"))


def state_dtype(module: nn.Module, policy: Policy | None) -> np.dtype | None:
    """Returns the dtype of state, such as a cache, if it is wider than the compute dtype."""
    if policy is None or module.scope is None:
        return None
    others = ("params", "batch_stats", "intermediates")  # may be written in any dtype
    names = [name for name in module.scope.variables() if name not in others]
    compute = np.dtype(policy.compute_dtype)
    dtype = widest([compute, *(leaf.dtype for name in names for leaf in own(module, name))])
    return dtype if dtype.itemsize > compute.itemsize else None


def lifted_by(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module and those around it, with lifted transforms: `scan(block)`."""
    return () if module.scope is None else tuple(module.scope.debug_path)
