"""Loss scales from strings and mappings: grammar, round trips, numbers."""

import collections
import json
import math
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.policies import loss_scales
from helpers.training import LARGEST_SCALE, LEAST_SCALE
from hypothesis import assume, example, given, strategies as st

import jmpx

Dynamic, Static, NoOp = jmpx.DynamicLossScale, jmpx.StaticLossScale, jmpx.NoOpLossScale

LONGEST = "dynamic, init=2**15, period=500, factor=2, min=1, max=2**24, backoff=0.5, hysteresis=2"
STRINGS = {
    "dynamic": Dynamic(),
    " DYNAMIC ;": Dynamic(),
    "dynamic=1024": Dynamic(1024),
    "Dynamic = 2 ** 10 , Period = 7": Dynamic(1024, period=7),
    LONGEST: Dynamic(2.0**15, 0, 500, 2, 1.0, 2.0**24, 0.5, 2),
    "dynamic,hysteresis=3,counter=-2": Dynamic(counter=-2, hysteresis=3),
    "dynamic,max=1024": Dynamic(1024, max_loss_scale=1024),
    "dynamic,min=2**20": Dynamic(2**20, min_loss_scale=2**20),
    "dynamic,init=2**-14,min=2**-20": Dynamic(2.0**-14, min_loss_scale=2.0**-20),
    "dynamic,factor=1,backoff=.5": Dynamic(factor=1, backoff_factor=0.5),
    "dynamic,period=1e4": Dynamic(period=10000),
    "static=1024": Static(1024),
    "static,init=0.1": Static(0.1),
    "static=1_000": Static(1000),
    "none": NoOp(),
    "NoOp": NoOp(),
}


@pytest.mark.parametrize("text", STRINGS)
def test_strings(text):
    loss_scale = jmpx.get_loss_scale(text)
    assert loss_scale == STRINGS[text] and type(loss_scale) is type(STRINGS[text])
    assert jmpx.get_loss_scale(text, policy="f16") == loss_scale
    assert jmpx.get_loss_scale(loss_scale) is loss_scale


@pytest.mark.parametrize(
    ("loss_scale", "text"),
    [
        (Dynamic(), "dynamic,init=32768"),
        (Dynamic(period=500), "dynamic,init=32768,period=500"),
        (Dynamic(2.0**24, 5, period=500), "dynamic,init=16777216,period=500,counter=5"),
        (Dynamic(2.0**100, max_loss_scale=2**101), "dynamic,init=2**100,max=2**101"),
        (Dynamic(0.1, min_loss_scale=0.1), "dynamic,init=0.1,min=0.1"),
        (Dynamic(2.0**-14, min_loss_scale=0), "dynamic,init=2**-14,min=0"),
        (Dynamic(factor=4, hysteresis=2), "dynamic,init=32768,factor=4,hysteresis=2"),
        (Static(2.0**-14), "static=2**-14"),
        (Static(1e10), "static=10000000000"),
        (Static(0), "static=0"),
        (NoOp(), "none"),
    ],
)
def test_the_canonical_string(loss_scale, text):
    assert str(loss_scale) == f"{loss_scale}" == text
    assert jmpx.get_loss_scale(text) == loss_scale
    assert repr(loss_scale).startswith(type(loss_scale).__name__ + "(")


@given(loss_scales())
def test_strings_and_mappings_round_trip(loss_scale):
    text, mapping = str(loss_scale), loss_scale.to_dict()
    through_json = json.loads(json.dumps(mapping))
    for again in (
        jmpx.get_loss_scale(text),
        jmpx.get_loss_scale(f" {text.upper()};".replace(",", " , ").replace("=", " = ")),
        jmpx.get_loss_scale(mapping),
        jmpx.get_loss_scale(through_json),
        jmpx.get_loss_scale({key: str(value) for key, value in mapping.items()}),
    ):
        assert again == loss_scale and type(again) is type(loss_scale)
        assert str(again) == text and again.to_dict() == mapping
    assert through_json == mapping
    if not isinstance(loss_scale, NoOp):
        again = jmpx.get_loss_scale(text)
        assert again.loss_scale.tobytes() == loss_scale.loss_scale.tobytes()  # pyright: ignore[reportAttributeAccessIssue]


@given(st.floats(0, LARGEST_SCALE, width=32))
def test_every_float32_is_written_exactly(number):
    assume(number == 0 or number >= LEAST_SCALE)
    assert jmpx.get_loss_scale(str(Static(number))).loss_scale == np.float32(number)


@given(st.integers(-126, 126))
def test_powers_of_two_are_readable(power):
    text = str(Static(2.0**power)).removeprefix("static=")
    assert text == f"2**{power}" or (len(text) <= 8 and float(text) == 2.0**power)


