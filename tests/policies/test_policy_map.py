"""Policy maps: what their strings give, what rules match and inherit, and how maps are applied."""

import pickle

import haiku as hk
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st

import jmpx

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
Rule = jmpx.types.Rule
PARSED = [
    ("c=bf16,o=f32", "c=bf16,o=f32", []),
    ("c=bf16 ; ", "c=bf16", []),
    (" Linear: full;c=bf16 ;\n", "c=bf16", [Rule("Linear", compute=F32)]),
    (
        "c=bf16,o=f32; BatchNorm: full; */head/*: c=f32",
        "c=bf16,o=f32",
        [Rule("BatchNorm", compute=F32), Rule("*/head/*", compute=F32)],
    ),
    (" *: o = F16 ;bf16-mixed", "bf16-mixed", [Rule("*", output=F16)]),
    (
        "haiku.BatchNorm : p=f32,c=f16 ; op.exp?:f32; mlp/linear: bf16-mixed",
        "f32",
        [Rule("haiku.BatchNorm", F32, F16), Rule("op.exp", compute=F32, optional=True),
         Rule("mlp/linear", F32, BF16, F32)],
    ),
    # words that are keys of policies, too
    ("C: full; Output: full", "f32", [Rule("C", compute=F32), Rule("Output", compute=F32)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "default", "rules"), PARSED)
def test_get_policy_map(text, default, rules):
    policy_map = jmpx.get_policy_map(text)
    assert policy_map == jmpx.PolicyMap(jmpx.get_policy(default), tuple(rules))
    assert jmpx.get_policy_map(policy_map) is policy_map
    policy = policy_map.default
    assert jmpx.get_policy_map(policy) == jmpx.PolicyMap(policy)


def test_a_rule_keeps_its_dtypes_as_a_policy_does():
    rule = Rule("Linear", np.dtype("float32"), "bf16", jnp.float16)
    assert rule == Rule("Linear", "f32", jnp.bfloat16, np.float16)
    assert rule.compute is jnp.bfloat16
    assert str(rule) == "Linear: params=float32,compute=bfloat16,output=float16"


def test_the_mark_is_no_part_of_the_selector():
    marked, plain = jmpx.get_policy_map("BatchNorm ?: full"), jmpx.get_policy_map("BatchNorm: full")
    assert marked.rules[0].label == "BatchNorm?" and marked.rules[0].selector == "BatchNorm"
    assert marked.rule_for(hk.BatchNorm, "x") and plain != marked and str(marked) != str(plain)


# Matching


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
    ("BatchNorm.Inner", BatchNorm.Inner, "x", True),
    ("Inner", BatchNorm.Inner, "x", True),
    ("haiku.BatchNorm", hk.BatchNorm, "x", True),
    ("haiku.BatchNorm", BatchNorm, "x", False),
    ("haiku.Module", hk.BatchNorm, "x", True),
    ("haik.BatchNorm", hk.BatchNorm, "x", False),
    ("haiku.nets.MLP", hk.nets.MLP, "x", False),  # it lives in haiku._src.nets
    # Globs
    ("*/head/*", Norm, "net/head", True),
    ("*/head/*", Norm, "head/linear", True),
    ("*/head/*", Norm, "ahead/linear", False),
    ("net/norm", Norm, "net/norm2", False),
    ("*", Norm, "", True),
    ("a.c/*", Norm, "abc/x", False),  # a dot is a dot
    ("op.exp", Norm, "op.exp", False),
]


def test_matching():
    for selector, cls, path, expected in MATCHES:
        policy_map = jmpx.get_policy_map(f"{selector}: full")
        found = policy_map.rule_for(cls, path)
        assert (found is not None) == expected, (selector, cls, path)


def test_the_last_rule_that_matches_wins_and_the_map_stays_as_it_is():
    policy_map = jmpx.get_policy_map("c=bf16; Norm: full; */head/*: c=f16; BatchNorm: c=bf16")
    before = pickle.dumps(policy_map), vars(policy_map).copy()
    first, second, third = policy_map.rules
    assert policy_map.rule_for(Norm, "x") is first
    assert policy_map.rule_for(Norm, "head") is second
    assert policy_map.rule_for(BatchNorm, "head") is third
    assert policy_map.rule_for(int, "x") is None
    assert (pickle.dumps(policy_map), vars(policy_map)) == before
    assert pickle.loads(before[0]) == policy_map


def matches(glob, path):
    return Rule(glob).matches(object, path)


def model_of_globs(glob, path):
    """Matches a glob letter by letter."""

    def match(glob, text):
        if not glob:
            return not text
        if glob[0] == "*":
            return any(match(glob[1:], text[i:]) for i in range(len(text) + 1))
        return bool(text) and text[0] == glob[0] and match(glob[1:], text[1:])

    return any(match(glob, text) for text in (path, f"/{path}", f"{path}/", f"/{path}/"))


@given(glob=st.text("ab/*", max_size=7), path=st.text("ab/", max_size=9))
@example(glob="ab*ba", path="aba")  # the ends may not overlap
@example(glob="*a*a*", path="a")
@example(glob="**", path="")
@example(glob="a*b*a", path="abba")
@example(glob="*/a", path="a")
def test_globs_match_as_the_model_does(glob, path):
    assume("/" in glob or "*" in glob)
    assert matches(glob, path) == model_of_globs(glob, path)


