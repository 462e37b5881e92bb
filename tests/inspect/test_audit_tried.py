"""Advice is tried: what raises the error is not proposed; outer products are no leaks."""

import json
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, run_jmpx
from helpers.findings_of import found

import jmpx
from jmpx._inspect.running import relative_error

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]
WIDTH, ROWS = 16, 24


# --- Outer products, which sum nothing ---


def angles(x, w):
    place = jnp.einsum("i,j->ij", jnp.arange(len(x), dtype=F32), jnp.exp(w[0]))
    return x + jnp.sin(place).astype(x.dtype)


def decays(x, w):
    step = jax.nn.softplus(x.astype(F32))
    decay = jnp.exp(-jnp.einsum("ld,dn->ldn", step, jnp.exp(w)))
    return jnp.sum(decay, axis=-1).astype(x.dtype)


def one_feature(x, w):
    time = jnp.exp(x[:, :1].astype(F32)) @ jnp.exp(w[:1])
    return x + jnp.cos(time).astype(x.dtype)


class Net(nn.Module):
    plant: Callable
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(0.1), (WIDTH, WIDTH))
        x = nn.Dense(WIDTH, dtype=self.dtype)(x)
        x = nn.Dense(WIDTH, dtype=self.dtype)(self.plant(x, w.astype(F32)))
        return jnp.mean(x.astype(F32) ** 2)


@pytest.mark.parametrize("policy", ["", "c=bf16", "by=modules,c=bf16", "by=arguments,c=bf16"])
@pytest.mark.parametrize("plant", [angles, decays, one_feature])
def test_an_outer_product_in_float32_is_no_leak(plant, policy):
    model = Net(plant, None if policy else BF16)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), F32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = jmpx.apply_policy(model.apply, policy) if policy else model.apply
    products = jmpx.inspect.audit(loss)(params, x).products
    assert any(each.dtypes == "float32 x float32" for each in products)
    assert not found(loss, params, x, names=("float32-product", "mixed-product"))


# --- Edits on trial: a program leaks, and an edit follows the advice ---

NUMBERS = np.random.default_rng(0)
TABLE = NUMBERS.normal(size=(WIDTH, WIDTH)).astype("f")
PLACES = np.arange(ROWS, dtype="f")[:, None] * [[37.0, 101.0]]
PARAMS = [NUMBERS.normal(size=(WIDTH, WIDTH), scale=0.3).astype("f") for _ in range(3)]
X = NUMBERS.normal(size=(ROWS, WIDTH)).astype("f")
SHAPES = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in PARAMS]


def loss_with(layer):
    def loss(params, x, places=PLACES, low=BF16):
        first, second, third = (w.astype(low) for w in params)
        h = jnp.tanh(x.astype(low) @ first)
        h = layer(h, second, params[1], places).astype(low)
        return jnp.mean((h @ third).astype(F32) ** 2)

    return loss


def waves(h, w, wide, places):
    angles = places @ jnp.asarray(TABLE[:2])
    return h * jnp.sin(angles).astype(h.dtype) @ w


def late_waves(h, w, wide, places):
    angles = jnp.arange(len(h), dtype=F32) * 37
    return (h + jnp.sin(angles)[:, None]) @ w


# Each leaks, and has the edit that the audit's advice tells.
HARMLESS = {
    "number": (
        lambda h, w, *_: jnp.tanh(h * np.float32(1.5)) @ w,
        lambda h, w, *_: jnp.tanh(h * 1.5) @ w,
    ),
    "table": (
        lambda h, w, *_: jnp.tanh(h @ w + jnp.tanh(jnp.asarray(TABLE[0]))) @ w.T,
        lambda h, w, *_: jnp.tanh(h @ w + jnp.tanh(jnp.asarray(TABLE[0])).astype(h.dtype)) @ w.T,
    ),
    "parameter": (lambda h, w, wide, _: h @ wide, lambda h, w, *_: h @ w),
    "cast": (lambda h, w, *_: h.astype(F32) @ w.astype(F32), lambda h, w, *_: h @ w),
    "result": (
        lambda h, w, *_: jnp.einsum("ij,jk->ik", h, w, preferred_element_type=F32),
        lambda h, w, *_: h @ w,
    ),
}


