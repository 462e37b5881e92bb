"""A dtype, or a mapping, wherever a policy is taken: it means what its string means."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import nnx
from helpers.adapters import ADAPTERS, LAYERS, every_adapter, warnings_of
from hypothesis import given, strategies as st

import jmpx
import jmpx.flags

DTYPES = [
    pytest.param(spelling, name, id=f"{name}-{i}")
    for name, spellings in {
        "float16": (jnp.float16, np.float16, np.dtype("float16"), np.half),
        "bfloat16": (jnp.bfloat16, np.dtype(jnp.bfloat16), jnp.bfloat16.dtype.type),
        "float32": (jnp.float32, np.float32, np.dtype("float32"), jnp.ones(2).dtype),
        "float64": (jnp.float64, np.float64, np.dtype("float64"), np.double),
        "float8_e4m3fn": (jnp.float8_e4m3fn, np.dtype(jnp.float8_e4m3fn)),
    }.items()
    for i, spelling in enumerate(spellings)
]
every_dtype = pytest.mark.parametrize(("dtype", "name"), DTYPES)


@every_dtype
def test_a_dtype_means_its_name(dtype, name):
    assert jmpx.get_policy(dtype) == jmpx.get_policy(name) == jmpx.Policy(name, name, name)
    assert jmpx.get_policy_map(dtype) == jmpx.get_policy_map(name)
    assert jmpx.get_mixed_precision(dtype) == jmpx.get_mixed_precision(name)
    assert jmpx.get_policy({"compute": dtype}) == jmpx.get_policy(f"compute={name}")
    assert jmpx.get_policy({"output": dtype}) == jmpx.get_policy(f"output={name}")


class Own:
    pass


def set_and_get(cls, policy):
    jmpx.set_policy(cls, policy)
    try:
        return jmpx.policy_of(cls)
    finally:
        jmpx.clear_policy(cls)


def push_and_get(cls, policy):
    with jmpx.push_policy(cls, policy):
        return jmpx.policy_of(cls)


def jaxpr_of_gradient(gradient, policy):
    call = gradient(lambda w: (w**2).sum(), jmpx.NoOpLossScale(), policy=policy)
    return str(jax.make_jaxpr(call)(jnp.ones(3)))


def flag(define, policy):
    values = flags.FlagValues()
    holder = define("policy", policy, "The policy.", values)
    values(["program"])
    return holder.value


def mp_flags(policy):
    values = flags.FlagValues()
    mp = jmpx.flags.define_mp_flags(default_policy=policy, flag_values=values)
    values(["program"])
    return mp.policy_map


# What takes a policy -> something of what it does with it that can be compared.
TAKERS = {
    "set_policy": lambda policy: set_and_get(Own, policy),
    "set_policy of a Haiku module": lambda policy: set_and_get(hk.Linear, policy),
    "set_policy of an Equinox module": lambda policy: set_and_get(eqx.nn.Linear, policy),
    "push_policy": lambda policy: push_and_get(Own, policy),
    "push_policy of an NNX module": lambda policy: push_and_get(nnx.Linear, policy),
    "filter_grad": lambda policy: jaxpr_of_gradient(jmpx.filter_grad, policy),
    "filter_value_and_grad": lambda policy: jaxpr_of_gradient(jmpx.filter_value_and_grad, policy),
    "autocast": lambda policy: str(jax.make_jaxpr(jmpx.autocast(jnp.dot, policy))(ONES, ONES)),
    "get_loss_scale": lambda policy: jmpx.get_loss_scale("auto", policy=policy).to_dict(),
    "DEFINE_policy": lambda policy: flag(jmpx.flags.DEFINE_policy, policy),
    "DEFINE_policy_map": lambda policy: flag(jmpx.flags.DEFINE_policy_map, policy),
    "define_mp_flags": mp_flags,
    **{adapter: ADAPTERS[adapter] for adapter in ADAPTERS},
}
ONES = np.ones((3, 3), np.float32)
every_taker = pytest.mark.parametrize("taker", TAKERS)


@pytest.mark.sampled(3)
@every_taker
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.dtype("float32")])
def test_every_taker_of_a_policy_takes_a_dtype(taker, dtype):
    take = TAKERS[taker]
    given_dtype, given_name = take(dtype), take(np.dtype(dtype).name)
    assert given_dtype == given_name
    other = "float32" if np.dtype(dtype).name == "float16" else "float16"
    assert given_name != take(other)  # else this test would compare nothing


@every_taker
def test_every_taker_of_a_policy_takes_a_mapping(taker):
    take = TAKERS[taker]
    assert take({"compute": "f16", "output": jnp.bfloat16}) == take("c=f16,o=bf16")


@every_adapter
def test_adapters_take_a_mapping_with_rules(adapter):
    rules = [{"select": LAYERS[adapter], "compute": "f32"}, {"select": "NoSuch", "compute": "f32"}]
    mapping = {"policy": {"compute": "bf16"}, "rules": rules}
    by_string = warnings_of(ADAPTERS[adapter], f"c=bf16; {LAYERS[adapter]}: f32; NoSuch: f32")
    assert warnings_of(ADAPTERS[adapter], mapping) == by_string
    assert len(by_string) == 1 and "'NoSuch: compute=float32'" in by_string[0]


@pytest.mark.parametrize("gradient", [jmpx.filter_grad, jmpx.filter_value_and_grad])
def test_gradient_functions_take_a_mapping_with_rules_as_a_map(gradient):
    def loss(w):
        return jnp.exp(w @ w).sum()

    def jaxpr(loss, policy):
        return str(jax.make_jaxpr(gradient(loss, jmpx.NoOpLossScale(), policy=policy))(ONES))

    autocast = jmpx.autocast(loss, "c=bf16; op.exp: f32")
    mapping = {"policy": "c=f16", "rules": [{"select": "op.exp", "compute": "f32"}]}
    assert jaxpr(autocast, mapping) == jaxpr(autocast, "c=f16; op.exp: f32")
    assert "f16" not in jaxpr(autocast, mapping).replace("bf16", "")  # the map casts nothing
    for without_rules in ({"policy": "c=f16", "rules": []}, {"compute": "f16"}):
        assert jaxpr(loss, without_rules) == jaxpr(loss, "c=f16")
    assert "f16" in jaxpr(loss, "c=f16")


NO_DTYPES = [
    int, bool, float, complex, np.int32, np.dtype("int8"), jnp.bool_, np.complex64, np.void,
    np.str_, np.dtype("U3"), np.dtype([("a", "f4")]), np.floating, np.generic, np.object_,
    jnp.int4, jax.dtypes.prng_key, jax.dtypes.float0,
]  # fmt: skip
NO_POLICIES = [3, True, 1.5, [jnp.bfloat16], (), object(), str, Own, jnp.ones(2), b"f32"]


@every_taker
def test_what_is_no_policy_is_refused_in_one_sentence(taker):
    for thing in (*NO_DTYPES, *NO_POLICIES):
        with pytest.raises((TypeError, ValueError, flags.IllegalFlagValueError)) as error:
            TAKERS[taker](thing)
        sentence = str(error.value)
        assert "\n" not in sentence and sentence[-1] in ".?"
        assert (
            "expected a floating dtype" in sentence
            or "a dtype or a jmpx" in sentence
            or ("a dtype, a jmpx" in sentence)
        )


@pytest.mark.parametrize("read", [jmpx.get_policy, jmpx.get_policy_map, jmpx.get_mixed_precision])
def test_none_is_no_policy(read):
    with pytest.raises(TypeError, match="^Expected .* got None: write for example "):
        read(None)


@given(st.sampled_from([*NO_DTYPES, *NO_POLICIES, jnp.float32, "f32"]), st.integers(0, 3))
def test_nested_in_lists_it_is_none(thing, depth):
    for _ in range(depth + 1):
        thing = [thing]
    with pytest.raises(TypeError, match="^Expected a policy string, a mapping, a dtype or a "):
        jmpx.get_policy(thing)  # pyright: ignore[reportArgumentType]


def test_a_dtype_of_8_bits_fails_when_it_computes():
    # As its name does.
    for dtype in (jnp.float8_e4m3fn, "float8_e4m3fn"):
        with pytest.raises(ValueError, match="Cannot compute in float8_e4m3fn"):
            jmpx.autocast(jnp.dot, dtype)(ONES, ONES)
