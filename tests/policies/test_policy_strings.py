"""Policy strings with a common mistake end in one sentence that says how to write them."""

import contextlib
import copy
import pickle
import re

import haiku as hk
import jax.numpy as jnp
import pytest
from helpers.adapters import ADAPTERS, LAYERS, X, every_adapter, warnings_of
from hypothesis import example, given, strategies as st

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx._policies.rules import _matches_path


def push(policy):
    with jmpx.push_policy(hk.Linear, policy):
        pass


TAKE_A_POLICY = {
    "get_policy": jmpx.get_policy,
    "set_policy": lambda policy: jmpx.set_policy(hk.Linear, policy),
    "set_policy of a class of one's own": lambda policy: jmpx.set_policy(Own, policy),
    "push_policy": push,
}


class Own:
    pass


@pytest.mark.parametrize("taker", TAKE_A_POLICY)
@pytest.mark.parametrize(
    ("text", "rule", "position"),
    [
        ("c=bf16; BatchNorm: full", "'BatchNorm: full'", 8),
        ("BatchNorm: full", "'BatchNorm: full'", 0),
        ("bf16-mixed;op.exp:f32;", "'op.exp:f32'", 11),
        ("*/head/*?: c=f32; c=bf16", "'*/head/*?: c=f32'", 0),
    ],
)
def test_a_policy_map_where_only_a_policy_can_be(taker, text, rule, position):
    expected = re.escape(f"Unexpected rule {rule} at position {position} of policy {text!r}: ")
    with pytest.raises(ValueError, match=expected) as error:
        TAKE_A_POLICY[taker](text)
    message = str(error.value)
    assert "\n" not in message
    for takes_a_map in ("get_policy_map", "autocast", "with_policies", "DEFINE_policy_map"):
        assert takes_a_map in message
    with pytest.raises(TypeError, match="Expected a policy, got the policy map") as error:
        TAKE_A_POLICY[taker](jmpx.get_policy_map(text))
    assert "\n" not in str(error.value) and ".default is a policy" in str(error.value)
    assert jmpx.policy_of(hk.Linear) is jmpx.policy_of(Own) is None


def test_a_map_without_rules_is_no_policy_either():
    # Else a program would fail on the day when its first rule is written.
    with pytest.raises(TypeError, match="got the policy map 'params=float32,compute=bfloat16"):
        jmpx.get_policy(jmpx.get_policy_map("c=bf16"))  # pyright: ignore[reportArgumentType]


COLONS = [
    ("compute:bf16", 7, "compute=bf16"),
    ("c:bf16", 1, "c=bf16"),
    ("o : f32", 2, "o=f32"),
    ("params:f32,compute:bf16", 6, "params=f32"),
    ("params=f32, compute: bf16", 19, "compute=bf16"),
    ("c := bf16", 2, "c=bf16"),
]


@pytest.mark.parametrize(("text", "position", "meant"), COLONS)
def test_a_colon_for_an_equals_sign(text, position, meant):
    of = rf"of policy( map)? {re.escape(repr(text))}"
    message = f"Unexpected ':' at position {position} {of}: write '{meant}', "
    for parse in (jmpx.get_policy, jmpx.get_policy_map, jmpx.haiku.policies):
        with (
            pytest.raises(ValueError, match=message) as error,
            contextlib.ExitStack() as s,
        ):
            s.enter_context(parse(text))  # pyright: ignore[reportArgumentType]
        assert "\n" not in str(error.value)
    assert jmpx.get_policy(meant)
    # In a rule, and after one, it is one as well.
    for before in ("Linear: ", "c=bf16; ", "BatchNorm: full; "):
        there = f"Unexpected ':' at position {position + len(before)} of"
        with pytest.raises(ValueError, match=f"{there}|Unknown key 'c :'"):
            jmpx.get_policy_map(before + text)


def test_keys_as_classes_and_as_paths():
    assert jmpx.get_policy_map("C: full").rules == (jmpx.types.Rule("C", compute=jnp.float32),)
    assert jmpx.get_policy_map("Output: full").rules[0].selector == "Output"
    with pytest.raises(ValueError, match=re.escape("or '*/output' for a path")):
        jmpx.get_policy_map("c=bf16; output: full")
    assert jmpx.get_policy_map("c=bf16; */output: full").rule_for(Own, "output")
    for text in ("C: bf16", "Compute:bf16"):
        with pytest.raises(ValueError, match="Unexpected rule '[cC].*bf16' at position 0"):
            jmpx.get_policy(text)


