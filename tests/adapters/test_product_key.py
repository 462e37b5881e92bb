"""`product=f32` in a rule: 16-bit operands, float32 results, in all frameworks and autocast."""

import contextlib
import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32
from helpers.four_frameworks import FRAMEWORKS, gradients, in_words_of
from helpers.jaxprs import trace
from helpers.products import products_of

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx._base.matmul import SUMMED_IN_FLOAT32

every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
# What a rule says, and the same by compute, output and matmul.
SPELLED = {
    "c={low},o=f32; */head: product=f32": "c={low},o=f32; */head: c=f32,o=f32,m={algorithm}",
    "c={low}; */block: product=f32": "c={low}; */block: c=f32,o=f32,m={algorithm}",
    "c={low},m=high; <Own>Head: product=f32": (
        "c={low},m=high; <Own>Head: c=f32,o=f32,m={algorithm}"
    ),
    # The 16 bits are those around, else of the default; a rule may name them.
    "full; <Own>Net: c={low}; */head: product=f32": (
        "full; <Own>Net: c={low}; */head: c=f32,o=f32,m={algorithm}"
    ),
    "c={low}; */block: full; */inner: product=f32": (
        "c={low}; */block: full; */inner: c=f32,o=f32,m={algorithm}"
    ),
    "full; */head: c={low},product=f32": "full; */head: c=f32,o=f32,m={algorithm}",
    "c={other}; */head: c={low},product=f32": "c={other}; */head: c=f32,o=f32,m={algorithm}",
    # One inside of the other.
    "c={low}; */block: product=f32; */inner: product=f32; */outer: c={low}": (
        "c={low}; */block: c=f32,o=f32,m={algorithm}; */inner: c=f32,o=f32,m={algorithm}; "
        "*/outer: c={low}"
    ),
}


def of(framework, words, low):
    (other,) = {*SUMMED_IN_FLOAT32} - {low}
    words = words.format(low=low, other=other, algorithm=SUMMED_IN_FLOAT32[low])
    return in_words_of(framework, words)


def program(framework, policy_map):
    """The text of the jaxpr of a gradient in the parameters and the inputs."""
    _, model, adapter, _ = FRAMEWORKS[framework]
    text = str(trace(*gradients(adapter(policy_map), model)))
    return re.sub(r"0x[0-9a-f]+", "", text)  # of Python's objects


@pytest.mark.sampled(9)
@every_framework
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("words", SPELLED)
def test_modules_do_what_the_three_keys_say(framework, words, low):
    found = program(framework, of(framework, words, low))
    assert found == program(framework, of(framework, SPELLED[words], low))
    assert SUMMED_IN_FLOAT32[low] in found


def two_layers(params, x):
    with jax.named_scope("body"):
        h = jnp.tanh(x @ params["a"])
    with jax.named_scope("head"):
        return h @ params["b"] + params["c"]


def autocast_program(words, low):
    policy_map = words.format(low=low, algorithm=SUMMED_IN_FLOAT32[low])
    shapes = {"a": (3, 4), "b": (4, 5), "c": (5,)}
    params = {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}
    run = jmpx.apply_policy(two_layers, f"by=operations,{policy_map}")
    x = jax.ShapeDtypeStruct((2, 3), F32)
    return jax.grad(lambda params, x: run(params, x).astype(F32).sum()), params, x


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("save", ["", "save=products,"])
def test_scopes_do_what_the_three_keys_say(low, save):
    by_key, spelled = (
        autocast_program(f"{save}c={{low}}; head: {rule}", low)
        for rule in ("product=f32", "c=f32,o=f32,m={algorithm}")
    )
    assert str(trace(*by_key)) == str(trace(*spelled))
    if low == "float16":
        return  # JAX has no F16_F16_F32 on a CPU
    products = sorted((*each.dtypes, each.how) for each in products_of(*by_key))
    assert products == [("bf16", "DEFAULT")] * 2 + [("f32", "bf16 f32 x1")] * 2  # logits are unused


def test_the_16_bits_of_a_scope_are_those_around_it():
    def nested(w, x):
        with jax.named_scope("net"), jax.named_scope("head"):
            return x @ w

    w, x = (jax.ShapeDtypeStruct(shape, F32) for shape in ((3, 4), (2, 3)))
    run = jmpx.apply_policy(nested, "by=operations,full; net: c=f16; head: product=f32")
    assert "precision=F16_F16_F32" in str(trace(run, w, x))


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
    exact = x @ w, x.T @ g, g @ w.T
    for found, expected in zip((logits, dw, dx), exact, strict=True):
        assert found.dtype == F32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# A convolution in four frameworks, and under autocast.


class EquinoxConv(eqx.Module):
    head: eqx.nn.Conv1d

    def __call__(self, x):
        return jax.vmap(self.head)(x)


