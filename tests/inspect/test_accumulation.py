"""Sums in loops and moving averages that are kept in 16 bits are found, on the right line."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of
from helpers.planted_layer import FRAMEWORKS, planted
from jax import lax

import jmpx.haiku

NAMES = ("low-carry", "low-average")
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


def decayed(x):
    def body(mean, row):
        return 0.99 * mean + 0.01 * row, None  # decay

    return x + lax.scan(body, jnp.zeros_like(x[0]), x)[0]


def towards(x):
    def body(mean, row):
        return mean + 0.01 * (row - mean), None  # towards

    return x + lax.scan(body, jnp.zeros_like(x[0]), x)[0]


# layer -> (name, severity, mark)
PLANTS = {
    by_scan: ("low-carry", "high", "scan"),
    by_fori: ("low-carry", "high", "fori"),
    by_select: ("low-carry", "high", "select"),
    nested: ("low-carry", "low", "nested"),
    decayed: ("low-average", "high", "decay"),
    towards: ("low-average", "high", "towards"),
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


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("decay", [0.5, 0.75, 0.9, 0.99])
def test_an_average_stays_where_the_message_says(dtype, decay, rng):
    def step(mean, x):
        return decay * mean + (1 - decay) * x

    finding = found(NAMES, lambda *a: (step(*a), 0), shape(dtype=dtype), shape(dtype=dtype))[0]
    stated = float(finding.message.partition("less than ")[2].partition("%")[0]) / 100
    mean = jnp.asarray(rng.uniform(1, 2, size=2000), dtype)
    d, low = jnp.asarray(decay, dtype), jnp.asarray(1 - decay, dtype)
    moved = step(np.asarray(mean, np.float64), np.asarray(mean, np.float64) * (1 + 2 * stated))
    assert (np.asarray(jnp.asarray(moved, dtype)) != np.asarray(mean)).all()
    moved = step(np.asarray(mean, np.float64), np.asarray(mean, np.float64) * (1 + stated / 4))
    assert (np.asarray(jnp.asarray(moved, dtype)) == np.asarray(mean)).all()
    assert d < 1 and low > 0


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


def leaky(x):
    return lax.scan(lambda h, row: (0.9 * h + 0.1 * jnp.tanh(h + row), None), x[0], x)[0]


def in_float32(x):
    return lax.scan(lambda s, r: (s + r.astype(F32), None), jnp.zeros(x[0].shape), x)[0]


def stacked(x):
    return lax.scan(lambda c, row: (c, row + 1), x[0], x)[1]


def written(x):
    def body(i, cache):
        return lax.dynamic_update_slice(cache, x[i][None] + 1, (i, 0))

    return lax.fori_loop(0, len(x), body, jnp.zeros_like(x))


def mixed_up(x):
    return 0.9 * x + 0.1 * x[::-1]


def layers_with_context(x):
    """The gradient of what a loop over layers closes over is a sum of few terms."""
    return lax.scan(lambda h, w: (h + jnp.tanh(h * w + x[0]), None), x[1], x[:24])[0]


CLEAN = (residual, reversible, gated, counted, leaky, in_float32, stacked, written, mixed_up)


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


# Averages that a step takes and returns.


def haiku_average(policy):
    net = hk.transform_with_state(lambda x: hk.ExponentialMovingAverage(0.9)(x))  # haiku

    def loss(params, state, x):
        with jmpx.haiku.policies(policy):
            out, state = net.apply(params, state, None, x)
        return jnp.mean(out.astype(F32)), state

    x = shape(4, dtype=BF16 if policy == "p=bf16" else F32)
    params, state = jax.eval_shape(net.init, jax.random.key(0), x)
    return lambda w, state, x: loss(params, state, x * w.astype(x.dtype)), shape(4), state, x


class LinenAverage(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x):
        mean = self.variable("stats", "mean", jnp.zeros, x.shape, self.dtype)
        mean.value = 0.9 * mean.value + 0.1 * x.astype(self.dtype)  # linen
        return x - mean.value.astype(x.dtype)


def linen_average(dtype):
    net = LinenAverage(dtype)

    def loss(w, variables, x):
        out, state = net.apply(variables, x * w, mutable=["stats"])
        return jnp.mean(out), state

    x = shape(4)
    return loss, x, jax.eval_shape(net.init, jax.random.key(0), x), x


class NNXAverage(nnx.Module):
    def __init__(self, dtype):
        self.mean = nnx.BatchStat(jnp.zeros(4, dtype))

    def __call__(self, x):
        mean = self.mean[...]
        self.mean[...] = 0.9 * mean + 0.1 * x.astype(mean.dtype)  # nnx
        return x - mean.astype(x.dtype)


def nnx_average(dtype):
    return lambda w, net, x: jnp.mean(net(x * w)), shape(4), NNXAverage(dtype), shape(4)


class EquinoxAverage(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self, dtype):
        self.index = eqx.nn.StateIndex(jnp.zeros(4, dtype))

    def __call__(self, x, state):
        mean = state.get(self.index)
        new = 0.9 * mean + 0.1 * x.astype(mean.dtype)  # equinox
        return x - mean.astype(x.dtype), state.set(self.index, new)


def equinox_average(dtype):
    net, state = eqx.nn.make_with_state(EquinoxAverage)(dtype)

    def loss(w, state, x):
        out, state = net(x * w, state)
        return jnp.mean(out), state

    return loss, shape(4), state, shape(4)


STATEFUL = {"linen": linen_average, "nnx": nnx_average, "equinox": equinox_average}


@pytest.mark.parametrize("framework", STATEFUL)
def test_an_average_in_the_state_of_a_module_is_found(framework):
    finding = only(framework, "low-average", *STATEFUL[framework](BF16))
    assert "decay 0.8984 " in finding.message  # which is 0.9 in bfloat16
    assert "3.8%" in finding.message
    assert not found(NAMES, *STATEFUL[framework](F32))


@pytest.mark.usefixtures("standard_promotion")
def test_the_average_of_haiku_is_found_and_mended_by_a_rule():
    fn, *args = haiku_average("p=bf16")
    (finding,) = found(NAMES, fn, *args)
    assert (finding.name, finding.place.line) == ("low-average", line_of(__file__, "haiku"))
    assert "keep it in float32" in finding.rule  # no rule is offered for an outermost module
    fn, *args = haiku_average("p=bf16,o=f32; ExponentialMovingAverage: full")
    assert not found(NAMES, fn, *args)


def optimized(optimizer):
    def loss(w, x):
        return jnp.mean((x @ w.astype(x.dtype)).astype(F32) ** 2)

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)  # optax
        return optax.apply_updates(params, updates), state

    params = shape(4, 2)
    return step, params, jax.eval_shape(optimizer.init, params), shape(3, 4, dtype=BF16)


@pytest.mark.usefixtures("standard_promotion")
def test_averages_of_optax_in_16_bits_are_found():
    finding = only("optax", "low-average", *optimized(optax.adam(1e-3, mu_dtype=BF16)))
    assert finding.severity == "medium" and "mu_dtype" in finding.rule
    only("optax", "low-average", *optimized(optax.ema(0.99, accumulator_dtype=BF16)))
    only("optax", "low-average", *optimized(optax.sgd(0.1, 0.9, accumulator_dtype=BF16)))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "sgd", "rmsprop"])
def test_optimizers_in_float32_have_none(name):
    assert not found(NAMES, *optimized(getattr(optax, name)(1e-3)))


def test_the_gradient_of_a_penalty_is_no_average():
    def loss(w, x):
        return jnp.sum((x * w + 0.1 * w * w).astype(F32))

    assert not found(NAMES, loss, shape(4, dtype=BF16), shape(4, dtype=BF16))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dtype, names", [(F32, []), (BF16, ["low-average"])])
def test_training_inside_of_a_scan(dtype, names):
    """Momentum decays and gets gradients that depend on it only in the next trip."""
    optimizer = optax.sgd(0.1, 0.9, accumulator_dtype=dtype)

    def train(params, x):
        def body(state, batch):
            grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state[0])
            updates, inner = optimizer.update(grads, state[1])
            return (optax.apply_updates(state[0], updates), inner), None

        return lax.scan(body, (params, optimizer.init(params)), x)[0]

    assert [each.name for each in found(NAMES, train, shape(4, 2), shape(9, 3, 4))] == names


def test_micro_batches_in_16_bits_are_found():
    def step(w, x):
        def body(total, batch):
            grads = jax.grad(lambda w: jnp.mean((batch @ w).astype(F32)))(w)
            return total + grads, None  # micro

        return lax.scan(body, jnp.zeros_like(w), x)[0]

    only("micro", "low-carry", step, shape(4, 2, dtype=BF16), shape(9, 3, 4, dtype=BF16))
