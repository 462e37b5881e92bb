"""`compare`: two functions of one model, scope by scope, paired by what agrees in float32."""

import html
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32
from helpers.four_frameworks import FRAMEWORKS, X
from helpers.op_by_op import one_by_one
from jax import lax

import jmpx
from jmpx._inspect.compare.pairs import relative_error

compare: Any = jmpx.inspect.compare  # also called with wrong arguments
WIDTH, LAYERS = 8, 2


# A model that goes through all tokens at once, or one by one with a cache.


def given(rng, length=8, batch=8):  # lengths that are equal, so that shapes do not tell axes apart
    shape = LAYERS, WIDTH, WIDTH
    names = ("q", "k", "v", "o")
    params = {name: rng.normal(size=shape).astype(np.float32) / WIDTH**0.5 for name in names}
    params["head"] = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)
    return params, rng.normal(size=(batch, length, WIDTH)).astype(np.float32)


def mixed(q, k, v, seen):
    with jax.named_scope("attend"):
        scores = jnp.where(seen, jnp.einsum("...qd,...kd->...qk", q, k), -1e30)
        return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores), v)


def head(params, x):
    with jax.named_scope("head"):
        return jax.nn.log_softmax((x @ params["head"]).astype(F32))


def full(params, x):
    """Takes x (batch, length, width)."""
    seen = jnp.tri(x.shape[1], dtype=bool)
    for i in range(LAYERS):
        with jax.named_scope(f"layer_{i}"):
            q, k, v = (x @ params[name][i] for name in "qkv")
            x = x + jnp.tanh(mixed(q, k, v, seen) @ params["o"][i])
    return head(params, x)


def one_token(params, caches, x, place):
    """Takes x (batch, 1, width), and keys and values of each layer."""
    after = []
    for i, (keys, values) in enumerate(caches):
        with jax.named_scope(f"layer_{i}"):
            q, k, v = (x @ params[name][i] for name in "qkv")
            keys = lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), place, 1)
            values = lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), place, 1)
            seen = jnp.arange(keys.shape[1]) <= place
            x = x + jnp.tanh(mixed(q, keys, values, seen) @ params["o"][i])
            after.append((keys, values))
    return after, head(params, x)


def empty(x):
    return [(jnp.zeros(x.shape), jnp.zeros(x.shape)) for _ in range(LAYERS)]


def scanned(params, x):
    def step(caches, given):
        token, place = given
        return one_token(params, caches, token[:, None], place)

    tokens = jnp.swapaxes(x, 0, 1), jnp.arange(x.shape[1])
    return jnp.swapaxes(lax.scan(step, empty(x), tokens)[1][:, :, 0], 0, 1)


def looped(params, x):
    caches, found = empty(x), []
    for place in range(x.shape[1]):
        caches, scores = one_token(params, caches, x[:, place : place + 1], place)
        found.append(scores[:, 0])
    return jnp.stack(found, axis=1)


SAMPLERS = pytest.mark.parametrize("sampler", [scanned, looped], ids=lambda f: f.__name__)


@SAMPLERS
def test_a_sampler_with_a_cache_is_paired_token_by_token(sampler, rng):
    params, x = given(rng)
    report = compare(full, sampler)(params, x)
    scopes = [row.scope for row in report.rows]
    for scope in ("layer_0/attend", "layer_0", "layer_1/attend", "layer_1", "head", "result"):
        assert scope in scopes
    assert all(row.error < 1e-5 and row.in_float32 < 1e-5 for row in report.rows)
    assert report.first() is None and report.check() is report
    # One holds scores of the cache, which the other does not have.
    assert {each.scope for each in report.unpaired} <= {
        f"layer_{i}{inside}" for i in range(LAYERS) for inside in ("", "/attend")
    }
    assert report.log_probabilities.is_distribution
    assert abs(report.log_probabilities.kl) < 1e-7


@pytest.mark.sampled(1)  # each operation of two samplers is compiled
@SAMPLERS
def test_16_bits_differ_as_they_are_written(sampler, rng):
    """The errors are those of running both operation by operation."""
    params, x = given(rng)
    kl = {}
    for low in ("bf16", "f16", "f32"):
        ways = [jmpx.apply_policy(f, f"by=operations,c={low},o=f32") for f in (full, sampler)]
        report = compare(*ways)(params, x)
        (row,) = [row for row in report.rows if row.scope == "result"]
        old, new = (np.asarray(one_by_one(way, params, x)) for way in ways)
        assert row.error == pytest.approx(relative_error(old, new), rel=1e-3, abs=1e-6)
        assert row.in_float32 < 1e-5
        kl[low] = report.log_probabilities.kl
        expected = np.mean(np.sum(np.exp(old.astype(np.float64)) * (old - new), axis=-1))
        assert kl[low] == pytest.approx(expected, rel=1e-2, abs=1e-7)
    assert abs(kl["f32"]) < 1e-7


