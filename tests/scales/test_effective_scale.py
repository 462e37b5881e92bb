"""Every method applies the same scale, however it was made: its bounds, its digits, its cost."""

import dataclasses

import compiled_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, leniently, normal
from helpers.training import LARGEST_SCALE, LEAST_SCALE, value
from hypothesis import given, settings, strategies as st

import jmpx


def unflattened(number, **configuration):
    """Makes a loss scale as a checkpoint does: from its leaves, without its constructor."""
    template = jmpx.DynamicLossScale(**configuration)
    leaves = [np.float32(number), np.int32(0)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


ORIGINS = {
    "number": jmpx.DynamicLossScale,
    "NumPy": lambda number, **kw: jmpx.DynamicLossScale(np.float64(number), **kw),
    "array": lambda number, **kw: jmpx.DynamicLossScale(jnp.float32(number), **kw),
    "traced": lambda number, **kw: jax.jit(lambda x: jmpx.DynamicLossScale(x, **kw))(number),
    "mapped": lambda number, **kw: jax.tree.map(
        lambda x: x[0], jax.vmap(lambda x: jmpx.DynamicLossScale(x, **kw))(jnp.array([number]))
    ),
    "replaced": lambda number, **kw: dataclasses.replace(
        jmpx.DynamicLossScale(**kw), loss_scale=number
    ),
    "unflattened": unflattened,
}
# The number to start with, the configuration, and the scale that they give.
BOUNDS = [
    (2.0**20, {"max_loss_scale": 2.0**10}, 2.0**10),
    (2.0**127, {}, LARGEST_SCALE),
    (2.0**127, {"max_loss_scale": 2.0**127}, LARGEST_SCALE),
    (0.5, {}, 1.0),
    (0.5, {"min_loss_scale": 0.125}, 0.5),
    (0.0, {"min_loss_scale": 0}, LEAST_SCALE),
    (2.0**-140, {"min_loss_scale": 2.0**-140}, LEAST_SCALE),
    (8.0, {"min_loss_scale": 32, "max_loss_scale": 64}, 32.0),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("origin", ORIGINS)
def test_one_scale_holds_in_every_method(origin, rng):
    x = rng.normal(size=4).astype(np.float32)
    for start, configuration, expected in BOUNDS:
        loss_scale = ORIGINS[origin](start, **configuration)
        if origin != "unflattened":
            assert value(loss_scale) == expected, (start, configuration)
        assert loss_scale.scale(jnp.float32(1)) == value(loss_scale.adjust(True)) == expected
        low = max(configuration.get("min_loss_scale", 1), LEAST_SCALE)
        assert value(loss_scale.adjust(False)) == max(expected / 2, low)
        if 2.0**-100 < expected < 2.0**100:  # nothing of x is flushed
            np.testing.assert_array_equal(loss_scale.unscale(loss_scale.scale(x)), x)


@pytest.mark.parametrize(("start", "configuration", "expected"), BOUNDS)
def test_and_in_the_gradient_functions(start, configuration, expected, rng):
    x = jnp.asarray(rng.integers(1, 8, size=4), jnp.float32)
    factor = 2.0 ** -np.clip(np.log2(expected), -100, 100)

    @jax.jit
    def run(loss_scale, x):
        seen = loss_scale.scale(jnp.float32(1)), loss_scale.adjust(False).adjust(True).loss_scale
        grad_fn = jmpx.filter_grad(lambda w: (w * x * factor).sum(), loss_scale, policy="full")
        return *seen, grad_fn(x)

    scale, shrunk, (new, finite, grads) = run(unflattened(start, **configuration), x)
    assert scale == value(new) == expected and finite
    assert shrunk == max(expected / 2, configuration.get("min_loss_scale", 1), LEAST_SCALE)
    np.testing.assert_array_equal(grads, x * factor)


CONFIGURATIONS = st.fixed_dictionaries(
    {
        "loss_scale": st.floats(0, 2.0**127, width=32),
        "counter": st.integers(0, 2**31 - 1),
        "period": st.integers(1, 3) | st.integers(1, 2**31 - 1),
        "factor": st.sampled_from([1, 2, 3, 2**40, 2.0**126]) | st.floats(1, 2.0**126),
        "min_loss_scale": st.sampled_from([0, 1, 2**40]) | st.floats(0, 2.0**126),
        "max_loss_scale": st.sampled_from([None, 2**32, 2.0**127]) | st.floats(0, 2.0**127),
        "backoff_factor": st.sampled_from([None, 0.5])
        | st.floats(LEAST_SCALE, 1, exclude_max=True),
    }
)


def constructed(configuration):
    """Returns the loss scale, or None if the configuration is refused, as it may be."""
    low = max(configuration["min_loss_scale"], LEAST_SCALE)
    high = min(configuration["max_loss_scale"] or 0, LARGEST_SCALE)
    if configuration["max_loss_scale"] is None:
        high = LARGEST_SCALE
    no_way_down = configuration["factor"] == 1 and configuration["backoff_factor"] is None
    if low > high or no_way_down:
        with pytest.raises(ValueError, match="Expected"):
            jmpx.DynamicLossScale(**configuration)
        return None
    return jmpx.DynamicLossScale(**configuration)


@pytest.mark.thorough
@settings(deadline=None, max_examples=25)
@given(CONFIGURATIONS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_whatever_can_be_constructed_works(configuration, steps):
    loss_scale = constructed(configuration)
    if loss_scale is None:
        return
    low = np.float32(max(configuration["min_loss_scale"], LEAST_SCALE))
    highest = configuration["max_loss_scale"]
    high = np.float32(LARGEST_SCALE if highest is None else min(highest, LARGEST_SCALE))
    factor = configuration["factor"]
    backoff = configuration["backoff_factor"] or 1 / factor
    scale = float(np.clip(np.float32(configuration["loss_scale"]), low, high))
    counter = configuration["counter"]

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        back = loss_scale.unscale(loss_scale.scale(jnp.float32(1)))
        return loss_scale, (loss_scale.loss_scale, loss_scale.counter, back)

    last, found = jax.lax.scan(step, loss_scale, jnp.array(steps))
    assert jax.tree.structure(last) == jax.tree.structure(loss_scale)
    for finite, got, got_counter, back in zip(steps, *found, strict=True):
        due = counter >= configuration["period"] - 1
        moved = scale * (backoff if not finite else factor if due else 1)
        expected = min(max(moved, float(low)), float(high))
        # In float32, by one rounded operation of one rounded number.
        np.testing.assert_allclose(got, expected, rtol=2.0**-22)
        counter = counter + 1 if finite and not due else 0
        assert got_counter == counter and low <= got <= high
        np.testing.assert_allclose(back, 1, rtol=2.0**-22)
        scale = float(got)  # so that roundings do not add up


WORK = {
    "maximum": {"loss_scale": 1.0, "max_loss_scale": 2**32},
    "minimum": {"min_loss_scale": 2**40},
    "factor": {"factor": 2**40},
    "smallest minimum": {"loss_scale": 2.0**-125, "min_loss_scale": 0},
    "longest period": {"period": 2**31 - 1},
    "large backoff": {"backoff_factor": 1 - 2.0**-20},
}


@pytest.mark.parametrize("name", WORK)
def test_what_failed_later_works(name):
    loss_scale = jmpx.DynamicLossScale(**WORK[name])
    for adjust in (lambda s, f: s.adjust(f), jax.jit(lambda s, f: s.adjust(f))):
        for finite in (True, False):
            new = adjust(loss_scale, jnp.array(finite))
            assert new.scale(jnp.float32(1)) == new.loss_scale
            assert new.unscale(new.loss_scale) == 1


REFUSED = {
    "period": {"period": 10**10},
    "minimum": {"min_loss_scale": 2.0**127},
    "factor": {"factor": 2.0**127},
    "backoff": {"backoff_factor": 2.0**-140},
    "maximum of nothing": {"min_loss_scale": 0, "max_loss_scale": 0},
    "counter": {"counter": 2**31},
    "swapped bounds": {"min_loss_scale": 8.0, "max_loss_scale": 4.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_when_it_is_made(name):
    with pytest.raises(ValueError, match="Expected .* got ") as error:
        jmpx.DynamicLossScale(**REFUSED[name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [2.0**127, 2.0**-127, 1e-40])
def test_a_static_scale_that_no_product_undoes_is_refused(number):
    with pytest.raises(ValueError, match=r"to be a number between 2\*\*-126 and 2\*\*126"):
        jmpx.StaticLossScale(number)


def test_a_static_scale_of_0_holds_a_place_and_cannot_scale(rng):
    nothing = jmpx.StaticLossScale(0.0)
    assert jax.tree.leaves(nothing) == [] and nothing == jmpx.StaticLossScale(0)
    grad_fn = jmpx.filter_grad(jnp.sum, nothing, policy="full")
    for use in (nothing.scale, nothing.unscale, jax.jit(nothing.unscale), grad_fn):
        with pytest.raises(ValueError, match=r"Cannot scale .* by StaticLossScale\(0\): give a"):
            use(jnp.ones(2))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", [3.0, 2.0**15 + 1, 1000.1, 2.0**15, 1 / 3])
@pytest.mark.parametrize("kind", ["Static", "Dynamic"])
def test_float64_gradients_keep_their_digits(kind, number, rng):
    with enable_x64():
        make = getattr(jmpx, f"{kind}LossScale")
        loss_scale = make(number) if kind == "Static" else make(number, min_loss_scale=0)
        x = rng.normal(size=64)
        for run in (lambda f: f, jax.jit):
            unscaled = run(lambda s, x: s.unscale(x))(loss_scale, jnp.asarray(x))
            assert unscaled.dtype == jnp.float64
            np.testing.assert_allclose(unscaled, x / float(np.float32(number)), rtol=2.0**-52)
            grad_fn = jmpx.filter_grad(lambda w: (w * x).sum(), loss_scale, policy="f64")
            np.testing.assert_allclose(run(grad_fn)(jnp.asarray(x))[2], x, rtol=2.0**-51)
            both = run(lambda s, z: s.unscale(s.scale(z)))(loss_scale, jnp.asarray(x + 1j * x))
            np.testing.assert_allclose(both, x + 1j * x, rtol=2.0**-51)


def test_each_leaf_is_unscaled_in_its_own_dtype_by_one_product(rng):
    with enable_x64():
        tree = {
            "a": jnp.asarray(rng.normal(size=3), jnp.float16),
            "b": normal(rng, 3),
            "c": jnp.asarray(rng.normal(size=3), jnp.float64),
        }
        for method in ("scale", "unscale"):
            jaxpr = jax.make_jaxpr(lambda s, t, m=method: getattr(s, m)(t))(
                jmpx.DynamicLossScale(3.0), tree
            )
            of_arrays = [eqn for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape == (3,)]
            names = sorted(eqn.primitive.name for eqn in of_arrays)
            assert names == ["convert_element_type", "mul", "mul", "mul"]
            products = [eqn.invars for eqn in of_arrays if eqn.primitive.name == "mul"]
            dtypes = [{atom.aval.dtype.name for atom in atoms} for atoms in products]
            assert dtypes == [{"float32"}, {"float32"}, {"float64"}]


def count_step(layers, by_hand):
    """Counts what a JMP-style step of a chain of matrices compiles to."""

    def scaled_loss(params, scale, x):
        for w in params:
            x = jnp.tanh(x @ w.astype(jnp.float16))
        return scale(x.astype(jnp.float32).sum())

    def ours(params, loss_scale, x):
        grads = jax.grad(scaled_loss)(params, loss_scale.scale, x)
        grads = loss_scale.unscale(grads)
        finite = jmpx.all_finite(grads)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jmpx.select_tree(finite, new, params), loss_scale.adjust(finite)

    def hand_written(params, loss_scale, x):
        scale, counter = loss_scale.loss_scale, loss_scale.counter
        grads = jax.grad(scaled_loss)(params, lambda loss: loss * scale, x)
        grads = jax.tree.map(lambda g: g * (1 / scale), grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in grads]).all()
        new = [jnp.where(finite, p - 0.1 * g, p) for p, g in zip(params, grads, strict=True)]
        due = counter == 1999
        grown = jnp.where(due & jnp.isfinite(scale * 2), scale * 2, scale)
        scale = jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0))
        return new, (scale, jnp.where(finite & ~due, counter + 1, 0))

    params = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * layers
    arguments = params, jmpx.DynamicLossScale(), jax.ShapeDtypeStruct((4, 32), jnp.float16)
    lowered = jax.jit(hand_written if by_hand else ours, donate_argnums=(0, 1)).lower(*arguments)
    return compiled_step.counts(lowered.compile())


def test_the_loop_of_jmp_costs_what_the_hand_written_one_does():
    ours, by_hand = count_step(24, by_hand=False), count_step(24, by_hand=True)
    for name in ("entry_ops", "bytes_accessed", "instructions"):
        assert ours[name] <= 1.01 * by_hand[name], name


# MPX's trajectory


@pytest.mark.sampled(4)
@pytest.mark.parametrize("factor", [2, 4, 3])
@pytest.mark.parametrize("start", [2.0**4, 2.0**15, 60_000.0])
def test_dynamic_loss_scaling_takes_mpxs_steps(start, factor, rng):
    mpx = pytest.importorskip("mpx")
    theirs = mpx.DynamicLossScaling(jnp.float32(start), jnp.float32(2), factor, period=2)
    ours = jmpx.mpx.DynamicLossScaling(jnp.float32(start), jnp.float32(2), factor, period=2)
    seen = set()
    flags = [*[True] * 26, *[False] * 16, *(rng.random(40) < 0.8)]
    for finite in flags:
        theirs, ours = leniently(theirs.adjust)(jnp.array(bool(finite))), ours.adjust(bool(finite))
        assert ours.counter == theirs.counter
        # A third is a product here, so that eager and compiled steps agree, and a division there.
        tolerance = 1e-5 if factor == 3 else 0
        np.testing.assert_allclose(value(ours), float(theirs.loss_scaling), rtol=tolerance)
        seen.add(value(ours))
    assert 65504.0 in seen and 2.0 in seen  # the ceiling and the floor
    assert value(jmpx.DynamicLossScale(65504.0, period=1).adjust(True)) == 2 * 65504