def tried(loss, *args) -> Any:
    return jmpx.inspect.audit(loss, run=True)(*args)


@pytest.mark.parametrize("name", HARMLESS)
def test_advice_that_is_harmless_has_the_error_of_the_edited_program(name):
    leaky, mended = map(loss_with, HARMLESS[name])
    report = tried(leaky, PARAMS, X)
    (finding,) = report.findings
    exact = jax.grad(leaky)(PARAMS, X, low=F32)
    for loss, error in ((leaky, finding.before), (mended, finding.after)):
        got = jax.jit(jmpx.inspect.emulate(jax.grad(loss)))(PARAMS, X)
        assert relative_error(got, exact) == pytest.approx(error, rel=0.15)
    assert finding.severity in ("high", "medium") and "float32" not in finding.advice[:8]
    assert f"tried: {finding.before:.1e} before, {finding.after:.1e} after" in str(report)
    assert "not tried" not in str(report)
    assert jmpx.inspect.audit(mended)(PARAMS, X).findings == ()


def test_an_edit_that_raises_the_error_is_not_advised():
    loss = loss_with(waves)
    (finding,) = jmpx.inspect.audit(loss)(PARAMS, X, PLACES).findings
    assert finding.severity == "high" and "bfloat16" in finding.advice
    (told,) = tried(loss, PARAMS, X, PLACES).findings
    assert told.severity == "low" and told.advice.startswith("keep it in float32")
    assert told.before < 0.02 < 0.3 < told.after


def test_the_cast_of_an_array_is_advised_where_it_is_met_not_where_it_is_made():
    loss = loss_with(late_waves)
    (finding,) = jmpx.inspect.audit(loss)(PARAMS, X).findings
    assert finding.advice == "cast it with .astype(jnp.bfloat16) where a bfloat16 array meets it"
    (told,) = tried(loss, PARAMS, X).findings
    assert told.advice == finding.advice
    assert told.after < 1.5 * told.before < 0.02


def test_a_report_says_in_one_line_that_advice_was_not_tried():
    leaky, mended = map(loss_with, HARMLESS["number"])
    report = jmpx.inspect.audit(leaky)(PARAMS, X)
    assert report.untried == "pass run=True" and report.findings[0].after is None
    assert str(report).count("not tried") == 1
    assert jmpx.inspect.audit(mended)(PARAMS, X).untried == ""


# --- Shapes ---


def test_shapes_of_floats_are_filled():
    (finding,) = tried(loss_with(HARMLESS["cast"][0]), SHAPES, X).findings
    assert 0 < finding.before < 0.02 and finding.after < 1.5 * finding.before


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (WIDTH, "Expected an array as x, got a shape of float32: run=True fills"),
        (2**13, "Expected arrays, got shapes of 768 MiB: run=True fills at most 256"),
    ],
)
def test_shapes_that_are_not_filled(width, message):
    params, x = (
        [jax.ShapeDtypeStruct((width, width), F32)] * 3,
        jax.ShapeDtypeStruct((9, width), F32),
    )
    with pytest.raises(ValueError, match=message):
        tried(loss_with(HARMLESS["cast"][0]), params, x)


def test_infinite_results_are_not_tried():
    report = tried(loss_with(HARMLESS["cast"][0]), PARAMS, X * np.inf)
    assert report.untried == "the results in float32 are not finite"
    assert "Advice was not tried: the results in float32 are not finite." in str(report)


# --- Rules ---


class Encoder(nn.Module):
    offset: float

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x) + self.offset


class Far(nn.Module):
    """Reads the results of its encoder without their mean."""

    offset: float

    @nn.compact
    def __call__(self, x):
        y = Encoder(self.offset, name="enc")(x) @ self.param("w", lambda key: jnp.eye(WIDTH))
        return jnp.mean((y - y.mean(axis=0)).astype(F32) ** 2)


