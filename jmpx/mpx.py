"""MPX's words, casts and defaults: `import jmpx.mpx as mpx` is all that its users change.

MPX (arXiv 2507.03312) computes in float16 unless it is told otherwise, and its loss scale stays
within float16. jmpx differs from it in three ways: gradients are unscaled by the scale that the
backward pass used, the loss is scaled in float32, and casts reach NumPy arrays and float64, too.
"""

from jmpx._adapters.function_casts import cast_function as cast_function
from jmpx._base.casts import (
    cast_to_full as cast_to_float32,
    cast_to_full as cast_to_full_precision,
    cast_tree as cast_tree,
)
from jmpx._base.trees import all_finite as all_finite, select_tree as select_tree
from jmpx._steps.mpx import (
    BFLOAT16_MAX as BFLOAT16_MAX,
    FLOAT16_MAX as FLOAT16_MAX,
    HALF_PRECISION_DATATYPE as HALF_PRECISION_DATATYPE,
    DynamicLossScaling as DynamicLossScaling,
    calculate_scaled_grad as calculate_scaled_grad,
    cast_to_bfloat16 as cast_to_bfloat16,
    cast_to_float16 as cast_to_float16,
    cast_to_half_precision as cast_to_half_precision,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    force_full_precision as force_full_precision,
    half_precision_datatype as half_precision_datatype,
    scaled as scaled,
    set_half_precision_datatype as set_half_precision_datatype,
)
from jmpx._steps.optimizer import optimizer_update as optimizer_update

__all__ = (
    "BFLOAT16_MAX",
    "DynamicLossScaling",
    "FLOAT16_MAX",
    "HALF_PRECISION_DATATYPE",
    "all_finite",
    "calculate_scaled_grad",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "half_precision_datatype",
    "optimizer_update",
    "scaled",
    "select_tree",
    "set_half_precision_datatype",
)