@given(st.integers(-200, 200) | st.integers(-200, 200).map(lambda n: n / 8), st.integers(-99, 99))
@example(0, -1)
@example(2, 126)
@example(2, 127)
def test_powers_are_those_of_python(base, power):
    text = f"{base}**{power}"
    expected = math.inf if base == 0 and power < 0 else eval(text)
    # Python reads -2**2 as -(2**2); scales have to be in range.
    read = f"dynamic, init={text}, min=0, max={text}"
    if base >= 0 and LEAST_SCALE <= expected <= LARGEST_SCALE:
        scale: Any = jmpx.get_loss_scale(read)
        assert scale.max_loss_scale == float(base) ** power
    else:
        with pytest.raises(ValueError, match="Expected the number|Expected '"):
            jmpx.get_loss_scale(read)


# auto


@pytest.mark.parametrize(
    ("policy", "scales"),
    [
        ("f32", False),
        ("bf16-mixed", False),
        ("16-mixed", True),
        ("p=f16,c=f32; X: f32", False),
        ("c=bf16; BatchNorm: full", False),
        ("c=bf16; BatchNorm: f16", True),
        ("c=bf16; BatchNorm: p=f16", False),
        (jmpx.get_policy("c=f16"), True),
        (jmpx.get_policy_map("c=bf16; op.exp?: f16"), True),
        (jnp.float16, True),
    ],
    ids=str,
)
def test_auto_is_decided_by_the_policy(policy, scales):
    default = Dynamic() if scales else NoOp()
    assert jmpx.get_loss_scale("auto", policy) == default
    expected = Dynamic(64, period=3) if scales else NoOp()
    mapping = {"type": "auto", "init": 64, "period": 3}
    for spec in ("auto, init=64, period=3", "Auto=64,period=3", mapping):
        assert jmpx.get_loss_scale(spec, policy=policy) == expected
    # Without a loss scale, a mixed precision has this one.
    assert jmpx.get_mixed_precision(policy) == jmpx.MixedPrecision(policy)
    assert jmpx.MixedPrecision(policy) == jmpx.MixedPrecision(policy, default)


# Numbers

NO_NUMBERS = [
    "3+4", "3*4", "1/2", "(3)", "f(3)", "int('3')", "2**2**2", "2**", "**2", "2**0.5", "2**(3)",
    "x", "nan", "inf", "-inf", "infinity", "0x10", "1__0", "_1", "1_", "1e", "1e5e5", ".", "1 2",
   "1.2.3",
    "2* *3", "2^15", "\N{ARABIC-INDIC DIGIT THREE}", "\N{SUPERSCRIPT TWO}", "True", "None", "1j",
    "__import__('os')", "-2**2", "--1", "1,5",
]  # fmt: skip
TOO_LARGE = ["2**99999999", "9**" + "9" * 99, "1e400", "1" * 400, "2**127", "-1", "1e-999999 **-3"]


def test_nothing_is_evaluated():
    for number in NO_NUMBERS:
        for text, index in ((f"static={number}", 7), (f"dynamic, period= {number}", 17)):
            with pytest.raises(ValueError) as error:
                jmpx.get_loss_scale(text)
            place = f"got {number!r} at position {index} of loss scale {text!r}: write it as 32768"
            assert place in str(error.value) or number == "1,5"


def test_a_number_out_of_its_range_costs_nothing():
    for number in TOO_LARGE:
        start = time.process_time()
        with pytest.raises(ValueError, match="Expected 'init' to be a number between 2"):
            jmpx.get_loss_scale(f"static={number}")
        assert time.process_time() - start < 1


def test_numbers_of_a_mapping_may_be_numpys():
    fields = {"init": np.float32(8), "period": np.int64(3), "max": jnp.asarray(9.0)}
    precision = jmpx.get_mixed_precision(
        {"policy": "f16", "loss_scale": {"type": "dynamic", **fields}}
    )
    assert precision.loss_scale == Dynamic(8, period=3, max_loss_scale=9)


@pytest.mark.parametrize("kind", [dict, types.MappingProxyType, collections.UserDict])
@pytest.mark.parametrize("text", ["none", "static=8", "dynamic,init=4", "dynamic,counter=3"])
def test_a_class_takes_no_mapping_and_names_what_does(kind, text):
    loss_scale = jmpx.get_loss_scale(text)
    mapping = kind(loss_scale.to_dict())
    with pytest.raises(TypeError, match=r"to be a number.*: write jmpx.get_loss_scale\(mapping\)"):
        jmpx.DynamicLossScale(mapping)
    assert jmpx.get_loss_scale(mapping) == loss_scale


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_a_replica_of_a_stack_is_written(shape):
    loss_scale = jmpx.DynamicLossScale(4.0)
    stack = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), loss_scale)
    for _ in shape:
        with pytest.raises(TypeError, match="or index the replica, as jax.tree.map"):
            stack.to_dict()
        stack = jax.tree.map(lambda x: x[0], stack)
    assert stack.to_dict() == loss_scale.to_dict()
