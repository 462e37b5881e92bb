"""Policies, policy maps and loss scales from nested mappings, and back to plain dicts."""

import collections
import json
import types

import jax.numpy as jnp
import ml_collections
import numpy as np
import omegaconf
import pytest
import yaml
from helpers.policies import READERS, given_value_or_sentence, policy_maps
from hypothesis import given, settings, strategies as st

import jmpx

MAP = {
    "policy": {"compute": "bf16", "output": "f32"},
    "rules": [{"select": "LayerNorm", "compute": "f32"}, "*/router?: c=f32,m=highest"],
}
MAP_STRING = "c=bf16,o=f32; LayerNorm: full; */router?: c=f32,m=highest"


# Libraries of configurations, each with the value that its users pass on.
LIBRARIES = {
    "dict": dict,
    "json": lambda mapping: json.loads(json.dumps(mapping)),
    "yaml": lambda mapping: yaml.safe_load(yaml.safe_dump(mapping)),
    "Mapping": types.MappingProxyType,
    "UserDict": collections.UserDict,
    "ConfigDict": ml_collections.ConfigDict,
    "DictConfig": omegaconf.OmegaConf.create,
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_kind_of_mapping(library):
    make = LIBRARIES[library]
    assert jmpx.get_policy(make({"compute": "bf16"})) == jmpx.get_policy("c=bf16")
    assert jmpx.get_policy_map(make(MAP)) == jmpx.get_policy_map(MAP_STRING)
    loss_scale = make({"type": "dynamic", "init": 2**10, "period": 5})
    assert str(jmpx.get_loss_scale(loss_scale)) == "dynamic,init=1024,period=5"
    precision = jmpx.get_mixed_precision(make({**MAP, "loss_scale": {"type": "static", "init": 8}}))
    assert precision == jmpx.get_mixed_precision(f"{MAP_STRING} | static=8")


def test_a_frozen_config_dict_holds_rules_as_strings():
    # ml_collections refuses mappings in lists.
    rules = ["LayerNorm: full", "*/router?: c=f32,m=highest"]
    config = ml_collections.FrozenConfigDict({"policy": {"c": "bf16", "o": "f32"}, "rules": rules})
    assert isinstance(config.rules, tuple)
    assert jmpx.get_policy_map(config) == jmpx.get_policy_map(MAP_STRING)


def test_references_and_interpolations_are_followed():
    config = ml_collections.ConfigDict({"dtype": "bf16"})
    config.policy = {"compute": config.get_ref("dtype")}
    assert jmpx.get_policy(config.policy) == jmpx.get_policy("c=bf16")
    config = omegaconf.OmegaConf.create(
        {"dtype": "f32", "policy": "bf16", "rules": [{"select": "X", "c": "${dtype}"}]}
    )
    assert jmpx.get_policy_map(config["policy"]) == jmpx.get_policy_map("bf16")
    assert jmpx.get_policy_map({"rules": config["rules"]}) == jmpx.get_policy_map("X: f32")
    config["rules"] = [{"select": "X", "c": "${nothing}"}]
    with pytest.raises(omegaconf.errors.InterpolationKeyError, match=r"rules\[0\]\.c"):
        jmpx.get_policy_map({"rules": config["rules"]})
    with pytest.raises(omegaconf.errors.MissingMandatoryValue, match="policy.compute"):
        jmpx.get_policy_map(omegaconf.OmegaConf.create({"policy": {"compute": "???"}}))


SPELLINGS = [
    {"policy": "c=bf16,o=f32", "rules": ["LayerNorm: full;", MAP["rules"][1]]},
    {"policy": "c=bf16,o=f32", "rules": "LayerNorm: full; */router?: c=f32,m=highest"},
    {"policy": MAP_STRING},
    {"policy": jmpx.get_policy_map(MAP_STRING)},
    {"policy": jmpx.get_policy("bf16-mixed"), "rules": jmpx.get_policy_map(MAP_STRING).rules},
    {" Policy ": {"C": jnp.bfloat16, " OUTPUT": np.dtype("float32")}, "RULES": (
        {"select": " LayerNorm ", "policy": "full"},
        {"Select": "*/router ?", "policy": {"c": "f32", "m": "HIGHEST"}},
    )},
    {"policy": {"p": "f32", "compute": "bf16", "o": "full"}, "rules": [
        {"select": "LayerNorm", "policy": jnp.float32},
        {"select": "*/router ?", "compute": "f32", "matmul": "highest"},
    ]},
]  # fmt: skip


@pytest.mark.parametrize("mapping", SPELLINGS)
def test_any_value_may_be_its_string(mapping):
    policy_map = jmpx.get_policy_map(mapping)
    assert policy_map == jmpx.get_policy_map(MAP_STRING)
    assert jmpx.get_mixed_precision(mapping).policy_map == policy_map


def test_defaults():
    without = {"compute": "bf16"}, {"policy": {"c": "bf16"}}, {"policy": "c=bf16", "rules": []}
    for mapping in without:
        assert jmpx.get_policy_map(mapping) == jmpx.get_policy_map("c=bf16")
    assert jmpx.get_policy_map({"rules": ["X: bf16"]}) == jmpx.get_policy_map("X: bf16")
    rule = {"select": "X", "policy": {"output": "bf16"}}
    assert jmpx.get_policy_map({"rules": [rule]}).rules == (jmpx.types.Rule("X", output="bf16"),)
    for policy in ("bf16-mixed", jmpx.get_policy("bf16-mixed")):  # both name all three
        rule = jmpx.get_policy_map({"rules": [{"select": "X", "policy": policy}]}).rules[0]
        assert rule == jmpx.types.Rule("X", "f32", "bf16", "f32")


YAML = """
policy: {compute: bf16, output: f32, reduce: bf16}
rules:
  - select: LayerNorm?
    compute: f32
  - "*/router: c=f32,m=highest"
loss_scale: {type: dynamic, init: 2**12, max: 1e4, period: 500}
"""


def test_what_yaml_makes_of_numbers():
    numbers = yaml.safe_load(YAML)["loss_scale"]
    assert numbers["init"] == "2**12" and numbers["max"] == "1e4"  # YAML 1.1: not numbers
    precision = jmpx.get_mixed_precision(yaml.safe_load(YAML))
    parts = (
        "params=float32,compute=bfloat16,output=float32,reduce=bfloat16",
        "LayerNorm?: compute=float32",
        "*/router: compute=float32,matmul=highest | dynamic,init=4096,period=500,max=10000",
    )
    assert str(precision) == "; ".join(parts)


@given(policy_maps(), st.sampled_from(sorted(LIBRARIES)))
@settings(deadline=None, max_examples=50)
def test_policy_maps_come_back_from_dicts(policy_map, library):
    plain = policy_map.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert jmpx.get_policy_map(LIBRARIES[library](plain)) == policy_map
    for rule in policy_map.rules:
        assert jmpx.get_policy_map({"rules": [rule.to_dict()]}).rules == (rule,)
    assert jmpx.get_policy_map(str(policy_map)) == policy_map
    default = policy_map.default
    assert jmpx.get_policy(default.to_dict()) == default
    assert jmpx.get_policy_map(default.to_dict()) == jmpx.PolicyMap(default)


RULES = ["LayerNorm: full;", "LayerNorm?: full", "'*/head/*': c=f32,o=f32", "op.exp: f32"]


@pytest.mark.parametrize("rule", [*RULES, "haiku.LayerNorm: {compute: f32, output: bf16}"])
def test_a_rule_of_yaml_needs_no_quotes(rule):
    """YAML reads `- LayerNorm: full` as a mapping of one key."""
    mixed = jmpx.get_mixed_precision(yaml.safe_load(f"policy: bf16\nrules:\n- {rule}\n"))
    text = rule.replace("'", "").replace("{compute: f32, output: bf16}", "c=f32,o=bf16")
    assert mixed.policy_map == jmpx.get_policy_map(f"bf16; {text}")


def test_a_mapping_that_contains_itself_and_a_deep_one():
    endless: dict[str, object] = {"policy": "bf16"}
    endless["rules"] = endless["loss_scale"] = endless["policy"] = endless
    deep = []
    for _ in range(100_000):
        deep = [deep]
    keys = "rules", "policy", "loss_scale", "compute"
    for mapping in (endless, *({key: deep} for key in keys)):
        for read in READERS:
            assert isinstance(given_value_or_sentence(read, mapping), str)
    while deep:  # else Python's own destructor recurses
        deep = deep.pop()


def test_long_values_are_shortened():
    message = given_value_or_sentence(jmpx.get_policy, {"compute": ["bf16" * 10_000] * 10_000})
    assert isinstance(message, str) and len(message) < 1000