def test_float32_against_a_policy(rng):
    params, x = given(rng)
    report = compare(full, jmpx.apply_policy(full, "by=operations,c=bf16,o=f32"))(params, x)
    assert report.unpaired == ()
    errors = {row.scope: row.error for row in report.rows}
    assert 1e-4 < errors["layer_0"] < errors["layer_1"] < 0.05
    assert all(row.in_float32 < 1e-6 for row in report.rows)
    dtypes = {row.scope: row.dtypes for row in report.rows}
    assert dtypes["layer_0"] == ("float32", "bfloat16")
    assert report.first(at_most=1e-4).scope == report.rows[0].scope
    place = report.rows[-1].place
    assert place.file == __file__ and place.function == "head"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_modules_are_named_by_their_paths(framework):
    _, model, adapter, _ = FRAMEWORKS[framework]
    if isinstance(model, nnx.Module):
        model = nnx.clone(model)
    runs = [adapter(f"c={low},o=f32") for low in ("f32", "bf16")]
    report = compare(*runs)(model, X)
    names = " ".join(row.scope for row in report.rows)
    for name in ("first", "block/inner", "block/outer", "head", "result"):
        assert name in names
    assert all(0 < row.error < 0.02 and row.in_float32 < 1e-6 for row in report.rows)


def test_axes_are_told_apart_by_their_numbers(rng):
    """All have one length."""
    x = rng.normal(size=(4, 4, 4, 1)).astype(np.float32)

    def of(order):
        def f(x):
            with jax.named_scope("a"):
                return jnp.transpose(x * 3, order)

        return f

    report = compare(of((0, 1, 2, 3)), of((2, 3, 0, 1)))(x)
    assert [(row.scope, row.error) for row in report.rows] == [("a", 0), ("result", 0)]


def test_constants_that_were_traced_in_16_bits_agree(rng):
    """And what is nearly the same is not taken for it."""
    x = rng.normal(size=(16, 16)).astype(np.float32)

    def f(x):
        with jax.named_scope("block"):
            h = jnp.tanh(x @ x)
            other = h * 1.01 + 0.001
        return h + 0.3 * h, other * 0.1

    rows = compare(f, lambda x: f(x.astype(BF16)))(x).rows
    assert [row.scope for row in rows] == ["block", "block", "result", "result"]
    assert all(row.error < 0.05 and row.in_float32 < 4e-3 for row in rows)
    assert max(row.in_float32 for row in rows) > 2e-4


def test_the_turns_of_nested_scans_are_stacked(rng):
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)

    def layer(row):
        with jax.named_scope("layer"):
            return jnp.sin(row)

    found = compare(layer, lambda x: lax.map(lambda y: lax.map(layer, y), x))(x)
    assert [(row.scope, row.size) for row in found.rows] == [("layer", 24), ("result", 24)]
    assert found.check(at_most=1e-6).unpaired == ()


def test_fills_of_masks_do_not_count(rng):
    x = rng.normal(size=(8, 8)).astype(np.float32)

    def f(x, by=1.0):
        with jax.named_scope("scores"):
            masked = jnp.where(jnp.tri(8, dtype=bool), x, -1e30) * by
        return jax.nn.softmax(masked)

    report = compare(f, lambda x: f(x, by=1.0002))(x)
    (row,) = [row for row in report.rows if row.scope == "scores"]
    assert row.error == pytest.approx(2e-4, rel=1e-2)
    reference = np.array([1.0, -1e30, -np.inf, -65504.0, 2.0])
    assert relative_error(reference, reference * [2, 3, 1, 1, 1]) == pytest.approx(1 / 5**0.5)


