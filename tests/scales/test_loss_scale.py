import copy
import dataclasses
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import warns_once
from helpers.training import value
from hypothesis import given, settings, strategies as st

import jmpx
from jmpx._scales.kinds import is_at_least_1

KINDS = {
    "NoOp": jmpx.NoOpLossScale(),
    "Static": jmpx.StaticLossScale(2.0**15),
    "Dynamic": jmpx.DynamicLossScale(2.0**15),
}
SCALING = [KINDS["Static"], KINDS["Dynamic"]]


# scale and unscale


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_unscale_undo_each_other_and_leave_other_leaves(kind, rng):
    tree = {
        "x": rng.normal(size=4).astype(np.float32),
        "z": jnp.asarray(rng.normal(size=2) + 1j * rng.normal(size=2), jnp.complex64),
        "n": jnp.arange(3),
        "key": jax.random.key(0),
        "other": ("name", None, jnp.tanh, 3, True),
    }
    scaled = KINDS[kind].scale(tree)
    back = KINDS[kind].unscale(scaled)
    for name in ("x", "z"):
        factor = np.float32(KINDS[kind].loss_scale)
        np.testing.assert_array_equal(scaled[name], np.asarray(tree[name]) * factor)
        np.testing.assert_array_equal(back[name], tree[name])
        assert back[name].dtype == tree[name].dtype
    for name in ("n", "key", "other"):
        assert scaled[name] is tree[name] and back[name] is tree[name] or name == "other"
    assert back["other"] == tree["other"]


def test_no_op_returns_its_argument():
    tree = {"x": jnp.ones(2, jnp.float16)}
    no_op = jmpx.NoOpLossScale()
    assert no_op.scale(tree) is tree and no_op.unscale(tree) is tree
    assert no_op.adjust(jnp.array(False)) is no_op and no_op.loss_scale == 1


@pytest.mark.parametrize("loss_scale", SCALING, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn])
def test_16_bit_leaves_are_scaled_in_float32(loss_scale, dtype, rng):
    x = jnp.asarray(rng.normal(size=64), dtype)
    wide = np.asarray(x).astype(np.float32)
    for run in (lambda f: f, jax.jit):
        scaled, unscaled = run(loss_scale.scale)(x), run(loss_scale.unscale)(x)
        assert scaled.dtype == unscaled.dtype == jnp.float32
        np.testing.assert_array_equal(scaled, wide * np.float32(2**15))
        np.testing.assert_array_equal(unscaled, wide / np.float32(2**15))


def test_a_float16_loss_of_4_survives_a_scale_of_2_to_the_15():
    assert KINDS["Dynamic"].scale(jnp.float16(4)) == 4 * 2**15


