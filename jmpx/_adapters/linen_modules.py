"""What a Linen module is in a call: its `dtype` field, what it holds itself, what lifted it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jmpx._adapters.dtype_fields import spelled_as
from jmpx._base.leaves import is_floating
from jmpx._policies.policy import Policy


@contextlib.contextmanager
def field_set(module: nn.Module, dtype: np.dtype | None) -> Iterator[None]:
    """Sets the `dtype` field of a module for a call; None leaves it."""
    written = vars(module).get("dtype")
    if dtype is None or np.dtype(written) == dtype:
        yield
        return
    object.__setattr__(module, "dtype", spelled_as(written, dtype))  # a module is frozen
    try:
        yield
    finally:
        object.__setattr__(module, "dtype", written)


def own(module: nn.Module, collection: str) -> list[Any]:
    """Returns the floating arrays of a collection that a module itself holds."""
    variables = {} if module.scope is None else module.scope.variables().get(collection, {})
    held = [value for value in variables.values() if not isinstance(value, Mapping)]
    return list(filter(is_floating, jax.tree.leaves(held)))


def reads(module: nn.Module) -> bool:
    """Whether a module itself reads parameters or running statistics."""
    return bool(own(module, "params") or own(module, "batch_stats"))


# Collections that are no state: what is written there may have any dtype.
_NO_STATE = ("params", "batch_stats", "intermediates")


def state_dtype(module: nn.Module, policy: Policy | None) -> np.dtype | None:
    """Returns the dtype of state that a module holds, if it is wider than the compute dtype.

    What is written there often has to be as wide: the keys of a cache that was made outside.
    """
    if policy is None or module.scope is None:
        return None
    names = [name for name in module.scope.variables() if name not in _NO_STATE]
    dtypes = [np.dtype(leaf.dtype) for name in names for leaf in own(module, name)]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    is_wide = widest is not None and widest.itemsize > np.dtype(policy.compute_dtype).itemsize
    return widest if is_wide else None


def lifted_by(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module and those around it, with lifted transforms: `scan(block)`."""
    return () if module.scope is None else tuple(module.scope.debug_path)


def written_class(cls: type) -> type:
    """Returns the class that the user wrote, for one that `nn.scan`, `nn.remat` or alike made."""
    while cls.__module__ == nn.remat.__module__:
        cls = cls.__bases__[0]
    return cls
