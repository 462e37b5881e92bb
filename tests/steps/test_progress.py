"""`check_progress` tells that a run has diverged, `nonfinite` where, and `metrics` what to plot."""

# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import json
import math
import re
import socket

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import finish, normal, start_python
from helpers.maps import AXIS, mesh_of
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx

NO_SCALE = jmpx.NoOpLossScale()

# nonfinite


def counts_of(tree):
    return {path: tuple(map(int, counts)) for path, counts in tree.items()}


DTYPES = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_counts_as_numpy_does(dtype, rng):
    jit = DTYPES.index(dtype) % 2 == 0
    dtype = jnp.dtype(dtype)
    choices = [0.0, 1.0, np.nan] + ([] if dtype.name == "float8_e4m3fn" else [np.inf, -np.inf])
    values = rng.choice(choices, size=(7, 5))
    if dtype == np.complex64:
        values = jax.lax.complex(*(rng.choice(choices, size=(7, 5)).astype("f4") for _ in "ab"))
    leaf = jnp.asarray(values, dtype)
    wide = np.asarray(leaf).astype(np.complex128 if dtype == np.complex64 else np.float64)
    func = jax.jit(jmpx.inspect.nonfinite) if jit else jmpx.inspect.nonfinite
    found = func({"a": [jnp.ones(3, dtype), leaf]})
    expected = {"['a'][0]": (0, 0), "['a'][1]": (np.isinf(wide).sum(), np.isnan(wide).sum())}
    assert counts_of(found) == expected
    for counts in found.values():
        assert isinstance(counts, jmpx.inspect.NonfiniteCounts)
        assert all(count.dtype == jnp.int32 and count.shape == () for count in counts)


def test_other_leaves_are_left_out_and_those_outside_of_jax_are_counted():
    wide = np.longdouble([1, np.inf, np.nan])
    tree = {"wide": wide, "f": 1.0, "nan": math.nan, "z": 2j, "n": 3, "key": jax.random.key(0)}
    tree |= {"text": np.array("x"), "call": print, "none": None, "ints": jnp.arange(2)}
    expected = {"['f']": (0, 0), "['nan']": (0, 1), "['wide']": (1, 1), "['z']": (0, 0)}
    assert counts_of(jmpx.inspect.nonfinite(tree)) == expected
    assert jmpx.inspect.nonfinite({"n": 1}) == jmpx.inspect.nonfinite(None) == {}
    assert counts_of(jmpx.inspect.nonfinite(jnp.inf)) == {"": (1, 0)}


LEAVES = st.lists(
    st.lists(st.floats(width=16), min_size=0, max_size=4).map(lambda x: np.array(x, np.float16)),
    max_size=4,
)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(leaves=LEAVES)
def test_it_agrees_with_all_finite(leaves):
    counts = counts_of(jmpx.inspect.nonfinite(leaves))
    assert (sum(map(sum, counts.values())) == 0) == bool(jmpx.all_finite(leaves))


def test_it_costs_two_reductions_a_leaf():
    tree = {str(i): jnp.ones(3, jnp.float16) for i in range(5)}
    text = str(jax.make_jaxpr(jmpx.inspect.nonfinite)(tree))
    assert len(re.findall(r"= reduce_sum\[", text)) == 10
    assert "callback" not in text


def test_counts_do_not_wrap_around(monkeypatch):
    large = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float16)  # too large to make
    text = str(jax.make_jaxpr(jmpx.inspect.nonfinite)([large]))
    assert not re.search(r":i32\[\] = reduce_sum", text)
    monkeypatch.setattr("jmpx._steps.progress.LARGEST_COUNT", 200)
    tree = [jnp.full(200, jnp.nan), jnp.full(300, jnp.nan), jnp.ones(300).at[3].set(jnp.nan)]
    nans = [int(counts.nan) for counts in jmpx.inspect.nonfinite(tree).values()]
    assert nans == [200, 73, 1]


# Where states are


def after(consecutive, optimizer=None, total=None):
    state = jmpx.skip_nonfinite(optimizer or optax.sgd(0.1)).init({"w": jnp.ones(2)})
    total = consecutive if total is None else total
    counts = {"total_skipped": jnp.int32(total), "consecutive_skipped": jnp.int32(consecutive)}
    return state._replace(**counts)


