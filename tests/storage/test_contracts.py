"""Precision contracts: what a checkpoint says of its dtypes, and what is refused after it."""

import json
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest
from flax import serialization
from helpers import enable_x64, normal
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jmpx

check_restored: Any = jmpx.inspect.check_restored


def saved(tree, policy=None):
    """A description that went through JSON."""
    return json.loads(json.dumps(jmpx.inspect.describe_precision(tree, policy)))


def test_a_description_is_plain_and_names_paths_dtypes_and_the_policy(rng, key):
    params = {"w": normal(rng, 3), "b": jnp.zeros(2), "h": jnp.ones(1, jnp.bfloat16)}
    state = {
        "params": params,
        "opt": optax.adam(0.1).init({"w": params["w"]}),
        "key": key,
        "lr": 0.1,
        "scale": jmpx.DynamicLossScale(),
        "act": jax.nn.relu,
    }
    description = jmpx.inspect.describe_precision(state, "c=bf16,o=f32; LayerNorm: full | dynamic")
    assert description == {
        "policy": "params=float32,compute=bfloat16,output=float32; LayerNorm: compute=float32",
        "dtypes": {
            "key": "key<fry>",
            "lr": "float",
            "opt/0/count": "int32",
            "opt/0/mu/w": "float32",
            "opt/0/nu/w": "float32",
            "params/b": "float32",
            "params/h": "bfloat16",
            "params/w": "float32",
        },
        "rounded": dict.fromkeys(("opt/0/mu/w", "opt/0/nu/w", "params/b"), "bfloat16"),
    }
    assert saved(state) == {**description, "policy": None}
    assert msgpack.unpackb(msgpack.packb(description)) == description
    jmpx.inspect.check_restored(state, description)
    assert saved(state, jmpx.get_policy("f32"))["policy"].startswith("params=float32")


def test_containers_may_differ(rng):
    class State(NamedTuple):
        params: Any
        step: Any

    leaves = {"w": normal(rng, 3)}
    state = State([leaves], jnp.array(1))
    jmpx.inspect.check_restored({"params": (leaves,), "step": np.int32(1)}, saved(state))
    jmpx.inspect.check_restored(serialization.to_state_dict(state), saved(state))


def test_paths_that_look_alike_are_told_apart():
    state = {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1, jnp.bfloat16)}}
    assert sorted(saved(state)["dtypes"].values()) == ["bfloat16", "float32"]
    jmpx.inspect.check_restored(state, saved(state))
    with pytest.raises(ValueError, match="wider"):
        jmpx.inspect.check_restored(jmpx.cast_to_full(state), saved(state))


