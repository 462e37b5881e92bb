"""Loss scales from strings and mappings: grammar, round trips, errors."""

import copy
import json
import math
import time

import numpy as np
import pytest
from helpers.training import LARGEST_SCALE, LEAST_SCALE
from hypothesis import example, given, settings, strategies as st

import jmpx
from jmpx._scales.arguments import DYNAMIC
from jmpx._scales.numbers import format_number, parse_number

Dynamic, Static, NoOp = jmpx.DynamicLossScale, jmpx.StaticLossScale, jmpx.NoOpLossScale
F16 = "params=float32,compute=float16"

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
        (Dynamic(max_loss_scale=65504), "dynamic,init=32768,max=65504"),
        (Static(1024), "static=1024"),
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


SCALES = st.floats(LEAST_SCALE, LARGEST_SCALE, width=32)
BOUNDS = st.floats(LEAST_SCALE, LARGEST_SCALE) | st.integers(1, 2**126)


@st.composite
def dynamic_scales(draw):
    low, high = sorted([draw(BOUNDS), draw(BOUNDS)])
    return Dynamic(
        draw(SCALES | st.integers(1, 2**126)),
        draw(st.integers(-(2**31) + 1, 2**31 - 1)),
        draw(st.integers(1, 2**31 - 1)),
        draw(st.floats(1, LARGEST_SCALE, exclude_min=True) | st.integers(2, 2**126)),
        draw(st.just(0) | st.just(low)),
        draw(st.none() | st.just(high)),
        draw(st.none() | st.floats(LEAST_SCALE, 1, exclude_max=True)),
        draw(st.integers(1, 2**31 - 1)),
    )


@given(dynamic_scales() | SCALES.map(Static) | st.just(NoOp()))
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


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**127), 2**127))
@example(-(2**53) - 1)
def test_every_number_is_written_exactly(number):
    assert parse_number(format_number(number)) == number


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=0))
def test_every_float32_is_written_exactly(number):
    if number == 0 or LEAST_SCALE <= number <= LARGEST_SCALE:
        again = jmpx.get_loss_scale(str(Static(number)))
        assert again.loss_scale == np.float32(number)


@given(st.integers(-126, 126))
def test_powers_of_two_are_readable(power):
    text = str(Static(2.0**power)).removeprefix("static=")
    assert text == f"2**{power}" or (len(text) <= 8 and float(text) == 2.0**power)


@given(st.integers(-200, 200), st.integers(-200, 200))
def test_powers_are_those_of_python(base, power):
    for number in (base, base / 8):
        text = f"{number}**{power}"
        if number < 0:  # Python reads -2**2 as -(2**2)
            with pytest.raises(ValueError):
                parse_number(text)
        elif number or power >= 0:
            expected = eval(text) if power < 0 or number < 16 else math.inf
            if expected < 2**1000:
                assert parse_number(text) == float(number) ** power


# auto


@pytest.mark.parametrize(
    ("policy", "scales"),
    [
        ("f32", False),
        ("bf16-mixed", False),
        ("16-mixed", True),
        ("p=f16,c=f32", False),
        ("c=bf16; BatchNorm: full", False),
        ("c=bf16; BatchNorm: f16", True),
        ("c=bf16; BatchNorm: p=f16", False),
        (jmpx.get_policy("c=f16"), True),
        (jmpx.get_policy_map("c=bf16; op.exp?: f16"), True),
    ],
    ids=str,
)
def test_auto_is_decided_by_the_policy(policy, scales):
    assert jmpx.get_loss_scale("auto", policy) == (Dynamic() if scales else NoOp())
    expected = Dynamic(64, period=3) if scales else NoOp()
    for spec in (
        "auto, init=64, period=3",
        "Auto=64,period=3",
        {"type": "auto", "init": 64, "period": 3},
    ):
        assert jmpx.get_loss_scale(spec, policy=policy) == expected


def test_auto_needs_a_policy():
    with pytest.raises(ValueError) as error:
        jmpx.get_loss_scale(" auto")
    assert str(error.value) == (
        "Cannot decide 'auto' at position 1 of loss scale ' auto' without a policy: give "
        "get_loss_scale a policy=, or write 'dynamic' or 'none'."
    )
    with pytest.raises(ValueError, match="Unknown dtype 'f17'"):
        jmpx.get_loss_scale("none", policy="c=f17")
    with pytest.raises(
        ValueError, match="max_loss_scale to be at least min"
    ):  # also where it is none
        jmpx.get_loss_scale("auto,min=8,max=2", policy="f32")


