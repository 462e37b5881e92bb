"""`MixedPrecision`: a policy map and a loss scale as one value, one string and one mapping."""

import copy
import dataclasses
import json
import pickle
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from helpers.policies import READERS, given_value_or_sentence, mixed_precisions
from hypothesis import given, settings

import jmpx

TEXT = "c=bf16,o=f32; LayerNorm: full | dynamic, init=2**15, period=500"
PRINTED = (
    "params=float32,compute=bfloat16,output=float32; LayerNorm: compute=float32 | "
    "dynamic,init=32768,period=500"
)


def test_one_string():
    precision = jmpx.get_mixed_precision(TEXT)
    assert precision.policy_map == jmpx.get_policy_map("c=bf16,o=f32; LayerNorm: full")
    loss_scale = precision.loss_scale
    assert isinstance(loss_scale, jmpx.DynamicLossScale)
    assert float(loss_scale.loss_scale) == 2**15 and loss_scale.period == 500
    assert str(precision) == f"{precision}" == PRINTED
    assert jmpx.get_mixed_precision(PRINTED) == precision
    assert jmpx.get_mixed_precision(precision) is precision
    in_capitals = TEXT.upper().replace("LAYERNORM", "LayerNorm")
    for text in (f" {TEXT} ;", in_capitals, TEXT.replace(" ", "")):
        assert jmpx.get_mixed_precision(text) == precision


SAME = [
    "c=f16,o=f32 | auto",
    "c=f16,o=f32",
    {"compute": "f16", "output": "f32"},
    {"policy": "16-mixed", "loss_scale": "auto"},
    {"policy": "16-mixed", "loss_scale": {"type": "auto"}},
    {"policy": "16-mixed", "loss_scale": jmpx.DynamicLossScale()},
    jmpx.get_policy("16-mixed"),
    jmpx.get_policy_map("16-mixed"),
]


@pytest.mark.parametrize("spec", SAME, ids=str)
def test_what_a_mixed_precision_may_come_from(spec):
    precision = jmpx.get_mixed_precision(spec)
    assert precision == jmpx.MixedPrecision("16-mixed", "dynamic")
    assert str(precision) == "params=float32,compute=float16,output=float32 | dynamic,init=32768"
    assert precision.policy == jmpx.get_policy("16-mixed")


@given(mixed_precisions())
@settings(deadline=None, max_examples=30)  # the first call compiles
def test_it_is_a_value(precision):
    scale = jax.tree.map(jnp.asarray, precision.loss_scale)  # as a train step returns it
    others = [pickle.loads(pickle.dumps(precision)), copy.deepcopy(precision), copy.copy(precision)]
    others += [dataclasses.replace(precision), jmpx.MixedPrecision(precision.policy_map, scale)]
    assert len({precision, *others}) == 1 == len({str(each) for each in (precision, *others)})
    more = (*precision.policy_map.rules, jmpx.types.Rule("Other", compute="f32"))
    policy_map = dataclasses.replace(precision.policy_map, rules=more)
    assert precision != dataclasses.replace(precision, policy_map=policy_map)
    assert precision != str(precision)
    assert "\n" not in str(precision)
    plain = precision.to_dict()
    strings = {"policy": str(precision.policy_map), "loss_scale": str(precision.loss_scale)}
    for spec in (str(precision), plain, yaml.safe_load(yaml.safe_dump(plain)), strings):
        assert jmpx.get_mixed_precision(spec) == precision
    assert json.loads(json.dumps(plain)) == plain


PARTS = ["init=2**14", "counter=1", "period=3", "hysteresis=2", "max=2**20", "min=0.5", "factor=4"]
DIFFERENT = [
    *("f16 | dynamic", "f16; X: f32 | dynamic", "f16 | static=2**15", "f16 | static=1"),
    *("f16 | none", "p=f16,r=bf16 | none", "f16 | dynamic, backoff=0.25"),
    *(f"f16 | dynamic, {part}" for part in PARTS),
]


def test_different_ones_differ():
    precisions = [jmpx.get_mixed_precision(text) for text in DIFFERENT]
    assert len({*precisions}) == len(DIFFERENT)
    assert all((a == b) == (a is b) for a in precisions for b in precisions)


@pytest.mark.parametrize("finite", [True, False])
def test_a_state_that_has_moved_on_is_another_value(finite):
    precision = jmpx.get_mixed_precision(TEXT)
    moved = jmpx.MixedPrecision(precision.policy_map, precision.loss_scale.adjust(finite))
    assert moved != precision and jmpx.get_mixed_precision(str(moved)) == moved
    assert precision == jmpx.get_mixed_precision(TEXT)


def test_a_donated_loss_scale_leaves_the_value_alone(rng):
    scale = jnp.asarray(2.0 ** rng.integers(1, 20), jnp.float32)
    precision = jmpx.MixedPrecision("f16", jmpx.DynamicLossScale(scale))
    before = hash(precision), str(precision)
    scale.delete()
    assert (hash(precision), str(precision)) == before
    assert isinstance(precision.loss_scale, jmpx.DynamicLossScale)
    assert isinstance(precision.loss_scale.loss_scale, np.ndarray)


def test_a_static_argument_of_jit():
    traces = []

    def scaled(precision, x):
        traces.append(str(precision))
        return precision.loss_scale.scale(precision.policy.cast_to_compute(x))

    jitted, x = jax.jit(scaled, static_argnums=0), np.ones(3, np.float32)
    for text in ["f16 | dynamic, init=2**10"] * 2 + ["f16 | none"]:
        y = jitted(jmpx.get_mixed_precision(text), x)
        np.testing.assert_array_equal(y, x if text.endswith("none") else x * 2**10)
    assert len(traces) == 2
    precision = jmpx.get_mixed_precision("f16")
    assert jax.tree.leaves(precision) == [precision]  # no pytree: the loss scale is one by itself
    with pytest.raises(dataclasses.FrozenInstanceError):
        precision.loss_scale = jmpx.NoOpLossScale()  # pyright: ignore[reportAttributeAccessIssue]


# The part in braces is repeated.
LONG = [
    "{X: f32;}", "{;}", "{c=bf16,}", "{ }", "c:bf16{ }x", "X{ }Y: f32", "{a.}: f32", "{*a}: f32",
    "c={bf16}", "{dynamic}", "{|}", "{X: f32;} | dynamic", "f16 | dynamic{, init=8}",
    "f16 | dynamic, init={9}", "f16 | dynamic, init={2**}", "f16 | dynamic,{ }init",
    "static={1}x", "static={1_}", "static=0.{1}x", "static=1e{1}", "static=2**{1}", "static={1 }x",
    "dynamic{,}", "dynamic{=}", "dynamic,{x}=1", "dynamic{,period=1}",
]  # fmt: skip


def lengthened(shape, length):
    before, piece, after = re.split("[{}]", shape)
    return before + piece * (length // len(piece)) + after


def lines_run(function, *args):
    """Counts the lines of Python that a call runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("shape", LONG)
def test_long_strings_take_linear_time(shape):
    for read in READERS:
        given_value_or_sentence(read, lengthened(shape, 100))  # what the first call alone runs
        short, long = (
            lines_run(given_value_or_sentence, read, lengthened(shape, n)) for n in (700, 1400)
        )
        assert long < 2.2 * short + 200
        start = time.process_time()
        given_value_or_sentence(read, lengthened(shape, 30_000))
        assert time.process_time() - start < 2  # quadratic time in C would be more
