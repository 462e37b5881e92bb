"""Float32 products that hardware multiplies in fewer bits are found, if a platform is given."""

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F32
from helpers.findings_of import found, line_of
from helpers.planted_layer import FRAMEWORKS, planted
from jax import lax

import jmpx

NAMES = ("platform-product",)


def doubled(x):
    return x @ (2 * jnp.eye(4, dtype=x.dtype))  # product


@pytest.mark.sampled(3)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("platform, inside", [("tpu", "bfloat16"), ("gpu", "TF32")])
def test_a_model_in_float32_has_one_finding(framework, platform, inside):
    loss, args = planted(framework, doubled, "c=f32")
    (finding,) = found(NAMES, loss, *args, platform=platform)
    assert finding.severity == "high" and f"in {inside}" in finding.message
    assert (finding.count, finding.scope) == (3, "")  # three products: first, plant, head
    assert finding.flops == 2 * 2 * 4 * (4 + 4 + 1)
    rule = finding.rule.partition(" ")[0]
    loss, args = planted(framework, doubled, f"c=f32,{rule}")
    assert not found(NAMES, loss, *args, platform=platform)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rule_for_float32_asks_for_what_it_does_not_get(framework):
    policy = "c=bf16,o=f32; */plant: c=f32"
    loss, args = planted(framework, doubled, policy)
    (finding,) = found(NAMES, loss, *args, platform="tpu")
    assert (finding.severity, finding.rule) == ("high", "*/plant: m=highest")
    assert finding.place.line == line_of(__file__, "product")
    assert finding.flops == 2 * 2 * 4 * 4
    loss, args = planted(framework, doubled, f"{policy},m=highest")
    assert not found(NAMES, loss, *args, platform="tpu")
    loss, args = planted(framework, doubled, f"{policy}; {finding.rule}")
    assert not found(NAMES, loss, *args, platform="tpu")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_float32_product_of_a_16_bit_model_is_less_severe(framework):
    def leak(x):
        return doubled(x.astype(F32)).astype(x.dtype)

    loss, args = planted(framework, leak, "c=bf16,o=f32")
    (finding,) = found(NAMES, loss, *args, platform="tpu")
    assert (finding.severity, finding.scope.endswith("plant")) == ("low", True)


@pytest.mark.parametrize("platform", [None, "cpu"])
@pytest.mark.parametrize("policy", ["c=f32", "c=bf16,o=f32; */plant: c=f32"])
def test_without_such_a_platform_there_is_none(platform, policy):
    loss, args = planted("haiku", doubled, policy)
    assert not found(NAMES, loss, *args, platform=platform)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_model_in_16_bits_has_none(framework):
    loss, args = planted(framework, doubled, "c=bf16,o=f32")
    assert not found(NAMES, loss, *args, platform="tpu")


def convolved(precision):
    def loss(w, x):
        out = lax.conv_general_dilated(x, w, (1,), "SAME", precision=precision)
        return jnp.mean(out**2)

    w = jax.ShapeDtypeStruct((3, 2, 2), F32)
    return loss, w, jax.ShapeDtypeStruct((1, 2, 5), F32)


@pytest.mark.parametrize("precision", ["highest", "float32", "default", lax.Precision.HIGH])
def test_a_product_that_says_its_precision_is_none(precision):
    fn, *args = convolved(precision)
    assert not found(NAMES, fn, *args, platform="gpu")


def test_a_convolution_counts():
    fn, *args = convolved(None)
    (finding,) = found(NAMES, fn, *args, platform="gpu")
    assert finding.flops == 2 * 3 * 2 * (2 * 5 - 1)  # one tap of the last number lies outside
    with jax.default_matmul_precision("highest"):
        assert not found(NAMES, fn, *args, platform="gpu")


def test_under_autocast_a_rule_for_a_scope_mends_it():
    def loss(w, x):
        with jax.named_scope("trunk"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return jnp.mean(x @ w)  # head

    w, policy = jax.ShapeDtypeStruct((4, 4), F32), "c=bf16; */head: c=f32"
    (finding,) = found(NAMES, jmpx.autocast(loss, policy), w, w, platform="tpu")
    assert (finding.severity, finding.place.line) == ("high", line_of(__file__, "head"))
    assert finding.rule == "*/head: m=highest"
    policy = f"{policy}; {finding.rule}"
    assert not found(NAMES, jmpx.autocast(loss, policy), w, w, platform="tpu")


def test_products_of_mixed_dtypes_are_none():
    """Another finding says that they are mixed."""

    def loss(w, x):
        out = lax.dot(x, w, preferred_element_type=F32)
        return jnp.mean(out)

    w, x = jax.ShapeDtypeStruct((4, 4), F32), jax.ShapeDtypeStruct((4, 4), BF16)
    assert not found(NAMES, loss, w, x, platform="tpu")