def nnx_optimizer(count):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jmpx.skip_nonfinite(optax.adam(0.1)), wrt=nnx.Param)
    optimizer.opt_state.consecutive_skipped[...] = jnp.int32(count)
    optimizer.opt_state.total_skipped[...] = jnp.int32(count)
    return optimizer


STATES = {  # each after so many steps that were skipped
    "alone": after,
    "chain": lambda n: (optax.EmptyState(), (after(n), optax.EmptyState())),
    "several": lambda n: {"encoder": after(0), "decoder": [after(n), after(n - 1)]},
    "of two networks": lambda n: {"actor": after(n, total=0), "critic": after(0, total=n)},
    "stack": lambda n: jax.tree.map(lambda a, b: jnp.stack([a, b]), after(n), after(0)),
    "one in another": lambda n: after(0)._replace(inner_state=(after(n),)),
    "of MultiSteps": lambda n: after(n, optax.MultiSteps(optax.sgd(0.1), 2)),
    "a train state": lambda n: {"params": {"w": jnp.ones(3)}, "opt_state": after(n), "step": 4},
    "of NNX": nnx_optimizer,
    "a checkpoint": lambda n: {"consecutive_skipped": np.int32(n), "total_skipped": np.int32(n)},
    "numbers": lambda n: after(0)._replace(consecutive_skipped=n, total_skipped=n),
    "of NumPy": lambda n: jax.tree.map(np.asarray, after(n)),
}


def message(*args, **options):
    with pytest.raises(FloatingPointError) as error:
        jmpx.inspect.check_progress(*args, **options)
    text = str(error.value)
    assert "\n" not in text and text.endswith(".") and text.count(". ") == 0
    return text


