"""Strings and mappings that Hypothesis draws: parsers understand or refuse them.

An input gives a value that its string and its dict give back, or a ValueError or TypeError of one
sentence, which quotes a string as a whole, a few times at most.
"""

import ast
import json
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

import jmpx

PARSERS: dict[str, Callable[[Any], Any]] = {
    "get_policy": jmpx.get_policy,
    "get_policy_map": jmpx.get_policy_map,
    "get_loss_scale": jmpx.get_loss_scale,
    "get_loss_scale, with a policy": lambda spec: jmpx.get_loss_scale(spec, policy="c=f16"),
    "get_mixed_precision": jmpx.get_mixed_precision,
}
SEEDS = (
    "params=float32,compute=bfloat16,output=float32",
    "p=f32,c=f16,o=f32,m=highest,r=f32",
    "full,m=BF16_BF16_F32_X3;",
    "bf16-mixed",
    "mixed_float16",
    "half",
    "float8_e4m3fn",
    "c=bf16,o=f32; BatchNorm: full; */head/*?: c=f32,m=high",
    "f32; op.exp: bf16; haiku.Linear ? : p=f16",
    "dynamic, init=2**15, period=500, factor=2, min=2**-14, max=2**24, backoff=.5, hysteresis=2",
    "dynamic=1e4,counter=-3",
    "static=1_024",
    "auto, min=0.25, init=0.5",
    "c=f16,o=f32; LayerNorm: full | dynamic, init=2**10, hysteresis=2",
    "c=bf16,m=high; X?: p=f16; */a: product=f32 | static=8",
)
WORDS = (
    *("p", "param", "params", "c", "compute", "o", "output", "m", "matmul", "r", "reduce"),
    *("policy", "rules", "loss_scale", "select", "selector", "optional", "type"),
    *("init", "period", "factor", "min", "max", "backoff", "hysteresis", "counter"),
    *("f16", "bf16", "full", "half", "float64", "highest", "BF16_BF16_F32_X3", "16-mixed"),
    *("dynamic", "static", "none", "noop", "auto", "op.exp", "LayerNorm", "*/head/*", "?"),
    *(";", ":", ",", "=", "|", "**", "2**15", "2**-126", "1e40", "-1", "\n", "\u2028", "\x85"),
)
OBJECTS = (
    *(None, True, False, 0, 1, -1, 2**15, 10**400, 0.5, math.inf, math.nan, 1e-45, -0.0, 2.0**126),
    *(jnp.bfloat16, np.float32, np.dtype("float16"), int, float, "", b"f16", 1j, object, (), {}),
    *(np.float32(4), np.array(8.0), np.array([1.0, 2.0]), np.array("f16"), jmpx.get_policy("f16")),
    *(jmpx.types.Rule("*/a", compute="f32"), jmpx.get_policy_map("f16; A: full")),
    *(jmpx.StaticLossScale(2), jmpx.DynamicLossScale(8, period=3), jmpx.NoOpLossScale()),
)


class Finding(Exception):
    """A violation of the contract of parsers."""


def spliced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


places = st.integers(0, 80)
words = st.sampled_from(WORDS) | st.text(max_size=8)
texts = (
    st.lists(words, max_size=24).map("".join)
    | st.text(max_size=200)
    | st.text("cof=163b,:;| *?/x\n")
    | st.text("pco=,f1632b -_;halfulxed", max_size=24)
    | st.builds(spliced, st.sampled_from(SEEDS), places, places, words)
)
leaves = texts | words | st.sampled_from(SEEDS) | st.sampled_from(OBJECTS)
keys = words | st.sampled_from((None, True, 0, -1, 0.5, math.nan, b"f16", int, ()))
specs = texts | st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=12,
)


