"""Hysteresis of a dynamic loss scale: it shrinks after several overflows in a row."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from helpers import assert_same_bits
from helpers.training import value
from hypothesis import given, settings, strategies as st

import jmpx


@dataclasses.dataclass
class Model:
    """The scale in plain Python, with one number for the finite steps and one for the overflows."""

    scale: float
    period: int
    hysteresis: int
    low: float = 1.0
    high: float = 2.0**126
    steps: int = 0
    overflows: int = 0

    def adjust(self, finite):
        if finite:
            self.overflows = 0
            self.steps += 1
            if self.steps == self.period:
                self.steps = 0
                self.scale = min(self.scale * 2, self.high)
        else:
            self.steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale / 2, self.low)

    @property
    def counter(self):
        return self.steps or -min(self.overflows, self.hysteresis - 1)


def step(loss_scale, finite):
    loss_scale = loss_scale.adjust(finite)
    return loss_scale, (loss_scale.loss_scale, loss_scale.counter)


def run_eagerly(loss_scale, steps):
    seen = []
    for finite in steps:
        loss_scale, numbers = step(loss_scale, finite)
        seen.append(numbers)
    return loss_scale, [jnp.stack(column) for column in zip(*seen, strict=True)]


def run_jitted(loss_scale, steps):
    compiled = jax.jit(step, donate_argnums=0)
    seen = []
    for finite in steps:
        loss_scale, numbers = compiled(loss_scale, finite)
        seen.append(jax.device_get(numbers))
    return loss_scale, [np.stack(column) for column in zip(*seen, strict=True)]


def run_scanned(loss_scale, steps):
    return jax.lax.scan(step, loss_scale, jnp.array(steps))


def run_mapped(loss_scale, steps):
    """The scale in a stack with another one, which sees the opposite flags."""
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), loss_scale)
    flags = jnp.stack([jnp.array(steps), ~jnp.array(steps)])
    last, seen = jax.vmap(lambda s, f: jax.lax.scan(step, s, f))(stack, flags)
    return jax.tree.map(lambda x: x[0], (last, seen))


RUNS = {
    "eager": run_eagerly,
    "jit": run_jitted,
    "scan": run_scanned,
    "vmap": run_mapped,
}


def follows_the_model(run, loss_scale, model, steps):
    expected = []
    for finite in steps:
        model.adjust(finite)
        expected.append((model.scale, model.counter))
    last, (scales, counters) = run(loss_scale, steps)
    assert list(zip(map(float, scales), map(int, counters), strict=True)) == expected
    assert (last.loss_scale.dtype, last.counter.dtype) == (jnp.float32, jnp.int32)
    assert not jax.typeof(last.counter).weak_type
    assert last.hysteresis == loss_scale.hysteresis and last.period == loss_scale.period


@pytest.mark.thorough
@settings(deadline=None, max_examples=40)
@given(
    period=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    low=st.sampled_from([1.0, 2.0**8]),
    high=st.sampled_from([2.0**12, 2.0**126]),
    steps=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_every_sequence_of_flags_follows_the_model(period, hysteresis, low, high, steps):
    scale = jmpx.DynamicLossScale(
        2.0**10, 0, period, 2, low, high if high < 2.0**126 else None, hysteresis=hysteresis
    )
    model = Model(2.0**10, period, hysteresis, low, high)
    follows_the_model(run_scanned, scale, model, steps)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("run", RUNS)
def test_in_every_transformation(run, hysteresis, rng):
    for period in (1, 2):
        steps = (rng.random(20) < 0.4).tolist()
        scale = jmpx.DynamicLossScale(2.0**20, period=period, hysteresis=hysteresis)
        follows_the_model(RUNS[run], scale, Model(2.0**20, period, hysteresis), steps)


def test_each_overflow_after_the_row_shrinks_until_a_finite_step():
    scale, seen = jmpx.DynamicLossScale(64, period=3, hysteresis=2), []
    for finite in [False, False, False, True, False, True, True, False, True, True, True]:
        scale = scale.adjust(finite)
        seen.append((value(scale), int(scale.counter)))
    assert seen == [
        *[(64, -1), (32, -1), (16, -1)],
        *[(16, 1), (16, -1)],  # one overflow alone changes nothing
        *[(16, 1), (16, 2), (16, -1)],  # but the finite steps are counted anew
        *[(16, 1), (16, 2), (32, 0)],
    ]


def adjust_before(loss_scale, finite):
    """The adjustment as it was before hysteresis."""
    finite = jnp.asarray(finite)
    scale = jnp.minimum(jnp.maximum(loss_scale.loss_scale, np.float32(1)), np.float32(2.0**126))
    grown, shrunk = scale * 2.0, scale * 0.5
    due = loss_scale.counter >= loss_scale.period - 1
    new = jnp.where(finite, jnp.where(due, grown, scale), shrunk)
    counter = jnp.where(finite & ~due, loss_scale.counter + 1, 0)
    return jnp.minimum(jnp.maximum(new, np.float32(1)), np.float32(2.0**126)), counter


def test_without_hysteresis_the_program_is_as_before(rng):
    loss_scale = jmpx.DynamicLossScale(jnp.float32(8), jnp.int32(1), period=3)
    by_hand = jax.make_jaxpr(adjust_before)(loss_scale, jnp.array(True))
    ours = jax.make_jaxpr(lambda s, f: jax.tree.leaves(s.adjust(f)))(loss_scale, jnp.array(True))
    assert str(ours) == str(by_hand)
    more = jax.make_jaxpr(
        lambda s: dataclasses.replace(s, hysteresis=2).adjust(jnp.array(True)).counter
    )(loss_scale)
    assert len(more.eqns) > len(ours.eqns)  # the comparison above could fail


def test_leaves_and_configuration():
    loss_scale = jmpx.DynamicLossScale(8.0, hysteresis=3)
    assert jax.tree.leaves(loss_scale) == [8, 0]
    assert jax.tree.structure(loss_scale) != jax.tree.structure(jmpx.DynamicLossScale(8.0))
    assert jmpx.DynamicLossScale(2**15, 0, 2000, 2, 1.0, None, None, 3).hysteresis == 3
    for trip in (dataclasses.replace, lambda s: pickle.loads(pickle.dumps(s))):
        assert trip(loss_scale.adjust(False)) == loss_scale.adjust(False)
    assert jmpx.mpx.DynamicLossScaling().hysteresis == 1
    assert repr(loss_scale).endswith("hysteresis=3)")


def test_a_pickle_from_before_hysteresis_has_none():
    old = pickle.loads(pickle.dumps(jmpx.DynamicLossScale(8.0)))
    del old.__dict__["hysteresis"]
    assert old == jmpx.DynamicLossScale(8.0) and value(old.adjust(False)) == 4


def test_the_counter_is_kept_within_its_row():
    for given_counter in (-5, np.int32(-5), np.asarray(-5)):
        for hysteresis, expected in ((1, 0), (2, -1), (9, -5)):
            scale = jmpx.DynamicLossScale(8.0, given_counter, hysteresis=hysteresis)
            assert scale.counter == expected and scale.counter.dtype == np.int32
    scale = jmpx.DynamicLossScale(8.0, jnp.int32(-5), hysteresis=2).adjust(False)
    assert (value(scale), int(scale.counter)) == (4, -1)


def restored_by_flax(saved, template):
    return serialization.from_bytes(template, serialization.to_bytes(saved))


def restored_by_leaves(saved, template):
    return jax.tree.unflatten(jax.tree.structure(template), jax.tree.leaves(saved))


@pytest.mark.parametrize("restore", [restored_by_flax, restored_by_leaves])
def test_a_checkpoint_restores_the_row_into_a_template(restore):
    saved = jmpx.DynamicLossScale(64.0, period=5, hysteresis=3).adjust(False).adjust(False)
    assert int(saved.counter) == -2
    for hysteresis in (2, 3, 4):
        template = jmpx.DynamicLossScale(period=7, hysteresis=hysteresis)
        restored = restore(saved, template)
        assert (restored.period, restored.hysteresis) == (7, hysteresis)
        after = restored.adjust(False)
        assert value(after) == (64 if hysteresis == 4 else 32)
        assert int(after.counter) == max(-3, 1 - hysteresis)
        assert int(restored.adjust(True).counter) == 1
    without = restore(saved, jmpx.DynamicLossScale())
    assert value(without.adjust(False)) == 32 and int(without.adjust(False).counter) == 0


@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_orbax_restores_the_row(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    saved = jmpx.DynamicLossScale(64.0, hysteresis=3).adjust(False)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scale", {"scale": saved})
        checkpointer.wait_until_finished()
        template = {"scale": jmpx.DynamicLossScale(hysteresis=3)}
        restored = checkpointer.restore(tmp_path / "scale", template)["scale"]
    assert_same_bits(jax.tree.map(jnp.asarray, restored), saved)
    assert [value(restored.adjust(False)), value(restored.adjust(False).adjust(False))] == [64, 32]


def test_the_gradient_functions_adjust_with_hysteresis(rng):
    w = jnp.asarray(rng.normal(size=4), jnp.float32)
    scaling = jmpx.DynamicLossScale(2.0**40, hysteresis=2)  # far beyond float16
    scales = []
    for _ in range(3):
        grad = jmpx.filter_grad(lambda w: (w**2).sum(), scaling, policy="c=f16")
        scaling, finite, _ = grad(w)
        scales.append(value(scaling))
        assert not finite
    assert scales == [2.0**40, 2.0**39, 2.0**38]


@pytest.mark.parametrize("hysteresis", [0, -1, 1.5, 2**31, None, True, "2"])
def test_bad_hysteresis(hysteresis):
    with pytest.raises((TypeError, ValueError), match="hysteresis") as error:
        jmpx.DynamicLossScale(hysteresis=hysteresis)
    assert "\n" not in str(error.value) and "Expected" in str(error.value)
