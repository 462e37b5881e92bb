"""Words of other libraries and of jmpx 0.2, and what to write instead."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

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
# Of PyTorch, Apex, Lightning, Flax, JAX, optax, Keras and Haiku.
OTHERS = {
    "AveragedModel": "jmpx.optim.ema",
    "DynamicLossScaler": "jmpx.DynamicLossScale",
    "DynamicScale": "jmpx.DynamicLossScale with jmpx.filter_value_and_grad",
    "FP16_Optimizer": "jmpx.optim.low_precision_params",
    "GradScaler": "jmpx.DynamicLossScale with jmpx.filter_value_and_grad",
    "LossScaleOptimizer": "jmpx.skip_nonfinite with a jmpx.DynamicLossScale",
    "LossScaler": "jmpx.StaticLossScale",
    "MixedPrecisionPlugin": "jmpx.get_mixed_precision",
    "MixedPrecisionPolicy": "jmpx.get_policy",
    "amp": "jmpx.apply_policy, or jmpx.autocast for single operations",
    "apply_if_finite": "jmpx.skip_nonfinite",
    "cast": "jmpx.cast_tree",
    "custom_fwd": "jmpx.force_full_precision",
    "detect_anomaly": "jmpx.inspect.first_nonfinite",
    "grad": "jmpx.filter_grad",
    "initialize": "jmpx.apply_policy",
    "master_params": "jmpx.optim.split_master",
    "mixed_precision": "jmpx.apply_policy, or jmpx.set_policy for a class",
    "scale_loss": "jmpx.filter_value_and_grad",
    "set_detect_anomaly": "jmpx.inspect.first_nonfinite",
    "set_global_policy": "the policy= of jmpx.filter_value_and_grad and jmpx.apply_policy",
    "value_and_grad": "jmpx.filter_value_and_grad",
}
# The arguments of DynamicLossScale by the words that others have for them.
SCALES = {
    "delayed_shift": "hysteresis",
    "dynamic_growth_steps": "period",
    "fin_steps": "counter",
    "growth_factor": "factor",
    "growth_interval": "period",
    "init_scale": "loss_scale",
    "initial_scale": "loss_scale",
    "max_scale": "max_loss_scale",
    "min_scale": "min_loss_scale",
    "minimum_scale": "min_loss_scale",
    "scale": "loss_scale",
    "scale_factor": "factor",
    "scale_window": "period",
}
# What is written instead of an argument, by the function that others, or jmpx 0.2, give it to.
ARGUMENTS = {
    "jmpx.autocast": {
        "cache_enabled": "leave it out, because each parameter is cast once in a trace",
        "device_type": "leave it out, because one autocast serves all devices",
        "dtype": 'policy="c=bf16"',
        "enabled": 'leave it out, or give policy="full" where it is off',
        "rules": 'rules for operations in policy, as policy="c=bf16; op.exp: f32",',
    },
    "jmpx.DynamicLossScale": {
        **{word: f"{argument}=" for word, argument in SCALES.items()},
        "enabled": "leave it out, or take jmpx.NoOpLossScale() where it is off",
        "loss_scaling": "loss_scale=, or jmpx.mpx.DynamicLossScaling,",
        "min_loss_scaling": "min_loss_scale=, or jmpx.mpx.DynamicLossScaling,",
    },
    "a gradient function": {
        "accumulate_steps": "batch=jmpx.Batch(microbatches=...)",
        "argnums": "leave it out, and pass what is differentiated first",
        "axis_name": 'over=jmpx.Over("data")',
        "batch_argnums": "batch=jmpx.Batch(argnums=...)",
        "batch_sharding": "batch=jmpx.Batch(sharding=...)",
        "dtype": 'policy="c=bf16"',
        "microbatches": "batch=jmpx.Batch(microbatches=...)",
        "sharded": 'over=jmpx.Over("data", sharded=...)',
        "uncast_argnames": "uncast=...",
        "uncast_argnums": "uncast=...",
        "use_mixed_precision": "jmpx.mpx.filter_value_and_grad or jmpx.mpx.filter_grad",
    },
    "jmpx.MixedPrecision": {
        "buffer_dtype": "a policy map with rules for modules",
        "cast_forward_inputs": "leave it out, and give jmpx.apply_policy uncast=",
        "output_dtype": 'policy_map="c=bf16,o=f32"',
        "param_dtype": 'policy_map="c=bf16"',
        "reduce_dtype": 'policy_map="c=bf16,reduce=f32"',
    },
}
F = TypeVar("F", bound=Callable[..., Any])


def instead_of(name: str) -> str | None:
    """Returns what to write instead of a name that is not where it was looked for, if anything."""
    if name.startswith("_"):
        return None
    rooms = (importlib.import_module(f"jmpx{room}") for room in ROOMS)
    places = (f"{room.__name__}.{name}" for room in rooms if name in room.__all__)
    return RENAMED.get(name) or OTHERS.get(name) or next(places, None)


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


def remedy(function: str, argument: str) -> str | None:
    """Returns what to do about an argument that a function does not take, if that is known."""
    found = ARGUMENTS[function].get(argument)
    return f"write {found} instead" if found and not found.startswith("leave") else found


def telling(name: str) -> Callable[[F], F]:
    """Makes a function, or the constructor of a class, tell what to write for an argument.

    Args:
        name: its key in the table.
    """

    def decorate(func: Any) -> Any:
        if isinstance(func, type):
            func.__init__ = decorate(func.__init__)
            return func

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for key in kwargs:
                if found := remedy(name, key):
                    raise TypeError(f"{name} takes no {key}: {found}.")
            return func(*args, **kwargs)

        return wrapper

    return decorate