class LinenConv(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(2, (1,), name="head")(x)


class NNXConv(nnx.Module):
    def __init__(self):
        self.head = nnx.Conv(3, 2, (1,), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(x)


def haiku_conv(policy_map):
    class Net(hk.Module):
        def __call__(self, x):
            return hk.Conv1D(2, 1, name="head")(x)

    net = hk.without_apply_rng(hk.transform(lambda x: Net(name="net")(x)))
    params = net.init(jax.random.key(0), jnp.ones((1, 4, 3)))
    with jmpx.haiku.policies(policy_map):
        return net.apply(params, jnp.ones((1, 4, 3)))


def linen_conv(policy_map):
    net = LinenConv()
    params = net.init(jax.random.key(0), jnp.ones((1, 4, 3)))
    with jmpx.flax.policies(policy_map):
        return net.apply(params, jnp.ones((1, 4, 3)))


def nnx_conv(policy_map):
    return jmpx.flax.with_policies(NNXConv(), policy_map)(jnp.ones((1, 4, 3)))


def equinox_conv(policy_map):
    model = EquinoxConv(eqx.nn.Conv1d(3, 2, 1, key=jax.random.key(0)))
    return jmpx.equinox.with_policies(model, policy_map)(jnp.ones((1, 3, 4)))


def autocast_conv(policy_map):
    def conv(w, x):
        with jax.named_scope("net/head"):
            return jax.lax.conv(x, w, (1,), "SAME")

    return jmpx.autocast(conv, policy_map)(jnp.ones((2, 3, 1)), jnp.ones((1, 3, 4)))


CONVOLUTIONS = (haiku_conv, linen_conv, nnx_conv, equinox_conv, autocast_conv)


@pytest.mark.parametrize("selector", ["*/head", "*"])
@pytest.mark.parametrize("run", CONVOLUTIONS, ids=lambda run: run.__name__)
def test_a_convolution_is_refused(run, selector):
    with pytest.raises(ValueError, match="product=float32' in .*: it is for matrix products, as"):
        run(f"c=bf16; {selector}: product=f32")
    run(f"c=bf16; {selector}: full")


@pytest.mark.parametrize(
    ("run", "holder"),
    [
        (haiku_conv, "Net"),
        (linen_conv, "LinenConv"),
        (nnx_conv, "NNXConv"),
        (equinox_conv, "EquinoxConv"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_convolution_inside_of_what_a_rule_selects_is_refused(run, holder):
    with pytest.raises(ValueError, match="product=float32' in .*: it is for matrix products, as"):
        run(f"c=bf16; {holder}: product=f32")
    run(f"c=bf16; {holder}: c=f32,m=BF16_BF16_F32")


@pytest.mark.parametrize("run", CONVOLUTIONS, ids=lambda run: run.__name__)
def test_a_convolution_inside_may_have_a_rule_of_its_own(run):
    is_scope = run is autocast_conv  # in which nothing else multiplies
    for rule in "c=f32", "c=f32,m=default":
        warns = pytest.warns(UserWarning, match="has no effect")
        with warns if is_scope else contextlib.nullcontext():
            run(f"c=bf16; *: product=f32; */head: {rule}")


@pytest.mark.parametrize(
    ("policy_map", "message"),
    [
        ("c=bf16,product=f32", "Unexpected key 'product' at position 7 of policy map"),
        ({"compute": "bf16", "product": "f32"}, "Unexpected key 'product' at product: products"),
        ("c=bf16; */a: product=bf16", "Cannot hand out bfloat16 from products at position 21 of"),
        ("c=bf16; */a: product=f64", "Cannot hand out float64 from products at position 21 of"),
        ("c=bf16; op.dot_general: product=f32", "select the module or scope around the operation"),
        ("c=bf16; */a: product=f32,c=f32", "compute is the dtype of the operands, so write"),
        ("c=bf16; */a: product=f32,o=bf16", "it returns float32, so leave output out"),
        ("c=bf16; */a: product=f32,m=high", "leave matmul out"),
        ("c=bf16; */a: product=f32,product=f32", "Duplicate key 'product' at position 25"),
        ({"policy": "c=bf16", "rules": [{"select": "*/a", "product": 32}]}, "Expected a dtype"),
    ],
)
def test_errors(policy_map, message):
    with pytest.raises((TypeError, ValueError)) as error:
        jmpx.get_policy_map(policy_map)
    assert message in str(error.value)


def test_a_policy_has_none():
    with pytest.raises(ValueError, match="give the key in a rule for a module or a scope"):
        jmpx.get_policy("c=bf16,product=f32")


def test_it_is_read_and_written():
    written = "params=float32,compute=bfloat16,output=bfloat16; */head: product=float32"
    policy_map = jmpx.get_policy_map("c=bf16; */head: product=fp32")
    assert str(policy_map) == written
    assert jmpx.get_policy_map(written) == policy_map
    rules = [{"select": "*/head", "product": "float32"}]
    assert policy_map.to_dict()["rules"] == rules
    assert jmpx.get_policy_map({"policy": "c=bf16", "rules": rules}) == policy_map
    assert policy_map.rules[0] == jmpx.types.Rule("*/head", product=jnp.float32)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_without_16_bits_around_it_is_refused(dtype):
    rule = jmpx.types.Rule("*/head", product="f32")
    default = jmpx.get_policy(dtype)
    if dtype == F32:
        with pytest.raises(ValueError, match="where the compute dtype is float32: its operands"):
            rule.resolve(default, None)
    else:
        policy = rule.resolve(default, None)
        assert str(policy) == (
            f"params={dtype.name},compute=float32,output=float32,"
            f"matmul={SUMMED_IN_FLOAT32[dtype.name]}"
        )


def test_a_rule_for_what_multiplies_nothing_warns():
    def scale(x):
        with jax.named_scope("head"):
            return jnp.tanh(x @ x)

    def norm(x):
        with jax.named_scope("norm"):
            return x / 2

    run = jmpx.apply_policy(lambda x: norm(scale(x)), "by=operations,c=bf16; norm: product=f32")
    with pytest.warns(UserWarning, match="'norm: product=float32' .* no matrix product of float32"):
        run(jnp.ones((2, 2)))
