"""One cause is one finding: it names where float32 was made, and weighs as much as its share."""

import importlib.util
import os

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32
from helpers.findings_of import found, line_of

import jmpx
import jmpx.flax
import jmpx.haiku
from jmpx._inspect.audit.findings import KINDS
from jmpx._jaxprs import places

pytestmark = pytest.mark.usefixtures("standard_promotion")

WIDTH = 64
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), BF16)
X = jax.ShapeDtypeStruct((8, WIDTH), BF16)


def findings(fn, *args):
    return found(tuple(KINDS), fn, *args)


def mean_square(y):
    return jnp.mean(jnp.square(y.astype(F32)))


def at(mark):
    return f"{os.path.basename(__file__)}:{line_of(__file__, mark)} "


def made_elsewhere(w, x):
    noise = jax.random.normal(jax.random.key(0), x.shape)  # made here
    noise = jnp.tanh(noise)
    first = noise @ w  # first product
    second = noise @ w.T
    return mean_square(x @ w + (first + second).astype(BF16))


def added_elsewhere(w, x):
    angles = jnp.sin(jnp.arange(WIDTH, dtype=F32))  # angles
    x = jnp.tanh(x)
    return mean_square((x @ w + angles) @ w)  # added


def wide_island(w, x):
    x = x @ w
    wide = x.astype(F32)  # island
    normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    gate = jax.nn.silu(normal @ w)  # gate
    return mean_square(((normal @ w.T) * gate).astype(BF16) @ w @ w)


@pytest.mark.parametrize(
    "loss, name, mark, made, count",
    [
        (made_elsewhere, "mixed-product", "first product", "made here", 2),
        (added_elsewhere, "promotion", "added", "angles", 1),
        (wide_island, "mixed-product", "gate", "island", 2),
    ],
)
def test_a_finding_names_the_line_where_float32_was_made(loss, name, mark, made, count):
    (finding,) = findings(loss, W, X)
    assert (finding.name, finding.count) == (name, count)
    assert finding.place.line == line_of(__file__, mark)
    assert at(made) in finding.message
    assert finding.message.startswith("2 products") == (count == 2)


def test_layers_that_multiply_one_array_have_findings_of_their_own():
    """Two arrays that two lines make are two causes."""

    def loss(w, x):
        one = jax.random.normal(jax.random.key(0), x.shape)
        two = jax.random.normal(jax.random.key(1), x.shape)
        return mean_square((one @ w + two @ w).astype(BF16) @ w @ w + x @ w)

    assert len(findings(loss, W, X)) == 1  # of one line and scope
    assert findings(loss, W, X)[0].count == 2


class Fields(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="first")(x)
        left = nn.Dense(WIDTH, dtype=F32, name="left")(x)
        right = nn.Dense(WIDTH, dtype=F32, name="right")(x)
        return left * right + nn.Dense(WIDTH, name="last")(x)


def test_rules_mend_dtype_fields():
    net, x = Fields(), jnp.ones((8, WIDTH))
    params = jax.eval_shape(net.init, jax.random.key(0), x)

    def wide(policy_map):
        def loss(params, x):
            with jmpx.flax.policies(policy_map):
                return mean_square(jnp.asarray(net.apply(params, x)))

        return found(("float32-product", "mixed-product"), loss, params, x)

    rules = [finding.rule for finding in wide("c=bf16,o=f32")]
    assert sorted(rules) == [f"*/{side}: c=bf16,o=bf16" for side in ("left", "right")]
    assert wide("; ".join(["c=bf16,o=f32", *rules])) == []


def test_a_boolean_that_becomes_float32_is_an_array():
    is_trained = jnp.asarray(True)

    def loss(w, x):
        return mean_square((x * jax.jit(lambda: is_trained.astype(F32))()) @ w)  # boolean

    (finding,) = findings(loss, W, X)
    assert (finding.name, finding.place.line) == ("promotion", line_of(__file__, "boolean"))
    assert "meets a float32 array and goes on" in finding.message


# Products in parents that own nothing.


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(100, WIDTH)
        x = nn.Dense(WIDTH)(nn.Dense(256)(embed(tokens)))
        x = jnp.tanh(jax.random.normal(jax.random.key(0), x.shape)) + x  # linen noise
        return x @ embed.embedding.T


class HaikuTied(hk.Module):
    def __call__(self, tokens):
        embed = hk.Embed(100, WIDTH)
        x = hk.Linear(WIDTH)(hk.Linear(256)(embed(tokens)))
        x = jnp.tanh(jax.random.normal(jax.random.key(0), x.shape)) + x  # haiku noise
        return x @ embed.embeddings.T


