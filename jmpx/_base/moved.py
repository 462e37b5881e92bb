"""Names of jmpx 0.2 that have moved, and what to write instead."""

import importlib

ROOMS = ("", ".inspect", ".optim", ".distributed", ".types", ".mpx")
# Renamed since 0.2; what only moved is found in its room.
RENAMED = {
    "Wire": "jmpx.inspect.Collectives",
    "describe": "jmpx.inspect.describe_precision",
    "filter_grad": "jmpx.grad",
    "filter_value_and_grad": "jmpx.value_and_grad",
    "loss_scale_from": "jmpx.get_loss_scale with the to_dict() of what was saved",
    "wire": "jmpx.inspect.collectives",
}
# The arguments of gradient functions in jmpx 0.2, MPX and JAX: what to write instead.
GRADIENT_ARGUMENTS = {
    "accumulate_steps": "microbatches=...",
    "axis_name": 'over="data"',
    "batch_argnums": "batch=jmpx.Batch(argnums=...)",
    "batch_sharding": "r=f32 in the policy",
    "dtype": 'policy="c=bf16"',
    "scaling": "the loss scale as the second argument, or loss_scale=...,",
    "sharded": 'over=jmpx.Over("data", sharded=...)',
    "uncast_argnames": "uncast=...",
    "uncast_argnums": "uncast=...",
    "use_mixed_precision": "jmpx.mpx.filter_value_and_grad or jmpx.mpx.filter_grad",
}


def instead_of(name: str) -> str | None:
    """Returns what to write instead of `jmpx.name`, None if the name is not known elsewhere."""
    rooms = (importlib.import_module(f"jmpx{room}") for room in ROOMS)
    places = (f"{room.__name__}.{name}" for room in rooms if name in room.__all__)
    return RENAMED.get(name) or next(places, None)


def message(module: str, name: str) -> str | None:
    """Returns the error for a name that a module does not have, if it is known elsewhere."""
    instead = None if name.startswith("_") else instead_of(name)
    return instead and f"module {module!r} has no attribute {name!r}: write {instead} instead."