NAMES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
HOLDS = {  # which values are all those of which wider dtype
    ("bfloat16", "float32"),
    ("float16", "float32"),
    *((f8, wide) for f8 in NAMES[3:] for wide in NAMES[:3]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("got", NAMES)
@pytest.mark.parametrize("was", NAMES)
def test_narrowing_and_widening_are_refused_unless_asked(was, got, rng):
    was, got = np.dtype(was), np.dtype(got)
    tree = {"w": normal(rng, 40)}
    description = saved(jmpx.cast_tree(tree, was), "f32")
    restored = jmpx.cast_tree(jmpx.cast_tree(tree, was), got)
    if was == got:
        jmpx.inspect.check_restored(restored, description)
        return
    kind = "widening" if (was.name, got.name) in HOLDS else "narrowing"
    words = {"narrowing": "less precision", "widening": "wider dtypes"}[kind]
    other = {"narrowing": "widening", "widening": "narrowing"}[kind]
    match = (
        f"1 of 1 leaves in {words} .* under the policy 'params=float32.*such as w in {got.name} "
    )
    with pytest.raises(ValueError, match=f"{match}instead of {was.name}.*allow_{kind}=True"):
        jmpx.inspect.check_restored(restored, description, **{f"allow_{other}": True})
    jmpx.inspect.check_restored(restored, description, **{f"allow_{kind}": True})
    with pytest.raises(ValueError, match=words):  # before anything is read
        jmpx.inspect.check_restored(jax.eval_shape(lambda: restored), description)


@pytest.mark.parametrize("through", [jnp.bfloat16, jnp.float16])
def test_values_that_went_through_16_bits_are_found(through, rng):
    state = {"w": normal(rng, 40), "zeros": jnp.zeros(3)}
    description = saved(state)
    jmpx.inspect.check_restored(state, description)
    rounded = jmpx.cast_to_full(jmpx.cast_tree(state, through))
    name = np.dtype(through).name
    for each in (rounded, jax.tree.map(np.asarray, rounded)):
        with pytest.raises(ValueError, match=f"w in float32 with values of {name} alone"):
            jmpx.inspect.check_restored(each, description)
        jmpx.inspect.check_restored(each, description, allow_narrowing=True)
    jmpx.inspect.check_restored(rounded, saved(rounded))
    # Without values, nothing is known of them.
    shapes = jax.eval_shape(lambda: state)
    assert saved(shapes)["rounded"] is None
    jmpx.inspect.check_restored(rounded, saved(shapes))
    jmpx.inspect.check_restored(shapes, description)


def test_nan_and_inf_and_empty_arrays_come_back(rng):
    state = {"w": jnp.array([np.nan, 0.1]), "inf": jnp.array([np.inf, 0.1]), "none": jnp.ones(0)}
    jmpx.inspect.check_restored(jax.tree.map(lambda x: x + 0, state), saved(state))


def test_integers_may_become_wider_and_not_narrower():
    with enable_x64():
        state = {"n": jnp.array(3, jnp.int32), "f": jnp.array(0.1, jnp.float64)}
        description = saved(state)
        jmpx.inspect.check_restored({**state, "n": jnp.array(3, jnp.int64)}, description)
        for wrong in (jnp.int16, jnp.float32, jnp.bool_):
            with pytest.raises(ValueError, match="n in .* instead of int32"):
                jmpx.inspect.check_restored({**state, "n": jnp.array(3, wrong)}, description)
        with pytest.raises(ValueError, match="f in float64 with values of float32 alone"):
            single = state["f"].astype(jnp.float32).astype(jnp.float64)
            jmpx.inspect.check_restored({**state, "f": single}, description)
        beyond = {"large": jnp.array(2.0**200), "small": jnp.array(2.0**-200)}  # of float32
        assert saved(beyond)["rounded"] == {}
        rounded = jnp.array(0.5, jnp.float64)
        jmpx.inspect.check_restored({**state, "f": rounded}, saved({**state, "f": rounded}))
    with pytest.raises(ValueError, match="f in float32 instead of float64"):
        jmpx.inspect.check_restored({"n": np.int32(3), "f": jnp.array(0.1)}, description)


@pytest.mark.parametrize("dtype", ["V2", "O", "U8", "m8[s]"])
@pytest.mark.parametrize("was", [jnp.bfloat16, np.int8, np.bool_])
def test_what_is_no_number_holds_none(was, dtype):
    with pytest.raises(ValueError, match="less precision"):
        jmpx.inspect.check_restored({"w": np.zeros(1, dtype)}, saved({"w": np.zeros(1, was)}))


def test_numbers_of_python_have_no_dtype_to_keep():
    jmpx.inspect.check_restored(
        {"lr": np.array(0.1), "n": 3}, saved({"lr": 0.1, "n": jnp.array(3)})
    )


RAW = np.zeros(2, np.uint32)
KEYS = {
    "raw": (
        RAW,
        jax.random.key(0),
        "another kind .* key in uint32 instead of key<fry>: restore it in key",
    ),
    "wrapped": (jax.random.key(0), RAW, "key in key<fry> instead of uint32: restore it in uint32"),
    "impl": (
        jax.random.key(0, impl="rbg"),
        jax.random.key(0),
        "key in key<rbg> instead of key<fry>: restore it in key",
    ),
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("allowed", [False, True])
def test_another_kind_of_random_key_is_refused(name, allowed):
    restored, was, match = KEYS[name]
    jmpx.inspect.check_restored({"key": was}, saved({"key": was}))
    with pytest.raises(ValueError, match=match):
        jmpx.inspect.check_restored(
            {"key": restored},
            saved({"key": was}),
            allow_narrowing=allowed,
            allow_widening=allowed,
        )


def test_an_optimizer_of_other_wrappers_is_refused_with_its_remedy():
    wrapped = jmpx.skip_nonfinite(optax.adam(0.1)).init(W)
    with pytest.raises(ValueError, match="with the same wrappers of its optimizer"):
        jmpx.inspect.check_restored(optax.adam(0.1).init(W), saved(wrapped))


def test_modules_and_shards_are_described(key, rng):
    model = eqx.nn.MLP(2, 2, 4, 1, key=key)
    description = saved(model, "c=bf16,o=f32")
    assert "layers/0/weight" in description["dtypes"]
    jmpx.inspect.check_restored(model, description)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "d"), P("d"))
    state = jax.device_put({"w": normal(rng, 16)}, sharding)
    jmpx.inspect.check_restored(jax.tree.map(np.asarray, state), saved(state))


def test_a_trace_describes_what_it_closes_over(rng):
    state = {"w": normal(rng, 3), "zeros": jnp.zeros(2)}
    found = []
    jax.jit(lambda x: found.append(jmpx.inspect.describe_precision(state)) or x)(jnp.ones(2))
    assert found == [jmpx.inspect.describe_precision(state)]


def test_a_trace_describes_dtypes():
    found = []
    jax.jit(lambda x: found.append(jmpx.inspect.describe_precision({"x": x, "c": np.ones(2)})))(
        jnp.ones(2)
    )
    assert found == [{"policy": None, "dtypes": {"c": "float64", "x": "float32"}, "rounded": None}]


GOOD = {"policy": None, "dtypes": {"w": "float32"}, "rounded": {}}
W = {"w": jnp.array([0.1])}
BAD = {
    "text": (W, json.dumps(GOOD), TypeError, "description of a checkpoint, got '{"),
    "no dtypes": (W, {"policy": "f32"}, TypeError, "description of a checkpoint, got {'policy'"),
    "missing": ({}, GOOD, ValueError, "the 1 leaves that were described, got 0, .* by 'w'"),
    "more": ({**W, "v": 1}, GOOD, ValueError, "got 2, which differ for example by 'v'"),
    "part": ({"params": W}, GOOD, ValueError, "got 1, which differ for example by 'params/w'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_one_sentence(name):
    tree, description, error, match = BAD[name]
    with pytest.raises(error, match=match) as caught:
        check_restored(tree, description)
    assert str(caught.value).count(". ") == 0


def test_a_wrong_policy_is_refused():
    with pytest.raises(ValueError, match="bf61"):
        jmpx.inspect.describe_precision(W, "c=bf61")
