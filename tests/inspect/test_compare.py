"""`compare`: two functions of one model, scope by scope, paired by agreement in float32."""

import functools
import html
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, normal, zoo
from jax import lax

import jmpx

compare = jmpx.inspect.compare
WIDTH = LENGTH = BATCH = 4  # equal, so that shapes do not tell axes apart
LAYERS = 2


# A model that goes through all tokens at once, or one by one with a cache.


@functools.cache
def given():
    """Returns parameters, and x of shape (batch, length, width)."""
    rng = np.random.default_rng(0)
    params = {name: normal(rng, LAYERS, WIDTH, WIDTH) / WIDTH**0.5 for name in "qkvo"}
    return params | {"head": normal(rng, WIDTH, WIDTH)}, normal(rng, BATCH, LENGTH, WIDTH)


def layer(params, i, x, attend):
    with jax.named_scope(f"layer_{i}"):
        q, k, v = (x @ params[name][i] for name in "qkv")
        return x + jnp.tanh(attend(q, k, v) @ params["o"][i])


def mixed(q, k, v, seen):
    with jax.named_scope("attend"):
        scores = jnp.where(seen, jnp.einsum("...qd,...kd->...qk", q, k), -1e30)
        return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores), v)


def head(params, x):
    with jax.named_scope("head"):
        return jax.nn.log_softmax((x @ params["head"]).astype(F32))


def full(params, x):
    seen = jnp.tri(x.shape[1], dtype=bool)
    for i in range(LAYERS):
        x = layer(params, i, x, lambda q, k, v: mixed(q, k, v, seen))
    return head(params, x)


def one_token(params, caches, x, place):
    """Takes x (batch, 1, width), and keys and values of each layer."""
    after = []

    def attend(q, *new):
        pairs = zip(caches[len(after)], new, strict=True)
        place_in = lambda old, new: lax.dynamic_update_slice_in_dim(  # noqa: E731
            old, new.astype(old.dtype), place, 1
        )
        after.append([place_in(*pair) for pair in pairs])
        return mixed(q, *after[-1], seen=jnp.arange(LENGTH) <= place)

    for i in range(LAYERS):
        x = layer(params, i, x, attend)
    return after, head(params, x)


def empty(x):
    return [[jnp.zeros(x.shape)] * 2 for _ in range(LAYERS)]


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


def as_written(f):
    """Returns the results of a function if each 16-bit result is rounded."""
    return np.asarray(jax.jit(jmpx.inspect.emulate(f))(*given()), np.float64)


def low(f, dtype="bf16"):
    return jmpx.apply_policy(f, f"by=operations,c={dtype},o=f32")


@functools.cache
def in_16_bits():
    """Compares the function of all tokens with the one that has a cache, in bfloat16."""
    return compare(full, low(scanned), band=1e-5)(*given())


def test_a_sampler_with_a_cache_is_paired_token_by_token():
    report = compare(full, looped)(*given())
    scopes = {row.scope for row in report.rows}
    assert scopes >= {"layer_0/attend", "layer_0", "layer_1/attend", "layer_1", "head", "result"}
    assert all(row.error < 1e-5 and row.in_float32 < 1e-5 for row in report.rows)
    assert report.first() is None and report.check() is report
    # One holds scores of the cache, which the other does not have.
    assert {each.scope for each in report.unpaired} <= {
        f"layer_{i}{inside}" for i in range(LAYERS) for inside in ("", "/attend")
    }
    assert report.log_probabilities is not None and report.log_probabilities.is_distribution
    assert abs(report.log_probabilities.kl) < 1e-7


def test_16_bits_differ_as_they_are_written():
    old, new = as_written(full), as_written(low(scanned))
    report = in_16_bits()
    (row,) = [row for row in report.rows if row.scope == "result"]
    expected = np.linalg.norm(new - old) / np.linalg.norm(old)
    assert row.error == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert row.in_float32 < 1e-5
    expected = np.mean(np.sum(np.exp(old) * (old - new), axis=-1))
    assert report.log_probabilities is not None
    assert report.log_probabilities.kl == pytest.approx(expected, rel=1e-2, abs=1e-7)


@pytest.mark.thorough
def test_float32_against_a_policy():
    report = compare(full, low(full))(*given())
    assert report.unpaired == ()
    errors = {row.scope: row.error for row in report.rows}
    assert 1e-4 < errors["layer_0"] < errors["layer_1"] < 0.05
    assert all(row.in_float32 < 1e-6 for row in report.rows)
    dtypes = {row.scope: row.dtypes for row in report.rows}
    assert dtypes["layer_0"] == ("float32", "bfloat16")
    first, place = report.first(at_most=1e-4), report.rows[-1].place
    assert first is not None and first.scope == report.rows[0].scope
    assert place is not None
    assert place.file == __file__ and place.function == "head"


def test_modules_are_named_by_their_paths(rng):
    x = normal(rng, 2, 3)
    net = zoo.build("nnx", zoo.nested, x, rng=rng)
    report = compare(*(net.under(f"by=modules,c={low},o=f32") for low in ("f32", "bf16")))(
        net.model, x
    )
    names = " ".join(row.scope for row in report.rows)
    for name in ("first", "block/inner", "block/outer", "head", "result"):
        assert name in names
    assert all(0 < row.error < 0.02 and row.in_float32 < 1e-6 for row in report.rows)


def test_axes_are_told_apart_by_their_numbers(rng):
    """All have one length."""

    def of(order):
        def f(x):
            with jax.named_scope("a"):
                return jnp.transpose(x * 3, order)

        return f

    report = compare(of((0, 1, 2, 3)), of((2, 3, 0, 1)))(normal(rng, 4, 4, 4, 1))
    assert [(row.scope, row.error) for row in report.rows] == [("a", 0), ("result", 0)]


