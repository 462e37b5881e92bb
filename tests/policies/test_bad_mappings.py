"""A mistake in a nested mapping ends in one sentence, with the path of the value in the mapping."""

import jax.numpy as jnp
import pytest
import yaml
from helpers.policies import given_value_or_sentence

import jmpx

# What a configuration may have wrong -> the beginning of the message, and what else is in it.
POLICIES = [
    ({"comptue": "bf16"}, "Unknown key 'comptue' at comptue: ", "did you mean 'compute'?"),
    ({"c": "bf16", "compute": "f32"}, "Duplicate key 'compute' at compute: ", "at most once"),
    ({"C": "bf16", "c ": "f32"}, "Duplicate key 'compute' at ['c ']: ", "at most once"),
    ({"compute": "bflaot16"}, "Unknown dtype 'bflaot16' at compute: ", "did you mean 'bfloat16'?"),
    ({"compute": "  "}, "Missing dtype at compute: ", "expected one of"),
    ({"compute": "c=bf16"}, "Unknown dtype 'c=bf16' at compute: ", "expected one of"),
    ({"compute": None}, "Expected a dtype at compute, got None: ", "leave it out"),
    ({"compute": False}, "Expected a dtype at compute, got False: ", "YAML reads"),
    ({"compute": 16}, "Expected a dtype at compute, got 16: ", "'bfloat16'"),
    ({"compute": ["bf16"]}, "Expected a dtype at compute, got ['bf16']: ", "'bfloat16'"),
    ({"compute": {"a": 1}}, "Expected a dtype at compute, got {'a': 1}: ", "'bfloat16'"),
    ({"compute": jnp.ones((2, 2))}, "Expected a dtype at compute, got Array([[1., 1.], ", "write"),
    ({"compute": "TF32"}, "Unknown dtype 'TF32' at compute: ", "matmul=tensorfloat32"),
    ({"output": jnp.int32}, "Unknown dtype 'int32' at output: ", "expected a floating dtype"),
    ({"output": float}, "Unknown dtype <class 'float'> at output: ", "expected a floating dtype"),
    ({"matmul": "higest"}, "Unknown algorithm 'higest' at matmul: ", "did you mean 'highest'?"),
    ({"m": None}, "Expected the name of an algorithm of matrix products at m, got None", "leave"),
    (
        {"m": jnp.float32},
        "Expected the name of an algorithm of matrix products at m, got ",
        "write",
    ),
    ({"reduce": "float8_e5m2"}, "Cannot reduce in float8_e5m2 at reduce, ", "reduce=float32"),
    ({"rules": []}, "Unexpected key 'rules' at rules: ", "get_policy_map"),
    (
        {"loss_scale": "none", "c": "bf16"},
        "Unexpected key 'loss_scale' at loss_scale: ",
        "get_mixed_precision",
    ),
    ({"policy": "bf16"}, "Unexpected key 'policy' at policy: ", "{'compute': 'bfloat16'}"),
    ({}, "Missing policy: ", "{'compute': 'bfloat16'}"),
    ({1: "bf16"}, "Expected a string as a key, got 1: ", "quotes"),
    ({True: "bf16"}, "Expected a string as a key, got True: ", "YAML reads the words on, off"),
    ({"a\nb": "bf16"}, r"Unknown key 'a\nb' at ['a\nb']: ", "expected one of"),
]
MAPS = [
    ({"polcy": "bf16"}, "Unknown key 'polcy' at polcy: ", "did you mean 'policy'?"),
    (
        {"policy": {"comptue": "f32"}},
        "Unknown key 'comptue' at policy.comptue: ",
        "did you mean 'compute'?",
    ),
    ({"policy": {"rules": []}}, "Unexpected key 'rules' at policy.rules: ", "get_policy_map"),
    ({"policy": {"policy": "f32"}}, "Unexpected key 'policy' at policy.policy: ", "'compute'"),
    ({"policy": {}}, "Missing policy at policy: ", "'compute'"),
    (
        {"compute": "bf16", "rules": []},
        "Unexpected key 'compute' at compute beside 'rules': ",
        "'policy'",
    ),
    (
        {"policy": ["c=bf16"]},
        "Expected a policy map string, a mapping, ",
        "at policy, got ['c=bf16']",
    ),
    ({"policy": None}, "Expected a policy map string, a mapping, ", "at policy, got None"),
    (
        {"policy": "c=bf16; X: f16", "rules": []},
        "Duplicate key 'rules' at rules: ",
        "write one of them",
    ),
    (
        {"policy": "c=bflaot16"},
        "Unknown dtype 'bflaot16' at position 2 of policy map 'c=bflaot16' at policy",
        "did you mean 'bfloat16'?",
    ),
    (
        {"policy": "f32|none"},
        "Unexpected '|' at position 3 of policy map 'f32|none' at policy: ",
        "'loss_scale'",
    ),
    (
        {"policy": "f32", "loss_scale": "none"},
        "Unexpected key 'loss_scale' at loss_scale: ",
        "get_mixed_precision",
    ),
    (
        {"rules": {"LayerNorm": "full"}},
        "Expected a list of rules at rules, got {'LayerNorm': 'full'}: ",
        "their order counts",
    ),
    ({"rules": []}, "Missing policy: ", "{'compute': 'bfloat16'}"),
    ({"rules": range(10**18)}, "Expected a rule at rules[0], got 0: ", "'select'"),
    ({"loss-scale": "none"}, "Unknown key 'loss-scale' at ['loss-scale']: ", "'policy'"),
    ({"rules": None}, "Expected a list of rules at rules, got None: ", "leave it out"),
    ({"rules": 3}, "Expected a list of rules at rules, got 3: ", "'select'"),
    ({"rules": b"X: f32"}, "Expected a list of rules at rules, got b'X: f32': ", "'select'"),
    ({"rules": "full"}, "Unexpected policy without a selector in 'full' at rules: ", "'policy'"),
    ({"rules": ["full"]}, "Expected one rule, got 'full' at rules[0]: ", "'select'"),
    (
        {"rules": ["X: f32; Y: f32"]},
        "Expected one rule, got 'X: f32; Y: f32' at rules[0]: ",
        "write",
    ),
    (
        {"rules": ["X: f32 | none"]},
        "Unexpected '|' at position 7 of rule 'X: f32 | none' at rules[0]",
        "get_mixed_precision",
    ),
    (
        {"rules": ["X: f32", "Y: flaot32"]},
        "Unknown dtype 'flaot32' at position 3 of rule 'Y: flaot32' at rules[1]",
        "did you mean 'float32'?",
    ),
    ({"rules": [None]}, "Expected a rule at rules[0], got None: ", "leave it out"),
    ({"rules": [["X", "f32"]]}, "Expected a rule at rules[0], got ['X', 'f32']: ", "'select'"),
    (
        {"rules": [{"selct": "X"}]},
        "Unknown key 'selct' at rules[0].selct: ",
        "did you mean 'select'?",
    ),
    ({"rules": [{"X": None}]}, "Expected a policy string, ", "at rules[0].X, got None: "),
    ({"rules": [{}]}, "Missing key 'select' at rules[0]: ", "'select'"),
    ({"rules": [{"select": "X"}]}, "Missing policy at rules[0]: ", "'compute': 'bfloat16'"),
    (
        {"rules": [{"select": "X", "policy": {}}]},
        "Missing policy at rules[0].policy: ",
        "'compute'",
    ),
    (
        {"rules": [{"select": "X", "policy": None}]},
        "Expected a policy string",
        "at rules[0].policy, got",
    ),
    (
        {"rules": [{"select": "X", "policy": "Y: f32"}]},
        "Unexpected rule 'Y: f32' at position 0 of policy ",
        "'Y: f32' at rules[0].policy: ",
    ),
    (
        {"rules": [{"select": "X", "policy": "f32", "c": "f16"}]},
        "Unexpected key at rules[0].c beside 'policy': ",
        "or none",
    ),
    (
        {"rules": [{"select": "X", "comput": "f32"}]},
        "Unknown key 'comput' at rules[0].comput: ",
        "did you mean 'compute'?",
    ),
    (
        {"rules": [{"select": "X", "c": "flaot32"}]},
        "Unknown dtype 'flaot32' at rules[0].c: ",
        "did you mean 'float32'?",
    ),
    (
        {"rules": [{"select": "X", "c": None}]},
        "Expected a dtype at rules[0].c, got None: ",
        "'bfloat16'",
    ),
    (
        {"rules": [{"select": "X", "reduce": "f32"}]},
        "Unexpected key 'reduce' at rules[0].reduce: ",
        "default",
    ),
    (
        {"rules": [{"select": "X", "policy": "r=f32"}]},
        "Unexpected key 'r' at position 0 of policy 'r=f32' at rules[0].policy: ",
        "default",
    ),
    (
        {"rules": [{"select": "X", "policy": {"r": "f32"}}]},
        "Unexpected key 'r' at rules[0].policy.r: ",
        "default",
    ),
    (
        {"rules": [{"select": "X y", "c": "f32"}]},
        "Unknown selector 'X y' at rules[0].select: ",
        "glob",
    ),
    (
        {"rules": [{"select": "*:a", "c": "f32"}]},
        "Unknown selector '*:a' at rules[0].select: ",
        "glob",
    ),
    (
        {"rules": [{"select": "*|a", "c": "f32"}]},
        "Unknown selector '*|a' at rules[0].select: ",
        "glob",
    ),
    ({"rules": [{"select": "", "c": "f32"}]}, "Missing selector at rules[0].select: ", "glob"),
    (
        {"rules": [{"select": False, "c": "f32"}]},
        "Expected a selector at rules[0].select, got False: ",
        "YAML reads",
    ),
    (
        {"rules": [{"select": "X", "optional": True, "c": "f32"}]},
        "Unknown key 'optional' at rules[0].optional: ",
        "expected one of 'select', 'policy', 'params'",
    ),
    ({"rules": [{1: "X"}]}, "Expected a string as a key at rules[0], got 1: ", "quotes"),
]
LOSS_SCALES = [
    (None, "Expected the string of a loss scale, ", "at loss_scale, got None: "),
    (False, "Expected the string of a loss scale, ", "YAML reads the words on, off"),
    (1024, "Expected the string of a loss scale, ", "at loss_scale, got 1024: "),
    (["dynamic"], "Expected the string of a loss scale, ", "at loss_scale, got ['dynamic']: "),
    ({}, "Missing key 'type' at loss_scale: ", "'dynamic'"),
    ({"init": 8}, "Missing key 'type' at loss_scale: ", "'dynamic'"),
    ({"type": None}, "Expected the kind of a loss scale at loss_scale.type, got None", "'none'"),
    ({"type": "dynamc"}, "Unknown kind 'dynamc' at loss_scale.type: ", "did you mean 'dynamic'?"),
    (
        {"type": "dynamic", "int": 8},
        "Unknown key 'int' at loss_scale.int: ",
        "did you mean 'init'?",
    ),
    (
        {"type": "dynamic", "init": True},
        "Expected 'init' to be a number",
        "got True at loss_scale.init",
    ),
    (
        {"type": "dynamic", "Init": [8]},
        "Expected 'init' to be a number",
        "got [8] at loss_scale.Init",
    ),
    (
        {"type": "dynamic", "init": "2+2"},
        "Expected the number of 'init', got '2+2' at loss_scale.init",
        "nothing is evaluated",
    ),
    ({"type": "dynamic", "init": 10**5000}, "Expected 'init' to be a number", "at loss_scale.init"),
    (
        {"type": "dynamic", "init": 8, "INIT": 8},
        "Duplicate key 'init' at loss_scale.INIT: ",
        "at most once",
    ),
    (
        {"type": "dynamic", "min": 4, "max": 2},
        "Cannot make the loss scale at loss_scale.type: Expected max_loss_scale to be at least min",
        "swap them",
    ),
    ({"type": "static"}, "Cannot make the loss scale at loss_scale.type: ", "static=1024"),
    ({"type": "none", "init": 8}, "Unexpected 'init' at loss_scale.init: ", "does not take it"),
    (
        "dynamic, inti=3",
        "Unknown key 'inti' at position 9 of loss scale 'dynamic, inti=3' at loss_scale: ",
        "did you mean 'init'?",
    ),
    (
        "f32 | none",
        "Unexpected '|' at position 4 of loss scale 'f32 | none' at loss_scale: ",
        "get_mixed_precision",
    ),
]
BAD = [
    *((jmpx.get_policy, *row) for row in POLICIES),
    *((jmpx.get_policy_map, *row) for row in MAPS),
    *(
        (jmpx.get_mixed_precision, {"policy": "f16", "loss_scale": loss_scale}, *row)
        for loss_scale, *row in LOSS_SCALES
    ),
]


