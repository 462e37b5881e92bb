"""`check_progress`, which tells that a run has diverged, and `nonfinite`, which tells where."""

# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import json
import math
import re
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import finish, normal, start_python
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmpx

# nonfinite

DTYPES = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn", "complex64"]


def counts_of(tree):
    return {path: tuple(map(int, counts)) for path, counts in tree.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_counts_as_numpy_does(dtype, jit, rng):
    dtype = jnp.dtype(dtype)
    choices = [0.0, 1.0, np.nan] + ([] if dtype.name == "float8_e4m3fn" else [np.inf, -np.inf])
    values = rng.choice(choices, size=(7, 5))
    if dtype == np.complex64:
        values = jax.lax.complex(*(rng.choice(choices, size=(7, 5)).astype("f4") for _ in "ab"))
    leaf = jnp.asarray(values, dtype)
    wide = np.asarray(leaf).astype(np.complex128 if dtype == np.complex64 else np.float64)
    func = jax.jit(jmpx.inspect.nonfinite) if jit else jmpx.inspect.nonfinite
    found = func({"a": [jnp.ones(3, dtype), leaf]})
    assert counts_of(found) == {
        "['a'][0]": (0, 0),
        "['a'][1]": (np.isinf(wide).sum(), np.isnan(wide).sum()),
    }
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


# check_progress: what it raises


def state_after(count, optimizer=None):
    state = jmpx.skip_nonfinite(optimizer or optax.sgd(0.1)).init({"w": jnp.ones(2)})
    return state._replace(consecutive_skipped=jnp.int32(count))


def message(*args, **options):
    with pytest.raises(FloatingPointError) as error:
        jmpx.inspect.check_progress(*args, **options)
    text = str(error.value)
    assert "\n" not in text and text.endswith(".") and text.count(". ") == 0
    return text


@pytest.mark.parametrize("most", [1, 2, 50, np.int64(7), 2**31 - 2])
def test_one_more_step_than_the_limit_raises(most):
    jmpx.inspect.check_progress(state_after(0), jmpx.NoOpLossScale(), max_consecutive=most)
    jmpx.inspect.check_progress(state_after(most), jmpx.NoOpLossScale(), max_consecutive=most)
    text = message(state_after(most + 1), jmpx.NoOpLossScale(), max_consecutive=most)
    assert f"Skipped {most + 1} optimizer steps in a row, more than max_consecutive={most}," in text


def test_the_default_limit_lets_a_scale_of_2_to_the_24_fall():
    scaling, steps = jmpx.DynamicLossScale(2.0**24, hysteresis=4), 0
    while scaling.loss_scale != 1:
        scaling, steps = scaling.adjust(False), steps + 1
    jmpx.inspect.check_progress(state_after(2 * steps - 10), scaling)
    assert "max_consecutive=50" in message(state_after(51), scaling)


def restored(scaling, number):
    """A scale as a checkpoint restores it: not through the constructor, which clips."""
    leaves, structure = jax.tree.flatten(scaling)
    return jax.tree.unflatten(structure, [jnp.float32(number), *leaves[1:]])


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (jmpx.NoOpLossScale(), "=50, with the loss scale 'none': lower the learning rate, "),
        (jmpx.StaticLossScale(2.0**20), "with the loss scale 'static=1048576': lower"),
        (jmpx.DynamicLossScale(2.0**10), "'dynamic,init=1024': lower the learning rate, return"),
        (restored(jmpx.DynamicLossScale(), 0.125), "'dynamic,init=1': "),
        (restored(jmpx.DynamicLossScale(), math.nan), "'DynamicLossScale("),
        (jmpx.DynamicLossScale(2.0**-20, min_loss_scale=2.0**-20), "'dynamic,init=2**-20,min="),
    ],
)
def test_the_message_tells_the_scale(scaling, expected):
    assert expected in message(state_after(51), scaling)


def test_the_message_names_the_first_gradients_that_are_not_finite(rng):
    grads = {
        name: normal(rng, 4).at[:2].set(jnp.array([jnp.inf, jnp.nan])) for name in "abcdefghijklmno"
    }
    grads |= {"a": normal(rng, 4), "c": normal(rng, 2).at[0].set(-jnp.inf), "n": None}
    text = message(state_after(51), jmpx.NoOpLossScale(), grads)
    named = "grads['b'], grads['c'], grads['d'] and 10 more: "
    assert f"the loss scale 'none', and infinities or NaN in {named}lower" in text
    few = {"a": grads["a"], "b": [jnp.array([jnp.nan])]}
    text = message(state_after(51), jmpx.NoOpLossScale(), few)
    assert "infinities or NaN in grads['b'][0]: " in text
    text = message(state_after(51), jmpx.NoOpLossScale(), {"a": grads["a"]})
    assert "the loss scale 'none': lower" in text
    # Gradients that are not finite are no error by themselves.
    jmpx.inspect.check_progress(state_after(50), jmpx.NoOpLossScale(), grads)


# check_progress: where it finds states


def inner(count):
    return state_after(count, optax.adam(0.1))


def nnx_optimizer(count):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jmpx.skip_nonfinite(optax.adam(0.1)), wrt=nnx.Param)
    optimizer.opt_state.consecutive_skipped[...] = jnp.int32(count)
    return optimizer


