"""Parameters, optimizer states and averages in 16 bits that keep what they are given."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx._ema import Ema as Ema, ema as ema
    from jmpx._low_precision_params import low_precision_params as low_precision_params
    from jmpx._rounding import stochastic_round as stochastic_round
    from jmpx._split_master import merge_master as merge_master, split_master as split_master
    from jmpx._state_dtype import with_state_dtype as with_state_dtype

    __all__: tuple[str, ...]
else:
    from jmpx._later import later

    __getattr__, __dir__, __all__ = later(
        __name__,
        {
            "_ema": "Ema ema",
            "_low_precision_params": "low_precision_params",
            "_rounding": "stochastic_round",
            "_split_master": "merge_master split_master",
            "_state_dtype": "with_state_dtype",
        },
    )
