"""Loss scales in checkpoints: plain numbers, and a run that goes on with another kind."""

import json
import logging
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax import serialization
from helpers import assert_same_bits
from helpers.training import value
from hypothesis import given, settings, strategies as st

import jmpx

STATES = {
    "none": (jmpx.NoOpLossScale(), {"type": "none"}),
    "static": (jmpx.StaticLossScale(8), {"type": "static", "loss_scale": 8.0}),
    "dynamic": (
        jmpx.DynamicLossScale(2.0**12, 5, period=9),
        {"type": "dynamic", "loss_scale": 4096.0, "counter": 5},
    ),
    "dynamic, on a device": (
        jmpx.DynamicLossScale(jnp.float32(2.0**12), jnp.int32(5)),
        {"type": "dynamic", "loss_scale": 4096.0, "counter": 5},
    ),
}
LIKES = (jmpx.NoOpLossScale(), jmpx.StaticLossScale(16), jmpx.DynamicLossScale(4.0, period=7))
restore_loss_scale: Any = jmpx.restore_loss_scale


@pytest.mark.parametrize("name", STATES)
def test_the_state_is_plain_numbers(name):
    scale, expected = STATES[name]
    state = scale.state_dict()
    assert state == expected
    assert all(type(each) in (str, int, float) for each in state.values())
    assert json.loads(json.dumps(state)) == msgpack.unpackb(msgpack.packb(state)) == state


@settings(max_examples=50, deadline=None)
@given(
    st.floats(2.0**-126, 2.0**126, width=32), st.integers(-(2**31 - 1), 2**31 - 1), st.integers(1)
)
def test_every_state_comes_back_to_the_bit(scale, counter, hysteresis):
    hysteresis = min(hysteresis, 2**31 - 1)
    saved = jmpx.DynamicLossScale(scale, counter, min_loss_scale=0, hysteresis=hysteresis)
    like = jmpx.DynamicLossScale(min_loss_scale=0, hysteresis=hysteresis)
    text = json.dumps(saved.state_dict())
    assert_same_bits(jmpx.restore_loss_scale(json.loads(text), like), saved)


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_a_resumed_run_takes_the_steps_of_the_unbroken_one(hysteresis, rng):
    flags = rng.random(60) < 0.8
    scale = unbroken = jmpx.DynamicLossScale(2.0**10, period=4, hysteresis=hysteresis)
    for flag in map(bool, flags):
        state = json.loads(json.dumps(scale.state_dict()))
        like = jmpx.DynamicLossScale(period=4, hysteresis=hysteresis)
        scale, unbroken = jmpx.restore_loss_scale(state, like).adjust(flag), unbroken.adjust(flag)
        assert_same_bits(scale, unbroken)


@pytest.mark.parametrize("like", LIKES)
@pytest.mark.parametrize("name", STATES)
def test_each_kind_restores_into_each_other(name, like, caplog):
    saved, state = STATES[name]
    both = isinstance(saved, jmpx.DynamicLossScale) and isinstance(like, jmpx.DynamicLossScale)
    same = both or (type(saved) is type(like) and str(saved) == str(like))
    with caplog.at_level(logging.INFO, "jmpx"):
        restored = jmpx.restore_loss_scale(state, like=like)
    expected = "dynamic,init=4096,period=7,counter=5" if both else str(like)
    assert str(restored) == expected and type(restored) is type(like)
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if same else logging.WARNING)
    assert f"goes on as '{expected}'" in record.getMessage()
    assert f"'{name.partition(',')[0]}" in record.getMessage()
    restored.adjust(True)


@pytest.mark.parametrize("like", LIKES)
@pytest.mark.parametrize("name", STATES)
def test_flax_restores_each_kind_into_each_other(name, like, caplog):
    saved, _ = STATES[name]
    kinds = [isinstance(each, jmpx.DynamicLossScale) for each in (saved, like)]
    state = {"w": jnp.ones(2), "scale": saved}
    template = {"w": jnp.zeros(2), "scale": like}
    with caplog.at_level(logging.INFO, "jmpx"):
        there = serialization.from_bytes(template, serialization.to_bytes(state))
    assert there["w"][0] == 1
    assert str(there["scale"]) == (
        "dynamic,init=4096,period=7,counter=5" if all(kinds) else str(like)
    )
    assert len(caplog.records) == (kinds[0] != kinds[1])  # the others have nothing to restore
    by_flax = jmpx.restore_loss_scale(serialization.to_state_dict(saved), like)
    assert str(by_flax) == str(there["scale"])


