"""Strings that mean something else than they say: each ends in a sentence that says what is meant.

Dtypes that nothing can compute in, rules where no rule can be, operations that are none, optional
rules, and globs that a regular expression would take for ever to match.
"""

import contextlib
import copy
import pickle
import re
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, strategies as st
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx.__main__ import main
from jmpx._autocast.rules import overridable, registered
from jmpx._autocast.unused import INSTEAD, near_operation
from jmpx._policy_map import _matches_path

X = np.ones((2, 3), np.float32)


# What traces a model of two linear layers under a string, framework by framework.


def shape_of(function, x=X):
    return jax.eval_shape(lambda x: function(x), x)


def run_haiku(text):
    network = hk.transform(lambda x: hk.nets.MLP([4, 2], name="mlp")(x))
    with jmpx.haiku.policies(text):
        return shape_of(lambda x: network.apply(network.init(jax.random.key(0), x), None, x))


def run_linen(text):
    model = nn.Sequential([nn.Dense(4), nn.Dense(2)])
    with jmpx.flax.policies(text):
        return shape_of(lambda x: model.apply(model.init(jax.random.key(0), x), x))


def run_nnx(text):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs))
    return shape_of(jmpx.flax.with_policies(model, text))


def run_equinox(text):
    view = jmpx.equinox.with_policies(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), text)
    return shape_of(jax.vmap(view))


ADAPTERS = {"haiku": run_haiku, "linen": run_linen, "nnx": run_nnx, "equinox": run_equinox}
LAYERS = {"haiku": "Linear", "linen": "Dense", "nnx": "Linear", "equinox": "Linear"}
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS)


def warnings_of(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in caught]


# 8 bits are for storage.

FLOAT8 = sorted(name for name in vars(jnp) if name.startswith("float8_"))


def autocast_product(x, policy, **options):
    @jmpx.autocast(policy=policy, **options)
    def f(x):
        with jax.named_scope("head"):
            return jnp.exp(x @ x.T)

    return f(x)


def with_class_policy(cls, policy, run):
    with jmpx.push_policy(cls, policy):
        return run()


def with_haikus_own(policy):
    hk.mixed_precision.set_policy(hk.Linear, jmpx.get_policy(policy))
    try:
        return hk.transform(lambda x: hk.Linear(2)(x)).init(jax.random.key(0), X)
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)


def linear_without_a_map():
    return jmpx.equinox.with_policies(eqx.nn.Linear(3, 2, key=jax.random.key(0)))(X[0])


COMPUTES = {
    "cast_to_compute": lambda n: jmpx.get_policy(f"c={n}").cast_to_compute({"w": X}),
    "cast_to_compute of nothing": lambda n: jmpx.get_policy(n).cast_to_compute(None),
    "compute follows params": lambda n: jmpx.get_policy(f"p={n}").cast_to_compute(X),
    "filter_grad": lambda n: jmpx.filter_grad(jnp.sum, jmpx.NoOpLossScale(), policy=n)(X),
    "filter_value_and_grad": lambda n: jmpx.filter_value_and_grad(
        jnp.sum, jmpx.NoOpLossScale(), policy=f"c={n},o=f32"
    )(X),
    "autocast": lambda n: autocast_product(X, n),
    "autocast, scope": lambda n: autocast_product(X, f"c=bf16; */head: {n}"),
    "autocast, operation": lambda n: autocast_product(X, f"c=bf16; op.exp: {n}"),
    "autocast, rules": lambda n: autocast_product(X, "c=bf16", rules={lax.exp_p: n}),
    "haiku, class": lambda n: with_class_policy(hk.nets.MLP, f"c={n}", lambda: run_haiku("bf16")),
    "haiku, its own registry": lambda n: with_haikus_own(f"c={n},o=f32"),
    "equinox, class": lambda n: with_class_policy(eqx.nn.Linear, f"c={n}", linear_without_a_map),
    **{
        f"{adapter}, {kind}": lambda n, run=run, text=text: run(text.format(n))
        for adapter, run in ADAPTERS.items()
        for kind, text in {
            "default": "c={},o=f32",
            "class rule": f"c=bf16; {LAYERS[adapter]}: {{}}",
            "path rule": "c=bf16; *: c={}",
        }.items()
    },
}


