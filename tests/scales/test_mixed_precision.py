"""`MixedPrecision`: a policy map and a loss scale as one value, one string and one mapping."""

import copy
import dataclasses
import json
import pickle
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from helpers.policies import given_value_or_sentence, mixed_precisions
from hypothesis import example, given, settings, strategies as st

import jmpx

TEXT = "c=bf16,o=f32; LayerNorm: full | dynamic, init=2**15, period=500"
PRINTED = (
    "params=float32,compute=bfloat16,output=float32; LayerNorm: compute=float32 | "
    "dynamic,init=32768,period=500"
)
READERS = (jmpx.get_policy, jmpx.get_policy_map, jmpx.get_loss_scale, jmpx.get_mixed_precision)


def test_one_string():
    precision = jmpx.get_mixed_precision(TEXT)
    assert precision.policy_map == jmpx.get_policy_map("c=bf16,o=f32; LayerNorm: full")
    loss_scale = precision.loss_scale
    assert isinstance(loss_scale, jmpx.DynamicLossScale)
    assert float(loss_scale.loss_scale) == 2**15 and loss_scale.period == 500
    assert str(precision) == f"{precision}" == PRINTED
    assert jmpx.get_mixed_precision(PRINTED) == precision
    assert jmpx.get_mixed_precision(precision) is precision
    for text in (
        f" {TEXT} ;",
        TEXT.upper().replace("LAYERNORM", "LayerNorm"),
        TEXT.replace(" ", ""),
    ):
        assert jmpx.get_mixed_precision(text) == precision


