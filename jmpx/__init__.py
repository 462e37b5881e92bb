"""jmpx: mixed precision for JAX, from a policy string.

What a training script uses is here. The rest is in rooms: `jmpx.inspect` looks at programs and
values, `jmpx.optim` stores in 16 bits, `jmpx.distributed` gathers shards, `jmpx.types` has the
classes of results and states, `jmpx.mpx` speaks MPX's words, `jmpx.flags` absl's, and
`jmpx.haiku`, `jmpx.equinox` and `jmpx.flax` are for modules of these frameworks.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx import (
        distributed as distributed,
        equinox as equinox,
        flags as flags,
        flax as flax,
        haiku as haiku,
        inspect as inspect,
        mpx as mpx,
        optim as optim,
        types as types,
    )
    from jmpx._applying import apply_policy as apply_policy
    from jmpx._autocast import autocast as autocast
    from jmpx._batches import Batch as Batch
    from jmpx._casts import (
        cast_to_full as cast_to_full,
        cast_to_half as cast_to_half,
        cast_tree as cast_tree,
    )
    from jmpx._dtypes import half_dtype as half_dtype
    from jmpx._function_casts import force_full_precision as force_full_precision
    from jmpx._gradient import (
        filter_grad as filter_grad,
        filter_value_and_grad as filter_value_and_grad,
    )
    from jmpx._loss_scale import (
        DynamicLossScale as DynamicLossScale,
        LossScale as LossScale,
        NoOpLossScale as NoOpLossScale,
        StaticLossScale as StaticLossScale,
    )
    from jmpx._loss_scale_state import restore_loss_scale as restore_loss_scale
    from jmpx._loss_scale_strings import get_loss_scale as get_loss_scale
    from jmpx._metrics import metrics as metrics
    from jmpx._mixed_precision import (
        MixedPrecision as MixedPrecision,
        get_mixed_precision as get_mixed_precision,
    )
    from jmpx._optimizer import (
        optimizer_update as optimizer_update,
        skip_nonfinite as skip_nonfinite,
    )
    from jmpx._policy import Policy as Policy
    from jmpx._policy_map import PolicyMap as PolicyMap, get_policy_map as get_policy_map
    from jmpx._policy_strings import get_policy as get_policy
    from jmpx._registry import (
        clear_policy as clear_policy,
        current_policy as current_policy,
        policy_of as policy_of,
        push_policy as push_policy,
        set_policy as set_policy,
    )
    from jmpx._scopes import full_precision as full_precision
    from jmpx._shards import Over as Over
    from jmpx._tree import all_finite as all_finite, select_tree as select_tree

    __all__: tuple[str, ...]
else:
    # These add parts to the keys of JAX's caches, which have to be there before the first trace.
    from jmpx import _contexts, _matmul  # noqa: F401
    from jmpx._later import later

    __getattr__, __dir__, __all__ = later(
        __name__,
        {
            "_applying": "apply_policy",
            "_autocast": "autocast",
            "_batches": "Batch",
            "_casts": "cast_to_full cast_to_half cast_tree",
            "_dtypes": "half_dtype",
            "_function_casts": "force_full_precision",
            "_gradient": "filter_grad filter_value_and_grad",
            "_loss_scale": "DynamicLossScale LossScale NoOpLossScale StaticLossScale",
            "_loss_scale_state": "restore_loss_scale",
            "_loss_scale_strings": "get_loss_scale",
            "_metrics": "metrics",
            "_mixed_precision": "MixedPrecision get_mixed_precision",
            "_optimizer": "optimizer_update skip_nonfinite",
            "_policy": "Policy",
            "_policy_map": "PolicyMap get_policy_map",
            "_policy_strings": "get_policy",
            "_registry": "clear_policy current_policy policy_of push_policy set_policy",
            "_scopes": "full_precision",
            "_shards": "Over",
            "_tree": "all_finite select_tree",
        },
        rooms=dict.fromkeys(("distributed", "inspect", "mpx", "optim", "types"), "")
        | {"equinox": "equinox", "flags": "absl", "flax": "flax", "haiku": "haiku"},
    )

__version__ = "0.2.0"