@pytest.mark.parametrize("way", COMPUTES)
def test_8_bits_are_refused_as_a_compute_dtype(way):
    assert len(FLOAT8) >= 5
    for name in FLOAT8 if "," not in way else FLOAT8[:2]:
        with pytest.raises(ValueError, match=f"^Cannot compute in {name}, where .*, as") as error:
            COMPUTES[way](name)
        assert "\n" not in str(error.value) and f"params={name}" in str(error.value)
    assert jmpx.current_policy() is None


@pytest.mark.parametrize("name", FLOAT8)
def test_8_bits_remain_a_dtype_to_parse_and_to_store_in(name):
    policy = jmpx.get_policy(f"p={name},c=bf16,o={name}")
    assert jmpx.get_policy(str(policy)) == policy
    assert policy.param_dtype is policy.output_dtype is getattr(jnp, name)
    stored = policy.cast_to_param({"w": X})
    assert stored["w"].dtype.name == name
    assert policy.cast_to_compute(stored)["w"].dtype == jnp.bfloat16
    assert policy.cast_to_output(X).dtype.name == jmpx.cast_tree(X, name).dtype.name == name
    assert autocast_product(X, "bf16", output=name).dtype.name == name
    assert jmpx.get_policy(name).compute_dtype is getattr(jnp, name)  # refused where it is used
    assert str(jmpx.get_policy_map(f"Linear: {name}")).endswith(f"Linear: compute={name}")