SAME = [
    "c=f16,o=f32 | auto",
    "c=f16,o=f32",
    "16-mixed|dynamic",
    {"compute": "f16", "output": "f32"},
    {"policy": "16-mixed"},
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
    assert str(precision) == ("params=float32,compute=float16,output=float32 | dynamic,init=32768")


@pytest.mark.parametrize(
    ("policy_map", "kind"),
    [
        ("c=bf16", "none"),
        ("f32", "none"),
        ("f16", "dynamic"),
        ("c=bf16; X: f16", "dynamic"),
        ("p=f16,c=f32; X: f32", "none"),
        (jnp.float16, "dynamic"),
        (jnp.bfloat16, "none"),
    ],
)
def test_without_a_loss_scale_the_policy_decides(policy_map, kind):
    expected = jmpx.MixedPrecision(policy_map, kind)
    assert jmpx.get_mixed_precision(policy_map) == jmpx.MixedPrecision(policy_map) == expected
    assert str(expected).partition(" | ")[2].startswith(kind)


BAD = [
    ("", "Empty rule at position 0 of policy ''"),
    ("| dynamic", "Empty rule at position 0 "),
    ("c=bf16 |", "Missing kind at position 8 "),
    ("c=bf16 |  ", "Missing kind at position 8 "),
    ("c=bf16 || dynamic", "Unexpected '|' at position 8 "),
    ("c=bf16 | dynamic | static=8", "Unexpected '|' at position 17 "),
    ("|", "Empty rule at position 0 "),
    ("dynamic", "Unknown dtype 'dynamic' at position 0 "),
    (" static=8 | c=bf16", "Unknown key 'static' at position 1 "),
    (
        "c=bf16; X: bflaot16 | none",
        "Unknown dtype 'bflaot16' at position 11 of policy 'c=bf16; X: ",
    ),
    (
        "c=bf16; f32 | none",
        "Second default 'f32' at position 8 of policy 'c=bf16; f32 | none'",
    ),
    ("c=bf16;; | none", "Empty rule at position 7 of policy 'c=bf16;; | none'"),
    ("c:bf16 | none", "Unexpected ':' at position 1 of policy 'c:bf16 | none'"),
    ("c=bf16 | c=f16", "Unknown kind 'c' at position 9 of policy 'c=bf16 | c=f16'"),
    (
        "c=bf16 | dynamic, inti=8",
        "Unknown key 'inti' at position 18 of policy 'c=bf16 | dynamic",
    ),
    ("c=bf16 | dynamic= x", "Expected the number of 'init', got 'x' at position 18 of policy"),
    (
        "c=bf16 | dynamic; f32",
        "Unexpected ';' at position 16 of policy 'c=bf16 | dynamic; f32'",
    ),
    (
        "c=bf16 | none, init=8",
        "Unexpected 'init' at position 20 of policy 'c=bf16 | none, ini",
    ),
    (
        "c=bf16 | dynamic, init:8",
        "Expected 'key=number', got 'init:8' at position 18 of policy '",
    ),
    (
        "f16 | dynamic, min=8, max=2",
        "Cannot make the loss scale at position 6 of policy 'f16 | dynamic, min=8, "
        "max=2': Expected max_loss_scale to be at least min_loss_scale, got 2 and 8",
    ),
]


@pytest.mark.parametrize(("text", "begins"), BAD)
def test_bad_strings_say_where(text, begins):
    with pytest.raises(ValueError, match=f"^{re.escape(begins)}") as error:
        jmpx.get_mixed_precision(text)
    sentence = str(error.value)
    assert repr(text) in sentence and "\n" not in sentence and sentence[-1] in ".?"


@pytest.mark.parametrize(
    ("read", "text", "place"),
    [
        (jmpx.get_policy, TEXT, "Unexpected '|' at position 30 of policy 'c=bf16,o=f32;"),
        (jmpx.get_policy, "bf16|none", "Unexpected '|' at position 4 of policy 'bf16|none'"),
        (jmpx.get_policy_map, TEXT, "Unexpected '|' at position 30 of policy map 'c=bf16,o=f32;"),
        (jmpx.get_loss_scale, TEXT, "Unexpected '|' at position 30 of loss scale 'c=bf16,o=f32;"),
    ],
)
def test_a_bar_where_only_one_side_can_be(read, text, place):
    with pytest.raises(ValueError, match=f"^{re.escape(place)}") as error:
        read(text)
    assert "jmpx.get_mixed_precision" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("thing", [None, 3, True, b"f16", ["c=f16"], jnp.ones(2), str])
def test_what_is_no_mixed_precision(thing):
    message = "^Expected a policy map string, .* got .*: "
    with pytest.raises(TypeError, match=message):
        jmpx.get_mixed_precision(thing)


def test_values_that_are_only_a_part_or_more():
    with pytest.raises(TypeError, match=r"got StaticLossScale\(.*: "):
        jmpx.get_mixed_precision(jmpx.StaticLossScale(8))  # pyright: ignore[reportArgumentType]
    for read in (jmpx.get_policy, jmpx.get_policy_map, lambda spec: jmpx.autocast(jnp.exp, spec)):
        with pytest.raises(TypeError, match=r"got MixedPrecision\("):
            read(jmpx.get_mixed_precision(TEXT))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Expected the string of a loss scale, .* got None"):
        jmpx.MixedPrecision("f16", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Expected a policy map string, .* got None"):
        jmpx.MixedPrecision(None)  # pyright: ignore[reportArgumentType]


def test_the_policy_alone():
    assert jmpx.get_mixed_precision("c=bf16 | none").policy == jmpx.get_policy("c=bf16")
    with pytest.raises(ValueError, match=r"LayerNorm.*policy_map, whose \.default is the policy"):
        _ = jmpx.get_mixed_precision(TEXT).policy


@given(mixed_precisions())
@settings(deadline=None)  # The first call compiles.
def test_it_is_a_value(precision):
    again = pickle.loads(pickle.dumps(precision))
    scale = jax.tree.map(jnp.asarray, precision.loss_scale)  # as a train step returns it
    others = [again, copy.deepcopy(precision), copy.copy(precision), dataclasses.replace(precision)]
    others += [jmpx.MixedPrecision(precision.policy_map, scale)]
    for other in others:
        assert (
            other == precision and hash(other) == hash(precision) and str(other) == str(precision)
        )
    assert len({precision, *others}) == 1
    more = (*precision.policy_map.rules, jmpx.types.Rule("Other", compute="f32"))
    policy_map = dataclasses.replace(precision.policy_map, rules=more)
    assert precision != dataclasses.replace(precision, policy_map=policy_map)
    assert precision != str(precision)


@pytest.mark.thorough
@given(mixed_precisions())
@settings(deadline=None)
def test_it_comes_back_from_its_string_and_its_dict(precision):
    assert "\n" not in str(precision)
    assert jmpx.get_mixed_precision(str(precision)) == precision
    plain = precision.to_dict()
    assert jmpx.get_mixed_precision(plain) == precision
    assert jmpx.get_mixed_precision(json.loads(json.dumps(plain))) == precision
    assert jmpx.get_mixed_precision(yaml.safe_load(yaml.safe_dump(plain))) == precision
    strings = {"policy": str(precision.policy_map), "loss_scale": str(precision.loss_scale)}
    assert jmpx.get_mixed_precision(strings) == precision


DIFFERENT = [
    "f16 | dynamic",
    "f16; X: f32 | dynamic",
    "f16 | dynamic, init=2**14",
    "f16 | dynamic, counter=1",
    "f16 | dynamic, period=3",
    "f16 | dynamic, hysteresis=2",
    "f16 | dynamic, max=2**20",
    "f16 | dynamic, min=0.5",
    "f16 | dynamic, factor=4",
    "f16 | dynamic, backoff=0.25",
    "f16 | static=2**15",
    "f16 | static=1",
    "f16 | none",
    "p=f16,r=bf16 | none",
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


def test_a_loss_scale_that_is_no_number_is_refused():
    policy_map = jmpx.get_policy_map("f16")
    message = "^Expected loss_scale of the loss scale to be one number, got "
    with pytest.raises(TypeError, match=message) as error:
        jax.jit(lambda scale: jmpx.MixedPrecision(policy_map, scale) and scale)(
            jmpx.DynamicLossScale()
        )
    assert "\n" not in str(error.value) and "outside of jax.jit" in str(error.value)
    donated = jnp.float32(8)
    donated.delete()
    for leaf in (jnp.ones(3), donated, jax.ShapeDtypeStruct((), jnp.float32), "a sharding", None):
        scale = jax.tree.map(lambda _: leaf, jmpx.DynamicLossScale())  # noqa: B023
        with pytest.raises(TypeError, match=message) as error:
            jmpx.MixedPrecision(policy_map, scale)
        assert "\n" not in str(error.value)


def test_a_static_argument_of_jit(rng):
    traces = []

    def loss(precision, w, x):
        traces.append(str(precision))
        return precision.loss_scale.scale(
            precision.policy.cast_to_compute(w) @ x.astype(jnp.float16)
        )

    jitted = jax.jit(loss, static_argnums=0)
    w, x = rng.normal(size=(3,)).astype(np.float32), rng.normal(size=(3,)).astype(np.float32)
    for _ in range(2):
        scaled = jitted(jmpx.get_mixed_precision("f16 | dynamic, init=2**10"), w, x)
    assert len(traces) == 1
    exact = w.astype(np.float16).astype(np.float64) @ x.astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(scaled / 2**10, exact, atol=1e-2)
    jitted(jmpx.get_mixed_precision("f16 | none"), w, x)
    assert len(traces) == 2
    precision = jmpx.get_mixed_precision("f16")
    assert jax.tree.leaves(precision) == [precision]  # no pytree: the loss scale is one by itself


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        jmpx.get_mixed_precision("f16").loss_scale = jmpx.NoOpLossScale()  # pyright: ignore[reportAttributeAccessIssue]


WORDS = ["c=bf16", "f16", "X?: f32", "*/a: m=highest", "dynamic", "static=8", "init=2**15", "auto"]


@given(
    st.text()
    | st.text("cof=163b,:;| *?/x\n")
    | st.lists(st.sampled_from([*WORDS, "|", ";", ",", " ", "=", ":"]), max_size=9).map("".join)
)
@example("c=bf16 | dynamic")
@example("c=bf16;|none;")
@settings(deadline=None)
def test_any_text_gives_a_value_or_one_sentence(text):
    for read in READERS:
        value = given_value_or_sentence(read, text)
        if not isinstance(value, str):
            assert str(read(str(value))) == str(value)


LONG = {
    "rules": lambda n: "X: f32;" * (n // 7),
    "empty rules": lambda n: ";" * n,
    "keys": lambda n: "c=bf16," * (n // 7),
    "spaces": lambda n: " " * n,
    "spaces behind a colon": lambda n: f"c:bf16{' ' * n}x",
    "spaces in a selector": lambda n: f"X{' ' * n}Y: f32",
    "dots": lambda n: f"{'a.' * (n // 2)}: f32",
    "stars": lambda n: f"{'*a' * (n // 2)}: f32",
    "an unknown dtype": lambda n: f"c={'bf16' * (n // 4)}",
    "an unknown word": lambda n: "dynamic" * (n // 7),
    "bars": lambda n: "|" * n,
    "a bar at the end": lambda n: f"{'X: f32;' * (n // 7)} | dynamic",
    "keys of a loss scale": lambda n: f"f16 | dynamic{', init=8' * (n // 8)}",
    "digits": lambda n: f"f16 | dynamic, init={'9' * n}",
    "stars in a number": lambda n: f"f16 | dynamic, init={'2**' * (n // 3)}",
    "spaces in a loss scale": lambda n: f"f16 | dynamic,{' ' * n}init",
}


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", LONG)
def test_long_strings_take_linear_time(shape):
    for read in READERS:
        given_value_or_sentence(read, LONG[shape](100))  # what the first call alone runs
        short, long = (
            lines_run(given_value_or_sentence, read, LONG[shape](n)) for n in (2800, 5600)
        )
        assert long < 2.2 * short + 200
        given_value_or_sentence(read, LONG[shape](100_000))
