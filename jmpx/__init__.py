"""jmpx: mixed precision for JAX, from a policy string."""

from typing import TYPE_CHECKING

from jmpx._casts import (
    cast_to_bfloat16 as cast_to_bfloat16,
    cast_to_float16 as cast_to_float16,
    cast_to_float32 as cast_to_float32,
    cast_to_full as cast_to_full,
    cast_to_full_precision as cast_to_full_precision,
    cast_to_half as cast_to_half,
    cast_to_half_precision as cast_to_half_precision,
    cast_tree as cast_tree,
)
from jmpx._dtypes import half_dtype as half_dtype
from jmpx._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    DynamicLossScaling as DynamicLossScaling,
    LossScale as LossScale,
    NoOpLossScale as NoOpLossScale,
    StaticLossScale as StaticLossScale,
)
from jmpx._policy import Policy as Policy
from jmpx._policy_map import (
    PolicyMap as PolicyMap,
    Rule as Rule,
    get_policy_map as get_policy_map,
)
from jmpx._policy_strings import get_policy as get_policy
from jmpx._registry import (
    clear_policy as clear_policy,
    current_policy as current_policy,
    policy_of as policy_of,
    push_policy as push_policy,
    set_policy as set_policy,
)
from jmpx._scopes import full_precision as full_precision
from jmpx._tree import all_finite as all_finite, select_tree as select_tree

# Training and autocast are most of the code. Their first use imports them, so that `import jmpx` is
# fast.
if TYPE_CHECKING:
    from jmpx._audit.api import audit as audit
    from jmpx._audit.report import Audit as Audit
    from jmpx._autocast import Autocast as Autocast, autocast as autocast
    from jmpx._batches import Batch as Batch
    from jmpx._contracts import check_restored as check_restored, describe as describe
    from jmpx._ema import Ema as Ema, EmaState as EmaState, ema as ema
    from jmpx._first_nonfinite import (
        FirstNonfinite as FirstNonfinite,
        first_nonfinite as first_nonfinite,
    )
    from jmpx._function_casts import (
        cast_function as cast_function,
        force_full_precision as force_full_precision,
    )
    from jmpx._gather import gather as gather
    from jmpx._gradient import (
        Gradients as Gradients,
        GradientsAndAux as GradientsAndAux,
        ValueAndGradients as ValueAndGradients,
        filter_grad as filter_grad,
        filter_value_and_grad as filter_value_and_grad,
    )
    from jmpx._loss_scale_state import loss_scale_from as loss_scale_from
    from jmpx._loss_scale_strings import get_loss_scale as get_loss_scale
    from jmpx._low_precision_params import (
        LowPrecisionParamsState as LowPrecisionParamsState,
        low_precision_params as low_precision_params,
    )
    from jmpx._mixed_precision import (
        MixedPrecision as MixedPrecision,
        get_mixed_precision as get_mixed_precision,
    )
    from jmpx._optimizer import (
        SkipNonfiniteState as SkipNonfiniteState,
        optimizer_update as optimizer_update,
        skip_nonfinite as skip_nonfinite,
    )
    from jmpx._progress import (
        NonfiniteCounts as NonfiniteCounts,
        check_progress as check_progress,
        nonfinite as nonfinite,
    )
    from jmpx._ranges.api import ranges as ranges
    from jmpx._ranges.report import Ranges as Ranges
    from jmpx._rounding import stochastic_round as stochastic_round
    from jmpx._shards import Over as Over
    from jmpx._split_master import merge_master as merge_master, split_master as split_master
    from jmpx._state_dtype import (
        StateDtypeState as StateDtypeState,
        with_state_dtype as with_state_dtype,
    )
    from jmpx._update_report import (
        LostUpdates as LostUpdates,
        UpdateReport as UpdateReport,
        update_report as update_report,
    )
    from jmpx._wire import Wire as Wire, wire as wire
else:
    _LATER = {
        "_audit.api": ("audit",),
        "_audit.report": ("Audit",),
        "_autocast": ("Autocast", "autocast"),
        "_batches": ("Batch",),
        "_contracts": ("check_restored", "describe"),
        "_ema": ("Ema", "EmaState", "ema"),
        "_first_nonfinite": ("FirstNonfinite", "first_nonfinite"),
        "_function_casts": ("cast_function", "force_full_precision"),
        "_gather": ("gather",),
        "_gradient": (
            "Gradients",
            "GradientsAndAux",
            "ValueAndGradients",
            "filter_grad",
            "filter_value_and_grad",
        ),
        "_loss_scale_state": ("loss_scale_from",),
        "_loss_scale_strings": ("get_loss_scale",),
        "_low_precision_params": ("LowPrecisionParamsState", "low_precision_params"),
        "_mixed_precision": ("MixedPrecision", "get_mixed_precision"),
        "_optimizer": ("SkipNonfiniteState", "optimizer_update", "skip_nonfinite"),
        "_progress": ("NonfiniteCounts", "check_progress", "nonfinite"),
        "_ranges.api": ("ranges",),
        "_ranges.report": ("Ranges",),
        "_rounding": ("stochastic_round",),
        "_shards": ("Over",),
        "_split_master": ("merge_master", "split_master"),
        "_state_dtype": ("StateDtypeState", "with_state_dtype"),
        "_update_report": ("LostUpdates", "UpdateReport", "update_report"),
        "_wire": ("Wire", "wire"),
    }

    def __getattr__(name):
        """Imports the file that defines a public name, and adds its public names to this module."""
        file = next((file for file, names in _LATER.items() if name in names), None)
        if file is None:
            raise AttributeError(f"module 'jmpx' has no attribute {name!r}")
        from importlib import import_module  # here, because names of this module are public

        module = import_module(f"jmpx.{file}")
        globals().update((each, getattr(module, each)) for each in _LATER[file])
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__})


__version__ = "0.2.0"

__all__ = (
    "Audit",
    "Autocast",
    "Batch",
    "DynamicLossScale",
    "DynamicLossScaling",
    "Ema",
    "EmaState",
    "FirstNonfinite",
    "Gradients",
    "GradientsAndAux",
    "LossScale",
    "LostUpdates",
    "LowPrecisionParamsState",
    "MixedPrecision",
    "NoOpLossScale",
    "NonfiniteCounts",
    "Over",
    "Policy",
    "PolicyMap",
    "Ranges",
    "Rule",
    "SkipNonfiniteState",
    "StateDtypeState",
    "StaticLossScale",
    "UpdateReport",
    "ValueAndGradients",
    "Wire",
    "all_finite",
    "audit",
    "autocast",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full",
    "cast_to_full_precision",
    "cast_to_half",
    "cast_to_half_precision",
    "cast_tree",
    "check_progress",
    "check_restored",
    "clear_policy",
    "current_policy",
    "describe",
    "ema",
    "filter_grad",
    "filter_value_and_grad",
    "first_nonfinite",
    "force_full_precision",
    "full_precision",
    "gather",
    "get_loss_scale",
    "get_mixed_precision",
    "get_policy",
    "get_policy_map",
    "half_dtype",
    "loss_scale_from",
    "low_precision_params",
    "merge_master",
    "nonfinite",
    "optimizer_update",
    "policy_of",
    "push_policy",
    "ranges",
    "select_tree",
    "set_policy",
    "skip_nonfinite",
    "split_master",
    "stochastic_round",
    "update_report",
    "wire",
    "with_state_dtype",
)
