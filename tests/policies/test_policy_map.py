import copy
import pickle
import warnings

import haiku as hk
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import jmpx
from jmpx._policies.maps import warn_unused

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
PARSED = [
    ("c=bf16,o=f32", "c=bf16,o=f32", []),
    ("BatchNorm: full", "f32", [("BatchNorm", None, F32, None)]),
    (
        "c=bf16,o=f32; BatchNorm: full; */head/*: c=f32",
        "c=bf16,o=f32",
        [("BatchNorm", None, F32, None), ("*/head/*", None, F32, None)],
    ),
    (" *: o = F16 ;bf16-mixed", "bf16-mixed", [("*", None, None, F16)]),
    (
        "haiku.BatchNorm : p=f32,c=f16 ; op.exp:f32; mlp/linear: bf16-mixed",
        "f32",
        [("haiku.BatchNorm", F32, F16, None), ("op.exp", None, F32, None),
         ("mlp/linear", F32, BF16, F32)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "default", "rules"), PARSED)
def test_get_policy_map(text, default, rules):
    policy_map = jmpx.get_policy_map(text)
    assert policy_map.default == jmpx.get_policy(default)
    assert policy_map.rules == tuple(jmpx.types.Rule(*rule) for rule in rules)
    assert jmpx.get_policy_map(str(policy_map)) == policy_map
    assert jmpx.get_policy_map(policy_map) is policy_map
    assert hash(jmpx.get_policy_map(text)) == hash(policy_map)
    for again in (pickle.loads(pickle.dumps(policy_map)), copy.deepcopy(policy_map)):
        assert again == policy_map


def test_a_policy_becomes_a_map_without_rules():
    policy = jmpx.get_policy("c=bf16")
    assert jmpx.get_policy_map(policy) == jmpx.PolicyMap(policy)
    assert jmpx.get_policy_map(policy).default is policy


@given(
    default=st.sampled_from(["f32", "c=bf16,o=f32", "16-mixed"]),
    rules=st.lists(
        st.tuples(
            st.sampled_from(["BatchNorm", "flax.linen.Dense", "*/head/*", "op.exp", "a/b"]),
            st.sampled_from(["full", "c=f16", "o=bf16", "p=f16,o=f32", "bf16-true"]),
        ),
        max_size=4,
    ),
)
def test_str_round_trips(default, rules):
    text = "; ".join([default, *(f"{selector}: {policy}" for selector, policy in rules)])
    policy_map = jmpx.get_policy_map(text)
    assert jmpx.get_policy_map(str(policy_map)) == policy_map
    assert len(policy_map.rules) == len(rules)


BAD = [
    ("", "Empty rule at position 0"),
    (";", "Empty rule at position 0"),
    ("c=bf16;;", "Empty rule at position 7"),
    ("c=bf16;; BatchNorm: full", "Empty rule at position 7"),
    ("c=bf16; BatchNorm:", "Missing policy for 'BatchNorm' at position 8"),
    ("c=bf16; : full", "Missing selector at position"),
    ("c=bf16; Batch Norm: full", "Unknown selector 'Batch Norm' at position 8"),
    ("c=bf16; 3x: full", "Unknown selector '3x' at position 8"),
    ("c=bf16; head=1: full", "Unknown selector 'head=1' at position 8"),
    ("c=bf16; o=f32", "Second default 'o=f32' at position 8"),
    ("c=bf16; BatchNorm: fulll", "Unknown dtype 'fulll' at position 19 .*did you mean 'full'"),
    ("c=bf16; BatchNorm: x=f32", "Unknown key 'x' at position 19"),
    ("BatchNorm: full; c=bf61", "Unknown dtype 'bf61' at position 19"),
    ("c=bf16; BatchNorm: c=f32,c=f16", "Duplicate key 'compute' at position 25"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_maps_say_what_and_where_in_one_sentence(text, message):
    with pytest.raises(ValueError, match=message) as error:
        jmpx.get_policy_map(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("thing", [None, 3, True, b"f32", ["c=bf16"], jnp.ones(2), str])
def test_other_types_are_refused(thing):
    with pytest.raises(TypeError, match="^Expected a policy map string, a mapping, "):
        jmpx.get_policy_map(thing)


# matching


class Norm:
    pass


class BatchNorm(Norm):
    class Inner:
        pass


MATCHES = [
    ("BatchNorm", BatchNorm, "x", True),
    ("Norm", BatchNorm, "x", True),  # by any base's name
    ("BatchNorm", Norm, "x", False),
    ("batchnorm", BatchNorm, "x", False),
    ("object", BatchNorm, "x", True),
    ("BatchNorm.Inner", BatchNorm.Inner, "x", True),
    ("Inner", BatchNorm.Inner, "x", True),
    ("haiku.BatchNorm", hk.BatchNorm, "x", True),
    ("haiku.BatchNorm", BatchNorm, "x", False),
    ("haiku.Module", hk.BatchNorm, "x", True),
    ("haik.BatchNorm", hk.BatchNorm, "x", False),
    ("haiku.nets.MLP", hk.nets.MLP, "x", False),  # it lives in haiku._src.nets
    ("*/head/*", Norm, "net/head/linear", True),
    ("*/head/*", Norm, "net/head", True),
    ("*/head/*", Norm, "head", True),
    ("*/head/*", Norm, "head/linear", True),
    ("*/head/*", Norm, "net/header", False),
    ("*/head/*", Norm, "ahead/linear", False),
    ("*/logits", Norm, "net/logits", True),
    ("*/logits", Norm, "logits", True),
    ("*/logits", Norm, "net/logits/linear", False),
    ("*/logits", Norm, "net/my_logits", False),
    ("*logits", Norm, "net/my_logits", True),
    ("net/*", Norm, "net", True),
    ("net/*/norm", Norm, "net/a/b/norm", True),
    ("net/norm", Norm, "net/norm", True),
    ("net/norm", Norm, "net/norm2", False),
    ("layers/0", Norm, "layers/0", True),
    ("*", Norm, "", True),
    ("a.c/*", Norm, "abc/x", False),  # a dot is a dot
    ("op.exp", Norm, "op.exp", False),
]


@pytest.mark.parametrize(("selector", "cls", "path", "expected"), MATCHES)
def test_matching(selector, cls, path, expected):
    policy_map = jmpx.get_policy_map(f"{selector}: full")
    assert (policy_map.rule_for(cls, path) is not None) == expected


def test_the_last_rule_that_matches_wins():
    policy_map = jmpx.get_policy_map("c=bf16; Norm: full; */head/*: c=f16; BatchNorm: c=bf16")
    first, second, third = policy_map.rules
    assert policy_map.rule_for(Norm, "x") is first
    assert policy_map.rule_for(Norm, "head") is second
    assert policy_map.rule_for(BatchNorm, "head") is third
    assert policy_map.rule_for(int, "x") is None


def test_a_used_map_is_the_value_that_it_was():
    policy_map = jmpx.get_policy_map("c=bf16; Norm: full; */head/*: c=f16; BatchNorm: c=bf16")
    before = pickle.dumps(policy_map), vars(policy_map).copy()
    policy_map.rule_for(BatchNorm, "body")
    assert (pickle.dumps(policy_map), vars(policy_map)) == before
    assert pickle.loads(before[0]) == policy_map


def test_rules_that_no_module_met_are_warned_of_each_time():
    policy_map = jmpx.get_policy_map("c=bf16; Norm: full; */head/*: c=f16; BatchNorm: c=bf16")
    body, head = (BatchNorm, "body"), (Norm, "head/x")
    for _ in range(2):  # of BatchNorm's two rules the first matches, though the last one wins
        with pytest.warns(UserWarning, match=r"'\*/head/\*: compute=float16'") as caught:
            warn_unused(policy_map, [body], stacklevel=1)
        assert len(caught) == 1
    warn_unused(policy_map, [body, head], stacklevel=1)  # all matched
    warn_unused(policy_map, [], stacklevel=1)  # no module ran: nothing is known


def test_resolve_inherits():
    policy_map = jmpx.get_policy_map("p=f64,c=bf16,o=f32; A: full; B: o=f32; C: p=f16,c=f16,o=f16")
    a, b, c = policy_map.rules
    default, f16 = policy_map.default, jmpx.get_policy("f16")
    assert a.resolve(default, default) == jmpx.Policy("f64", F32, BF16)
    assert a.resolve(default, f16) == jmpx.Policy("f64", F32, F16)
    assert b.resolve(default, f16) == jmpx.Policy("f64", F16, F32)
    assert c.resolve(default, default) == jmpx.get_policy("f16")
    # The outermost call's result is that of the whole.
    assert a.resolve(default, None) == jmpx.Policy("f64", F32, F32)


# warnings


def test_warnings_name_the_rule_and_the_nearest_class_or_path():
    policy_map = jmpx.get_policy_map(
        "c=bf16; BatchNrm: full; haiku.Linera: full; */haed/*: full; op.exp: f32; zzz/*: full"
    )
    seen = [(hk.BatchNorm, "net/batch_norm"), (hk.Linear, "net/head")]
    with pytest.warns(UserWarning) as caught:
        warn_unused(policy_map, seen, 1)
    assert all(w.filename == __file__ for w in caught)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 5
    assert "'BatchNrm: compute=float32'" in texts[0] and "did you mean 'BatchNorm'?" in texts[0]
    assert "did you mean 'Linear'?" in texts[1]
    assert "matched no path" in texts[2] and "did you mean 'net/head'?" in texts[2]
    assert "'op.exp: compute=float32'" in texts[3] and "jmpx.autocast" in texts[3]
    assert texts[4].endswith("matched no path.")


def test_no_warning_when_nothing_was_met():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unused(jmpx.get_policy_map("BatchNorm: full"), [], 1)