@pytest.mark.parametrize(("read", "mapping", "begins", "contains"), BAD)
def test_bad_mappings_say_what_where_and_how_to_mend_it(read, mapping, begins, contains):
    with pytest.raises((ValueError, TypeError)) as error:
        read(mapping)
    sentence = str(error.value)
    assert sentence.startswith(begins) and contains in sentence, sentence
    assert "\n" not in sentence and sentence[-1] in ".?"


@pytest.mark.parametrize("row", [*POLICIES, *MAPS], ids=str)
def test_the_same_mistake_in_a_mixed_precision(row):
    mapping, *_ = row
    if "loss_scale" in mapping or mapping == {"policy": "bf16"}:
        return  # there, it is none
    message = given_value_or_sentence(jmpx.get_mixed_precision, mapping)
    assert isinstance(message, str), message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("policy: bf16\nloss_scale: off", "at loss_scale, got False"),
        ("policy: bf16\nloss_scale: null", "at loss_scale, got None"),
        ("policy: bf16\nloss_scale:", "at loss_scale, got None"),
        ("policy:\nrules: []", "at policy, got None"),
        ("policy: {compute: bf16, on: f32}", "Expected a string as a key at policy, got True"),
        ("policy: bf16\nrules: [LayerNorm: on]", "at rules[0].LayerNorm, got True"),
        (
            "policy: bf16\nrules: [Layer Norm: full]",
            "selector 'Layer Norm' at rules[0]['Layer Norm']",
        ),
        (
            "policy: bf16\nrules: [{LayerNorm: full, Dense: bf16}]",
            "Unknown key 'LayerNorm' at rules[0].LayerNorm: expected one of 'select'",
        ),
        ("policy: bf16\nrules: [compute: full]", "Missing key 'select' at rules[0]: "),
        ("policy: bf16\nrules: [LayerNorm: tf32]", "'tf32' at position 0 of policy 'tf32'"),
        ("policy: bf16\nrules:\n  LayerNorm: full", "Expected a list of rules at rules, got"),
    ],
)
def test_traps_of_yaml(text, place):
    message = given_value_or_sentence(jmpx.get_mixed_precision, yaml.safe_load(text))
    assert isinstance(message, str) and place in message
    none = yaml.safe_load("policy: f16\nloss_scale: none")
    assert jmpx.get_mixed_precision(none).loss_scale == jmpx.NoOpLossScale()


@pytest.mark.parametrize(
    "rule",
    [
        "LayerNorm: full",
        "LayerNorm?: full",
        "'*/head/*': c=f32,o=f32",
        "op.exp: f32",
        "haiku.LayerNorm: {compute: f32, output: bf16}",
        "LayerNorm: full;",
    ],
)
def test_a_rule_of_yaml_needs_no_quotes(rule):
    """YAML reads `- LayerNorm: full` as a mapping of one key."""
    mixed = jmpx.get_mixed_precision(yaml.safe_load(f"policy: bf16\nrules:\n- {rule}\n"))
    text = rule.replace("'", "").replace("{compute: f32, output: bf16}", "c=f32,o=bf16")
    assert mixed.policy_map == jmpx.get_policy_map(f"bf16; {text}")
