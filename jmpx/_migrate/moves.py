"""Where names and arguments of other libraries and of jmpx 0.2 are now."""

import importlib
from pathlib import Path

from jmpx._base import moved

_JMP = """
    DynamicLossScale LossScale NoOpLossScale Policy StaticLossScale all_finite cast_to_full
    cast_to_half get_policy half_dtype select_tree
""".split()
_HAIKU = "clear_policy current_policy push_policy set_policy".split()
_MOVED = {
    **{f"jmp.{name}": f"jmpx.{name}" for name in _JMP},
    **{f"haiku.mixed_precision.{name}": f"jmpx.{name}" for name in _HAIKU},
    "haiku.mixed_precision.get_policy": "jmpx.policy_of",
    "flax.training.dynamic_scale.DynamicScale": "jmpx.DynamicLossScale",
}
# Arguments of Flax's DynamicScale, and what they are called here.
DYNAMIC_SCALE = {
    "backoff_factor": "backoff_factor",
    "fin_steps": "counter",
    "growth_factor": "factor",
    "growth_interval": "period",
    "minimum_scale": "min_loss_scale",
    "scale": "loss_scale",
}
# Arguments of the gradient functions of jmpx 0.2: the new argument, and its own argument there.
GRADIENT_FUNCTIONS = ("jmpx.filter_grad", "jmpx.filter_value_and_grad")
GRADIENT = {
    "accumulate_steps": ("batch", "microbatches"),
    "axis_name": ("over", "axis_name"),
    "batch_argnums": ("batch", "argnums"),
    "microbatches": ("batch", "microbatches"),
    "scaling": ("loss_scale", ""),
    "sharded": ("over", "sharded"),
    "uncast_argnames": ("uncast", ""),
    "uncast_argnums": ("uncast", ""),
}
_R = "leave out batch_sharding, and write r=f32 in the policy"
# Other arguments of jmpx 0.2 that are gone, by function and argument: what to write.
GONE = {
    ("autocast", "pieces"): 'leave out pieces: save="products" finds blocks',
    ("autocast", "rules"): 'write the rules into the policy, as in "c=bf16; op.exp: f32"',
    ("filter_grad", "batch_sharding"): _R,
    ("filter_grad", "use_mixed_precision"): moved.GRADIENT_ARGUMENTS["use_mixed_precision"],
    ("filter_value_and_grad", "batch_sharding"): _R,
    ("filter_value_and_grad", "use_mixed_precision"): 'write policy="full" for False',
    ("force_full_precision", "matmul"): 'wrap it in jmpx.full_precision(..., matmul="highest")',
    ("low_precision_params", "state_dtype"): "wrap the optimizer in jmpx.optim.with_state_dtype",
    ("ranges", "extremes_only"): "leave out extremes_only",
    ("skip_nonfinite", "max_consecutive_skips"): "call jmpx.inspect.check_progress between steps",
    ("update_report", "weight_decay"): "pass the decay as updates",
}


def new_name(old: str) -> str | None:
    """Returns the dotted name that takes the place of `old`; None if that stays, or is unknown."""
    module, _, name = old.rpartition(".")
    if module == "mpx" and name in importlib.import_module("jmpx.mpx").__all__:
        return f"jmpx.{old}"
    if module == "jmpx" and not _is_there(name):
        instead = moved.instead_of(name)
        return instead if instead and " " not in instead else None
    return _MOVED.get(old)


def unknown(old: str) -> str | None:
    """Returns what to say of a name of jmpx 0.2 that is gone; None for all others."""
    module, _, name = old.rpartition(".")
    if new_name(old) or name.startswith("__"):
        return None
    if module == "jmpx" and not _is_there(name):
        instead = moved.instead_of(name)
        return f"write {instead}" if instead else f"jmpx has no {name}"
    return None


def _is_there(name: str) -> bool:
    root = importlib.import_module("jmpx")
    return name in root.__all__ or Path(str(root.__file__)).with_name(f"{name}.py").is_file()