def test_statistics_of_a_model_that_is_stored_in_8_bits_are_float32():
    network = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, True))
    with jmpx.haiku.policies("p=float8_e4m3fn,c=bf16"):
        params, state = network.init(jax.random.key(0), X)
        y, state = network.apply(params, state, None, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float8_e4m3fn"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    assert y.dtype == jnp.bfloat16

    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    model = jmpx.cast_tree(model, "float8_e4m3fn")
    view = jmpx.equinox.with_policies(model, "p=float8_e4m3fn,c=bf16")
    y, state = jax.vmap(view, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)
    assert y.dtype == jnp.bfloat16
    statistics = [
        leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert statistics and {leaf.dtype.name for leaf in statistics} == {"float32"}


def test_a_policy_that_casts_in_its_own_way_may_compute_in_8_bits():
    class Scaled(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jmpx.cast_tree(jax.tree.map(lambda x: x / 4, tree), self.compute_dtype)

    cast = Scaled("f32", "float8_e4m3fn", "f32").cast_to_compute(jnp.asarray(X))
    assert cast.dtype == jnp.float8_e4m3fn and float(cast[0, 0]) == 0.25


# Rules where only a policy can be; a colon for an equals sign.


def gradient(policy):
    return jmpx.filter_grad(jnp.sum, jmpx.NoOpLossScale(), policy=policy)


def value_and_gradient(policy):
    return jmpx.filter_value_and_grad(jnp.sum, jmpx.NoOpLossScale(), policy=policy)


def push(policy):
    with jmpx.push_policy(hk.Linear, policy):
        pass


TAKE_A_POLICY = {
    "get_policy": jmpx.get_policy,
    "set_policy": lambda policy: jmpx.set_policy(hk.Linear, policy),
    "set_policy of a class of one's own": lambda policy: jmpx.set_policy(Own, policy),
    "push_policy": push,
    "filter_grad": gradient,
    "filter_value_and_grad": value_and_gradient,
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
        jmpx.get_policy(jmpx.get_policy_map("c=bf16"))


COLONS = [
    ("compute:bf16", 7, "compute=bf16"),
    ("c:bf16", 1, "c=bf16"),
    ("o : f32", 2, "o=f32"),
    ("params:f32,compute:bf16", 6, "params=f32,compute=bf16"),
    ("params=f32, compute: bf16", 19, "params=f32, compute=bf16"),
    ("c := bf16", 2, "c=bf16"),
]


@pytest.mark.parametrize(("text", "position", "meant"), COLONS)
def test_a_colon_for_an_equals_sign(text, position, meant):
    message = f"Unexpected ':' at position {position} of policy {text!r}: write {meant!r}, "
    for parse in (jmpx.get_policy, jmpx.get_policy_map, jmpx.haiku.policies):
        with (
            pytest.raises(ValueError, match=re.escape(message)) as error,
            contextlib.ExitStack() as s,
        ):
            s.enter_context(parse(text))
        assert "\n" not in str(error.value)
    assert jmpx.get_policy(meant)
    # In a rule, and after one, it is one as well.
    for before in ("Linear: ", "c=bf16; ", "BatchNorm: full; "):
        position_there = position + len(before)
        with pytest.raises(ValueError, match=f"Unexpected ':' at position {position_there} of"):
            jmpx.get_policy_map(before + text)


def test_keys_as_classes_and_as_paths():
    assert jmpx.get_policy_map("C: full").rules == (jmpx.Rule("C", compute=jnp.float32),)
    assert jmpx.get_policy_map("Output: full").rules[0].selector == "Output"
    with pytest.raises(ValueError, match=re.escape("or '*/output' for a path")):
        jmpx.get_policy_map("c=bf16; output: full")
    assert jmpx.get_policy_map("c=bf16; */output: full").rule_for(Own, "output")
    for text in ("C: bf16", "Compute:bf16"):
        with pytest.raises(ValueError, match="write '[cC].*=bf16', with an equals sign"):
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


# Operations that are none, or nobody's.


@every_adapter
def test_rules_for_operations_are_autocasts(adapter):
    run = ADAPTERS[adapter]
    (warning,) = warnings_of(run, "c=bf16; op.exp: full; *: c=f32")
    assert "The rule 'op.exp: compute=float32'" in warning
    assert "matched no module, as rules for operations are those of jmpx.autocast" in warning
    assert "write 'op.exp?' where one string serves both." in warning
    assert warnings_of(run, "c=bf16; op.exp?: full; *: c=f32") == []
    assert len(warnings_of(run, "c=bf16; op.exp: full; op.tanh: full")) == 2


@pytest.mark.parametrize("policies", [jmpx.haiku.policies, jmpx.flax.policies])
def test_they_are_where_no_module_ran_too(policies):
    with pytest.warns(UserWarning, match="'op.exp: compute=float32'") as caught:
        with policies("c=bf16; op.exp: full; Linear: full"):
            pass
    (warning,) = [w for w in caught if "The rule" in str(w.message)]  # of Linear nothing is known
    assert warning.filename == __file__
    with policies("c=bf16; op.exp?: full"):
        pass


FUNCTIONS = {
    "matmul": lambda x: jnp.matmul(x, x),
    "dot": lambda x: jnp.dot(x, x),
    "einsum": lambda x: jnp.einsum("ij,jk", x, x),
    "tensordot": lambda x: jnp.tensordot(x, x, 1),
    "inner": lambda x: jnp.inner(x, x),
    "vdot": lambda x: jnp.vdot(x, x),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
    "dot_product_attention": lambda x: jax.nn.dot_product_attention(*[x[None, :, None]] * 3),
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": jax.nn.logsumexp,
    "softplus": jax.nn.softplus,
    "logaddexp": lambda x: jnp.logaddexp(x, x),
    "elu": jax.nn.elu,
    "celu": jax.nn.celu,
    "gelu": lambda x: jax.nn.gelu(x) + jax.nn.gelu(x, approximate=False),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "clip": lambda x: jnp.clip(x, 0.0, 1.0),
    "maximum": lambda x: jnp.maximum(x, 2 * x),
    "sum": jnp.sum,
    "mean": jnp.mean,
    "average": jnp.average,
    "var": jnp.var,
    "std": jnp.std,
    "norm": jnp.linalg.norm,
    "prod": jnp.prod,
    "amax": jnp.max,
    "where": lambda x: jnp.where(x > 0, x, -x),
    "take": lambda x: jnp.take(x, jnp.arange(2), axis=0),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.arange(2), num_segments=2),
    "divide": lambda x: x / (x + 1),
    "power": lambda x: jnp.power(x, x),
    "log10": jnp.log10,
    "arcsin": jnp.arcsin,
    "arctan2": lambda x: jnp.arctan2(x, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_no_operation_names_what_to_write(name):
    function, x = FUNCTIONS[name], np.full((2, 2), 0.5, np.float32)
    for call in (function, jax.jit(function)):
        (warning,) = warnings_of(shape_of, jmpx.autocast(call, f"c=bf16; op.{name}: full"), x)
        assert f"matched no operation, as '{name}' is none of JAX's primitives: write" in warning
    advice = re.findall(r"'(op\.\w+)'", warning)
    assert advice and f"op.{name}" not in advice
    for selector in advice:  # whoever does as told hears no more of it
        text = f"c=bf16; {selector}: full"
        assert warnings_of(shape_of, jmpx.autocast(function, text), x) == []


def test_what_is_named_instead_is_an_operation_and_its_name_none():
    assert not INSTEAD.keys() & set(registered())
    assert {name for names in INSTEAD.values() for name in names} <= set(overridable())
    assert near_operation("op.SoftMax", ()).endswith("write 'op.exp' and 'op.reduce_sum'.")


@pytest.mark.parametrize("name", sorted({*registered(), *INSTEAD, "matmull", "exq", "jit", "foo"}))
def test_no_operation_suggests_itself(name):
    for met in ((), overridable(), INSTEAD, ("matmul", "softmax", "foo", "jit", name)):
        assert f"'op.{name}'" not in near_operation(f"op.{name}", met)


def test_near_operations():
    near = {
        "expp": "; did you mean 'op.exp'?",  # that ran
        "tanhh": "; did you mean 'op.tanh'?",  # that JAX has
        "exp2": "; did you mean 'op.exp'?",  # another that ran
        "cosh": ".",  # right, and did not run
        "while": ".",
        "qqqq": ".",
    }
    for name, end in near.items():
        (warning,) = warnings_of(jmpx.autocast(jnp.exp, f"c=bf16; op.{name}: full"), X)
        assert warning.endswith(f"matched no operation{end}"), warning


# The last name of a path, as a class.


@pytest.mark.parametrize(
    ("adapter", "selector"),
    [
        ("haiku", "linear_1"),
        ("haiku", "mlp.linear_1"),
        ("haiku", "linaer_1"),
        ("linen", "layers_1"),
        ("nnx", "Linera"),
        ("equinox", "Linera"),
    ],
)
def test_the_name_of_a_module_suggests_its_path(adapter, selector):
    run = ADAPTERS[adapter]
    (warning,) = warnings_of(run, f"c=bf16; {selector}: full")
    (meant,) = re.findall("matched no class; did you mean '(.*)'", warning)
    assert meant == {"haiku": "*/linear_1", "linen": "*/layers_1"}.get(adapter, "Linear")
    assert warnings_of(run, f"c=bf16; {meant}: full") == []


def test_attributes_suggest_their_path_in_views():
    class Net(nnx.Module):
        def __init__(self):
            self.decoder = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.decoder(x)

    class Module(eqx.Module):
        decoder: eqx.nn.Linear

        def __call__(self, x):
            return self.decoder(x)

    models = [
        (jmpx.flax.with_policies, Net()),
        (jmpx.equinox.with_policies, Module(eqx.nn.Linear(3, 2, key=jax.random.key(0)))),
    ]
    for with_policies, model in models:
        (warning,) = warnings_of(with_policies, model, "c=bf16; decoder: full")
        assert warning.endswith("matched no class; did you mean '*/decoder'?")
        assert warnings_of(with_policies, model, "c=bf16; */decoder: full") == []


# Optional rules.

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
    run = jmpx.autocast(lambda x: jnp.tanh(x @ x.T), f"c=bf16{house}", output=None)
    assert warnings_of(run, X) == [] and run(X).dtype == jnp.bfloat16
    run = jmpx.autocast(lambda x: jnp.tanh(x @ x.T), f"c=bf16; op.tanh?: full{house}", output=None)
    assert run(X).dtype == jnp.float32


def test_main_shows_the_mark(capsys):
    assert main(["c=bf16; BatchNorm?: full; */head: o=f32;"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["BatchNorm?", "float32", "float32", "bfloat16", "*"]
    assert lines[3].startswith("*/head  ") and lines[-1].startswith("? no warning where")
    assert main(["c=bf16; BatchNorm: full"]) == 0
    assert "?" not in capsys.readouterr().out


# Maps are values.


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
    assert not hasattr(policy_map, "unused") and set(vars(policy_map)) == {"default", "rules"}


# Globs.


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
