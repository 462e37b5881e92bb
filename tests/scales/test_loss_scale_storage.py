"""Numbers of a loss scale on their way: kept, restored, saved by Flax and Orbax."""

import dataclasses
import pickle
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from helpers import assert_same_bits, run_python
from helpers.training import LARGEST_SCALE, value

import jmpx


def test_numbers_are_kept_as_numpys_and_arrays_as_jaxs():
    for arguments in ((2**15, 3), (np.asarray(8.0), np.int64(1)), (np.float16(8), np.uint8(1))):
        scale = jmpx.DynamicLossScale(*arguments)
        for leaf, dtype in ((scale.loss_scale, np.float32), (scale.counter, np.int32)):
            assert type(leaf) is np.ndarray and leaf.shape == () and leaf.dtype == dtype
    scale = jmpx.DynamicLossScale(jnp.float16(8), jnp.asarray(1))
    assert isinstance(scale.loss_scale, jax.Array) and isinstance(scale.counter, jax.Array)
    assert isinstance(scale.adjust(True).loss_scale, jax.Array)


@pytest.mark.thorough
def test_no_backend_starts_before_a_step_runs():
    code = """
        import socket
        import jax, numpy as np
        import jmpx
        scales = jmpx.DynamicLossScale(2.0**15), jmpx.DynamicLossScale(np.float16(8)), \
            jmpx.mpx.DynamicLossScaling(2**15), jmpx.StaticLossScale(2.0**15), jmpx.NoOpLossScale()
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


@pytest.mark.sampled(3)
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
        target = state.replace(scaling=template)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        target = state_with(template, holder)
    as_bytes = serialization.from_bytes(target, serialization.to_bytes(state))
    as_dict = serialization.from_state_dict(target, serialization.to_state_dict(state))
    for restored in (as_bytes, as_dict):
        there = scaling_of(restored)
        assert type(there) is type(saved)
        if isinstance(saved, jmpx.DynamicLossScale):
            expected = min(value(saved), template.max_loss_scale or LARGEST_SCALE)
            assert (value(there), int(there.counter)) == (expected, 5)
            assert dataclasses.replace(there, loss_scale=1.0, counter=0) == dataclasses.replace(
                template, loss_scale=1.0, counter=0
            )
        else:
            assert there == template
        there.adjust(True)


def test_flax_refuses_what_is_no_state_of_a_loss_scale():
    with pytest.raises(ValueError, match=r"state of a NoOpLossScale to hold \[\], got"):
        serialization.from_state_dict(jmpx.NoOpLossScale(), {"counter": 0})
    with pytest.raises(ValueError, match="state of a DynamicLossScale to hold"):
        serialization.from_state_dict(jmpx.DynamicLossScale(), {"scale": 1.0, "counter": 0})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "imports",
    [
        "import jmpx, flax",  # jmpx first, and no adapter
        "import flax, jmpx",
        "import jmpx; jmpx.StaticLossScale(8); import flax.nnx",
        "import jmpx; early = jmpx.DynamicLossScale(8).adjust(True); import flax",
    ],
)
def test_flax_knows_loss_scales_in_every_order_of_imports(imports):
    code = f"""
        {imports}
        from flax import serialization
        scale = globals().get("early", jmpx.StaticLossScale(8)).adjust(True)
        assert serialization.from_bytes(scale, serialization.to_bytes(scale)) == scale
        assert isinstance(serialization.to_state_dict(scale), dict)
    """
    result = run_python("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr


@pytest.mark.thorough
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
