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
from jmpx._adapters.applying import apply_policy as apply_policy
from jmpx._adapters.function_casts import force_full_precision as force_full_precision
from jmpx._autocast import autocast as autocast
from jmpx._base.dtypes import half_dtype as half_dtype
from jmpx._base.trees import (
    all_finite as all_finite,
    cast_to_full as cast_to_full,
    cast_to_half as cast_to_half,
    cast_tree as cast_tree,
    select_tree as select_tree,
)
from jmpx._devices.shards import Over as Over
from jmpx._jaxprs.marks import full_precision as full_precision
from jmpx._policies.map_strings import get_policy_map as get_policy_map
from jmpx._policies.maps import PolicyMap as PolicyMap
from jmpx._policies.policy import Policy as Policy
from jmpx._policies.registry import (
    clear_policy as clear_policy,
    current_policy as current_policy,
    policy_of as policy_of,
    push_policy as push_policy,
    set_policy as set_policy,
)
from jmpx._policies.strings import get_policy as get_policy
from jmpx._remat.remat import remat as remat
from jmpx._scales.kinds import (
    DynamicLossScale as DynamicLossScale,
    LossScale as LossScale,
    NoOpLossScale as NoOpLossScale,
    StaticLossScale as StaticLossScale,
)
from jmpx._scales.strings import (
    MixedPrecision as MixedPrecision,
    get_loss_scale as get_loss_scale,
    get_mixed_precision as get_mixed_precision,
)
from jmpx._steps.batches import Batch as Batch
from jmpx._steps.gradient import (
    grad as grad,
    value_and_grad as value_and_grad,
)
from jmpx._steps.optimizer import (
    optimizer_update as optimizer_update,
    skip_nonfinite as skip_nonfinite,
)
from jmpx._steps.progress import metrics as metrics

__all__: tuple[str, ...]
__version__: str