def low_dynamic(loss_scale):
    return jmpx.DynamicLossScale(loss_scale, min_loss_scale=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("power", [-126, -3, 0, 15, 24, 126])
@pytest.mark.parametrize("kind", [jmpx.StaticLossScale, low_dynamic])
def test_powers_of_two_are_exact_to_the_extremes(kind, power, rng):
    # XLA computes x / s as x * (1 / s), and flushes 1 / 2**127 to zero.
    s = 2.0**power
    x = rng.normal(size=100).astype(np.float32)
    scaled = np.ldexp(x, np.clip(power, -100, 100)).astype(np.float32)
    loss_scale = kind(s)
    expected = np.ldexp(scaled.astype(np.float64), -power).astype(np.float32)
    runs = {
        "eager": loss_scale.unscale,
        "closed over": jax.jit(loss_scale.unscale),
        "argument": lambda x: jax.jit(lambda ls, x: ls.unscale(x))(loss_scale, x),
        "vmap": jax.vmap(loss_scale.unscale),
    }
    for name, unscale in runs.items():
        np.testing.assert_array_equal(unscale(scaled), expected, err_msg=name)
    with np.errstate(over="ignore", under="ignore"):
        product = x * np.float32(s)
    product[np.abs(product) < 2.0**-126] = 0  # flushed
    np.testing.assert_array_equal(loss_scale.scale(x), product)


@pytest.mark.parametrize("power", [-126, -3, 0, 15, 126])
def test_a_single_product_unscales_exactly(power, rng):
    x = np.ldexp(rng.normal(size=(2, 8)), np.clip(power, -100, 100)).astype(np.float32)
    loss_scale = low_dynamic(2.0**power)

    def unscale(loss_scale, x):
        return loss_scale.unscale({"a": x[0], "b": x[1]})

    jaxpr = jax.make_jaxpr(unscale)(loss_scale, x)
    of_arrays = [eqn.primitive.name for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape == (8,)]
    assert of_arrays.count("mul") == 2 and "div" not in of_arrays
    expected = np.ldexp(x.astype(np.float64), -power).astype(np.float32)
    for run in (unscale, jax.jit(unscale)):
        unscaled = run(loss_scale, x)
        np.testing.assert_array_equal(np.stack([unscaled["a"], unscaled["b"]]), expected)


def test_a_scale_beyond_its_maximum_counts_as_the_maximum(rng):
    x = rng.normal(size=3).astype(np.float32)
    loss_scale = jmpx.DynamicLossScale(2.0**20, max_loss_scale=2.0**10)
    np.testing.assert_array_equal(loss_scale.scale(x), x * 2**10)
    np.testing.assert_array_equal(loss_scale.unscale(x), x / 2**10)


@settings(deadline=None)
@given(
    st.floats(2.0**-126, 2.0**126, width=32),
    st.floats(-1, 1, width=32, allow_subnormal=False),
)
def test_unscale_divides(s, x):
    expected = np.float64(x) / np.float64(s)
    for kind in (jmpx.StaticLossScale, low_dynamic):
        got = float(kind(s).unscale(jnp.float32(x)))
        # XLA may multiply by the rounded reciprocal, and flushes what is below 2**-126.
        assert abs(got - expected) <= 2.0**-22 * abs(expected) + 2.0**-126


# adjust, against a model in plain Python


@dataclasses.dataclass
class Model:
    scale: float
    counter: int
    period: int
    factor: float
    low: float
    high: float
    backoff: float

    def adjust(self, finite):
        if not finite:
            self.counter = 0
            self.scale = max(float(np.float32(self.scale * self.backoff)), self.low)
        elif self.counter + 1 >= self.period:
            self.counter = 0
            self.scale = min(self.scale * self.factor, self.high)
        else:
            self.counter += 1


@settings(deadline=None, max_examples=25)  # each compiles a loop
@given(
    start=st.integers(-20, 127).map(lambda n: 2.0**n),
    counter=st.integers(0, 6),
    period=st.integers(1, 5),
    factor=st.sampled_from([2, 4, 2.0**64]),
    low=st.sampled_from([2.0**-126, 2.0**-20, 0.125, 1.0]),
    high=st.sampled_from([None, 2.0**20, 2.0**126, 2.0**127]),
    backoff=st.sampled_from([None, 0.25, 2.0**-30]),
    steps=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_adjust_follows_the_model(start, counter, period, factor, low, high, backoff, steps):
    loss_scale = jmpx.DynamicLossScale(start, counter, period, factor, low, high, backoff)
    highest = min(high or 2.0**126, 2.0**126)
    first = min(max(start, low), highest)
    model = Model(first, counter, period, factor, low, highest, backoff or 1 / factor)
    expected = []
    for finite in steps:
        model.adjust(finite)
        expected.append((model.scale, model.counter))

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        return loss_scale, (loss_scale.loss_scale, loss_scale.counter)

    last, (scales, counters) = jax.lax.scan(step, loss_scale, jnp.array(steps))
    assert list(zip(map(float, scales), map(int, counters), strict=True)) == expected
    assert (last.period, last.factor, last.min_loss_scale) == (period, factor, low)
    assert (last.max_loss_scale, last.backoff_factor) == (high, backoff)


@pytest.mark.parametrize("has_backoff", [False, True])
def test_a_compiled_step_adjusts_to_the_bits_of_an_eager_one(has_backoff, rng):
    """Also for factors that are no power of two, of which XLA rewrites a division."""
    for factor, backoff in zip(rng.uniform(1.01, 9, 4), rng.uniform(0.01, 0.99, 4), strict=True):
        factors: dict[str, Any] = {"factor": float(factor), "backoff_factor": float(backoff)}
        if not has_backoff:
            del factors["backoff_factor"]
            backoff = 1 / factor
        compiled = jax.jit(lambda scale, finite: scale.adjust(finite))
        for start in 2.0 ** rng.uniform(10, 40, 6):
            scale = jmpx.DynamicLossScale(start, period=1, **factors)
            for finite in (True, False):
                eager = scale.adjust(finite).loss_scale
                np.testing.assert_array_equal(eager, compiled(scale, finite).loss_scale)
                exact = float(scale.loss_scale) * (factor if finite else backoff)
                np.testing.assert_allclose(eager, exact, rtol=2**-22)


def test_it_grows_on_finite_step_number_period():
    loss_scale = jmpx.DynamicLossScale(4, period=3)
    scales = []
    for _ in range(7):
        loss_scale = loss_scale.adjust(True)
        scales.append(value(loss_scale))
    assert scales == [4, 4, 8, 8, 8, 16, 16]


def test_growth_stops_before_inf_and_shrinking_before_zero():
    large = jmpx.DynamicLossScale(2.0**125, period=1)
    for _ in range(3):
        large = large.adjust(True)
    assert value(large) == 2.0**126
    small = jmpx.DynamicLossScale(2.0**-125, min_loss_scale=0)
    for _ in range(3):
        small = small.adjust(False)
    assert value(small) == 2.0**-126


def test_a_scale_beyond_float16_is_no_limit():
    loss_scale = jmpx.DynamicLossScale(jnp.float16(2**15), period=1)
    for _ in range(5):
        loss_scale = loss_scale.adjust(True)
    assert value(loss_scale) == 2.0**20


@pytest.mark.parametrize("finite", [True, np.bool_(True), np.array(True), jnp.array(True)])
def test_adjust_takes_every_kind_of_bool(finite):
    assert int(jmpx.DynamicLossScale().adjust(finite).counter) == 1


@pytest.mark.parametrize("finite", [1, 1.0, None, jnp.ones(2, bool), jnp.float32(1)])
def test_adjust_refuses_other_flags(finite):
    with pytest.raises(TypeError, match="Expected grads_finite to be a scalar bool"):
        jmpx.DynamicLossScale().adjust(finite)


# as a pytree


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, np.float64, jnp.float32])
def test_the_scale_is_a_strong_float32_whatever_it_was_given(dtype):
    for given_scale in (np.asarray(2**15, dtype), jnp.asarray(np.asarray(2**15, dtype))):
        loss_scale = jmpx.DynamicLossScale(given_scale)
        for scale in (loss_scale, loss_scale.adjust(True), jmpx.cast_tree(loss_scale, jnp.float16)):
            assert scale.loss_scale.dtype == jnp.float32 and value(scale) == 2**15
            assert not jax.typeof(scale.loss_scale).weak_type
            assert scale.counter.dtype == jnp.int32
            assert not jax.typeof(scale.counter).weak_type


