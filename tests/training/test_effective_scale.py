"""One effective scale, everywhere and from wherever it came; what it may be; where it is kept."""

import dataclasses
import pickle
import textwrap

import compiled_step
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from helpers import assert_same_bits, enable_x64, leniently, run_python
from hypothesis import given, settings, strategies as st

import jmpx

LOW, HIGH = 2.0**-126, 2.0**126


def value(loss_scale):
    return float(loss_scale.loss_scale)


# One scale, from wherever it came


def unflattened(number, **configuration):
    """As a checkpoint restores it: the template's configuration, and no constructor."""
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
# start, configuration, what it is to be
BOUNDS = [
    (2.0**20, {"max_loss_scale": 2.0**10}, 2.0**10),
    (2.0**127, {}, HIGH),
    (2.0**127, {"max_loss_scale": 2.0**127}, HIGH),
    (0.5, {}, 1.0),
    (0.5, {"min_loss_scale": 0.125}, 0.5),
    (0.0, {"min_loss_scale": 0}, LOW),
    (2.0**-140, {"min_loss_scale": 2.0**-140}, LOW),
    (8.0, {"min_loss_scale": 32, "max_loss_scale": 64}, 32.0),
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_one_scale_holds_in_every_method(origin, rng):
    x = rng.normal(size=4).astype(np.float32)
    for start, configuration, expected in BOUNDS:
        loss_scale = ORIGINS[origin](start, **configuration)
        if origin != "unflattened":
            assert value(loss_scale) == expected, (start, configuration)
        assert loss_scale.scale(jnp.float32(1)) == value(loss_scale.adjust(True)) == expected
        low = max(configuration.get("min_loss_scale", 1), LOW)
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
    assert shrunk == max(expected / 2, configuration.get("min_loss_scale", 1), LOW)
    np.testing.assert_array_equal(grads, x * factor)


CONFIGURATIONS = st.fixed_dictionaries(
    {
        "loss_scale": st.floats(0, 2.0**127, width=32),
        "counter": st.integers(0, 2**31 - 1),
        "period": st.integers(1, 3) | st.integers(1, 2**31 - 1),
        "factor": st.sampled_from([1, 2, 3, 2**40, 2.0**126]) | st.floats(1, 2.0**126),
        "min_loss_scale": st.sampled_from([0, 1, 2**40]) | st.floats(0, 2.0**126),
        "max_loss_scale": st.sampled_from([None, 2**32, 2.0**127]) | st.floats(0, 2.0**127),
        "backoff_factor": st.sampled_from([None, 0.5]) | st.floats(LOW, 1, exclude_max=True),
    }
)


def constructed(configuration):
    """Returns the loss scale, or None if the configuration is refused, as it may be."""
    low = max(configuration["min_loss_scale"], LOW)
    high = min(configuration["max_loss_scale"] or 0, HIGH)
    if configuration["max_loss_scale"] is None:
        high = HIGH
    no_way_down = configuration["factor"] == 1 and configuration["backoff_factor"] is None
    if low > high or no_way_down:
        with pytest.raises(ValueError, match="Expected"):
            jmpx.DynamicLossScale(**configuration)
        return None
    return jmpx.DynamicLossScale(**configuration)


@settings(deadline=None, max_examples=25)
@given(CONFIGURATIONS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_whatever_can_be_constructed_works(configuration, steps):
    loss_scale = constructed(configuration)
    if loss_scale is None:
        return
    low = np.float32(max(configuration["min_loss_scale"], LOW))
    highest = configuration["max_loss_scale"]
    high = np.float32(HIGH if highest is None else min(highest, HIGH))
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
    with pytest.raises(ValueError, match=r"to be between 2\*\*-126 and 2\*\*126"):
        jmpx.StaticLossScale(number)


def test_a_static_scale_of_0_holds_a_place_and_cannot_scale(rng):
    nothing = jmpx.StaticLossScale(0.0)
    assert jax.tree.leaves(nothing) == [] and nothing == jmpx.StaticLossScale(0)
    grad_fn = jmpx.filter_grad(jnp.sum, nothing, policy="full")
    for use in (nothing.scale, nothing.unscale, jax.jit(nothing.unscale), grad_fn):
        with pytest.raises(ValueError, match=r"Cannot scale .* by StaticLossScale\(0\): give a"):
            use(jnp.ones(2))


# Digits


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
            "b": jnp.asarray(rng.normal(size=3), jnp.float32),
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


# Cost


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


# Numbers are NumPy's until they are used


def test_numbers_are_kept_as_numpys_and_arrays_as_jaxs():
    for arguments in ((2**15, 3), (np.asarray(8.0), np.int64(1)), (np.float16(8), np.uint8(1))):
        scale = jmpx.DynamicLossScale(*arguments)
        for leaf, dtype in ((scale.loss_scale, np.float32), (scale.counter, np.int32)):
            assert type(leaf) is np.ndarray and leaf.shape == () and leaf.dtype == dtype
    scale = jmpx.DynamicLossScale(jnp.float16(8), jnp.asarray(1))
    assert isinstance(scale.loss_scale, jax.Array) and isinstance(scale.counter, jax.Array)
    assert isinstance(scale.adjust(True).loss_scale, jax.Array)


def test_no_backend_starts_before_a_step_runs():
    code = """
        import socket
        import jax, numpy as np
        import jmpx
        scales = jmpx.DynamicLossScale(2.0**15), jmpx.DynamicLossScale(np.float16(8)), \
            jmpx.DynamicLossScaling(2**15), jmpx.StaticLossScale(2.0**15), jmpx.NoOpLossScale()
        for scale in scales:
            jmpx.filter_grad(lambda w: w.sum(), scale, policy="c=f16")
            jmpx.filter_value_and_grad(lambda w: w.sum(), scale, policy="c=bf16")
            jax.tree.map(lambda x: x.dtype, jax.tree.leaves(scale)), repr(scale), scale == scale
        jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend runs
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        jax.distributed.initialize(address, num_processes=1, process_id=0)
        print(jax.device_count(), float(scales[0].adjust(False).loss_scale))
    """
    result = run_python("-W", "error", "-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "3 16384.0\n"


def step_of(loss_scale):
    """A train step that counts how often it is traced."""
    traces = []

    def step(loss_scale, w):
        traces.append(jax.tree.map(jax.typeof, loss_scale))
        loss_scale, _, grads = jmpx.filter_grad(lambda w: (w**2).sum(), loss_scale, policy="c=f16")(
            w
        )
        return loss_scale, w - grads

    return step, traces


@pytest.mark.parametrize("compiler", ["jit", "donated", "filter_jit", "donated filter_jit"])
def test_the_second_step_is_not_traced_anew(compiler, rng):
    step, traces = step_of(jmpx.DynamicLossScale())
    run = {
        "jit": lambda: jax.jit(step),
        "donated": lambda: jax.jit(step, donate_argnums=(0, 1)),
        "filter_jit": lambda: eqx.filter_jit(step),
        "donated filter_jit": lambda: eqx.filter_jit(step, donate="all"),
    }[compiler]()
    loss_scale, w = jmpx.DynamicLossScale(8.0, period=2), jnp.ones(3)
    for expected in (8, 16, 16, 32):
        loss_scale, w = run(loss_scale, w)
        assert value(loss_scale) == expected
    assert len(traces) == 1
    assert jmpx.DynamicLossScale(8.0, period=2) == jmpx.DynamicLossScale(jnp.float32(8), period=2)


TRIPS = {
    "scan": lambda s: jax.lax.scan(lambda s, f: (s.adjust(f), None), s, jnp.ones(3, bool))[0],
    "fori_loop": lambda s: jax.lax.fori_loop(0, 3, lambda _, s: s.adjust(True), s),
    "cond": lambda s: jax.lax.cond(jnp.array(True), lambda s: s.adjust(True), lambda s: s, s),
    "partition": lambda s: eqx.combine(*eqx.partition(s, eqx.is_array)),
    "arithmetic": lambda s: jax.tree.map(lambda x: x * 1, s),
    "device_put": lambda s: jax.device_put(s, jax.devices()[1]),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "optax": lambda s: optax.tree_utils.tree_get({"scale": s}, "scale"),
    "sharded": lambda s: jax.jit(
        lambda s: s,
        out_shardings=jax.tree.map(
            lambda _: jax.sharding.NamedSharding(
                jax.sharding.Mesh(jax.devices()[:2], "d"), jax.sharding.PartitionSpec()
            ),
            s,
        ),
    )(s),
}


@pytest.mark.parametrize("trip", TRIPS)
def test_numpys_numbers_go_where_arrays_go(trip):
    numbers = jmpx.DynamicLossScale(8.0, period=2)
    arrays = jax.tree.map(jnp.asarray, numbers)
    there, expected = TRIPS[trip](numbers), TRIPS[trip](arrays)
    assert_same_bits(there, expected)
    types = lambda tree: [jax.typeof(x) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert [t.weak_type for t in types(there)] == [False, False]
    assert [(t.dtype, t.shape) for t in types(there)] == [(t.dtype, t.shape) for t in types(arrays)]


# Flax


SAVED = {
    "no-op": (jmpx.NoOpLossScale(), jmpx.NoOpLossScale()),
    "static": (jmpx.StaticLossScale(8), jmpx.StaticLossScale(8)),
    "dynamic": (
        jmpx.DynamicLossScale(2.0**12, 5, period=9, min_loss_scale=0.25),
        jmpx.DynamicLossScale(period=9, min_loss_scale=0.25),
    ),
    "dynamic, on a device": (
        jax.tree.map(jnp.asarray, jmpx.DynamicLossScale(2.0**12, 5)),
        jmpx.DynamicLossScale(),
    ),
    "into another configuration": (
        jmpx.DynamicLossScale(2.0**12, 5),
        jmpx.DynamicLossScale(1.0, period=3, max_loss_scale=2.0**10),
    ),
}


def state_with(scaling, holder):
    params = {"w": jnp.ones(3)}
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
    if holder == "dict":
        return {"params": params, "scaling": scaling}
    if holder == "optax state":
        return (optimizer.init(params), scaling)

    class State(TrainState):
        scaling: jmpx.LossScale

    return State.create(apply_fn=None, params=params, tx=optimizer, scaling=scaling)


def scaling_of(state):
    if isinstance(state, dict):
        return state["scaling"]
    return state[1] if isinstance(state, tuple) else state.scaling


@pytest.mark.parametrize("holder", ["dict", "optax state", "TrainState"])
@pytest.mark.parametrize("name", SAVED)
def test_flax_saves_and_restores_a_state_with_a_loss_scale(name, holder):
    saved, template = SAVED[name]
    state = state_with(saved, holder)
    if holder == "TrainState":  # its class is made anew
        target = state.replace(scaling=template)
    else:
        target = state_with(template, holder)
    as_bytes = serialization.from_bytes(target, serialization.to_bytes(state))
    as_dict = serialization.from_state_dict(target, serialization.to_state_dict(state))
    for restored in (as_bytes, as_dict):
        there = scaling_of(restored)
        assert type(there) is type(saved)
        if isinstance(saved, jmpx.DynamicLossScale):
            expected = min(value(saved), template.max_loss_scale or HIGH)
            assert (value(there), int(there.counter)) == (expected, 5)
            assert dataclasses.replace(there, loss_scale=1.0, counter=0) == dataclasses.replace(
                template, loss_scale=1.0, counter=0
            )
        else:
            assert there == template
        there.adjust(True)


def test_flax_refuses_the_state_of_another_loss_scale():
    of_dynamic = serialization.to_bytes(jmpx.DynamicLossScale())
    with pytest.raises(ValueError, match=r"state of a NoOpLossScale to hold \[\], got"):
        serialization.from_bytes(jmpx.NoOpLossScale(), of_dynamic)
    with pytest.raises(ValueError, match="state of a DynamicLossScale to hold"):
        serialization.from_state_dict(jmpx.DynamicLossScale(), {"scale": 1.0, "counter": 0})


@pytest.mark.parametrize(
    "imports",
    [
        "import jmpx, flax",  # jmpx first, and no adapter
        "import flax, jmpx",
        "import jmpx; early = jmpx.StaticLossScale(8); import jmpx.flax",
    ],
)
def test_flax_knows_loss_scales_in_every_order_of_imports(imports):
    code = f"""
        {imports}
        from flax import serialization
        scale = globals().get("early") or jmpx.StaticLossScale(8)
        assert serialization.from_bytes(scale, serialization.to_bytes(scale)) == scale
    """
    result = run_python("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr


def test_a_registration_of_the_users_own_stays():
    code = """
        import flax.serialization, jmpx
        flax.serialization.register_serialization_state(
            jmpx.DynamicLossScale, lambda s: {"mine": s.loss_scale}, lambda s, d: s
        )
        assert list(flax.serialization.to_state_dict(jmpx.DynamicLossScale())) == ["mine"]
    """
    result = run_python("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr


@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_orbax_saves_numpys_numbers_and_restores_into_them(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    fresh = jmpx.DynamicLossScale(2.0**12, 3, period=5)
    with checkpoint.StandardCheckpointer() as checkpointer:
        for name, saved in {"fresh": fresh, "stepped": fresh.adjust(True)}.items():
            checkpointer.save(tmp_path / name, {"scale": saved})
            checkpointer.wait_until_finished()
            template = {"scale": jmpx.DynamicLossScale(period=7)}
            restored = checkpointer.restore(tmp_path / name, template)["scale"]
            assert (value(restored), restored.counter, restored.period) == (4096, saved.counter, 7)
            assert restored.adjust(False).loss_scale == 2048


# Leaves that JAX cannot hold


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_all_finite_of_long_doubles(dtype, shape):
    beyond_float64 = np.full(shape, np.longdouble(10) ** 400, dtype)
    check = {"long": beyond_float64[()], "float": jnp.ones(2)}
    for run in (jmpx.all_finite, lambda t: jax.jit(lambda w: jmpx.all_finite({**t, "w": w}))(1.0)):
        assert run(check)
        for bad in (np.inf, np.nan):
            assert bool(run({**check, "long": np.full(shape, bad, dtype)})) == (0 in shape)
        assert not run({**check, "float": jnp.array([1.0, jnp.inf])})


OUTSIDE = {
    "text": (np.array(["a", "b"]), np.array(["c", "long"])),
    "one text": (np.str_("a"), np.str_("b")),
    "bytes": (np.array([b"a"]), np.array([b"b"])),
    "dates": (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
    "many dates": (np.arange(3).astype("M8[s]"), np.arange(1, 4).astype("M8[s]")),
    "durations": (np.timedelta64(1, "s"), np.timedelta64(2, "h")),
    "objects": (np.array([print, None]), np.array([None, print])),
    "long doubles": (np.longdouble(1), np.longdouble(2)),
    "a number and a text": (np.float32(1), np.str_("1")),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_select_tree_of_what_jax_cannot_hold(name):
    a, b = ({"w": jnp.full(2, float(w)), "x": x} for w, x in enumerate(OUTSIDE[name]))
    for true, false in ((True, False), (np.True_, np.False_), (jnp.array(True), jnp.array(False))):
        assert jmpx.select_tree(true, a, b)["x"] is a["x"]
        picked = jmpx.select_tree(false, a, b)
        assert picked["x"] is b["x"] and (picked["w"] == 1).all()
    picked = []

    def step(w, flag):
        picked.append(jmpx.select_tree(False, {**a, "w": w}, b)["x"])  # no tracer
        if name not in ("objects", "a number and a text"):  # equal ones are no conflict
            equal = {"w": w, "x": pickle.loads(pickle.dumps(a["x"]))}
            assert jmpx.select_tree(flag, {"w": w, "x": a["x"]}, equal)["x"] is a["x"]
        return jmpx.select_tree(flag, a, b)["w"]

    with pytest.raises(TypeError, match=r"by a traced flag between .* at tree\['x'\]") as error:
        jax.jit(step)(jnp.ones(2), True)
    message = str(error.value).splitlines()[0]  # JAX adds lines to what is raised in jit
    assert message.endswith("outside of jax.jit, or leave them out of the trees.")
    assert picked[0] is b["x"]


# MPX's trajectory


@pytest.mark.parametrize("factor", [2, 4, 3])
@pytest.mark.parametrize("start", [2.0**4, 2.0**15, 60_000.0])
def test_dynamic_loss_scaling_takes_mpxs_steps(start, factor, rng):
    mpx = pytest.importorskip("mpx")
    theirs = mpx.DynamicLossScaling(jnp.float32(start), jnp.float32(2), factor, period=2)
    ours = jmpx.DynamicLossScaling(jnp.float32(start), jnp.float32(2), factor, period=2)
    seen = set()
    flags = [*[True] * 26, *[False] * 16, *(rng.random(40) < 0.8)]
    for finite in flags:
        theirs, ours = leniently(theirs.adjust)(jnp.array(bool(finite))), ours.adjust(bool(finite))
        assert (value(ours), ours.counter) == (float(theirs.loss_scaling), theirs.counter)
        seen.add(value(ours))
    assert 65504.0 in seen and 2.0 in seen  # the ceiling and the floor
    assert value(jmpx.DynamicLossScale(65504.0, period=1).adjust(True)) == 2 * 65504