def numbers(metrics):
    """Returns the numbers of metrics, which are what they say they are."""
    for name, value in metrics.items():
        assert isinstance(value, jax.Array) and value.shape == () and not value.weak_type
        assert value.dtype == ("float32" if name == "loss_scale" else "int32")
    return {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("name", STATES)
def test_states_are_found_in_any_pytree(name):
    jmpx.inspect.check_progress(STATES[name](3), NO_SCALE, max_consecutive=3)
    state = STATES[name](4)
    assert "Skipped 4" in message(state, NO_SCALE, max_consecutive=3)
    assert numbers(jmpx.metrics(state)) == {"total_skipped": 4, "consecutive_skipped": 4}


@pytest.mark.parametrize("spec", [P(), P(AXIS)])
def test_states_on_several_devices(spec):
    # Replicated as under jit, and one for each device as under pmap: the longest row counts.
    sharding, is_one = NamedSharding(mesh_of(4), spec), spec == P()
    count = jnp.int32(7) if is_one else jnp.array([0, 7, 2, 0], jnp.int32)
    scale = jnp.float32(4) if is_one else jnp.array([4, 2, 4, 4], jnp.float32)
    state = after(0)._replace(consecutive_skipped=jax.device_put(count, sharding))
    leaves = [jax.device_put(scale, sharding), jnp.int32(0)]
    scaling = jax.tree.unflatten(jax.tree.structure(jmpx.DynamicLossScale()), leaves)
    jmpx.inspect.check_progress(state, scaling, max_consecutive=7)
    text = message(state, scaling, max_consecutive=6)
    scale, member = (4, "") if is_one else (2, " in member 1 of 4 (counted from 0)")
    assert text.startswith(f"Skipped 7 optimizer steps in a row{member}, more than ")
    assert f"max_consecutive=6, with the loss scale 'dynamic,init={scale}': " in text


# check_progress


@pytest.mark.parametrize("most", [1, 50, np.int64(7), 2**31 - 2])
def test_one_more_step_than_the_limit_raises(most):
    jmpx.inspect.check_progress(after(0), NO_SCALE, max_consecutive=most)
    jmpx.inspect.check_progress(after(most), NO_SCALE, max_consecutive=most)
    text = message(after(most + 1), NO_SCALE, max_consecutive=most)
    assert f"Skipped {most + 1} optimizer steps in a row, more than max_consecutive={most}," in text


def test_the_default_limit_lets_a_scale_of_2_to_the_24_fall():
    scaling, steps = jmpx.DynamicLossScale(2.0**24, hysteresis=4), 0
    while scaling.loss_scale != 1:
        scaling, steps = scaling.adjust(False), steps + 1
    jmpx.inspect.check_progress(after(2 * steps - 10), scaling)
    assert "max_consecutive=50" in message(after(51), scaling)


def restored(scaling, number):
    """A scale as a checkpoint restores it: not through the constructor, which clips."""
    leaves, structure = jax.tree.flatten(scaling)
    return jax.tree.unflatten(structure, [jnp.float32(number), *leaves[1:]])


def test_the_message_tells_the_scale_and_the_first_gradients_that_are_not_finite(rng):
    for scaling, expected in [
        (NO_SCALE, "=50, with the loss scale 'none': lower the learning rate, "),
        (restored(jmpx.DynamicLossScale(), 0.125), "'dynamic,init=1', which is at its floor"),
        (restored(jmpx.DynamicLossScale(), math.nan), "'DynamicLossScale("),
    ]:
        assert expected in message(after(51), scaling)
    grads = {"a": normal(rng, 4), "b": [jnp.array([jnp.nan])], "n": None}
    assert "infinities or NaN in grads['b'][0]: " in message(after(51), NO_SCALE, grads)
    assert "'none': lower" in message(after(51), NO_SCALE, {"a": grads["a"]})
    # Gradients that are not finite are no error by themselves.
    jmpx.inspect.check_progress(after(50), NO_SCALE, grads)


FLOORS = {  # loss scales, and whether they can fall no further
    "the default": (jmpx.DynamicLossScale(1.0), True),
    "above it": (jmpx.DynamicLossScale(2.0), False),
    "a lower floor": (jmpx.DynamicLossScale(1.0, min_loss_scale=2.0**-7), False),
    "at a lower floor": (jmpx.DynamicLossScale(2.0**-7, min_loss_scale=2.0**-7), True),
    "without a floor": (jmpx.DynamicLossScale(2.0**-126, min_loss_scale=0), False),
    "static": (jmpx.StaticLossScale(1.0), False),
    "of JMP": (jmp.DynamicLossScale(jnp.float32(1)), False),
}


@pytest.mark.parametrize("name", FLOORS)
def test_the_message_says_that_a_scale_can_fall_no_further(name):
    scaling, is_at_floor = FLOORS[name]
    text = message(after(51), scaling)
    floor = ", which is at its floor, min_loss_scale, where gradients still are not finite: if "
    floor += "the parameters are finite, lower that floor to the scale that jmpx.inspect.ranges "
    assert (floor in text) == ("floor" in text) == is_at_floor
    assert "lower the learning rate" in text


@pytest.mark.parametrize("name", FLOORS)
def test_the_message_says_that_a_dynamic_scale_that_still_falls_began_too_high(name):
    scaling, is_at_floor = FLOORS[name]
    falls = isinstance(scaling, jmpx.DynamicLossScale) and not is_at_floor
    assert ("if it fell in each of these steps, it began" in message(after(51), scaling)) == falls


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("counts", ["as the scale", "one", "another shape"])
def test_a_stacked_scale_is_written_as_one_number(size, counts):
    """As under `jax.pmap`, also over one device."""
    scales = jnp.array([8.0, 2.0, 4.0, 16.0][:size])
    scaling = jax.vmap(jmpx.DynamicLossScale)(scales)
    shape = {"as the scale": (size,), "one": (), "another shape": (3,)}[counts]
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), after(51))
    expected = scales[0] if counts == "as the scale" or size == 1 else scales.min()
    assert f"with the loss scale 'dynamic,init={int(expected)}': if it" in message(state, scaling)


