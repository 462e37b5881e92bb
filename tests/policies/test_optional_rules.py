"""Optional rules: they hold where they match, and are never reported as unused."""

import copy
import pickle

import haiku as hk
import jax.numpy as jnp
import pytest
from helpers.adapters import ADAPTERS, LAYERS, X, every_adapter, warnings_of
from hypothesis import given, strategies as st

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

SELECTORS = st.sampled_from(
    ["BatchNorm", "flax.linen.Dense", "*/head/*", "op.exp", "a/b", "*", "x?/*"]
)
DTYPES = st.sampled_from(["full", "c=f16", "o=bf16", "p=f16,o=f32", "bf16-true"])


@given(rules=st.lists(st.tuples(SELECTORS, st.booleans(), DTYPES), max_size=4), end=st.booleans())
def test_strings_of_optional_rules_round_trip(rules, end):
    parts = [f"{selector}{'?' * optional}: {dtypes}" for selector, optional, dtypes in rules]
    text = "; ".join(["c=bf16", *parts]) + ";" * end
    policy_map = jmpx.get_policy_map(text)
    assert [(r.selector, r.optional) for r in policy_map.rules] == [rule[:2] for rule in rules]
    for same in (
        jmpx.get_policy_map(str(policy_map)),
        pickle.loads(pickle.dumps(policy_map)),
        copy.deepcopy(policy_map),
    ):
        assert (
            same == policy_map and hash(same) == hash(policy_map) and str(same) == str(policy_map)
        )


def test_the_mark_is_no_part_of_the_selector():
    marked, plain = jmpx.get_policy_map("BatchNorm ?: full"), jmpx.get_policy_map("BatchNorm: full")
    assert marked.rules[0].label == "BatchNorm?" and marked.rules[0].selector == "BatchNorm"
    assert marked.rule_for(hk.BatchNorm, "x") and plain != marked and str(marked) != str(plain)
    for text in ("Batch?Norm: full", "BatchNorm??: full", "?: full", "c=bf16?: full"):
        with pytest.raises(ValueError, match="Unknown selector"):
            jmpx.get_policy_map(text)


@every_adapter
def test_optional_rules_hold_and_are_never_warned_of(adapter):
    run, layer = ADAPTERS[adapter], LAYERS[adapter]
    house = "; NoSuchNorm?: full; */nowhere/*?: c=f32; op.tanh?: full"
    assert warnings_of(run, f"c=bf16{house}") == []
    assert run(f"c=bf16{house}").dtype == jnp.bfloat16
    assert run(f"c=bf16; {layer}?: c=f32,o=f32{house}; *?: o=f16;").dtype == jnp.float16
    (warning,) = warnings_of(run, f"c=bf16{house}; NoSuchNorm: full")
    assert "'NoSuchNorm: compute=float32'" in warning


def test_optional_rules_under_autocast():
    house = "; NoSuchNorm?: full; */nowhere/*?: c=f32; op.cosh?: full"
    run = jmpx.autocast(lambda x: jnp.sin(x @ x.T), f"c=bf16{house}", output=None)
    assert warnings_of(run, X) == [] and run(X).dtype == jnp.bfloat16
    run = jmpx.autocast(lambda x: jnp.sin(x @ x.T), f"c=bf16; op.sin?: full{house}", output=None)
    assert run(X).dtype == jnp.float32
