"""Types of averages and of descriptions of checkpoints. Run here, and checked by pyright."""

from typing import Any, assert_type

import jax
from typed_models import make_params

import jmpx


def test_averages() -> None:
    params = make_params()
    average = jmpx.optim.ema(0.999, debias=True)
    assert_type(average, jmpx.optim.Ema)
    state = average.init(params)
    assert_type(state, jmpx.types.EmaState)
    averaged, state = average.update(params, state, jmpx.all_finite(params))
    assert_type(state, jmpx.types.EmaState)
    assert_type(state.count, jax.Array)
    jmpx.inspect.check_restored(averaged, jmpx.inspect.describe_precision(params))


def test_descriptions() -> None:
    params = make_params()
    description = jmpx.inspect.describe_precision(params, "c=bf16,o=f32")
    assert_type(description, dict[str, Any])
    jmpx.inspect.describe_precision(params, jmpx.MixedPrecision("f32", "none"))
    jmpx.inspect.check_restored(params, description, allow_narrowing=True, allow_widening=False)
