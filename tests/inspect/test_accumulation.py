"""Sums that a loop keeps in 16 bits are found, on the right line."""

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of
from helpers.planted_layer import FRAMEWORKS, planted
from jax import lax

NAMES = ("low-carry",)
MANY = 300


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def only(mark, name, fn, *args):
    """The only finding of a function, on the line with a mark."""
    (finding,) = found(NAMES, fn, *args)
    assert (finding.name, finding.place.line) == (name, line_of(__file__, mark))
    return finding


def by_scan(x):
    def body(total, row):
        return total + row, None  # scan

    return x + lax.scan(body, jnp.zeros_like(x[0]), x)[0]


def by_fori(x):
    return x + lax.fori_loop(0, MANY, lambda i, total: total + x[i], x[0])  # fori


def by_select(x):
    def body(total, row):
        summed = (total.astype(F32) + row.astype(F32)).astype(x.dtype)  # select
        return jnp.where(row > 0, summed, total), None

    return x + lax.scan(body, jnp.zeros_like(x[0]), x)[0]


def nested(x):
    def body(total, row):
        return lax.scan(lambda total, n: (total - n, None), total, row)[0], None  # nested

    return x + lax.scan(body, jnp.zeros_like(x[0, 0]), x)[0]


# layer -> (name, severity, mark)
PLANTS = {
    by_scan: ("low-carry", "high", "scan"),
    by_fori: ("low-carry", "high", "fori"),
    by_select: ("low-carry", "high", "select"),
    nested: ("low-carry", "low", "nested"),
}


def all_plants(x):
    return sum(plant(x) for plant in PLANTS)


EXPECTED = {(name, severity, line_of(__file__, mark)) for name, severity, mark in PLANTS.values()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_planted_accumulation_is_found_once_and_mended(framework):
    loss, args = planted(framework, all_plants, "c=bf16,o=f32", rows=MANY)
    findings = found(NAMES, loss, *args)
    assert len(findings) == len(EXPECTED)
    assert EXPECTED == {(each.name, each.severity, each.place.line) for each in findings}

    def mended(x):
        return jnp.asarray(all_plants(x.astype(F32))).astype(x.dtype)

    loss, args = planted(framework, mended, "c=bf16,o=f32", rows=MANY)
    assert not found(NAMES, loss, *args)
    loss, args = planted(framework, all_plants, "c=bf16,o=f32; */plant: full", rows=MANY)
    assert not found(NAMES, loss, *args)


def test_a_while_loop_is_found():
    def fn(x):
        def body(state):
            i, total = state
            return i + 1, total + x[i]  # while

        return lax.while_loop(lambda state: state[0] < 5, body, (0, jnp.zeros((), x.dtype)))[1]

    finding = only("while", "low-carry", lambda x: fn(x)[None], shape(8, dtype=BF16))
    assert finding.severity == "high" and "unknown" in finding.message


@pytest.mark.parametrize("dtype, limit", [(BF16, 256), (F16, 2048)])
def test_the_limit_of_the_message_is_where_a_sum_stops(dtype, limit, rng):
    def total(terms):
        return lax.scan(lambda s, t: (s + t, None), jnp.zeros((), dtype), terms)[0]

    def loss(w, trips):
        return total(w * jnp.ones(trips, dtype)).astype(F32)

    term = dtype.type(2.0 ** int(rng.integers(-8, 4)))
    terms = jnp.full(limit + 50, term, dtype)
    assert total(terms) == limit * term and total(terms[:limit]) == limit * term
    assert total(terms[: limit - 1]) == (limit - 1) * term
    for trips, severity in ((limit + 1, "high"), (limit, "medium"), (limit // 16, "low")):
        (finding,) = found(NAMES, lambda w, n=trips: loss(w, n), shape(dtype=dtype))
        assert finding.severity == severity and f"1/{limit} of" in finding.message


def residual(x):
    return lax.scan(lambda h, w: (h + jnp.tanh(h * w), None), x, x)[0]


def reversible(x):
    def body(streams, w):
        a, b = streams
        a = a + jnp.tanh(b * w)
        return (a, b + jnp.tanh(a * w)), None

    return lax.scan(body, (x, x), x)[0][0]


def gated(x):
    def body(state, row):
        keep = jax.nn.sigmoid(row + state)
        return keep * state + (1 - keep) * row, None

    return lax.scan(body, jnp.zeros_like(x[0]), x)[0]


def counted(x):
    return x * jnp.asarray(lax.while_loop(lambda i: i < 5, lambda i: i + 1, 0), x.dtype)


def averaged(x):
    return lax.scan(lambda mean, row: (0.9 * mean + 0.1 * row, None), x[0], x)[0]


def in_float32(x):
    return lax.scan(lambda s, r: (s + r.astype(F32), None), jnp.zeros(x[0].shape), x)[0]


def stacked(x):
    return lax.scan(lambda c, row: (c, row + 1), x[0], x)[1]


def written(x):
    def body(i, cache):
        return lax.dynamic_update_slice(cache, x[i][None] + 1, (i, 0))

    return lax.fori_loop(0, len(x), body, jnp.zeros_like(x))


def layers_with_context(x):
    """The gradient of what a loop over layers closes over is a sum of few terms."""
    return lax.scan(lambda h, w: (h + jnp.tanh(h * w + x[0]), None), x[1], x[:24])[0]


CLEAN = (residual, reversible, gated, counted, averaged, in_float32, stacked, written)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("layer", [*CLEAN, layers_with_context])
def test_what_does_not_accumulate_is_not_found(layer, dtype):
    def loss(x):
        return jnp.mean(jnp.asarray(layer(x)).astype(F32))

    if layer is counted:
        assert not found(NAMES, lambda x: (loss(x), 0), shape(24, 3, dtype=dtype))
    assert not found(NAMES, loss, shape(24, 3, dtype=dtype))


@pytest.mark.parametrize("cell_casts", [False, True])
def test_the_gradient_of_a_recurrent_weight_is_a_sum_over_time(cell_casts):
    def loss(w, x):
        if not cell_casts:
            w = w.astype(BF16)

        def cell(h, row):
            return jnp.tanh(h @ w.astype(BF16) + row), None

        h, _ = lax.scan(cell, jnp.zeros((2, 4), BF16), x)  # recurrent
        return jnp.mean(h.astype(F32))

    args = shape(4, 4), shape(MANY, 2, 4, dtype=BF16)
    if cell_casts:
        assert not found(NAMES, loss, *args)
    else:
        assert "gradient" in only("recurrent", "low-carry", loss, *args).message
        assert not found(NAMES, loss, shape(4, 4), shape(100, 2, 4, dtype=BF16))


@pytest.mark.parametrize("length", [9, 300])
def test_micro_batches_in_16_bits_are_found(length):
    """Beside the gradients, a loop hands on what they depend on, such as the state of a model."""

    def step(w, x):
        def body(carry, batch):
            total, mean = carry
            grads = jax.grad(lambda w: jnp.mean((batch @ w - mean).astype(F32)))(w)
            return (total + grads, jnp.maximum(mean, (batch @ w).max())), None  # micro

        return lax.scan(body, (jnp.zeros_like(w), jnp.zeros((), w.dtype)), x)[0]

    finding = only(
        "micro", "low-carry", step, shape(4, 2, dtype=BF16), shape(length, 3, 4, dtype=BF16)
    )
    assert finding.severity == ("low" if length == 9 else "high")
