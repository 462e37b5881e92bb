"""Classes of pytrees that `jax.export` serializes, as arguments or results of a step."""

import contextlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax.export

ClassT = TypeVar("ClassT", bound=type)
Configuration = Any  # what a node has beside its children


def serialized(
    cls: ClassT,
    write: Callable[[Configuration], object] = lambda configuration: configuration,
    read: Callable[[Any], Configuration] = lambda value: value,
) -> ClassT:
    """Lets `jax.export` serialize a class of pytrees, whose configuration is written as JSON."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    with contextlib.suppress(ValueError):  # A registration from before a module's reload stays.
        if hasattr(cls, "_fields"):
            return jax.export.register_namedtuple_serialization(cls, serialized_name=name)
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=lambda configuration: json.dumps(write(configuration)).encode(),
            deserialize_auxdata=lambda data: read(json.loads(data)),
        )
    return cls