@given(
    st.lists(st.tuples(*[st.text("ab.+?[(/", max_size=3)] * 2), min_size=1, max_size=5),
)
def test_a_glob_matches_what_was_made_of_it(parts):
    pieces, fillers = zip(*parts, strict=True)
    path = "".join(piece + filler for piece, filler in parts)
    assert matches("*".join([*pieces, ""]), path)
    assert len(pieces) == 1 or matches("*".join(pieces), path.removesuffix(fillers[-1]))


@pytest.mark.parametrize("times", [12, 3000])
def test_globs_of_many_stars_come_to_an_end(times):
    # A naive regular expression would backtrack forever.
    text = "a" * (4 * times)
    assert not matches("*a" * times + "*b", text)
    assert not matches("*a*b" * times, text)
    assert matches("*a" * times + "*", text)
    rule = jmpx.get_policy_map("*a" * times + "*b: full").rules[0]
    assert not rule.matches(Norm, text) and rule.matches(Norm, text + "b")


# Inheritance


def test_a_rule_inherits_the_dtypes_of_the_surrounding_call():
    policy_map = jmpx.get_policy_map("p=f64,c=bf16,o=f32; A: full; B: o=f32; C: p=f16,c=f16,o=f16")
    a, b, c = policy_map.rules
    default, f16 = policy_map.default, jmpx.get_policy("f16")
    assert a.resolve(default, default) == jmpx.Policy("f64", F32, BF16)
    assert a.resolve(default, f16) == jmpx.Policy("f64", F32, F16)
    assert b.resolve(default, f16) == jmpx.Policy("f64", F16, F32)
    assert c.resolve(default, default) == jmpx.get_policy("f16")
    # The outermost call has the output dtype of the default.
    assert a.resolve(default, None) == jmpx.Policy("f64", F32, F32)


def test_a_rule_inherits_the_algorithm_of_the_surrounding_call():
    policy_map = jmpx.get_policy_map("c=bf16,m=high,r=bf16; */a: m=highest; */b: c=f32")
    a, b = policy_map.rules
    assert (a.matmul, b.matmul, a.compute) == ("highest", None, None)
    assert b.resolve(policy_map.default, None).matmul_precision == "high"
    in_a = a.resolve(policy_map.default, policy_map.default)
    assert (in_a.matmul_precision, in_a.compute_dtype) == ("highest", jnp.bfloat16)
    assert b.resolve(policy_map.default, in_a).matmul_precision == "highest"
    assert str(policy_map) == (
        "params=float32,compute=bfloat16,matmul=high,reduce=bfloat16; "
        "*/a: matmul=highest; */b: compute=float32"
    )


# How a map is applied

# A policy map, the way in which it is applied, and its string.
WAYS = {
    "c=bf16": ("operations", "params=float32,compute=bfloat16"),
    "bf16": ("operations", "params=bfloat16,compute=bfloat16"),
    "mixed_float16": ("operations", "params=float32,compute=float16"),
    "c=bf16,o=bf16": ("operations", "params=float32,compute=bfloat16,output=bfloat16"),
    "c=bf16,save=products": ("operations", "params=float32,compute=bfloat16,save=products"),
    "c=bf16; Linear: full": ("operations", ""),
    "c=bf16; */head: full": ("operations", ""),
    "c=bf16; op.exp: f32": ("operations", ""),
    "by=arguments,c=bf16; Linear: full": ("arguments", "by=arguments,"),
    "By = Modules, c=bf16": ("modules", "by=modules,"),
    "c=bf16,by=operations": ("operations", "by=operations,"),
    "by=operations,bf16-mixed": ("operations", "by=operations,"),
    "bf16,m=highest,by=modules": ("modules", "by=modules,"),
    "by=modules; Linear: c=bf16": ("modules", "by=modules,"),
    "by=operations,c=bf16,save=products": (
        "operations",
        "by=operations,params=float32,compute=bfloat16,save=products",
    ),
    "by=operations,c=bf16,save=products+attention; */head: c=f32": ("operations", "by=operations,"),
    "by=arguments,c=bf16,save=products": ("arguments", "by=arguments,"),
    "by=modules,c=bf16,save=products+attention; Linear: full": ("modules", "by=modules,"),
    "save=products; Linear: c=bf16": ("operations", ""),
}


@pytest.mark.parametrize("text", WAYS)
def test_the_way_is_written_or_operations(text):
    policy_map = jmpx.get_policy_map(text)
    way, start = WAYS[text]
    assert policy_map.way == way
    written = str(policy_map)
    assert written == start if "params" in start else written.startswith(f"{start}params=")
    assert str(jmpx.get_policy_map(written)) == written
    for word in ("products", "products+mixed", "products+attention"):
        assert (policy_map.save == word) == (f"save={word};" in f"{text};")
    for same in (str(policy_map), policy_map.to_dict(), pickle.loads(pickle.dumps(policy_map))):
        assert jmpx.get_policy_map(same) == policy_map
    assert jmpx.get_mixed_precision(f"{text} | dynamic").policy_map == policy_map


SAME = [
    {"policy": "c=bf16", "by": "modules"},
    {"policy": "by=modules,c=bf16"},
    {"policy": {"compute": "bf16", "by": "modules"}},
    {"compute": "bf16", "BY": " Modules "},
]


@pytest.mark.parametrize("mapping", SAME, ids=str)
def test_a_mapping_has_the_key_beside_the_policy_or_in_it(mapping):
    assert jmpx.get_policy_map(mapping) == jmpx.get_policy_map("by=modules,c=bf16")
