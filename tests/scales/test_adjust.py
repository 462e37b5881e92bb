"""How a dynamic loss scale grows and shrinks, also after several overflows in a row: hysteresis."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leniently
from helpers.training import LARGEST_SCALE, LEAST_SCALE, value
from hypothesis import example, given, settings, strategies as st

import jmpx


class Model:
    """The scale in plain Python, with one number for the finite steps and one for the overflows."""

    def __init__(self, scale, counter, period, factor, low, high, backoff, hysteresis):
        self.low, self.high = np.float32(max(low, LEAST_SCALE)), np.float32(LARGEST_SCALE)
        if high is not None:
            self.high = min(np.float32(high), self.high)
        self.scale = min(max(np.float32(scale), self.low), self.high)
        self.steps, self.overflows = max(counter, 0), min(max(-counter, 0), hysteresis - 1)
        self.period, self.hysteresis = period, hysteresis
        self.factor, self.backoff = np.float32(factor), np.float32(backoff or 1 / factor)

    @np.errstate(over="ignore", under="ignore")
    def adjust(self, finite):
        if finite:
            self.overflows = 0
            self.steps += 1
            if self.steps >= self.period:
                self.steps = 0
                self.scale = min(self.scale * self.factor, self.high)
        else:
            self.steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale * self.backoff, self.low)

    @property
    def counter(self):
        return self.steps or -min(self.overflows, self.hysteresis - 1)


def step(loss_scale, finite):
    loss_scale = loss_scale.adjust(finite)
    return loss_scale, (loss_scale.loss_scale, loss_scale.counter)


def run_eagerly(loss_scale, steps, step=step):
    seen = []
    for finite in steps:
        loss_scale, numbers = step(loss_scale, finite)
        seen.append(jax.device_get(numbers))
    return loss_scale, [np.stack(column) for column in zip(*seen, strict=True)]


def run_jitted(loss_scale, steps):
    return run_eagerly(loss_scale, steps, jax.jit(step, donate_argnums=0))


def run_scanned(loss_scale, steps):
    return jax.lax.scan(step, loss_scale, jnp.array(steps))


def run_mapped(loss_scale, steps):
    """The scale in a stack with another one, which sees the opposite flags."""
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), loss_scale)
    flags = jnp.stack([jnp.array(steps), ~jnp.array(steps)])
    last, seen = jax.vmap(lambda s, f: jax.lax.scan(step, s, f))(stack, flags)
    return jax.tree.map(lambda x: x[0], (last, seen))


def follows_the_model(run, configuration, steps):
    loss_scale, model = jmpx.DynamicLossScale(*configuration), Model(*configuration)
    expected = []
    for finite in steps:
        model.adjust(finite)
        expected.append((model.scale, model.counter))
    last, (scales, counters) = run(loss_scale, steps)
    assert list(zip(map(float, scales), map(int, counters), strict=True)) == expected
    assert (last.loss_scale.dtype, last.counter.dtype) == (jnp.float32, jnp.int32)
    assert not jax.typeof(last.counter).weak_type
    assert jax.tree.structure(last) == jax.tree.structure(loss_scale)
    np.testing.assert_allclose(last.unscale(last.scale(jnp.float32(1))), 1, rtol=2.0**-22)


CONFIGURATIONS = st.tuples(
    st.integers(-20, 127).map(lambda n: 2.0**n) | st.floats(0, 2.0**127, width=32),
    st.integers(-5, 6) | st.integers(0, 2**31 - 1),
    st.integers(1, 5) | st.integers(1, 2**31 - 1),
    st.sampled_from([1, 2, 3, 4, 2**40, 2.0**126]) | st.floats(1, 2.0**126),
    st.sampled_from([0, 2.0**-20, 0.125, 1, 2**40]) | st.floats(0, 2.0**126),
    st.sampled_from([None, None, 2**32, 2.0**126, 2.0**127]) | st.floats(0, 2.0**127),
    st.sampled_from([None, None, 0.5, 0.25, 2.0**-30, 1 - 2.0**-20])
    | st.floats(LEAST_SCALE, 1, exclude_max=True),
    st.integers(1, 4),
)


@settings(deadline=None, max_examples=60)
@given(CONFIGURATIONS, st.lists(st.booleans(), min_size=1, max_size=12))
@example((1.0, 0, 2000, 2, 1.0, 2**32, None, 1), [True, False])
@example((2.0**15, 0, 2000, 2, 2**40, None, None, 1), [True, False])
@example((2.0**15, 0, 1, 2**40, 1.0, None, None, 1), [True, True, False, False])
@example((2.0**125, 0, 1, 2, 1.0, None, None, 1), [True] * 3)  # growth stops before inf
@example((2.0**-125, 0, 1, 2, 0, None, None, 1), [False] * 3)  # shrinking stops before 0
@example((64.0, 0, 3, 2, 1.0, None, None, 2), [*[False] * 3, True, False, True, True, False])
def test_every_sequence_of_flags_follows_the_model(configuration, steps):
    _, _, _, factor, low, high, backoff, _ = configuration
    highest = LARGEST_SCALE if high is None else min(high, LARGEST_SCALE)
    if max(low, LEAST_SCALE) > highest or (factor == 1 and backoff is None):
        with pytest.raises(ValueError, match="Expected"):
            jmpx.DynamicLossScale(*configuration)
    else:
        follows_the_model(run_eagerly, configuration, steps)


@pytest.mark.parametrize(
    ("run", "hysteresis"), [(run_jitted, 1), (run_scanned, 2), (run_mapped, 3)]
)
def test_in_every_transformation(run, hysteresis, rng):
    steps = (rng.random(20) < 0.4).tolist()
    follows_the_model(run, (2.0**20, 0, 2, 2, 1.0, None, None, hysteresis), steps)


@pytest.mark.parametrize("has_backoff", [False, True])
def test_a_compiled_step_adjusts_to_the_bits_of_an_eager_one(has_backoff, rng):
    """Also for factors other than powers of two, where XLA rewrites divisions."""
    factor = float(rng.uniform(1.01, 9))
    backoff = float(rng.uniform(0.01, 0.99)) if has_backoff else None
    compiled = jax.jit(lambda scale, finite: scale.adjust(finite))
    for start in 2.0 ** rng.uniform(10, 40, 6):
        scale = jmpx.DynamicLossScale(start, 0, 1, factor, 1.0, None, backoff)
        for finite in (True, False):
            eager = scale.adjust(finite).loss_scale
            np.testing.assert_array_equal(eager, compiled(scale, finite).loss_scale)
            exact = float(scale.loss_scale) * (factor if finite else backoff or 1 / factor)
            np.testing.assert_allclose(eager, exact, rtol=2**-22)


def test_adjust_takes_every_kind_of_bool_and_nothing_else():
    for finite in (True, np.bool_(True), np.array(True), jnp.array(True)):
        assert int(jmpx.DynamicLossScale().adjust(finite).counter) == 1
    wrong: Any = (1, 1.0, None, jnp.ones(2, bool), jnp.float32(1))
    for finite in wrong:
        with pytest.raises(TypeError, match="Expected grads_finite to be a scalar bool"):
            jmpx.DynamicLossScale().adjust(finite)


def adjust_before(loss_scale, finite):
    """The adjustment as it was before hysteresis."""
    finite = jnp.asarray(finite)
    scale = jnp.minimum(jnp.maximum(loss_scale.loss_scale, np.float32(1)), np.float32(2.0**126))
    grown, shrunk = scale * 2.0, scale * 0.5
    due = loss_scale.counter >= loss_scale.period - 1
    new = jnp.where(finite, jnp.where(due, grown, scale), shrunk)
    counter = jnp.where(finite & ~due, loss_scale.counter + 1, 0)
    return jnp.minimum(jnp.maximum(new, np.float32(1)), np.float32(2.0**126)), counter


def test_without_hysteresis_the_program_is_as_before():
    loss_scale = jmpx.DynamicLossScale(jnp.float32(8), jnp.int32(1), period=3)
    by_hand = jax.make_jaxpr(adjust_before)(loss_scale, jnp.array(True))
    ours = jax.make_jaxpr(lambda s, f: jax.tree.leaves(s.adjust(f)))(loss_scale, jnp.array(True))
    assert str(ours) == str(by_hand)
    more = jax.make_jaxpr(
        lambda s: dataclasses.replace(s, hysteresis=2).adjust(jnp.array(True)).counter
    )(loss_scale)
    assert len(more.eqns) > len(ours.eqns)  # the comparison above could fail


def test_mpxs_scale_and_a_pickle_from_before_hysteresis_have_none():
    assert jmpx.mpx.DynamicLossScaling().hysteresis == 1
    old = pickle.loads(pickle.dumps(jmpx.DynamicLossScale(8.0)))
    del old.__dict__["hysteresis"]
    assert old == jmpx.DynamicLossScale(8.0) and value(old.adjust(False)) == 4


def test_the_counter_is_kept_within_its_row():
    for hysteresis, expected in ((1, 0), (2, -1), (9, -5)):
        scale = jmpx.DynamicLossScale(8.0, np.asarray(-5), hysteresis=hysteresis)
        assert scale.counter == expected and scale.counter.dtype == np.int32
    scale = jmpx.DynamicLossScale(8.0, jnp.int32(-5), hysteresis=2).adjust(False)
    assert (value(scale), int(scale.counter)) == (4, -1)


# MPX's trajectory


@pytest.mark.parametrize(("start", "factor"), [(2.0**4, 4), (2.0**15, 2), (60_000.0, 3)])
def test_dynamic_loss_scaling_takes_mpxs_steps(start, factor, rng):
    mpx = pytest.importorskip("mpx")
    theirs = mpx.DynamicLossScaling(jnp.float32(start), jnp.float32(2), factor, period=2)
    ours = jmpx.mpx.DynamicLossScaling(jnp.float32(start), jnp.float32(2), factor, period=2)
    seen = set()
    flags = [*[True] * 26, *[False] * 16, *(rng.random(40) < 0.8)]
    for finite in flags:
        theirs, ours = leniently(theirs.adjust)(jnp.array(bool(finite))), ours.adjust(bool(finite))
        assert ours.counter == theirs.counter
        # jmpx multiplies by a third, so that eager and compiled steps agree; MPX divides.
        tolerance = 1e-5 if factor == 3 else 0
        np.testing.assert_allclose(value(ours), float(theirs.loss_scaling), rtol=tolerance)
        seen.add(value(ours))
    assert 65504.0 in seen and 2.0 in seen  # the ceiling and the floor
    assert value(jmpx.DynamicLossScale(65504.0, period=1).adjust(True)) == 2 * 65504
