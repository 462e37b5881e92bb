"""The keys `by` and `save` of a policy map: how it is applied."""

import pickle

import pytest

import jmpx

# What is written, what is in force, and how it is written back.
WAYS = {
    "c=bf16": ("arguments", ""),
    "c=bf16; Linear: full": ("modules", ""),
    "c=bf16; */head: full": ("modules", ""),
    "c=bf16; op.exp: f32": ("operations", ""),
    "c=bf16; op.exp: f32; Linear: full": ("modules", ""),
    "by=arguments,c=bf16; Linear: full": ("arguments", "by=arguments,"),
    "By = Modules, c=bf16": ("modules", "by=modules,"),
    "c=bf16,by=operations": ("operations", "by=operations,"),
    "by=operations,bf16-mixed": ("operations", "by=operations,"),
    "bf16,m=highest,by=modules": ("modules", "by=modules,"),
    "by=modules; Linear: c=bf16": ("modules", "by=modules,"),
}


@pytest.mark.parametrize("text", WAYS)
def test_the_way_is_written_or_follows_from_the_rules(text):
    policy_map = jmpx.get_policy_map(text)
    way, start = WAYS[text]
    assert policy_map.way == way
    assert str(policy_map).startswith(f"{start}params=")
    assert jmpx.get_policy_map(str(policy_map)) == policy_map
    assert jmpx.get_policy_map(policy_map.to_dict()) == policy_map
    assert pickle.loads(pickle.dumps(policy_map)) == policy_map
    assert jmpx.get_mixed_precision(f"{text} | dynamic").policy_map == policy_map


def test_a_whole_map_comes_back_from_its_string():
    policy_map = jmpx.get_policy_map("by=operations,c=bf16,save=products; */head: c=f32,o=f32")
    assert (policy_map.by, policy_map.save) == ("operations", "products")
    assert str(policy_map) == (
        "by=operations,params=float32,compute=bfloat16,output=bfloat16,save=products; "
        "*/head: compute=float32,output=float32"
    )
    assert jmpx.get_policy_map(str(policy_map)) == policy_map


@pytest.mark.parametrize("word", ["products", "products+attention"])
def test_what_is_saved_comes_back_from_its_string(word):
    policy_map = jmpx.get_policy_map(f"by=operations,c=bf16,save={word}")
    assert policy_map.save == word and f",save={word}" in str(policy_map)
    assert jmpx.get_policy_map(str(policy_map)) == policy_map
    assert jmpx.get_mixed_precision(f"{policy_map} | dynamic").policy_map == policy_map


MAPPINGS = [
    {"policy": "c=bf16", "by": "modules"},
    {"policy": "by=modules,c=bf16"},
    {"policy": {"compute": "bf16", "by": "modules"}},
    {"compute": "bf16", "BY": " Modules "},
]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_a_mapping_has_the_key_beside_the_policy_or_in_it(mapping):
    assert jmpx.get_policy_map(mapping) == jmpx.get_policy_map("by=modules,c=bf16")


BAD = {
    "by=module,c=bf16": "Unknown word 'module' at position 3 .* did you mean 'modules'",
    "by=,c=bf16": "Missing word at position 3",
    "by=modules,c=bf16,by=arguments": "Duplicate key 'by'",
    "c=bf16,save=products": "write by=operations beside it",
    "by=modules,c=bf16,save=products; Linear: full": "write by=operations beside it",
    "by=operations,save=all": "expected one of products",
    "c=bf16; Linear: full,by=modules": "Unexpected key 'by' at position 21 .* default part",
    "c=bf16; Linear: c=f32,save=products": "Unexpected key 'save' at position 22",
    "by: modules": "with an equals sign",
    "c=bf16,bye=modules": "did you mean 'by'",
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_word_is_one_sentence(text):
    with pytest.raises(ValueError, match=BAD[text]):
        jmpx.get_policy_map(text)


BAD_MAPPINGS = [
    ({"policy": "by=modules,c=bf16", "by": "modules"}, ValueError, "Duplicate key 'by' at by"),
    ({"compute": "bf16", "by": 3}, TypeError, "Expected a word at by"),
    ({"rules": [{"select": "A", "compute": "f32", "by": "modules"}]}, ValueError, r"rules\[0\].by"),
    ({"by": "modules"}, ValueError, "Missing policy"),
]


@pytest.mark.parametrize("mapping, error, message", BAD_MAPPINGS)
def test_a_wrong_mapping_is_one_sentence(mapping, error, message):
    with pytest.raises(error, match=message):
        jmpx.get_policy_map(mapping)


class Module:
    pass


@pytest.mark.parametrize("given", ["by=modules,c=bf16", {"compute": "bf16", "by": "modules"}])
@pytest.mark.parametrize("take", [jmpx.get_policy, lambda given: jmpx.set_policy(Module, given)])
def test_a_policy_and_a_class_policy_refuse_it(take, given):
    with pytest.raises(ValueError, match="Unexpected .*by.* default part of a policy map"):
        take(given)


def test_a_policy_cannot_be_read_from_a_way():
    with pytest.raises(ValueError, match="whose by it would drop"):
        _ = jmpx.MixedPrecision("by=modules,c=bf16").policy