def test_weak_numbers_become_strong_so_that_a_loop_compiles_once():
    loss_scale = jmpx.DynamicLossScale(jnp.asarray(8.0), jnp.asarray(0))
    traces = []

    @jax.jit
    def step(loss_scale):
        traces.append(loss_scale)
        return loss_scale.adjust(True)

    for _ in range(3):
        loss_scale = step(loss_scale)
    assert len(traces) == 1


def test_leaves_and_paths():
    assert jax.tree.leaves(KINDS["NoOp"]) == [] == jax.tree.leaves(KINDS["Static"])
    loss_scale = KINDS["Dynamic"]
    assert jax.tree.leaves(loss_scale) == [loss_scale.loss_scale, loss_scale.counter]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(loss_scale)]
    assert paths == [".loss_scale", ".counter"]
    assert jax.tree.map(lambda x: x, loss_scale) == loss_scale


CONFIGURED = jmpx.DynamicLossScale(0.5, 1, 3, 4, 0.125, 64.0, 0.5)
ROUND_TRIPS = {
    "jit": lambda s: jax.jit(lambda s: s)(s),
    "vmap": lambda s: jax.tree.map(
        lambda x: x[1],
        jax.vmap(lambda s: s, axis_size=2)(jax.tree.map(lambda x: jnp.stack([x, x]), s)),
    ),
    "scan": lambda s: jax.lax.scan(lambda s, _: (s, None), s, None, length=2)[0],
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deepcopy": copy.deepcopy,
    "tree": lambda s: jax.tree.unflatten(jax.tree.structure(s), jax.tree.leaves(s)),
    "device_put": lambda s: jax.device_put(s, jax.devices()[1]),
    "replace": dataclasses.replace,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("trip", ROUND_TRIPS)
@pytest.mark.parametrize("loss_scale", [*KINDS.values(), CONFIGURED], ids=[*KINDS, "configured"])
def test_round_trips_keep_everything(trip, loss_scale):
    there = ROUND_TRIPS[trip](loss_scale)
    assert there == loss_scale and type(there) is type(loss_scale)
    assert repr(there.adjust(False)) == repr(loss_scale.adjust(False))


class OfOnesOwn(jmpx.DynamicLossScale):
    def unscale(self, tree):
        return super().unscale(tree)


AT_LEAST_1 = {
    "none": True,
    "static=1": True,
    "static=0.5": False,
    "dynamic": True,
    "dynamic,min=1": True,
    "dynamic,init=2,min=0.5": False,
}


@pytest.mark.parametrize("text", AT_LEAST_1)
def test_which_scales_never_fall_below_1(text):
    assert is_at_least_1(jmpx.get_loss_scale(text)) == AT_LEAST_1[text]
    assert not is_at_least_1(OfOnesOwn())


def test_a_min_loss_scale_below_1_holds_in_a_jitted_loop():
    loss_scale = jmpx.DynamicLossScale(1.0, min_loss_scale=0.125)
    step = jax.jit(lambda s: s.adjust(False))
    for _ in range(5):
        loss_scale = step(loss_scale)
    assert value(loss_scale) == 0.125


def test_a_checkpoint_restores_numbers_and_the_template_keeps_its_configuration():
    saved = jax.tree.leaves(jmpx.DynamicLossScale(64.0, 7, period=10))
    template = jmpx.DynamicLossScale(period=5, min_loss_scale=0.5)
    restored = jax.tree.unflatten(jax.tree.structure(template), map(np.asarray, saved))
    assert (value(restored), restored.counter, restored.period) == (64, 7, 5)
    grown = restored.adjust(True)  # 7 finite steps are more than the new period
    assert value(grown) == 128 and grown.counter == 0


def test_trees_of_anything_have_its_structure():
    loss_scale = KINDS["Dynamic"]
    mesh = jax.sharding.Mesh(jax.devices(), "d")
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for thing in (0, None, True, replicated, jax.sharding.PartitionSpec(), object(), "x"):
        tree = jax.tree.map(lambda _, thing=thing: thing, loss_scale)
        assert tree.loss_scale is thing and tree.counter is thing
        assert jmpx.DynamicLossScale(object()).counter == 0
    shardings = jax.tree.map(lambda _: replicated, loss_scale)
    placed = jax.jit(lambda s: s, in_shardings=(shardings,), out_shardings=shardings)(loss_scale)
    assert placed.loss_scale.sharding == replicated
    axes = jax.tree.map(lambda _: 0, loss_scale)
    stacked = jax.vmap(jmpx.DynamicLossScale)(jnp.array([2.0, 4.0]))
    halved = jax.vmap(lambda s: s.adjust(False), in_axes=(axes,))(stacked)
    np.testing.assert_array_equal(halved.loss_scale, [1.0, 2.0])


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_lowering(kind, rng):
    x = rng.normal(size=3).astype(np.float32)

    def step(loss_scale, x):
        return loss_scale.adjust(jmpx.all_finite(loss_scale.scale(x)))

    shapes = jax.eval_shape(step, KINDS[kind], x)
    assert jax.tree.structure(shapes) == jax.tree.structure(KINDS[kind])
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), KINDS[kind])
    for argument in (KINDS[kind], structs, shapes):
        lowered = jax.jit(step, donate_argnums=0).lower(argument, x)
        assert lowered.args_info[0][0] is not None
        lowered.compile()


