"""The classes of what jmpx's functions return and keep, to annotate and to match."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx._autocast import Autocast as Autocast
    from jmpx._ema import EmaState as EmaState
    from jmpx._gradient import (
        Gradients as Gradients,
        GradientsAndAux as GradientsAndAux,
        ValueAndGradients as ValueAndGradients,
    )
    from jmpx._low_precision_params import LowPrecisionParamsState as LowPrecisionParamsState
    from jmpx._optimizer import SkipNonfiniteState as SkipNonfiniteState
    from jmpx._policy_map import Rule as Rule
    from jmpx._state_dtype import StateDtypeState as StateDtypeState

    __all__: tuple[str, ...]
else:
    from jmpx._later import later

    __getattr__, __dir__, __all__ = later(
        __name__,
        {
            "_autocast": "Autocast",
            "_ema": "EmaState",
            "_gradient": "Gradients GradientsAndAux ValueAndGradients",
            "_low_precision_params": "LowPrecisionParamsState",
            "_optimizer": "SkipNonfiniteState",
            "_policy_map": "Rule",
            "_state_dtype": "StateDtypeState",
        },
    )
