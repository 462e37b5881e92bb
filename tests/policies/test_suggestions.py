"""Warnings of rules that matched nothing: what they suggest matches, if a user pastes it."""

import copy
import dataclasses
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import zoo

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

X = np.ones((2, 3), np.float32)
WAYS = "operations", "modules"


def deep(m, x):
    """Layers at three depths, and a scope in the innermost module."""

    def attention(m, x):
        with jax.named_scope("mixing"):
            x = jnp.tanh(x)
        return m.linear("project", 5)(m.norm("norm")(x))

    x = m.inner("block", lambda m, x: m.inner("attend", attention)(m.linear("up", 6)(x)))(x)
    return m.linear("final_layer", 7)(x)


SCOPES = "final_layer", "block", "project"
# A rule -> the end of its warning. <Linear> is the class of the layers, <net/> the outer path.
NEAR = {
    **{name: f"; did you mean '*/{name}'?" for name in SCOPES},
    "final_layr": "; did you mean '*/final_layer'?",
    "Final_Layer": "; did you mean '*/final_layer'?",
    "*/final_layr": "; did you mean '*/final_layer'?",
    "*/final_layr/*": "; did you mean '*/final_layer'?",
    "/FINAL_LAYER": "; did you mean '*/final_layer'?",
    "attend/norm": "; did you mean '*/attend/norm'?",
    "attend/*norm": "; did you mean '*/attend/*norm'?",
    "*/atend/project": "; did you mean '*/attend/project'?",
    "attend/projct": "; did you mean '*/attend/project'?",
    "<net/>block/atend/project": "; did you mean '<net/>block/attend/project'?",
    "some.Layernorm": "; did you mean 'LayerNorm'?",
    "RMSNorm": "; did you mean 'LayerNorm'?",
    "layernorm": "; did you mean 'LayerNorm'?",
    "<Linear>s": "; did you mean '<Linear>'?",
    "*/zzzzz": ".",
}


def warned(framework, way, selectors):
    """Returns the selectors that matched nothing, with the ends of their warnings."""
    net = zoo.drawn(framework, deep, *X.shape)
    rules = (net.words(f"{selector}: full") for selector in selectors)
    apply = jmpx.apply_policy(net.apply, "; ".join([f"by={way},c=bf16", *rules]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(lambda x: apply(net.model, x), X)
    found = [str(warning.message) for warning in caught]
    pattern = r"The rule '(\S+): .*' matched no (class|path|module or scope)(.*)"
    matches = [re.fullmatch(pattern, each) for each in found]
    assert all(matches), found
    return {match[1]: match[3] for match in matches if match}


every_way = pytest.mark.parametrize("way", WAYS)
every_framework = pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
pytestmark = pytest.mark.usefixtures("standard_promotion")


@every_way
@every_framework
def test_what_is_suggested_for_a_rule(framework, way):
    words = zoo.drawn(framework, deep, *X.shape).words
    expected = {words(selector): words(end) for selector, end in NEAR.items()}
    found = warned(framework, way, NEAR)
    if way == "operations" and framework in ("haiku", "linen"):  # which name scopes after modules
        expected = {selector: end for selector, end in expected.items() if selector not in SCOPES}
    assert found == expected


@every_way
@every_framework
def test_where_nothing_is_near_classes_of_the_program_are_listed(framework, way):
    words = zoo.drawn(framework, deep, *X.shape).words
    (end,) = warned(framework, way, ["Zzzzz"]).values()
    assert end.startswith(": select a class that the program has, such as ")
    assert {words("<Linear>"), words("<Net>"), "LayerNorm"} <= {*re.findall(r"'(\w+)'", end)}


def misspelled(name):
    """Yields a name, or the path of a module, as users may get it wrong."""
    yield from (
        name,
        name.lower(),
        name.upper(),
        name[:-1],
        f"{name}s",
        name[1] + name[0] + name[2:],
    )
    yield from (f"some.{name}", f"/{name[:-1]}", f"*/{name}s", f"*/{name[:-1]}/*", f"x/{name}")


@every_way
@every_framework
def test_each_suggestion_matches(framework, way):
    names = ["final_layer", "block", "attend", "project", "norm", "block/attend", "attend/project"]
    names += ["<net/>block/attend/norm", "<Linear>", "LayerNorm", "<Inner>", "<Net>", "RMSNorm"]
    names += ["mixing", "attend/mixing", "<module.Linear>"]
    words = map(zoo.drawn(framework, deep, *X.shape).words, names)
    ends = warned(framework, way, [each for word in words for each in misspelled(word)])
    pasted = {each for end in ends.values() for each in re.findall(r"'([^']+)'", end)}
    assert len(ends) > 80 and len(pasted) > 10
    assert warned(framework, way, pasted) == {}


# A rule in a policy map -> as a warning quotes it.
WRITTEN = {
    "Zzzzz: full": "Zzzzz: full",
    "  Zzzzz  :c=f32 ": "Zzzzz :c=f32",
    "Zzzzz:\n  float32": "Zzzzz: float32",
    "*/zzzzz: compute=float32": "*/zzzzz: compute=float32",
    "op.cosh: c=bf16": "op.cosh: c=bf16",
}


@every_way
@pytest.mark.parametrize("rule", WRITTEN)
def test_a_warning_quotes_a_rule_as_it_is_written(rule, way):
    net = zoo.drawn("nnx", deep, *X.shape)

    def quoted(policy_map):
        with pytest.warns(UserWarning, match="The rule") as caught:
            jmpx.apply_policy(net.apply, policy_map)(net.model, X)
        return {str(warning.message).split("'")[1] for warning in caught}

    policy_map = jmpx.get_policy_map(f"by={way},c=bf16; {rule}")
    written, long = WRITTEN[rule], str(policy_map.rules[0])
    copies = policy_map, copy.deepcopy(policy_map), pickle.loads(pickle.dumps(policy_map))
    for each in (*copies, {"policy": f"by={way},c=bf16", "rules": [rule]}):
        assert quoted(each) == {written}
    changed = dataclasses.replace(policy_map.rules[0])
    for each in (dataclasses.replace(policy_map, rules=(changed,)), policy_map.to_dict()):
        assert quoted(each) == {long}
        assert jmpx.get_policy_map(each) == policy_map