def test_the_bounds_of_the_run_hold_and_the_log_says_so(caplog):
    saved = jmpx.DynamicLossScale(2.0**20, -2, hysteresis=4)
    with caplog.at_level(logging.INFO, "jmpx"):
        restored = restore_loss_scale(saved.state_dict(), "dynamic, max=2**10, init=8")
    assert (value(restored), int(restored.counter)) == (1024, 0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "init=1024" in record.getMessage()


def test_numbers_that_npz_has_stored_are_read(tmp_path):
    np.savez(tmp_path / "state.npz", **STATES["dynamic"][0].state_dict())
    with np.load(tmp_path / "state.npz") as state:
        restored = restore_loss_scale(dict(state), jmpx.DynamicLossScale())
    assert (value(restored), int(restored.counter)) == (4096, 5)


DYNAMIC = {"type": "dynamic", "loss_scale": 8.0, "counter": 0}
BAD = {
    "no mapping": (json.dumps(DYNAMIC), TypeError, "as a mapping, got '{"),
    "kind": ({"type": "dynamik"}, ValueError, "did you mean 'dynamic'"),
    "kind of no text": ({"type": 3}, ValueError, "Unknown kind '3'"),
    "missing": ({"type": "dynamic", "loss_scale": 8.0}, ValueError, r"got \['loss_scale'\]"),
    "whole": (
        {"loss_scale": DYNAMIC, "description": {}},
        ValueError,
        r"hold \['loss_scale', 'counter'\], got \['loss_scale', 'description'\]",
    ),
    "of torch": ({"scale": 8.0, "_growth_tracker": 0}, ValueError, r"got \['scale', "),
    "too much": ({"type": "none", "counter": 1}, ValueError, r"to hold \[\], got \['counter'\]"),
    "text": ({**DYNAMIC, "loss_scale": "8"}, TypeError, "loss_scale in the state .* got '8'"),
    "None": ({**DYNAMIC, "counter": None}, TypeError, "counter in the state .* got None"),
    "stack": ({**DYNAMIC, "loss_scale": np.ones(2)}, TypeError, "loss_scale in the state"),
    "NaN": ({**DYNAMIC, "loss_scale": float("nan")}, ValueError, "got nan"),
    "inf": ({**DYNAMIC, "loss_scale": float("inf")}, ValueError, "got inf"),
    "negative": ({**DYNAMIC, "loss_scale": -1.0}, ValueError, "got -1.0"),
    "large": ({**DYNAMIC, "loss_scale": 2.0**127}, ValueError, r"and 2\*\*126"),
    "fraction": ({**DYNAMIC, "counter": 0.5}, ValueError, "whole number .* got 0.5"),
    "count": ({**DYNAMIC, "counter": 2**31}, ValueError, "whole number"),
}


@pytest.mark.parametrize("like", LIKES)
@pytest.mark.parametrize("name", BAD)
def test_a_torn_state_ends_with_one_sentence(name, like):
    state, error, match = BAD[name]
    with pytest.raises(error, match=match) as caught:
        restore_loss_scale(state, like)
    assert str(caught.value).count(". ") == 0


def test_a_mixed_precision_stands_for_its_loss_scale():
    mp = jmpx.get_mixed_precision("c=f16 | dynamic, init=2, period=7")
    assert str(restore_loss_scale(DYNAMIC, mp)) == str(restore_loss_scale(DYNAMIC, mp.loss_scale))


def test_what_is_no_loss_scale_is_refused():
    with pytest.raises(TypeError, match="a loss scale"):
        restore_loss_scale(DYNAMIC, 3)
    with pytest.raises(ValueError, match="'auto' .* without a policy"):
        restore_loss_scale(DYNAMIC, "auto")


def test_a_traced_or_stacked_scale_has_no_state():
    with pytest.raises(TypeError, match="Expected loss_scale of the loss scale to be one"):
        jax.jit(lambda s: s.state_dict())(jmpx.DynamicLossScale())
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), jmpx.DynamicLossScale())
    with pytest.raises(TypeError, match="Expected loss_scale of the loss scale to be one"):
        stack.state_dict()
    nan = jax.tree.map(lambda x: x * np.nan, jmpx.DynamicLossScale())
    with pytest.raises(TypeError, match="to be finite, got nan"):
        nan.state_dict()