def of_linen(cls, tokens):
    net = cls()
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        with jmpx.flax.policies("c=bf16,o=f32"):
            return mean_square(jnp.asarray(net.apply(params, tokens)))

    return loss, params


def of_haiku(cls, tokens):
    net = hk.without_apply_rng(hk.transform(lambda tokens: cls(name="net")(tokens)))
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        with jmpx.haiku.policies("c=bf16,o=f32"):
            return mean_square(net.apply(params, tokens))

    return loss, params


@pytest.mark.parametrize(
    "make, cls, mark",
    [(of_linen, LinenTied, "linen noise"), (of_haiku, HaikuTied, "haiku noise")],
)
def test_a_tied_head_in_a_parent_is_found_where_its_input_became_float32(make, cls, mark):
    tokens = jnp.zeros((8, 16), int)
    loss, params = make(cls, tokens)
    (finding,) = findings(loss, params, tokens)
    assert (finding.name, finding.place.line) == ("promotion", line_of(__file__, mark))
    assert ", with 1 product behind it" in finding.message
    assert ".astype" in finding.rule


# Shares.


@pytest.mark.parametrize("rows, severity", [(8, "high"), (64, "medium"), (1024, "low")])
def test_severity_goes_by_shares(rows, severity):
    """Positions that are little work are less severe in a large step."""

    def loss(w, x):
        positions = jnp.arange(16, dtype=F32)[:, None] * jnp.ones((16, 16))
        positions = positions @ positions.T  # positions
        return mean_square(x @ w @ w) + jnp.sum(positions) * jnp.mean(x)

    x = jax.ShapeDtypeStruct((rows, WIDTH), BF16)
    share = 2 * 16**3 / sum(each.flops for each in jmpx.inspect.audit(loss)(W, x).products)
    assert {"high": share > 0.01, "medium": 0.001 < share < 0.01, "low": share < 0.001}[severity]
    (finding,) = found(("float32-product", "mixed-product"), loss, W, x)
    assert (finding.severity, finding.place.line) == (severity, line_of(__file__, "positions"))


# Libraries.


def test_a_library_names_its_own_line_and_the_callers(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "somebody"
    folder.mkdir(parents=True)
    file = folder / "layers.py"
    file.write_text("def scaled(x, number):\n    return x * number\n")
    spec = importlib.util.spec_from_file_location("somebody_layers", file)
    assert spec and spec.loader
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    monkeypatch.setattr(places, "_packages", lambda: (f"{folder.parent}{os.sep}",))

    def loss(w, x):
        return mean_square(layers.scaled(x @ w, np.float32(3)) @ w)  # called

    (finding,) = findings(loss, W, X)
    assert (finding.place.file, finding.place.line) == (str(file), 2)
    assert finding.place.caller.line == line_of(__file__, "called")
    text = f"somebody{os.sep}layers.py:2 (scaled), called at {finding.place.caller}"
    assert str(finding.place) == text
    assert text in str(jmpx.inspect.audit(loss)(W, X))


# What autocast rounds.

BODIES = {
    "rounded behind a factor": lambda h: h * 1e-9 * 1e9,
    "mask": lambda h: jax.nn.softmax(jnp.where(jnp.tri(8, WIDTH, dtype=bool), h, -1e9)),
    "added mask": lambda h: jax.nn.softmax(h + jnp.where(jnp.tri(8, WIDTH, dtype=bool), 0, -1e9)),
    "mask times number": lambda h: jax.nn.softmax(h - 1e9 * jnp.tri(8, WIDTH, dtype=bool)),
    "exact gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "norm": lambda h: h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6),
    "running sum": lambda h: jnp.cumsum(h, axis=0),
    "scatter": lambda h: h.at[jnp.array([0, 1, 0])].add(h[:3]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compute", ["bf16", "f16"])
@pytest.mark.parametrize("body", BODIES)
def test_what_autocast_rounds_is_no_finding(body, compute):
    def loss(w, x):
        return jnp.mean((BODIES[body](x @ w) @ w) ** 2)

    args = jax.ShapeDtypeStruct(W.shape, F32), jax.ShapeDtypeStruct(X.shape, F32)
    assert findings(jmpx.autocast(loss, f"c={compute}"), *args) == []


def test_what_the_user_rounds_under_autocast_is_one_finding():
    def loss(w, x):
        return jnp.mean((x @ w).astype(BF16).astype(F32) @ w)  # twice

    args = jax.ShapeDtypeStruct(W.shape, F32), jax.ShapeDtypeStruct(X.shape, F32)
    (finding,) = findings(jmpx.autocast(loss, "c=f16"), *args)
    assert (finding.name, finding.place.line) == ("double-rounding", line_of(__file__, "twice"))
