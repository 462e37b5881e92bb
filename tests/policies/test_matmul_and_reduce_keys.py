"""The keys `matmul` and `reduce` of policies: parsing, printing, inheritance, errors."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from jax import lax

import jmpx

WORDS = ["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"]
ALGORITHMS = [name for name in lax.DotAlgorithmPreset.__members__ if name != "DEFAULT"]
NAMES = WORDS + ALGORITHMS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spell", [str.lower, str.upper, " {} ".format])
def test_every_name_of_jax_in_any_case(name, spell):
    policy = jmpx.get_policy(f"c=bf16, m={spell(name)}")
    assert policy.matmul_precision == name
    with jax.default_matmul_precision(policy.matmul_precision):
        pass
    assert jmpx.Policy("f32", "bf16", "bf16", matmul_precision=spell(name)) == policy


@given(
    st.sampled_from([None, *NAMES]),
    st.sampled_from([None, "float16", "bfloat16", "float32", "float64"]),
)
def test_round_trip(matmul, reduce):
    policy = jmpx.Policy("f32", "bf16", "f32", matmul_precision=matmul, reduce_dtype=reduce)
    text = "params=float32,compute=bfloat16,output=float32"
    text += "" if matmul is None else f",matmul={matmul}"
    text += "" if reduce is None else f",reduce={reduce}"
    assert str(policy) == text
    for other in (
        jmpx.get_policy(text),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
        eval(repr(policy), {"Policy": jmpx.Policy}),
        policy.with_output_dtype("f32"),
    ):
        assert other == policy and hash(other) == hash(policy)


def test_unset_keys_are_absent_and_differ_from_set_ones():
    policy = jmpx.get_policy("c=bf16,o=f32")
    assert (policy.matmul_precision, policy.reduce_dtype) == (None, None)
    assert policy != jmpx.get_policy("c=bf16,o=f32,m=default")
    assert policy != jmpx.get_policy("c=bf16,o=f32,r=f32")
    assert jmpx.get_policy("o=f32,reduce=bf16").reduce_dtype is jnp.bfloat16


def test_other_keys_by_keyword_alone():
    with pytest.raises(TypeError, match="positional"):
        jmpx.Policy("f32", "f32", "f32", "highest")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("dtypes", ["full", "bfloat16", " F16 ", "bf16-mixed", "mixed_float16"])
def test_they_follow_a_dtype_or_a_preset(dtypes):
    policy = jmpx.get_policy(f"{dtypes}, m=highest,r=bf16")
    assert policy == jmpx.get_policy(f"{jmpx.get_policy(dtypes)},matmul=highest,reduce=bfloat16")
    with_dtypes, with_both = (
        jmpx.get_policy_map(f"*/router: {dtypes}{end}").rules[0] for end in ("", ",m=highest")
    )
    assert with_both == dataclasses.replace(with_dtypes, matmul="highest")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf61,m=high", "Unknown dtype 'bf61' at position 0 of policy 'bf61,m=high'"),
        ("full,m=hihg", "Unknown algorithm 'hihg' at position 7 of policy 'full,m=hihg'"),
        ("full,o=bf16,m=high", "Missing key for 'full' at position 0"),
        (" ,m=high", "Empty part at position 1"),
        ("full,m=high,m=high", "Duplicate key 'matmul' at position 12"),
    ],
)
def test_errors_behind_a_dtype(text, message):
    with pytest.raises(ValueError) as error:
        jmpx.get_policy(text)
    assert message in str(error.value)


def test_a_rule_inherits_from_the_surrounding_call():
    policy_map = jmpx.get_policy_map("c=bf16,m=high,r=bf16; */a: m=highest; */b: c=f32")
    a, b = policy_map.rules
    assert (a.matmul, b.matmul, a.compute) == ("highest", None, None)
    outermost = b.resolve(policy_map.default, None)
    assert outermost.matmul_precision == "high"
    in_a = a.resolve(policy_map.default, policy_map.default)
    assert (in_a.matmul_precision, in_a.compute_dtype) == ("highest", jnp.bfloat16)
    assert b.resolve(policy_map.default, in_a).matmul_precision == "highest"
    assert str(policy_map) == (
        "params=float32,compute=bfloat16,output=bfloat16,matmul=high,reduce=bfloat16; "
        "*/a: matmul=highest; */b: compute=float32"
    )
    assert jmpx.get_policy_map(str(policy_map)) == policy_map


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "c=bf16,m=higest",
            "Unknown algorithm 'higest' at position 9 of policy 'c=bf16,m=higest': expected one of "
            "default, high, highest, bfloat16, tensorfloat32, float32, or a dot algorithm such as "
            "BF16_BF16_F32_X3; did you mean 'highest'?",
        ),
        ("m=", "Missing algorithm at position 2 of policy 'm='"),
        ("m=bf16_bf16_f32_x2", "Unknown algorithm 'bf16_bf16_f32_x2' at position 2"),
        ("m=high,matmul=high", "Duplicate key 'matmul' at position 7"),
        ("r=float8_e4m3fn", "Cannot reduce in float8_e4m3fn at position 2 of policy"),
        ("reduce=highest", "Unknown dtype 'highest' at position 7"),
    ],
)
def test_errors_of_policies(text, message):
    with pytest.raises(ValueError) as error:
        jmpx.get_policy(text)
    assert message in str(error.value)
    with pytest.raises(ValueError):
        jmpx.get_policy_map(f"*/a: {text}")


def test_reduce_in_a_rule_is_refused():
    with pytest.raises(ValueError, match="Unexpected key 'r' at position 20 of"):
        jmpx.get_policy_map("c=bf16;  */a: c=f32,r=f32")


def test_errors_of_constructors():
    with pytest.raises(ValueError, match="Unknown algorithm 'exact' of matrix products"):
        jmpx.Policy("f32", "f32", "f32", matmul_precision="exact")
    with pytest.raises(TypeError, match="Unknown algorithm 3 of matrix products"):
        jmpx.types.Rule("*", matmul=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Cannot reduce in float8_e5m2, where"):
        jmpx.Policy("f32", "f32", "f32", reduce_dtype="float8_e5m2")