# Errors: one sentence, with the place

BAD = {
    "": "Missing kind at position 0 of loss scale ''",
    "  ;": "Missing kind at position 2 of",
    "1024": "Unknown kind '1024' at position 0 of",
    "dynamc": "Unknown kind 'dynamc' at position 0 .*did you mean 'dynamic'",
    "DynamicLossScale": "Unknown kind 'DynamicLossScale' at position 0",
    "dynamic init=4": "Unknown kind 'dynamic init' at position 0 .*did you mean 'dynamic'",
    "init=4": "Unknown kind 'init' at position 0",
    "c=bf16": "Unknown kind 'c' at position 0 of loss scale 'c=bf16'",
    "static": "Cannot make the loss scale at position 0 .*static=1024",
    "static=": "Expected the number of 'init', got '' at position 7",
    "static=-1": "Expected 'init' to be a number .* got -1 at position 7",
    "static=1e-40": "Cannot make the loss scale at position 0 .* number between 2.* got 1e-40",
    "static, period=3": "Unexpected 'period' at position 15 .*: 'static' does not take it",
    "none, init=3": "Unexpected 'init' at position 11 .*: 'none' does not take it",
    "none = f32": "Unexpected 'init' at position 7 .*: 'none' does not take it",
    "none=3": "Unexpected 'init' at position 5",
    "static=1024, dynamic": "Expected 'key=number', got 'dynamic' at position 13",
    "static=1, static=2": "Unknown key 'static' at position 10",
    "dynamic; static=2": "Unexpected ';' at position 7 of loss scale",
    "dynamic,,period=3": "Empty part at position 8",
    "dynamic,": "Empty part at position 8",
    "dynamic,period=3, period=4": "Duplicate key 'period' at position 18",
    "dynamic=3,init=4": "Duplicate key 'init' at position 10",
    "dynamic, perod=4": "Unknown key 'perod' at position 9 .*did you mean 'period'",
    "dynamic, backoff_factor=0.5": "Unknown key 'backoff_factor' at position 9",
    "dynamic,=4": "Missing key at position 8",
    "dynamic, period": "Expected 'key=number', got 'period' at position 9 .*'period'",
    "dynamic, period: 4": "Expected 'key=number', got 'period: 4' at position 9 .*an equals sign",
    "dynamic, max=1, min=2": "Cannot make .*max_loss_scale to be at least min.*, got 1 and 2",
    "dynamic, max=0.5": "Cannot make .*max_loss_scale to be at least min_loss_scale, got 0.5 and 1",
    "dynamic, init=0.5": "Expected 'init' to be within 'min' and 'max', got 0.5 at position 14",
    "dynamic=8,max=4": "Expected 'init' to be within 'min' and 'max', got 8 at position 8",
    "dynamic, factor=1": "Cannot make the loss scale at position 0 .*Expected a factor above 1",
    "dynamic, backoff=1": "Expected 'backoff' to be .* got 1 at position 17",
    "dynamic, period=0": "Expected 'period' to be a whole number .* got 0 at position 16",
    "dynamic, period=2.5": "whole number between 1 and 2.* got 2.5 at position 16",
    "dynamic, hysteresis=0": "Expected 'hysteresis' to be a whole number",
    "dynamic, counter=2**31": "Expected 'counter' to be a whole number",
    "dynamic, max=2**128": "Expected 'max' to be between .* float32's largest, got 3.4028",
    "dynamic | none": "Unexpected '[|]' at position 8",
}  # fmt: skip
NO_NUMBERS = [
    "3+4", "3*4", "1/2", "(3)", "f(3)", "int('3')", "2**2**2", "2**", "**2", "2**0.5", "2**(3)",
    "x", "nan", "inf", "-inf", "infinity", "0x10", "1__0", "_1", "1_", "1e", "1e5e5", ".", "1 2",
   "1.2.3",
    "2* *3", "2^15", "\N{ARABIC-INDIC DIGIT THREE}", "\N{SUPERSCRIPT TWO}", "True", "None", "1j",
    "__import__('os')", "-2**2", "--1", "1,5",
]  # fmt: skip
TOO_LARGE = ["2**99999999", "9**" + "9" * 99, "1e400", "1" * 400, "2**127", "-1", "1e-999999 **-3"]


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_is_one_sentence_with_its_place(text):
    with pytest.raises(ValueError, match=BAD[text]) as error:
        jmpx.get_loss_scale(text)
    message = str(error.value)
    assert "\n" not in message and repr(text) in message and message.endswith((".", "?"))


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_nothing_is_evaluated(number):
    for text, index in ((f"static={number}", 7), (f"dynamic, period= {number}", 17)):
        with pytest.raises(ValueError) as error:
            jmpx.get_loss_scale(text)
        if "," not in number:
            message = (
                f"got {number!r} at position {index} of loss scale {text!r}: write it as 32768"
            )
            assert message in str(error.value)


