"""The classes of what jmpx's functions return and keep, to annotate and to match."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    )
    from jmpx._storage.state_dtype import StateDtypeState as StateDtypeState

    __all__: tuple[str, ...]
else:
    from jmpx._base.later import later

    __getattr__, __dir__, __all__ = later(
        __name__,
        {
            "_autocast": "Autocast",
            "_storage.ema": "EmaState",
            "_steps.gradient": "Gradients GradientsAndAux ValueAndGradients",
            "_storage.low_precision_params": "LowPrecisionParamsState",
            "_steps.optimizer": "SkipNonfiniteState",
            "_policies.maps": "Rule",
            "_storage.state_dtype": "StateDtypeState",
        },
    )