def test_a_stack_of_scales_needs_vmap(rng):
    stack = jax.vmap(jmpx.DynamicLossScale)(jnp.array([1.0, 2.0, 4.0]))
    x = rng.normal(size=3).astype(np.float32)
    scaled = jax.vmap(lambda s, x: s.scale(x))(stack, x)
    np.testing.assert_array_equal(scaled, x * [1, 2, 4])
    for method in (stack.scale, stack.unscale, lambda _: stack.adjust(True)):
        with pytest.raises(ValueError, match=r"Expected a loss scale of shape \(\), got \(3,\)"):
            method(x)


# construction


def test_positional_arguments_are_those_of_jmp():
    loss_scale = jmpx.DynamicLossScale(jnp.float32(10), jnp.int32(3), 20, 3, jnp.asarray(0.37))  # pyright: ignore[reportArgumentType]
    assert (value(loss_scale), loss_scale.counter, loss_scale.period) == (10, 3, 20)
    assert loss_scale.factor == 3 and loss_scale.min_loss_scale == np.float32(0.37)
    assert jmpx.DynamicLossScale() == jmpx.DynamicLossScale(2**15, 0, 2000, 2, 1.0, None, None)
    for name in ("NoOp", "Static", "Dynamic"):
        assert isinstance(KINDS[name], getattr(jmpx, f"{name}LossScale"))
        assert isinstance(KINDS[name], jmpx.LossScale)


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_an_integer_array_is_taken_with_one_warning(name):
    with warns_once(__file__, f"Expected floating type for {name}"):
        loss_scale = jmpx.DynamicLossScale(**{name: jnp.asarray(8)})  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda s: s.adjust(False))(loss_scale)
        jmpx.DynamicLossScale(2**15)
    assert getattr(loss_scale, name) == 8


