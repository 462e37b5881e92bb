from jmpx._storage.ema import Ema as Ema, ema as ema
from jmpx._storage.low_precision_params import (
    low_precision_params as low_precision_params,
    with_state_dtype as with_state_dtype,
)
from jmpx._storage.rounding import (
    merge_master as merge_master,
    split_master as split_master,
    stochastic_round as stochastic_round,
)

__all__: tuple[str, ...]
