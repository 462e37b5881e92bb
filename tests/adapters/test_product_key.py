"""`product=f32` in a rule: 16-bit operands, float32 results, in all frameworks and autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, zoo
from helpers.jaxprs import program
from helpers.products import products_of

import jmpx

ALGORITHMS = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
# A framework, the 16 bits, and a policy map.
MAPS = [
    ("haiku", "bfloat16", "c={low},o=f32; */head: <K>"),
    ("linen", "float16", "c={low}; */block: <K>"),
    ("nnx", "bfloat16", "c={low},m=high; <Linear>: <K>"),
    # The 16 bits are those around, else of the default; a rule may name them.
    ("equinox", "bfloat16", "full; <Net>: c={low}; */head: <K>"),
    ("haiku", "float16", "c={low}; */block: full; */inner: <K>"),
    ("linen", "bfloat16", "full; */head: c={low},<K>"),
    ("nnx", "float16", "c={other}; */head: c={low},<K>"),
    # One inside of the other.
    ("equinox", "float16", "c={low}; */block: <K>; */inner: <K>; */outer: c={low}"),
]


@pytest.mark.parametrize(("framework", "low", "policy_map"), MAPS)
def test_modules_do_what_the_three_keys_say(framework, low, policy_map):
    x = jnp.ones((2, 3))
    net = zoo.build(framework, zoo.nested, x, rng=np.random.default_rng(0))
    (other,) = {*ALGORITHMS} - {low}

    def program_of(words):
        """The text of the jaxpr of a gradient in the parameters and the inputs."""
        words = words.format(low=low, other=other)
        apply, model = net.split(net.under(net.words(words)))
        loss = lambda model, x: (apply(model, x).astype(F32) ** 2).sum()  # noqa: E731
        return program(jax.grad(loss, (0, 1)), model, x)

    found = program_of(policy_map.replace("<K>", "product=f32"))
    spelled = policy_map.replace("c={low},<K>", "<K>")
    assert found == program_of(spelled.replace("<K>", f"c=f32,o=f32,m={ALGORITHMS[low]}"))
    assert ALGORITHMS[low] in found


def two_layers(params, x):
    with jax.named_scope("body"):
        h = jnp.tanh(x @ params["a"])
    with jax.named_scope("head"):
        return h @ params["b"] + params["c"]


@pytest.mark.parametrize(("low", "save"), [("bfloat16", "save=products,"), ("float16", "")])
def test_scopes_do_what_the_three_keys_say(low, save):
    shapes = {"a": (3, 4), "b": (4, 5), "c": (5,)}
    params = {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((2, 3), F32)

    def gradient(rule):
        run = jmpx.apply_policy(two_layers, f"by=operations,{save}c={low}; head: {rule}")
        return jax.grad(lambda params, x: run(params, x).astype(F32).sum())

    by_key = gradient("product=f32")
    spelled = gradient(f"c=f32,o=f32,m={ALGORITHMS[low]}")
    assert program(by_key, params, x) == program(spelled, params, x)
    if low == "float16":
        return  # JAX has no F16_F16_F32 on a CPU
    products = sorted((*each.dtypes, each.how) for each in products_of(by_key, params, x))
    assert products == [("bf16", "DEFAULT")] * 2 + [("f32", "bf16 f32 x1")] * 2  # logits are unused


def test_the_16_bits_of_a_scope_are_those_around_it():
    def nested(w, x):
        with jax.named_scope("net"), jax.named_scope("head"):
            return x @ w

    w, x = (jax.ShapeDtypeStruct(shape, F32) for shape in ((3, 4), (2, 3)))
    run = jmpx.apply_policy(nested, "by=operations,full; net: c=f16; head: product=f32")
    assert "precision=F16_F16_F32" in program(run, w, x)


def test_what_leaves_is_not_rounded(rng):
    """Forward and backward, of operands that bfloat16 holds: a CPU does not round them itself."""
    arrays = (rng.normal(size=s) for s in ((64, 50), (8, 64), (8, 50)))
    w, x, g = (np.asarray(jnp.asarray(each, BF16), np.float32) for each in arrays)

    def head(w, x):
        with jax.named_scope("head"):
            return x @ w

    run = jmpx.apply_policy(head, "by=operations,c=bf16,o=f32; head: product=f32")
    logits, pullback = jax.vjp(run, w, x)
    dw, dx = pullback(jnp.asarray(g))
    w, x, g = (each.astype(np.float64) for each in (w, x, g))
    for found, expected in zip((logits, dw, dx), (x @ w, x.T @ g, g @ w.T), strict=True):
        assert found.dtype == F32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# Convolutions: tests/messages has the error of autocast.


@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
def test_a_convolution_is_refused_unless_it_has_a_rule_of_its_own(framework):
    x, body = jnp.ones((1, 4, 4, 3)), lambda m, x: m.conv("head", 2, 1)(x)
    net = zoo.build(framework, body, x, rng=np.random.default_rng(0))

    def run(policy):
        jax.eval_shape(lambda x: net.under(policy)(net.model, x), x)

    for selector in "*/head", "*", net.words("<Net>"):
        message = "product=float32' in .*: it is for matrix products, as"
        with pytest.raises(ValueError, match=message):
            run(f"c=bf16; {selector}: product=f32")
        run(f"c=bf16; {selector}: c=f32,m=BF16_BF16_F32_X3")
    for rule in "c=f32", "c=f32,m=default":
        run(f"c=bf16; *: product=f32; */head: {rule}")


def test_under_autocast_a_rule_of_its_own_saves_a_convolution():
    def conv(w, x):
        with jax.named_scope("net/head"):
            return jax.lax.conv(x, w, (1, 1), "SAME")

    shapes = jax.ShapeDtypeStruct((2, 3, 1, 1), F32), jax.ShapeDtypeStruct((1, 3, 4, 4), F32)
    jax.eval_shape(jmpx.autocast(conv, "c=bf16; *: c=f32,m=BF16_BF16_F32_X3"), *shapes)
    for rule in "c=f32", "c=f32,m=default":  # and nothing else multiplies
        with pytest.warns(UserWarning, match="has no effect"):
            run = jmpx.autocast(conv, f"c=bf16; *: product=f32; */head: {rule}")
            jax.eval_shape(run, *shapes)


# The key


def test_it_is_read_and_written():
    written = "params=float32,compute=bfloat16; */head: product=float32"
    policy_map = jmpx.get_policy_map("c=bf16; */head: product=fp32")
    assert str(policy_map) == written
    assert jmpx.get_policy_map(written) == policy_map
    rules = [{"select": "*/head", "product": "float32"}]
    assert policy_map.to_dict()["rules"] == rules
    assert jmpx.get_policy_map({"policy": "c=bf16", "rules": rules}) == policy_map
    assert policy_map.rules[0] == jmpx.types.Rule("*/head", product=jnp.float32)