def test_semicolons():
    for text in ("c=bf16;", "c=bf16 ; "):
        assert jmpx.get_policy(text) == jmpx.get_policy("c=bf16")
    for text in ("c=bf16; Linear: full;", " Linear: full;c=bf16 ;\n"):
        assert jmpx.get_policy_map(text) == jmpx.get_policy_map("c=bf16; Linear: full")
    for text in ("c=bf16;;", "c=bf16; ;", ";c=bf16", "Linear: full;;", ";", "; ;", ""):
        with pytest.raises(ValueError, match="^Empty rule at position "):
            jmpx.get_policy_map(text)
        with pytest.raises(ValueError, match="position"):
            jmpx.get_policy(text)
    with pytest.raises(ValueError, match="';' at position 6 of policy 'c=bf16;o=f32': write comma"):
        jmpx.get_policy("c=bf16;o=f32")


@every_adapter
def test_a_used_map_warns_again_and_is_what_it_was(adapter):
    policy_map = jmpx.get_policy_map(f"c=bf16; {LAYERS[adapter]}: full; NoSuch: full; X?: full")
    before, same = pickle.dumps(policy_map), jmpx.get_policy_map(str(policy_map))
    for _ in range(2):
        assert len(warnings_of(ADAPTERS[adapter], policy_map)) == 1
    assert len(warnings_of(jmpx.autocast(jnp.exp, policy_map), X)) == 2
    assert pickle.dumps(policy_map) == before
    for other in (same, pickle.loads(before), copy.deepcopy(policy_map), copy.copy(policy_map)):
        assert other == policy_map and hash(other) == hash(policy_map)
    assert not hasattr(policy_map, "unused") and set(vars(policy_map)) == {
        "default",
        "rules",
        "by",
        "save",
    }


def model_of_globs(glob, path):
    """What a glob means, letter by letter."""

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
    assert _matches_path(glob, path) == model_of_globs(glob, path)


@given(
    st.lists(st.tuples(*[st.text("ab.+?[(/", max_size=3)] * 2), min_size=1, max_size=5),
)
def test_a_glob_matches_what_was_made_of_it(parts):
    pieces, fillers = zip(*parts, strict=True)
    path = "".join(piece + filler for piece, filler in parts).removesuffix(fillers[-1])
    assert _matches_path("*".join(pieces), path)
    assert _matches_path("*".join([*pieces, ""]), path + fillers[-1])


@pytest.mark.parametrize("times", [12, 3000])
def test_globs_of_many_stars_come_to_an_end(times):
    # A regular expression tries every way to share the letters out: it would never end.
    text = "a" * (4 * times)
    assert not _matches_path("*a" * times + "*b", text)
    assert not _matches_path("*a*b" * times, text)
    assert _matches_path("*a" * times + "*", text)
    rule = jmpx.get_policy_map("*a" * times + "*b: full").rules[0]
    assert not rule.matches(Own, text) and rule.matches(Own, text + "b")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("tf32", "matmul=tensorfloat32"),
        ("fp8", "params=float8_e4m3fn"),
        ("float8", "params=float8_e4m3fn"),
        ("int8", "integers have no gradient"),
        ("O1", "jmpx.autocast"),
        ("o2", "16-mixed"),
    ],
)
def test_what_is_often_taken_for_a_dtype_gets_its_own_sentence(word, remedy):
    for text in (word, f"c={word}", f"c = {word.upper()},o=f32"):
        for parse in (
            jmpx.get_policy,
            jmpx.get_policy_map,
            lambda t: jmpx.get_policy_map(f"f32; A: {t}"),
        ):
            with pytest.raises(
                ValueError, match=f"(?i)Unknown dtype '{word}' at position"
            ) as error:
                parse(text)
            assert remedy in str(error.value) and "did you mean" not in str(error.value)
    with pytest.raises(ValueError, match=remedy.replace(".", r"\.")):
        jmpx.cast_tree({}, word)


def test_the_short_name_of_an_algorithm_is_suggested():
    with pytest.raises(ValueError, match="did you mean 'tensorfloat32'"):
        jmpx.get_policy("f32,m=tf32")
