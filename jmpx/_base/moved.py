"""Names of jmpx 0.2 that have moved, and what to write instead."""

import importlib
import warnings
from typing import Any

from jmpx._base.messages import user_stacklevel

ROOMS = ("", ".inspect", ".optim", ".distributed", ".types", ".mpx")
# Renamed since 0.2; what only moved is found in its room.
RENAMED = {
    "Wire": "jmpx.inspect.Collectives",
    "describe": "jmpx.inspect.describe_precision",
    "loss_scale_from": "jmpx.get_loss_scale with the to_dict() of what was saved",
    "wire": "jmpx.inspect.collectives",
}
# Names that still work, in full: what to write instead, and the version that drops them.
RETIRED: dict[str, tuple[str, str]] = {}
# The arguments of gradient functions in jmpx 0.2, MPX and JAX: what to write instead.
GRADIENT_ARGUMENTS = {
    "accumulate_steps": "batch=jmpx.Batch(microbatches=...)",
    "axis_name": 'over=jmpx.Over("data")',
    "batch_argnums": "batch=jmpx.Batch(argnums=...)",
    "batch_sharding": "batch=jmpx.Batch(sharding=...)",
    "dtype": 'policy="c=bf16"',
    "microbatches": "batch=jmpx.Batch(microbatches=...)",
    "sharded": 'over=jmpx.Over("data", sharded=...)',
    "uncast_argnames": "uncast=...",
    "uncast_argnums": "uncast=...",
    "use_mixed_precision": "jmpx.mpx.filter_value_and_grad or jmpx.mpx.filter_grad",
}


def instead_of(name: str) -> str | None:
    """Returns what to write instead of a name that is not where it was looked for, if anything."""
    if name.startswith("_"):
        return None
    rooms = (importlib.import_module(f"jmpx{room}") for room in ROOMS)
    places = (f"{room.__name__}.{name}" for room in rooms if name in room.__all__)
    return RENAMED.get(name) or next(places, None)


def message(module: str, name: str) -> str | None:
    """Returns the error for a name that a module does not have, if it is known elsewhere."""
    instead = instead_of(name)
    return instead and f"module {module!r} has no attribute {name!r}: write {instead} instead."


def retired(name: str) -> Any:
    """Returns what a retired name stands for, and warns of its end.

    Args:
        name: a key of `RETIRED`.

    Warns:
        DeprecationWarning: it names the line of the program, the new name and the version.
    """
    new, version = RETIRED[name]
    text = f"{name} is now {new}: write that instead, because jmpx {version} drops the old name."
    warnings.warn(text, DeprecationWarning, stacklevel=user_stacklevel())
    module, _, attribute = new.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