@st.composite
def nearly_mixed_precisions(draw):
    """The mappings of mixed precisions, up to two places of which have any value instead."""
    text = draw(st.sampled_from([seed for seed in SEEDS if " | " in seed]))
    mapping = jmpx.get_mixed_precision(text).to_dict()
    for _ in range(draw(st.integers(0, 2))):
        node, key = mapping, draw(st.sampled_from(list(mapping)))
        while isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
            node = node[key]
            key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        node[key] = draw(specs)
    return mapping


def check(parser: str, spec: Any) -> bool:
    """Gives an input to its parser; returns whether it was understood.

    Raises:
        Finding: if the parser breaks its promise.
    """
    parse, before = PARSERS[parser], repr(spec)
    try:
        value = parse(spec)
    except (ValueError, TypeError) as error:
        check_sentence(str(error), spec)
        return False
    finally:
        if repr(spec) != before:
            raise Finding(f"it has changed {before}")
    for name, form in (("string", str(value)), ("dict", value.to_dict())):
        again = parse(form)
        if not (type(again) is type(value) and again == value and str(again) == str(value)):
            raise Finding(f"its {name}, {form!r}, gives {str(again)!r}")
    if json.loads(json.dumps(value.to_dict())) != value.to_dict():
        raise Finding(f"JSON does not keep {value.to_dict()}")
    if pickle.loads(pickle.dumps(value)) != value:
        raise Finding(f"pickle does not keep {value}")
    if isinstance(spec, str):
        check_string(parser, spec, value)
    return True


def check_string(parser: str, spec: str, value: Any) -> None:
    """Checks that other parsers read an accepted string in the same way."""
    if PARSERS[parser](f" \t{spec} ") != value:
        raise Finding("white space around it changes its value")
    if parser == "get_policy" and jmpx.get_policy_map(spec) != jmpx.PolicyMap(value):
        raise Finding("as a policy map it means something else")
    if parser == "get_policy_map":
        if jmpx.get_mixed_precision(spec).policy_map != value:
            raise Finding("as a mixed precision it means something else")
        rules = [rule.to_dict() for rule in value.rules]
        if jmpx.get_policy_map({"policy": str(value.default), "rules": rules}) != value:
            raise Finding("its rules as dicts mean something else")


_QUOTED = r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""


def check_sentence(message: str, spec: Any) -> None:
    """Checks that an error message is one sentence on one line, not much longer than its input."""
    if message.splitlines() != [message] or not message.endswith((".", "?")):
        raise Finding(f"no sentence: {message!r}")
    if re.search(r"[.?!] [A-Z]", re.sub(_QUOTED, "", message)):
        raise Finding(f"several sentences: {message!r}")
    if len(message) > 1500 + 4 * len(repr(spec)):
        raise Finding(f"a message of {len(message)} characters for {len(repr(spec))}")
    if isinstance(spec, str) and repr(spec) not in message and not message.startswith("Cannot "):
        raise Finding(f"no quotation of the whole: {message!r}")
    found = re.search(rf"{_QUOTED} at position (\d+) of [a-z ]+ {_QUOTED}", message)
    if found is None or message.startswith("Duplicate key") or "..." in found[1]:
        return  # "Duplicate key" names the long key; "..." stands for the middle of a long word
    word, whole = ast.literal_eval(found[1]), ast.literal_eval(found[3])
    if not whole[int(found[2]) :].lower().startswith(word.lower()):
        raise Finding(f"another position: {message!r}")


@pytest.mark.hypothesis  # CI runs it with new draws, as a property
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)
@given(st.sampled_from([*PARSERS]), specs | nearly_mixed_precisions())
@example("get_mixed_precision", "c=bf16;|none;")
@example("get_policy_map", "0\r0:")
@example("get_loss_scale", "none=")
def test_inputs_made_by_chance_give_values_or_sentences(parser: str, spec: Any) -> None:
    check(parser, spec)


@pytest.mark.parametrize("text", SEEDS)
def test_each_seed_is_understood_by_some_parser(text):
    assert any([check(parser, text) for parser in PARSERS])