@pytest.mark.parametrize(("offset", "is_proposed"), [(0.5, True), (300.0, False)])
def test_a_rule_that_raises_the_error_is_not_proposed(offset, is_proposed):
    model = Far(offset)
    params = model.init(jax.random.key(0), X)
    loss = jmpx.apply_policy(model.apply, "by=modules,c=bf16,o=f32; */enc: c=f32,o=f32")
    (finding,) = found(loss, params, X, names=("mixed-product",))
    assert finding.rule.startswith("*/enc: ") and finding.before is None
    (told,) = (each for each in tried(loss, params, X).findings if each.name == finding.name)
    if is_proposed:
        assert told.rule == finding.rule and told.after <= max(1.5 * told.before, 2**-7)
    else:
        assert told.rule == "" and told.advice.startswith("keep it in float32")
        assert told.after > 0.3 > told.before


def test_a_rule_that_mends_has_its_errors():
    def loss(params, x):
        h = jnp.tanh(x @ params[0])
        with jax.named_scope("head"):
            logits = h @ params[1] * 4
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    (finding,) = tried(jmpx.apply_policy(loss, "c=bf16"), PARAMS[:2], X).findings
    assert (finding.name, finding.rule) == ("rounded-logits", "*/head: product=float32")
    assert 0 < finding.after < finding.before


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(jnp.tanh(nn.Dense(8)(x)))


class Tied(nn.Module):
    """Multiplies with the table of its embedding, whose lookups it adds to."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WIDTH, 8, name="embed")
        x = Residual(name="block")(embed(tokens))
        return -jnp.mean(jax.nn.log_softmax(embed.attend(x).astype(F32))[..., 0])


@pytest.mark.parametrize(
    ("way", "rule"),
    [
        ("", "*/embed.attend: product=float32"),
        ("by=modules,", "*/embed: product=float32"),
    ],
)
def test_a_rule_for_tied_logits_leaves_lookups_alone_or_says_what_it_widens(way, rule):
    model, tokens = Tied(), jnp.arange(12).reshape(3, 4)
    params = model.init(jax.random.key(0), tokens)
    (finding,) = found(jmpx.apply_policy(model.apply, f"{way}c=bf16"), params, tokens)
    assert (finding.name, finding.rule) == ("rounded-logits", rule)
    assert ("The rule widens" in finding.message) == bool(way)
    report = jmpx.inspect.audit(jmpx.apply_policy(model.apply, f"{way}c=bf16; {rule}"))
    (block,) = (each for each in report(params, tokens).scopes if each.path == "block")
    assert ("float32" in block.dtypes) == bool(way)


# --- Reports and steps ---


def test_a_step_returns_parameters_that_hide_its_error():
    def step_with(layer):
        gradient = jax.value_and_grad(loss_with(layer))

        def step(params, x, places):
            value, grads = gradient(params, x, places)
            return value, [w - 1e-4 * g for w, g in zip(params, grads, strict=True)]

        return step

    (told,) = tried(step_with(waves), PARAMS, X, PLACES).findings
    assert told.advice.startswith("keep it in float32")
    (told,) = tried(step_with(HARMLESS["cast"][0]), PARAMS, X, PLACES).findings
    assert told.advice.startswith("leave out its cast") and told.after <= 1.5 * told.before


def test_json_holds_the_errors():
    report = tried(loss_with(HARMLESS["cast"][0]), PARAMS, X)
    plain = json.loads(report.to_json())
    assert plain == report.to_dict() and plain["untried"] == ""
    (finding,) = report.findings
    assert (plain["findings"][0]["before"], plain["findings"][0]["after"]) == finding[-2:]


def leaky():
    return loss_with(HARMLESS["cast"][0]), (PARAMS, X)


@pytest.mark.parametrize("flags", [[], ["--run"]])
def test_the_command_runs_the_program_if_it_is_told_to(flags, capsys):
    assert run_jmpx("audit", f"{__name__}:leaky", *flags) == 0
    printed = capsys.readouterr().out
    assert ("results, tried: " in printed) == bool(flags) != ("Advice was not tried: " in printed)