def test_under_pmap_the_message_is_the_one_of_a_replica(rng):
    optimizer, params = jmpx.skip_nonfinite(optax.sgd(1e-3)), normal(rng, 1, 3)
    state, scaling = jax.vmap(optimizer.init)(params), jmpx.DynamicLossScale(2.0**34)
    scaling = jax.tree.map(lambda x: jnp.asarray(x)[None], scaling)

    @jax.pmap
    def step(params, state, scaling):
        loss = lambda w: (w * 3e30).sum()  # noqa: E731
        grad_fn = jmpx.grad(loss, scaling, policy="f32")
        scaling, finite, grads = grad_fn(params)
        params, state = jmpx.optimizer_update(params, optimizer, state, grads, finite)
        return params, state, scaling

    for _ in range(4):
        params, state, scaling = step(params, state, scaling)
    text = message(state, scaling, max_consecutive=3)
    assert "Skipped 4 optimizer steps in a row, more than max_consecutive=3, " in text
    assert "with the loss scale 'dynamic,init=2**30': if it fell in each" in text


@pytest.mark.parametrize("shape", [(8,), (2, 3)])
def test_the_members_of_an_ensemble_that_skip_are_named(shape, rng):
    """Forces of networks, of which some start where float16 overflows at every scale from 1 on."""
    size = math.prod(shape)
    bad = sorted(map(int, rng.choice(size, int(rng.integers(1, 4)), replace=False)))
    optimizer, params = jmpx.skip_nonfinite(optax.sgd(1e-3)), normal(rng, *shape, 3)
    scales = np.full(shape, 64.0, np.float32)
    factors = np.ones(size, np.float32)
    factors[bad] = 1e6

    def loss_fn(w, factor):
        return jnp.sum((w.astype(jnp.float16) * factor.astype(jnp.float16)).astype(jnp.float32))

    def step(w, state, scaling, factor):
        grad_fn = jmpx.grad(loss_fn, scaling, policy="full", uncast=1)
        scaling, finite, grads = grad_fn(w, factor)
        w, state = jmpx.optimizer_update(w, optimizer, state, grads, finite)
        return w, state, scaling

    def start(w, scale):
        return w, optimizer.init(w), jmpx.DynamicLossScale(scale)

    several = step
    for _ in shape:
        several, start = jax.vmap(several), jax.vmap(start)
    run, state = jax.jit(several), start(params, scales)
    for _ in range(9):
        state = run(*state, factors.reshape(shape))
    text = message(*state[1:], max_consecutive=8)
    named = ", ".join(map(str, bad))
    assert f"Skipped 9 optimizer steps in a row in member {named} of {size} (counted fr" in text
    assert "'dynamic,init=1', which is at its floor" in text
    everyone = state[1]._replace(consecutive_skipped=jnp.full(shape, 99))
    assert "in a row, more" in message(everyone, state[2], max_consecutive=8)


@pytest.mark.thorough
def test_it_computes_nothing_on_the_device():
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    grads = {"w": jnp.ones(2)}
    states = [(after(n), jax.device_put(jmpx.DynamicLossScale(2.0**8))) for n in (3, 4)]
    jax.clear_caches()  # so that any operation would be traced and compiled again
    events.clear()
    jmpx.inspect.check_progress(*states[0], grads, max_consecutive=3)
    message(*states[1], max_consecutive=3)
    assert events == []
    message(*states[1], grads, max_consecutive=3)  # it looks at gradients for the error alone
    assert events


def test_it_is_refused_under_jit():
    check = lambda state: jmpx.inspect.check_progress(state, NO_SCALE)  # noqa: E731
    with pytest.raises(TypeError, match="traced array"):
        jax.jit(check)(after(99))
    shapes = jax.eval_shape(after, 1)
    with pytest.raises(TypeError, match="Expected the state of an optimizer of jmpx.skip_nonfinit"):
        check(shapes)


PROCESS = """
import json, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
import jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jmpx

mesh = Mesh(np.array(jax.devices()), "d")
shards, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ("d", ""))
values = np.array([1, 1, np.inf, np.nan], np.float32)
grads = {"w": jax.make_array_from_callback((4,), shards, lambda index: values[index])}
optimizer = jmpx.skip_nonfinite(optax.sgd(0.1))
state, scaling = jax.jit(
    lambda: (optimizer.init({"w": jnp.ones(4)}), jmpx.DynamicLossScale(4.0)),
    out_shardings=everywhere,
)()

@jax.jit
def step(state, scaling, grads):
    _, state = optimizer.update(grads, state)
    return state, scaling.adjust(state.grads_finite)

for number in range(6):
    state, scaling = step(state, scaling, grads)
    try:
        jmpx.inspect.check_progress(state, scaling, grads, max_consecutive=3)
    except FloatingPointError as error:
        jax.block_until_ready(state)
        print(json.dumps([number, str(error)]))
        break
jax.distributed.shutdown()
"""