def labeled(count):
    groups = {"a": jmpx.skip_nonfinite(optax.sgd(0.1)), "b": optax.adam(0.1)}
    state = optax.multi_transform(groups, {"x": "a", "y": "b"}).init({"x": 1.0, "y": 2.0})
    return optax.tree_utils.tree_set(state, consecutive_skipped=jnp.int32(count))


STATES = {
    "alone": inner,
    "chain": lambda n: (optax.EmptyState(), (inner(n), optax.EmptyState())),
    "of groups": labeled,
    "several": lambda n: {"encoder": inner(0), "decoder": [inner(n), inner(n - 1)]},
    "one in another": lambda n: inner(0)._replace(inner_state=(inner(n),)),
    "of MultiSteps": lambda n: state_after(n, optax.MultiSteps(optax.sgd(0.1), 2)),
    "a train state": lambda n: {"params": {"w": jnp.ones(3)}, "opt_state": inner(n), "step": 4},
    "of NNX": nnx_optimizer,
    "of NNX, split": lambda n: nnx.split(nnx_optimizer(n))[1],
    "a checkpoint": lambda n: {"inner_state": [], "consecutive_skipped": np.int32(n)},
    "numbers": lambda n: inner(0)._replace(consecutive_skipped=n),
    "of NumPy": lambda n: jax.tree.map(np.asarray, inner(n)),
}


@pytest.mark.parametrize("name", STATES)
def test_states_are_found_in_any_pytree(name):
    jmpx.inspect.check_progress(STATES[name](3), jmpx.NoOpLossScale(), max_consecutive=3)
    assert "Skipped 4" in message(STATES[name](4), jmpx.NoOpLossScale(), max_consecutive=3)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("d")])
def test_states_on_several_devices(spec):
    # Replicated as under jit, and one for each device as under pmap: the longest row counts.
    sharding = NamedSharding(Mesh(jax.devices()[:4], "d"), spec)
    count = jnp.int32(7) if spec == PartitionSpec() else jnp.array([0, 7, 2, 0], jnp.int32)
    scale = jnp.float32(4) if spec == PartitionSpec() else jnp.array([4, 2, 4, 4], jnp.float32)
    state = inner(0)._replace(consecutive_skipped=jax.device_put(count, sharding))
    leaves = [jax.device_put(scale, sharding), jnp.int32(0)]
    scaling = jax.tree.unflatten(jax.tree.structure(jmpx.DynamicLossScale()), leaves)
    jmpx.inspect.check_progress(state, scaling, max_consecutive=7)
    text = message(state, scaling, max_consecutive=6)
    expected = "in a row, more than max_consecutive=6, with the loss scale 'dynamic,init=4': "
    if spec != PartitionSpec():
        expected = "max_consecutive=6, with the loss scale 'DynamicLossScale(loss_scale=Array("
    assert text.startswith("Skipped 7 ") and expected in text


# check_progress: what it costs


@pytest.mark.thorough
def test_it_computes_nothing_on_the_device():
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    grads = {"w": jnp.ones(2)}
    states = [(state_after(n), jax.device_put(jmpx.DynamicLossScale(2.0**8))) for n in (3, 4)]
    jax.clear_caches()  # so that any operation would be traced and compiled again
    events.clear()
    jmpx.inspect.check_progress(*states[0], grads, max_consecutive=3)
    message(*states[1], max_consecutive=3)
    assert events == []
    message(*states[1], grads, max_consecutive=3)  # it looks at gradients for the error alone
    assert events


# check_progress: what it refuses


@pytest.mark.parametrize(
    ("args", "options", "error", "expected"),
    [
        (({"m": 1}, jmpx.NoOpLossScale()), {}, TypeError, "got a dict without one: wrap the"),
        ((optax.adam(1.0).init(1.0), 1.0), {}, TypeError, "a loss scale as the second .* got 1.0"),
        ((jmpx.NoOpLossScale(), inner(1)), {}, TypeError, "Expected a loss scale as the second"),
        ((inner(1), jmpx.NoOpLossScale), {}, TypeError, "a loss scale as the second .* got <class"),
        ((inner(1), None), {}, TypeError, "Expected a loss scale as the second .* got None"),
        (
            (jax.eval_shape(inner, 1), jmpx.NoOpLossScale()),
            {},
            TypeError,
            "Expected the state of an optimizer of jmpx.skip_nonfinite",
        ),
        *(
            ((inner(1), jmpx.NoOpLossScale()), {"max_consecutive": n}, error, expected)
            for n, error, expected in [
                (0, ValueError, "max_consecutive to be between 1 and 2.*31 - 1, got 0"),
                (-5, ValueError, "got -5"),
                (2**31, ValueError, "got 2147483648"),
                (True, TypeError, "max_consecutive to be a whole number, got True"),
                (2.0, TypeError, "got 2.0"),
                ("3", TypeError, "got '3'"),
                (None, TypeError, "got None"),
            ]
        ),
    ],
)
def test_bad_arguments(args, options, error, expected):
    with pytest.raises(error, match=expected) as caught:
        jmpx.inspect.check_progress(*args, **options)
    assert "\n" not in str(caught.value)


def test_it_is_refused_under_jit():
    check = lambda state: jmpx.inspect.check_progress(state, jmpx.NoOpLossScale())  # noqa: E731
    for transform in (jax.jit, lambda f: lambda x: jax.eval_shape(f, x)):
        with pytest.raises(TypeError, match="traced array"):
            transform(check)(inner(99))


# Several processes

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
