"""Types of rounding to 16 bits, and of what it loses. Run here, and checked by pyright."""

# An ignored error must be there: it is what this file asserts.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import pytest
from typed_models import Params, make_params

import jmpx


def test_stochastic_rounding() -> None:
    params = make_params()
    assert_type(jmpx.optim.stochastic_round(params, "bfloat16", jax.random.key(0)), Params)
    with pytest.raises(TypeError):
        jmpx.optim.stochastic_round(params, "bfloat16")  # pyright: ignore[reportCallIssue]


def test_split_masters() -> None:
    params = make_params()
    high, low = jmpx.optim.split_master(params)
    assert_type(high, Params)
    assert_type(jmpx.optim.merge_master(high, low), Params)


def test_update_report() -> None:
    params: Any = make_params()
    report = jmpx.inspect.update_report(params, params)
    assert_type(report, jmpx.inspect.UpdateReport)
    assert_type(report.updates, dict[str, jmpx.inspect.LostUpdates])
    assert isinstance(next(iter(report.updates.values())), jmpx.inspect.LostUpdates)
