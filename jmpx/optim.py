"""Parameters, optimizer states and averages in 16 bits that keep what they are given."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx._storage.ema import Ema as Ema, ema as ema
    from jmpx._storage.low_precision_params import low_precision_params as low_precision_params
    from jmpx._storage.rounding import stochastic_round as stochastic_round
    from jmpx._storage.split_master import (
        merge_master as merge_master,
        split_master as split_master,
    )
    from jmpx._storage.state_dtype import with_state_dtype as with_state_dtype

    __all__: tuple[str, ...]
else:
    from jmpx._base.later import later

    __getattr__, __dir__, __all__ = later(
        __name__,
        {
            "_storage.ema": "Ema ema",
            "_storage.low_precision_params": "low_precision_params",
            "_storage.rounding": "stochastic_round",
            "_storage.split_master": "merge_master split_master",
            "_storage.state_dtype": "with_state_dtype",
        },
    )