@pytest.mark.parametrize("number", TOO_LARGE)
def test_a_number_out_of_its_range_costs_nothing(number):
    start = time.process_time()
    with pytest.raises(ValueError, match="Expected 'init' to be a number between 2"):
        jmpx.get_loss_scale(f"static={number}")
    assert time.process_time() - start < 1


WORDS = [*DYNAMIC, "dynamic", "static", "none", "auto", *"=,;-. e20_:|(+\n\0ß", "**", "15", "1e4"]
TEXTS = st.text() | st.lists(st.sampled_from(WORDS)).map("".join)


@pytest.mark.thorough
@settings(deadline=None)
@given(TEXTS | TEXTS.map("dynamic,init=".__add__) | TEXTS.map("auto=2**4,".__add__))
def test_any_text_is_a_loss_scale_or_one_sentence(text):
    try:
        loss_scale = jmpx.get_loss_scale(text, policy=F16)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and repr(text) in str(error)
    else:
        assert jmpx.get_loss_scale(str(loss_scale)) == loss_scale


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
)
KEYS = st.sampled_from(["type", *DYNAMIC]) | st.text(max_size=4)


@pytest.mark.thorough
@settings(deadline=None)
@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.none() | st.sampled_from(["dynamic", "static", "none", "auto"]),
)
def test_any_mapping_is_a_loss_scale_or_one_sentence(mapping, kind):
    mapping = mapping if kind is None else {**mapping, "type": kind}
    before = copy.deepcopy(mapping)
    try:
        loss_scale = jmpx.get_loss_scale(mapping, policy=F16)
    except (TypeError, ValueError) as error:
        assert len(str(error).splitlines()) == 1
        assert " at " in str(error) or "Missing key 'type'" in str(error)
    else:
        assert jmpx.get_loss_scale(loss_scale.to_dict()) == loss_scale
    assert repr(mapping) == repr(before)


LONG = {
    "digits": lambda n: "static=" + "1" * n,
    "digits and a letter": lambda n: "static=" + "1" * n + "x",
    "groups": lambda n: "static=" + "1_" * n,
    "fraction": lambda n: "static=0." + "1" * n + "x",
    "exponent": lambda n: "static=1e" + "1" * n,
    "power": lambda n: "static=2**" + "1" * n,
    "powers": lambda n: "static=" + "2**" * n,
    "spaces": lambda n: "static=1" + " " * n + "x",
    "digits and spaces": lambda n: "static=" + "1" * n + " " * n + "x",
    "word": lambda n: "x" * n,
    "key": lambda n: "dynamic," + "x" * n + "=1",
    "commas": lambda n: "dynamic" + "," * n,
    "keys": lambda n: "dynamic" + ",period=1" * n,
    "equals": lambda n: "dynamic" + "=" * n,
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts_take_linear_time(name):
    start = time.process_time()
    with pytest.raises(ValueError):
        jmpx.get_loss_scale(LONG[name](100_000))
    # Quadratic time would be minutes.
    assert time.process_time() - start < 5


@pytest.mark.parametrize("spec", [None, 3, ["dynamic"], b"dynamic"])
def test_other_types_are_refused(spec):
    with pytest.raises(TypeError, match="Expected the string of a loss scale, a mapping") as error:
        jmpx.get_loss_scale(spec)
    assert "'dynamic,init=2**15'" in str(error.value)