def test_chosen_log_probabilities_have_the_estimate_k3(rng):
    params, x = given(rng)
    tokens = rng.integers(WIDTH, size=(*x.shape[:2], 1))

    def chosen(params, x):
        return jnp.take_along_axis(full(params, x), tokens, axis=-1)[..., 0]

    low = jmpx.apply_policy(chosen, "by=operations,c=bf16,o=f32")
    found = compare(chosen, low)(params, x).log_probabilities
    old, new = (np.asarray(one_by_one(f, params, x), np.float64) for f in (chosen, low))
    d = new - old
    assert (found.size, found.is_distribution) == (d.size, False)
    assert found.rms == pytest.approx(np.sqrt(np.mean(d**2)), rel=1e-3)
    assert found.largest == pytest.approx(np.abs(d).max(), rel=1e-3)
    assert found.kl == pytest.approx(np.mean(np.expm1(d) - d), rel=1e-2)


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_one_function_cannot_choose_is_infinitely_far(is_whole):
    """In 16 bits; what neither can choose is no difference."""

    def exact(x):
        found = jax.nn.log_softmax(x)
        return found if is_whole else found[:, :2]

    def cut(x):
        is_held = x.astype(BF16).astype(F32) == x
        return jnp.where(is_held if is_whole else is_held[:, :2], exact(x), -jnp.inf)

    for second, kl in ((1.0, 0), (1.001, np.inf)):
        scores = np.array([[0.5, second, -np.inf], [2.0, 0.0, 1.0]], np.float32)
        report = compare(exact, cut)(scores)
        found = report.log_probabilities
        assert (found.kl, found.rms, found.is_distribution) == (kl, kl, is_whole)
        json.loads(report.to_json(), parse_constant=pytest.fail)  # no NaN or Infinity


def report_of(rng, band=0.01):
    params, x = given(rng)
    return compare(full, jmpx.apply_policy(scanned, "by=operations,c=bf16,o=f32"), band=band)(
        params, x
    )


def test_it_is_printed_and_written(rng):
    report = report_of(rng, band=1e-5)
    text = str(report)
    first = report.first()
    assert text.startswith("Comparison of full and scanned: ")
    assert f"First beyond 1e-05: {first.scope}, " in text and str(first.place) in text
    assert "Log-probabilities, 512 numbers: rms " in text
    assert "Without a pair that agrees in float32:" in text
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["rows"][0]["scope"] == report.rows[0].scope
    page = report.to_html()
    assert page.count("<tr>") == len(report.rows) + 1
    assert html.escape(str(first.place)) in page


def test_checks(rng):
    report = report_of(rng)
    assert report.check(at_most=0.5, kl=0.1) is report
    with pytest.raises(AssertionError, match=r"full and scanned differ by .* in layer_0.*1e-06"):
        report.check(at_most=1e-6)
    with pytest.raises(AssertionError, match="have a KL of .*, expected at most 1e-12"):
        report.check(at_most=0.5, kl=1e-12)
    same = compare(jnp.sin, jnp.sin)(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="Expected results that are log-probabilities"):
        same.check(kl=0.1)


def test_steps_have_a_backward_pass(rng):
    """Whose outputs are apart from those of the forward pass."""
    w, x = (rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2))

    def step(w, x):
        def loss(w):
            with jax.named_scope("layer"):
                h = jnp.tanh(x @ w)
            return jnp.sum(h * h)

        return w - jax.grad(loss)(w)

    report = compare(step, step)(w, x)
    assert {row.is_backward for row in report.rows} == {True, False}
    assert all(row.error == 0 for row in report.rows)


def test_parameters_may_be_of_16_bits(rng):
    w, x = (jnp.asarray(rng.normal(size=(16, 16)), BF16) for _ in range(2))

    def f(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    def wide(w, x):
        return f(w.astype(F32), x.astype(F32))

    report = compare(wide, f)(w, x)
    assert [row.dtypes for row in report.rows] == [("float32", "bfloat16")] * 2
    assert all(1e-4 < row.error < 1e-2 and row.in_float32 < 1e-6 for row in report.rows)


def other(params, x):
    return jnp.cos(x * 7)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda p, x: compare(full, other)(p, x), ValueError, "No output of other agrees"),
        (
            lambda p, x: compare(full, full)(p, x * np.nan),
            ValueError,
            "full to be finite .* got NaN or",
        ),
        (lambda p, x: compare(full, full, band=-1), ValueError, "Expected band= to be a relative"),
        (lambda p, x: compare(full, full, band="1"), ValueError, "such as 0.01, got '1'"),
        (lambda p, x: compare(full, 3)(p, x), TypeError, "got 3: pass the function itself"),
        (
            lambda p, x: compare(full, full)(p, jax.ShapeDtypeStruct(x.shape, x.dtype)),
            TypeError,
            "Expected arrays, got a shape as x: jmpx.inspect.compare runs it",
        ),
        (
            lambda p, x: jax.jit(lambda x: compare(full, full)(p, x).rows)(x),
            TypeError,
            "Cannot look at the traced x: call jmpx.inspect.compare outside of jax.jit",
        ),
    ],
)
def test_bad_input(run, error, message, rng):
    with pytest.raises(error, match=message):
        run(*given(rng))
