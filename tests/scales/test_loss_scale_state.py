"""Loss scales in checkpoints: as mappings of plain numbers, and through Flax."""

import json

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax import serialization
from helpers import assert_same_bits
from hypothesis import given, settings, strategies as st

import jmpx

SCALES = {
    "none": jmpx.NoOpLossScale(),
    "static": jmpx.StaticLossScale(8),
    "dynamic": jmpx.DynamicLossScale(2.0**12, 5, period=9),
    "dynamic, on a device": jmpx.DynamicLossScale(jnp.float32(2.0**12), jnp.int32(5)),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_mapping_is_plain_numbers(name):
    saved = SCALES[name].to_dict()
    assert all(type(each) in (str, int, float) for each in saved.values())
    assert json.loads(json.dumps(saved)) == msgpack.unpackb(msgpack.packb(saved)) == saved
    assert jmpx.get_loss_scale(saved) == SCALES[name]


@settings(max_examples=50, deadline=None)
@given(
    st.floats(2.0**-126, 2.0**126, width=32), st.integers(-(2**31 - 1), 2**31 - 1), st.integers(1)
)
def test_every_mapping_comes_back_to_the_bit(scale, counter, hysteresis):
    hysteresis = min(hysteresis, 2**31 - 1)
    saved = jmpx.DynamicLossScale(scale, counter, min_loss_scale=0, hysteresis=hysteresis)
    assert_same_bits(jmpx.get_loss_scale(json.loads(json.dumps(saved.to_dict()))), saved)


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_a_resumed_run_takes_the_steps_of_the_unbroken_one(hysteresis, rng):
    flags = rng.random(60) < 0.8
    scale = unbroken = jmpx.DynamicLossScale(2.0**10, period=4, hysteresis=hysteresis)
    for flag in map(bool, flags):
        restored = jmpx.get_loss_scale(json.loads(json.dumps(scale.to_dict())))
        scale, unbroken = restored.adjust(flag), unbroken.adjust(flag)
        assert_same_bits(scale, unbroken)


@pytest.mark.parametrize("like", SCALES)
@pytest.mark.parametrize("name", SCALES)
def test_flax_restores_into_the_kind_that_was_saved_alone(name, like):
    saved, template = SCALES[name], SCALES[like]
    kinds = [isinstance(each, jmpx.DynamicLossScale) for each in (saved, template)]
    saved_bytes = serialization.to_bytes({"s": saved})
    if kinds[0] != kinds[1]:
        with pytest.raises(ValueError, match="to hold .* of another loss scale or program"):
            serialization.from_bytes({"s": template}, saved_bytes)
    else:
        expected = [4096, 5] if kinds[0] else []
        restored = serialization.from_bytes({"s": template}, saved_bytes)
        assert jax.tree.leaves(restored) == expected
        assert jax.tree.structure(restored) == jax.tree.structure({"s": template})


def test_a_traced_or_stacked_scale_has_no_mapping():
    with pytest.raises(TypeError, match="Expected loss_scale of the loss scale to be one"):
        jax.jit(lambda s: s.to_dict())(jmpx.DynamicLossScale())
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), jmpx.DynamicLossScale())
    with pytest.raises(TypeError, match="Expected loss_scale of the loss scale to be one"):
        stack.to_dict()
    nan = jax.tree.map(lambda x: x * np.nan, jmpx.DynamicLossScale())
    with pytest.raises(TypeError, match="to be finite, got nan"):
        nan.to_dict()
