"""Random policies, policy maps and loss scales, and what reading a configuration gives."""

import dataclasses

from hypothesis import strategies as st
from jax import lax

import jmpx
from helpers.training import LARGEST_SCALE, LEAST_SCALE

NAMES = [
    *("f16", "float16", "bf16", "bfloat16", "full", "fp32", "f32", "float32", "f64", "float64"),
    *("float8_e4m3fn", "float8_e5m2"),
]
MATMULS = [
    *("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"),
    *(
        name
        for name in lax.DotAlgorithmPreset.__members__
        if name != "DEFAULT" and "F8_" not in name
    ),
]
REDUCE_NAMES = ["f16", "bf16", "f32", "f64"]
SELECTORS = ["LayerNorm", "haiku.BatchNorm", "*/head/*", "mlp/linear", "op.exp", "*", "*/a?", "C"]


def by_arguments(policy):
    """The policy map of a policy, which casts arguments unless it says more."""
    policy_map = jmpx.get_policy_map(policy)
    plain = policy_map.by is None and not policy_map.rules
    return dataclasses.replace(policy_map, by="arguments") if plain else policy_map


@st.composite
def policies(draw):
    dtypes = [draw(st.sampled_from(NAMES)) for _ in range(3)]
    matmul = draw(st.none() | st.sampled_from(MATMULS))
    reduce = draw(st.none() | st.sampled_from(REDUCE_NAMES))
    return jmpx.Policy(*dtypes, matmul_precision=matmul, reduce_dtype=reduce)


@st.composite
def rules(draw):
    keys = draw(st.sets(st.sampled_from(["params", "compute", "output", "matmul"]), min_size=1))
    fields = {key: draw(st.sampled_from(NAMES)) for key in sorted(keys - {"matmul"})}
    if "matmul" in keys:
        fields["matmul"] = draw(st.sampled_from(MATMULS))
    selector, optional = draw(st.sampled_from(SELECTORS)), draw(st.booleans())
    return jmpx.types.Rule(selector, **fields, optional=optional or selector.endswith("?"))


def policy_maps():
    return st.builds(
        lambda default, rules: jmpx.PolicyMap(default, tuple(rules)),
        policies(),
        st.lists(rules(), max_size=4),
    )


READERS = (jmpx.get_policy, jmpx.get_policy_map, jmpx.get_loss_scale, jmpx.get_mixed_precision)


def given_value_or_sentence(read, value):
    """Returns what reading a value gives: an object, or the sentence of the error."""
    try:
        return read(value)
    except (ValueError, TypeError) as error:
        sentence = str(error)
        assert len(sentence.splitlines()) == 1 and sentence[-1] in ".?", sentence
        return sentence


SCALES = st.floats(LEAST_SCALE, LARGEST_SCALE, width=32)
BOUNDS = st.floats(LEAST_SCALE, LARGEST_SCALE) | st.integers(1, 2**126)


@st.composite
def dynamic_scales(draw):
    low, high = sorted([draw(BOUNDS), draw(BOUNDS)])
    return jmpx.DynamicLossScale(
        draw(SCALES | st.integers(1, 2**126)),
        draw(st.integers(-(2**31) + 1, 2**31 - 1)),
        draw(st.just(2000) | st.integers(1, 2**31 - 1)),
        draw(st.floats(1, LARGEST_SCALE, exclude_min=True) | st.integers(2, 2**126)),
        draw(st.just(1.0 if low >= 1 else 0) | st.just(low)),
        draw(st.none() | st.just(high)),
        draw(st.none() | st.floats(LEAST_SCALE, 1, exclude_max=True)),
        draw(st.just(1) | st.integers(1, 2**31 - 1)),
    )


def loss_scales():
    return dynamic_scales() | SCALES.map(jmpx.StaticLossScale) | st.just(jmpx.NoOpLossScale())


def mixed_precisions():
    return st.builds(jmpx.MixedPrecision, policy_maps(), loss_scales())
