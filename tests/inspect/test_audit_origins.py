"""A leak names the line where its float32 began, or the argument that it is."""

import os
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32
from helpers.findings_of import found, line_of, shape
from helpers.zoo import build
from jax import lax

import jmpx

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]

WIDTH = 8
TABLE = np.random.default_rng(0).normal(size=(4, WIDTH, WIDTH)).astype(np.float32)
LATER = "cast it with .astype(jnp.bfloat16) where a bfloat16 array meets it"
LAYER = "give the layer there dtype=jnp.bfloat16, or cast its result with .astype(jnp.bfloat16)"


def mean_square(y):
    return jnp.mean(y.astype(F32) ** 2)


# Float32 begins at the line with `made`, and a product of 16-bit activations meets it at the arrow.


def parameter_cast_up(w, x):
    wide = w.astype(F32)  # made
    wide = jnp.tanh(wide.T).reshape(WIDTH, WIDTH)
    return x @ wide  # <-


def rows_of_a_table(w, x):
    rows = jnp.asarray(TABLE)[2]  # made
    rows = rows - 0.5 * rows.T
    return x @ rows  # <-


def sines_of_a_range(w, x):
    angles = jnp.arange(WIDTH, dtype=F32)  # made
    waves = jnp.sin(angles[:, None] * jnp.exp(-angles))
    return x @ waves  # <-


def integers_divided(w, x):
    ids = jnp.arange(WIDTH)
    steps = ids / WIDTH  # made
    return x @ jnp.outer(steps, steps)  # <-


def array_of_ones(w, x):
    ones = jnp.ones((WIDTH, WIDTH), F32)  # made
    return x @ ones  # <-


def matrices_of_a_loop(w, x):
    stacked = jnp.cos(jnp.asarray(TABLE))  # made

    def body(x, matrix):
        return (x @ matrix).astype(BF16), None  # <-

    return lax.scan(body, x, stacked)[0]


def carried(w, x):
    start = jnp.full((WIDTH, WIDTH), 0.5, F32)  # made

    def body(matrix, _):
        return jnp.tanh(matrix) * 2, x @ matrix  # <-

    return lax.scan(body, start, None, length=3)[1]


def function_of_a_function(w, x):
    @jax.jit
    def kernel(scale):
        return jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) * scale  # made

    return x @ kernel(2.0)  # <-


def layer_in_float32(w, x):
    embed = nn.Embed(WIDTH, WIDTH, dtype=F32)
    rows = embed.apply({"params": {"embedding": w}}, jnp.arange(3))  # made
    return x + rows @ w  # <-


CASES = {
    parameter_cast_up: LATER,
    rows_of_a_table: LATER,
    sines_of_a_range: LATER,
    integers_divided: LATER,
    array_of_ones: LATER,
    matrices_of_a_loop: LATER,
    carried: LATER,
    function_of_a_function: LATER,
    layer_in_float32: LAYER,
}


def findings_of(body, dtype, policy=None):
    """The mixed products of a network around a function of a parameter and activations."""

    def loss(params, x):
        y = body(params["w"], jnp.tanh(x @ params["dense"]))
        return mean_square(jnp.tanh(y.astype(BF16) @ params["dense"].astype(BF16)))

    dense, w = shape(WIDTH, WIDTH), shape(WIDTH, WIDTH, dtype=dtype)
    params, x = {"w": w, "dense": dense}, shape(2, 3, WIDTH)
    if policy is None:
        params["dense"], x = jmpx.cast_tree((dense, x), BF16)
    fn = jmpx.apply_policy(loss, policy) if policy else loss
    return found(fn, params, x, names=("mixed-product",))


@pytest.mark.parametrize("dtype, policy", [(BF16, None), (F32, "by=arguments,c=bf16")])
@pytest.mark.parametrize("body", CASES)
def test_a_product_names_the_line_where_its_float32_began(body, dtype, policy):
    (finding,) = findings_of(body, dtype, policy)
    assert finding.place.line == line_of(body)
    made = f"{os.path.basename(__file__)}:{line_of(body, 'made')} "
    start = "because of a float32 array that is made at "
    assert made in finding.message.partition(start)[2]
    assert finding.advice == CASES[body]


@pytest.mark.parametrize(
    "body, dtype, cause",
    [
        (lambda w, x: x @ w.T, F32, "the float32 argument `params['w']`."),
        (lambda w, x: x @ jnp.tanh(w), F32, "a float32 array."),
        (lambda w, x: x @ TABLE[0], BF16, "a float32 array that is closed over."),
    ],
)
def test_what_is_no_line_of_its_own_is_named(body, dtype, cause):
    """A parameter that is cast up is no argument in float32."""
    (finding,) = findings_of(body, dtype)
    assert finding.message.endswith(f"because of {cause}")