def test_a_static_scale_is_hashable_and_a_constant():
    static = jmpx.StaticLossScale(jnp.float16(8))
    assert static == jmpx.StaticLossScale(8) and hash(static) == hash(jmpx.StaticLossScale(8.0))
    assert isinstance(static.loss_scale, np.float32)  # pyright: ignore[reportArgumentType]


def in_jit(make):
    return jax.jit(lambda x: make(x).adjust(True))(2.0)


BAD = [
    (lambda: in_jit(jmpx.StaticLossScale), TypeError, "traced"),
    (lambda: in_jit(lambda x: jmpx.DynamicLossScale(min_loss_scale=x)), TypeError, "traced"),
    (lambda: jmpx.StaticLossScale("2"), TypeError, "to be a number"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.StaticLossScale(jnp.ones(2)), TypeError, "to be a number"),
    (lambda: jmpx.StaticLossScale(-1), ValueError, "between 2"),
    (lambda: jmpx.StaticLossScale(float("nan")), ValueError, "between 2"),
    (lambda: jmpx.StaticLossScale(2**128), ValueError, "between 2"),
    (lambda: jmpx.DynamicLossScale("32768"), TypeError, "to be a number"),
    (lambda: jmpx.DynamicLossScale(float("inf")), ValueError, "between 0"),
    (lambda: jmpx.DynamicLossScale(period=0), ValueError, "period"),
    (lambda: jmpx.DynamicLossScale(period=2.5), ValueError, "period"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.DynamicLossScale(period=None), TypeError, "period"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.DynamicLossScale(factor=0.5), ValueError, "factor"),
    (lambda: jmpx.DynamicLossScale(factor=1), ValueError, "backoff_factor"),
    (lambda: jmpx.DynamicLossScale(backoff_factor=1.5), ValueError, "backoff_factor"),
    (lambda: jmpx.DynamicLossScale(max_loss_scale=0.5), ValueError, "max_loss_scale"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_arguments_are_refused_in_one_sentence(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "Expected" in str(caught.value) and "\n" not in str(caught.value)
