from jmpx._storage.ema import Ema as Ema, ema as ema
from jmpx._storage.low_precision_params import low_precision_params as low_precision_params
from jmpx._storage.rounding import stochastic_round as stochastic_round
from jmpx._storage.split_master import (
    merge_master as merge_master,
    split_master as split_master,
)
from jmpx._storage.state_dtype import with_state_dtype as with_state_dtype

__all__: tuple[str, ...]