def test_constants_that_were_traced_in_16_bits_agree(rng):
    """Values that are nearly the same make no pair."""

    def f(x):
        with jax.named_scope("block"):
            h = jnp.tanh(x @ x)
            other = h * 1.01 + 0.001
        return h + 0.3 * h, other * 0.1

    rows = compare(f, lambda x: f(x.astype(BF16)))(normal(rng, 16, 16)).rows
    assert [row.scope for row in rows] == ["block", "block", "result", "result"]
    assert all(row.error < 0.05 and row.in_float32 < 4e-3 for row in rows)
    assert max(row.in_float32 for row in rows) > 2e-4


def test_the_turns_of_nested_scans_are_stacked(rng):
    def layer(row):
        with jax.named_scope("layer"):
            return jnp.sin(row)

    nested = lambda x: lax.map(lambda y: lax.map(layer, y), x)  # noqa: E731
    found = compare(layer, nested)(normal(rng, 2, 3, 4))
    assert [(row.scope, row.size) for row in found.rows] == [("layer", 24), ("result", 24)]
    assert found.check(at_most=1e-6).unpaired == ()


@pytest.mark.parametrize("fills", [(-1e30, -np.inf), (-65504.0, -65504.0)], ids=str)
def test_fills_of_masks_do_not_count(rng, fills):
    def of(fill, by):
        def f(x):
            with jax.named_scope("scores"):
                masked = jnp.where(jnp.tri(4, 5, dtype=bool), x * by, fill)
            return jax.nn.softmax(masked)

        return f

    report = compare(of(fills[0], 1.0), of(fills[1], 1.0002))(normal(rng, 4, 5))
    (row,) = [row for row in report.rows if row.scope == "scores" and row.error]
    assert row.error == pytest.approx(2e-4, rel=1e-2)


@pytest.mark.thorough
def test_chosen_log_probabilities_have_the_estimate_k3(rng):
    tokens = rng.integers(WIDTH, size=(BATCH, LENGTH, 1))

    def chosen(params, x):
        return jnp.take_along_axis(full(params, x), tokens, axis=-1)[..., 0]

    ways = chosen, low(chosen)
    found = compare(*ways)(*given()).log_probabilities
    assert found is not None
    old, new = map(as_written, ways)
    d = new - old
    assert (found.size, found.is_distribution) == (d.size, False)
    assert found.rms == pytest.approx(np.sqrt(np.mean(d**2)), rel=1e-3)
    assert found.largest == pytest.approx(np.abs(d).max(), rel=1e-3)
    assert found.kl == pytest.approx(np.mean(np.expm1(d) - d), rel=1e-2)


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_one_function_cannot_choose_is_infinitely_far(is_whole):
    """In 16 bits; choices that are impossible in both make no difference."""

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
        assert found is not None
        assert (found.kl, found.rms, found.is_distribution) == (kl, kl, is_whole)
        json.loads(report.to_json(), parse_constant=pytest.fail)  # no NaN or Infinity


def test_it_is_printed_written_and_checked():
    report = in_16_bits()
    text, first = str(report), report.first()
    assert first is not None
    assert text.startswith("Comparison of full and scanned: ")
    assert f"First beyond 1e-05: {first.scope}, " in text and str(first.place) in text
    assert f"Log-probabilities, {BATCH * LENGTH * WIDTH} numbers: rms " in text
    assert "without a pair that agrees in float32" in text
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["rows"][0]["scope"] == report.rows[0].scope
    page = report.to_html()
    assert page.count("<tr>") == len(report.rows) + len(report.unpaired) + 2
    assert html.escape(str(first.place)) in page
    assert report.check(at_most=0.5, kl=0.1) is report


def test_equal_names_are_told_apart(rng):
    def loss_fn(w, x):
        with jax.named_scope("layer"):
            h = jnp.tanh(x @ w)
            g, f = jnp.sin(h @ w), jnp.cos(h[:2] @ w)
        return jnp.mean(h * g) + jnp.mean(f) * 0.1

    candidate = jmpx.apply_policy(loss_fn, "c=bf16")
    text = str(jmpx.inspect.compare(loss_fn, candidate)(normal(rng, 4, 4), normal(rng, 3, 4)))
    assert text.startswith("Comparison of loss_fn and loss_fn (the candidate): ")
    line = loss_fn.__code__.co_firstlineno
    names = re.findall(r"^layer.*?(?=  )", text, re.MULTILINE)
    second = f"layer, line {line + 3}"
    assert names == [f"layer, line {line + 2}", f"{second}, 12 numbers", f"{second}, 8 numbers"]


def test_steps_have_a_backward_pass(rng):
    """The outputs of the backward pass are rows of their own."""

    def step(w, x):
        def loss(w):
            with jax.named_scope("layer"):
                h = jnp.tanh(x @ w)
            return jnp.sum(h * h)

        return w - jax.grad(loss)(w)

    report = compare(step, step)(normal(rng, 4, 4), normal(rng, 4, 4))
    assert {row.is_backward for row in report.rows} == {True, False}
    assert all(row.error == 0 for row in report.rows)


def test_parameters_may_be_of_16_bits(rng):
    w, x = (normal(rng, 16, 16).astype(BF16) for _ in range(2))

    def f(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    report = compare(lambda w, x: f(w.astype(F32), x.astype(F32)), f)(w, x)
    assert [row.dtypes for row in report.rows] == [("float32", "bfloat16")] * 2
    assert all(1e-4 < row.error < 1e-2 and row.in_float32 < 1e-6 for row in report.rows)
