from jmpx._autocast import Autocast as Autocast
from jmpx._policies.maps import Rule as Rule
from jmpx._steps.gradient import (
    Gradients as Gradients,
    GradientsAndAux as GradientsAndAux,
    ValueAndGradients as ValueAndGradients,
)
from jmpx._steps.optimizer import SkipNonfiniteState as SkipNonfiniteState
from jmpx._storage.ema import EmaState as EmaState
from jmpx._storage.low_precision_params import (
    LowPrecisionParamsState as LowPrecisionParamsState,
    StateDtypeState as StateDtypeState,
)

__all__: tuple[str, ...]
