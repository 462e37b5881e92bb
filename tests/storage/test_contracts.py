"""Precision contracts: a checkpoint tells its dtypes, and others are refused later."""

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
from jmpx.inspect import check_restored, describe_precision


def saved(tree, policy=None):
    """A description that went through JSON."""
    return json.loads(json.dumps(describe_precision(tree, policy)))


def assert_refused(match, tree, description, **allowed):
    with pytest.raises(ValueError, match=match):
        check_restored(tree, description, **allowed)


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
    description = describe_precision(state, "c=bf16,o=f32; LayerNorm: full | dynamic")
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
    check_restored(state, description)
    assert saved(state, jmpx.get_policy("f32"))["policy"].startswith("params=float32")


def test_containers_may_differ(rng):
    class State(NamedTuple):
        params: Any
        step: Any

    leaves = {"w": normal(rng, 3)}
    state = State([leaves], jnp.array(1))
    check_restored({"params": (leaves,), "step": np.int32(1)}, saved(state))
    check_restored(serialization.to_state_dict(state), saved(state))
    # Similar paths differ.
    state = {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1, jnp.bfloat16)}}
    assert sorted(saved(state)["dtypes"].values()) == ["bfloat16", "float32"]
    check_restored(state, saved(state))
    assert_refused("wider", jmpx.cast_to_full(state), saved(state))


@pytest.mark.parametrize(
    ("was", "got", "kind"),
    [
        ("float32", "float32", None),
        ("float32", "bfloat16", "narrowing"),
        ("float16", "bfloat16", "narrowing"),
        ("bfloat16", "float16", "narrowing"),
        ("float8_e5m2", "float8_e4m3fn", "narrowing"),
        ("float16", "float32", "widening"),
        ("float8_e4m3fn", "bfloat16", "widening"),
        ("float8_e5m2", "float16", "widening"),
    ],
)
def test_narrowing_and_widening_are_refused_unless_asked(was, got, kind, rng):
    stored = jmpx.cast_tree({"w": normal(rng, 40)}, was)
    description, restored = saved(stored, "f32"), jmpx.cast_tree(stored, got)
    if kind is None:
        check_restored(restored, description)
        return
    words = {"narrowing": "less precision", "widening": "wider dtypes"}[kind]
    other = {"narrowing": "widening", "widening": "narrowing"}[kind]
    match = f"1 of 1 leaves in {words} .* under the policy 'params=float32.*such as w in {got} "
    match += f"instead of {was}.*allow_{kind}=True"
    assert_refused(match, restored, description, **{f"allow_{other}": True})
    check_restored(restored, description, **{f"allow_{kind}": True})
    # Before anything is read:
    assert_refused(words, jax.eval_shape(lambda: restored), description)


@pytest.mark.parametrize("through", ["bfloat16", "float16"])
def test_values_that_went_through_16_bits_are_found(through, rng):
    state = {"w": normal(rng, 40), "zeros": jnp.zeros(3)}
    description = saved(state)
    check_restored(state, description)
    rounded = jmpx.cast_to_full(jmpx.cast_tree(state, through))
    for each in (rounded, jax.tree.map(np.asarray, rounded)):
        assert_refused(f"w in float32 with values of {through} alone", each, description)
        check_restored(each, description, allow_narrowing=True)
    check_restored(rounded, saved(rounded))
    # Values are unknown.
    shapes = jax.eval_shape(lambda: state)
    assert saved(shapes)["rounded"] is None
    check_restored(rounded, saved(shapes))
    check_restored(shapes, description)


def test_integers_may_become_wider_and_not_narrower():
    with enable_x64():
        state = {"n": jnp.array(3, jnp.int32), "f": jnp.array(0.1, jnp.float64)}
        description = saved(state)
        check_restored({**state, "n": jnp.array(3, jnp.int64)}, description)
        for wrong in (jnp.int16, jnp.float32, jnp.bool_):
            changed = {**state, "n": jnp.array(3, wrong)}
            assert_refused("n in .* instead of int32", changed, description)
        single = {**state, "f": state["f"].astype(jnp.float32).astype(jnp.float64)}
        assert_refused("f in float64 with values of float32 alone", single, description)
        beyond = {"large": jnp.array(2.0**200), "small": jnp.array(2.0**-200)}  # of float32
        assert saved(beyond)["rounded"] == {}
        rounded = {**state, "f": jnp.array(0.5, jnp.float64)}
        check_restored(rounded, saved(rounded))
    single = {"n": np.int32(3), "f": jnp.array(0.1)}
    assert_refused("f in float32 instead of float64", single, description)


@pytest.mark.parametrize(
    ("was", "dtype"), [(jnp.bfloat16, "V2"), (np.int8, "O"), (np.bool_, "U8"), (np.int8, "m8[s]")]
)
def test_what_is_no_number_holds_none(was, dtype):
    assert_refused("less precision", {"w": np.zeros(1, dtype)}, saved({"w": np.zeros(1, was)}))


def test_what_comes_back_as_it_was(key, rng):
    nan, inf = jnp.array([np.nan, 0.1]), jnp.array([np.inf, 0.1])
    raw, impl = np.zeros(2, np.uint32), jax.random.key(0, impl="rbg")
    state = {"w": nan, "inf": inf, "empty": jnp.ones(0), "raw": raw, "key": key, "rbg": impl}
    check_restored(state, saved(state))
    # Numbers of Python have no dtype to keep.
    check_restored({"lr": np.array(0.1), "n": 3}, saved({"lr": 0.1, "n": jnp.array(3)}))
    model = eqx.nn.MLP(2, 2, 4, 0, key=key)
    description = saved(model, "c=bf16,o=f32")
    assert "layers/0/weight" in description["dtypes"]
    check_restored(model, description)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "d"), P("d"))
    state = jax.device_put({"w": normal(rng, 16)}, sharding)
    check_restored(jax.tree.map(np.asarray, state), saved(state))


def test_a_trace_describes_what_it_closes_over_and_the_dtypes_of_what_it_traces(rng):
    state = {"w": normal(rng, 3), "zeros": jnp.zeros(2)}
    found = []

    @jax.jit
    def traced(x):
        found.append(describe_precision(state))
        found.append(describe_precision({"x": x, "c": np.ones(2)}))
        return x

    traced(jnp.ones(2))
    dtypes = {"c": "float64", "x": "float32"}
    assert found[0] == describe_precision(state)
    assert found[1] == {"policy": None, "dtypes": dtypes, "rounded": None}