@pytest.mark.slow  # two processes
def test_every_process_raises_at_the_same_step():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    flags = "--xla_force_host_platform_device_count=2"
    processes = [
        start_python("-c", PROCESS, str(number), port, xla_flags=flags) for number in range(2)
    ]
    told = []
    for process in processes:
        result = finish(process)
        assert result.returncode == 0, result.stderr
        told.append(json.loads(result.stdout.splitlines()[-1]))
    start = "Skipped 4 optimizer steps in a row, more than max_consecutive=3, "
    assert all(number == 3 and text.startswith(start) for number, text in told)
    assert "infinities" not in told[0][1]
    assert "infinities or NaN in grads['w']: " in told[1][1]


# metrics


KEYS = ["loss_scale", "total_skipped", "consecutive_skipped"]
SCALES = {
    "none": (NO_SCALE, 1),
    "static": (jmpx.StaticLossScale(1024), 1024),
    "dynamic": (jmpx.DynamicLossScale(2.0**15), 2**15),
    "below 1": (jmpx.DynamicLossScale(2.0**-3, min_loss_scale=2.0**-5), 2**-3),
    # What is restored from a checkpoint may be beyond the bounds, of which the nearer one counts.
    "beyond": (restored(jmpx.DynamicLossScale(max_loss_scale=64.0), 2**15), 64),
    "jmp": (jmp.DynamicLossScale(jnp.float32(512)), 512),
    "jmp, none": (jmp.NoOpLossScale(), 1),
}


@pytest.mark.parametrize("scale", SCALES)
def test_the_scale_is_the_one_that_the_next_step_scales_by(scale):
    scaling, expected = SCALES[scale]
    runs = [jmpx.metrics] if scale.startswith("jmp") else [jmpx.metrics, jax.jit(jmpx.metrics)]
    for run in runs:
        assert numbers(run(loss_scale=scaling)) == {"loss_scale": expected}
        found = run(after(2, total=3), scaling)
        assert list(found) == (KEYS if run is jmpx.metrics else sorted(KEYS))  # jit sorts keys
        assert numbers(found) == dict(zip(KEYS, (expected, 3, 2), strict=True))


def test_nothing_is_made_up():
    plain = optax.adam(0.1).init({"w": jnp.ones(2)})  # steps are skipped, but not counted
    assert numbers(jmpx.metrics(plain, NO_SCALE)) == {"loss_scale": 1}
    assert list(jmpx.metrics(after(0))) == KEYS[1:]


def test_of_a_stack_of_scales_the_smallest_is_told():
    scales = jax.vmap(jmpx.DynamicLossScale)(jnp.array([8.0, 2.0, 4.0]))
    assert numbers(jmpx.metrics(None, scales)) == {"loss_scale": 2}
    found = jax.vmap(lambda scaling: jmpx.metrics(None, scaling))(scales)
    assert found["loss_scale"].tolist() == [8, 2, 4]


@pytest.mark.parametrize("vma", [True, False])
def test_each_device_tells_its_own_and_nothing_is_sent(vma):
    def of_device(total, scale):
        one = jmpx.DynamicLossScale(scale[0])
        states = after(5, total=0), after(0)._replace(total_skipped=total[0])
        return jax.tree.map(lambda x: x[None], jmpx.metrics(states, one))

    args = jnp.array([3, 1], jnp.int32), jnp.array([8.0, 2.0])
    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": vma}
    compiled = jax.jit(jax.shard_map(of_device, mesh=mesh_of(2), **specs)).lower(*args).compile()
    assert "all-" not in str(compiled.as_text())
    found = {name: value.tolist() for name, value in compiled(*args).items()}
    assert found == dict(zip(KEYS, ([8, 2], [3, 1], [5, 5]), strict=True))