# One cause is one finding.


class Fields(nn.Module):
    """Attention and layers between norms, all of which have a `dtype` field."""

    dtype: Any = F32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="first")(x)
        for _ in range(3):
            x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(x)
            y = nn.Dense(2 * WIDTH, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(WIDTH, dtype=self.dtype)(jax.nn.gelu(y))
        return nn.Dense(WIDTH, name="last")(x)


def of_fields(policy):
    net, x = Fields(), shape(2, 3, WIDTH)
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    loss = jmpx.apply_policy(lambda params, x: mean_square(net.apply(params, x)), policy)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        findings = jmpx.inspect.audit(loss)(params, x).findings
    products = [each for each in findings if each.name in ("float32-product", "mixed-product")]
    return products, " ".join(str(each.message) for each in warned)


def test_a_dtype_field_in_many_layers_is_one_finding_with_one_rule_for_their_class():
    findings, warned = of_fields("by=modules,c=bf16")
    counts = {"MultiHeadDotProductAttention": 3 * 4, "Dense": 3 * 2}
    rules = {f"{name}: c=bf16,o=bf16": count for name, count in counts.items()}
    assert {each.rule: each.count for each in findings} == rules
    assert all(f"because of the `dtype` of {name}" in str(findings) for name in counts)
    # Attention owns no parameters: its layers do. A rule for the model would select everything.
    assert "Fields: " not in warned
    assert all(f"{name}: compute=bfloat16" in warned for name in counts)
    assert of_fields("; ".join(["by=modules,c=bf16", *rules]))[0] == []


def test_without_a_policy_map_the_advice_names_the_class():
    findings, _ = of_fields("by=arguments,c=bf16")
    assert {each.advice for each in findings} >= {
        "give MultiHeadDotProductAttention dtype=jnp.bfloat16"
    }
    assert [each for each in findings if each.rule] == []


def test_one_array_that_meets_activations_in_several_places_is_one_finding():
    def loss(w, x):
        waves = jnp.sin(jnp.arange(WIDTH, dtype=F32))  # made
        y = jnp.tanh(x @ w + waves) @ w  # <-
        return mean_square((y.astype(BF16) * waves) @ w)

    (finding,) = found(loss, shape(WIDTH, WIDTH, dtype=BF16), shape(2, 3, WIDTH, dtype=BF16))
    assert (finding.name, finding.count) == ("promotion", 2)
    assert finding.place.line == line_of(loss)
    made = f"test_audit_origins.py:{line_of(loss, 'made')} "
    assert made in finding.message


@pytest.mark.parametrize(
    "framework, name",
    [("haiku", "low-exp"), ("linen", "cast-to-and-fro"), ("nnx", "cast-to-and-fro")],
)
def test_what_the_norms_of_a_class_have_in_common_is_one_finding(framework, name):
    def body(m, x):
        x = x + m.linear("first", WIDTH)(m.norm("before")(x))
        x = x + m.linear("second", WIDTH)(m.norm("between")(x))
        return m.linear("last", WIDTH)(m.norm("after")(x))

    net = build(framework, body, np.ones((2, 3, WIDTH)), rng=np.random.default_rng(0))

    def findings(policy):
        loss = jmpx.apply_policy(lambda model, x: mean_square(net.apply(model, x)), policy)
        return found(loss, net.model, shape(2, 3, WIDTH), names=(name,))

    (finding,) = findings("by=modules,c=bf16")
    assert finding.rule == "LayerNorm: full" and finding.count % 3 == 0
    assert findings(f"by=modules,c=bf16; {finding.rule}") == []


def test_a_layer_that_is_given_a_wide_array_may_have_a_wide_dtype():
    """The trace is the same for both, so the advice is what mends both."""

    def audited(dtype, inner):
        net = nn.Sequential([nn.LayerNorm(dtype=inner), nn.Dense(64, dtype=dtype)])
        x = jax.ShapeDtypeStruct((32, 64), "float32")
        params = jax.eval_shape(net.init, jax.random.key(0), x)
        loss = lambda params, x: mean_square(net.apply(params, x))  # noqa: E731
        policy = "by=arguments,c=bf16,o=f32"
        return jmpx.inspect.audit(jmpx.apply_policy(loss, policy))(params, x).findings

    for dtype, inner in ((jnp.float32, jnp.float32), (None, jnp.float32)):
        worst = audited(dtype, inner)[0]
        assert (worst.severity, worst.name) == ("high", "mixed-product")
        assert worst.advice == "give the layer here dtype=jnp.bfloat16"
    assert not [each for each in audited(jnp.bfloat16, jnp.float32) if "product" in each.name]
