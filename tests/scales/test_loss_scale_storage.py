"""The numbers of a loss scale, as they are kept, written as mappings, saved by Flax and Orbax."""

import copy
import dataclasses
import json
import math
import pickle
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from helpers import assert_same_bits, run_python
from helpers.training import LARGEST_SCALE, value

import jmpx

Dynamic = jmpx.DynamicLossScale


def test_numbers_are_kept_as_numpys_and_arrays_as_jaxs():
    for arguments in ((2**15, 3), (np.asarray(8.0), np.int64(1)), (np.float16(8), np.uint8(1))):
        scale = Dynamic(*arguments)
        for leaf, dtype in ((scale.loss_scale, np.float32), (scale.counter, np.int32)):
            assert type(leaf) is np.ndarray and leaf.shape == () and leaf.dtype == dtype
    assert {type(leaf) for leaf in jax.tree.leaves(jmpx.get_loss_scale("dynamic"))} == {np.ndarray}
    scale = Dynamic(jnp.float16(8), jnp.asarray(1))
    assert isinstance(scale.loss_scale, jax.Array) and isinstance(scale.counter, jax.Array)
    assert isinstance(scale.adjust(True).loss_scale, jax.Array)
    assert Dynamic(8.0, period=2) == Dynamic(jnp.float32(8), period=2)


@pytest.mark.thorough
def test_no_backend_starts_before_a_step_runs():
    code = """
        import socket
        import jax, numpy as np
        import jmpx
        scales = jmpx.DynamicLossScale(2.0**15), jmpx.DynamicLossScale(np.float16(8)), \
            jmpx.mpx.DynamicLossScaling(2**15), jmpx.StaticLossScale(2.0**15), jmpx.NoOpLossScale()
        for scale in scales:
            jmpx.grad(lambda w: w.sum(), scale, policy="c=f16")
            jmpx.value_and_grad(lambda w: w.sum(), scale, policy="c=bf16")
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


def test_the_second_step_is_not_traced_anew():
    traces = []

    def step(loss_scale, w):
        traces.append(jax.tree.map(jax.typeof, loss_scale))
        grad_fn = jmpx.grad(lambda w: (w**2).sum(), loss_scale, policy="c=f16")
        loss_scale, _, grads = grad_fn(w)
        return loss_scale, w - grads

    run = jax.jit(step, donate_argnums=(0, 1))
    loss_scale, w = Dynamic(jnp.asarray(8.0), period=2), jnp.ones(3)  # a weak number
    for expected in (8, 16, 16, 32):
        loss_scale, w = run(loss_scale, w)
        assert value(loss_scale) == expected
    assert len(traces) == 1


def replicated(tree):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda _: sharding, tree)


SCALES = {
    "none": jmpx.NoOpLossScale(),
    "static": jmpx.StaticLossScale(8),
    "configured": Dynamic(0.5, 1, 3, 4, 0.125, 64.0, 0.5, 2),
    "on a device": jax.device_put(Dynamic(2.0**12, -1, hysteresis=3)),
}
TRIPS = {
    "jit": lambda s: jax.jit(lambda s: s, out_shardings=replicated(s))(s),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deepcopy": copy.deepcopy,
    "tree.map": lambda s: jax.tree.map(lambda x: x * 1, s),
    "replace": dataclasses.replace,
    "partition": lambda s: eqx.combine(*eqx.partition(s, eqx.is_array)),
    "optax": lambda s: optax.tree_utils.tree_get({"scale": s}, "scale"),
}


@pytest.mark.parametrize("trip", TRIPS)
def test_round_trips_keep_everything(trip):
    for loss_scale in SCALES.values():
        there = TRIPS[trip](loss_scale)
        assert there == loss_scale and type(there) is type(loss_scale)
        assert_same_bits(there, loss_scale)
        assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(there))
        assert repr(there.adjust(False)) == repr(loss_scale.adjust(False))


# Mappings


@pytest.mark.parametrize("name", SCALES)
def test_a_mapping_is_plain_numbers(name):
    saved = SCALES[name].to_dict()
    assert all(type(each) in (str, int, float) for each in saved.values())
    assert json.loads(json.dumps(saved)) == msgpack.unpackb(msgpack.packb(saved)) == saved
    assert jmpx.get_loss_scale(saved) == SCALES[name]


def written_in_jit(loss_scale):
    seen = []
    jax.eval_shape(lambda x: seen.append(str(loss_scale)) or x, 1)
    return seen[0]


def test_a_loss_scale_on_devices_is_written():
    scale = Dynamic(1024, 3, period=5, hysteresis=2)
    text = "dynamic,init=1024,period=5,hysteresis=2,counter=3"
    sharded = jax.device_put(scale, replicated(scale))
    for there in (scale, jax.tree.map(jnp.asarray, scale), sharded):
        assert str(there) == text and jmpx.get_loss_scale(str(there)) == scale
        assert there.to_dict()["counter"] == 3
        assert written_in_jit(there) == text  # it comes from outside
    beyond = jax.tree.unflatten(jax.tree.structure(scale), [jnp.float32(0.25), jnp.int32(0)])
    assert str(beyond) == "dynamic,init=1,period=5,hysteresis=2"  # what it counts as


def donated():
    scale = jax.tree.map(jnp.asarray, Dynamic())
    jax.jit(lambda s: s.adjust(True), donate_argnums=0)(scale)
    return scale


OPAQUE = {
    "shape": lambda: jax.eval_shape(lambda s: s, Dynamic()),
    "axes": lambda: jax.tree.map(lambda _: 0, Dynamic()),
    "word": lambda: jax.tree.map(lambda _: "x", Dynamic()),
    "batch": lambda: jax.vmap(Dynamic)(jnp.array([2.0, 4.0])),
    "nan": lambda: dataclasses.replace(Dynamic(), loss_scale=np.float32(math.nan)),
    "donated": donated,
}


@pytest.mark.parametrize("name", OPAQUE)
def test_leaves_that_are_no_numbers_are_written_by_repr(name):
    loss_scale = OPAQUE[name]()
    with pytest.raises(TypeError, match="^Expected loss_scale of the loss scale to be ") as error:
        loss_scale.to_dict()
    assert "finite, got nan" in str(error.value) or "outside of jax.jit" in str(error.value)
    if name != "donated":
        assert str(loss_scale) == repr(loss_scale) and "DynamicLossScale(" in str(loss_scale)
    if name != "nan":
        with pytest.raises(TypeError, match="^Expected loss_scale of the loss scale to be one"):
            jmpx.MixedPrecision("f16", loss_scale)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.checkpoint])
def test_traced_leaves_are_written_by_repr(transform):
    seen = []

    def loss(x):
        scale = Dynamic(x)
        for use in (scale.to_dict, lambda: jmpx.MixedPrecision("f16", scale)):
            with pytest.raises(TypeError, match="Expected loss_scale of .* to be one number"):
                use()
        seen.append((str(scale), repr(scale)))
        return x

    transform(loss)(jnp.ones(2) if transform is jax.vmap else 2.0)
    ((text, written),) = seen
    assert text == written and "Trace" in text


# Flax and Orbax


SAVED = {
    "no-op": (jmpx.NoOpLossScale(), jmpx.NoOpLossScale()),
    "static": (jmpx.StaticLossScale(8), jmpx.StaticLossScale(8)),
    "dynamic": (
        Dynamic(2.0**12, 5, period=9, min_loss_scale=0.25),
        Dynamic(period=9, min_loss_scale=0.25),
    ),
    "into another configuration": (
        jax.tree.map(jnp.asarray, Dynamic(2.0**12, 5)),
        Dynamic(1.0, period=3, max_loss_scale=2.0**10),
    ),
}


class State(TrainState):
    scaling: dict[str, jmpx.LossScale]


@pytest.mark.parametrize("name", SAVED)
def test_flax_saves_and_restores_a_state_with_a_loss_scale(name):
    saved, template = SAVED[name]
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
    state = State.create(
        apply_fn=None, params={"w": jnp.ones(3)}, tx=optimizer, scaling={"both": (saved, saved)}
    )
    target = state.replace(scaling={"both": (template, template)})  # pyright: ignore[reportAttributeAccessIssue]
    as_bytes: Any = serialization.from_bytes(target, serialization.to_bytes(state))
    as_dict: Any = serialization.from_state_dict(target, serialization.to_state_dict(state))
    for there in (*as_bytes.scaling["both"], *as_dict.scaling["both"]):
        assert type(there) is type(saved)
        if isinstance(saved, Dynamic):
            expected = min(value(saved), template.max_loss_scale or LARGEST_SCALE)
            assert (value(there), int(there.counter)) == (expected, 5)
            assert jax.tree.structure(there) == jax.tree.structure(template)
        else:
            assert there == template
        there.adjust(True)


def test_flax_restores_into_the_kind_that_was_saved_alone():
    for saved in SCALES.values():
        for template in SCALES.values():
            saved_bytes = serialization.to_bytes({"s": saved})
            if isinstance(saved, Dynamic) == isinstance(template, Dynamic):
                restored = serialization.from_bytes({"s": template}, saved_bytes)
                assert jax.tree.structure(restored["s"]) == jax.tree.structure(template)
                continue
            with pytest.raises(ValueError, match="to hold .* of another loss scale or program"):
                serialization.from_bytes({"s": template}, saved_bytes)


@pytest.mark.thorough
def test_flax_knows_loss_scales_that_were_made_before_it_and_a_users_registration_stays():
    code = """
        import jmpx
        early = jmpx.DynamicLossScale(8).adjust(True)
        from flax import serialization
        serialization.register_serialization_state(
            jmpx.StaticLossScale, lambda s: {"mine": float(s.loss_scale)}, lambda s, d: s
        )
        assert serialization.to_state_dict(jmpx.StaticLossScale(8)) == {"mine": 8.0}
        for scale in (early.adjust(True), jmpx.NoOpLossScale()):
            assert serialization.from_bytes(scale, serialization.to_bytes(scale)) == scale
            assert isinstance(serialization.to_state_dict(scale), dict)
    """
    result = run_python("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr


def restored_by_flax(saved, template):
    return serialization.from_bytes(template, serialization.to_bytes(saved))


def restored_by_leaves(saved, template):
    leaves = map(np.asarray, jax.tree.leaves(saved))
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


@pytest.mark.parametrize("restore", [restored_by_flax, restored_by_leaves])
def test_a_checkpoint_restores_the_row_into_a_template(restore):
    saved = Dynamic(64.0, period=5, hysteresis=3).adjust(False).adjust(False)
    assert int(saved.counter) == -2
    for hysteresis in (2, 3, 4):
        restored = restore(saved, Dynamic(period=7, hysteresis=hysteresis))
        assert (restored.period, restored.hysteresis) == (7, hysteresis)
        after = restored.adjust(False)
        assert value(after) == (64 if hysteresis == 4 else 32)
        assert int(after.counter) == max(-3, 1 - hysteresis)
        assert int(restored.adjust(True).counter) == 1
    without = restore(saved, Dynamic())
    assert value(without.adjust(False)) == 32 and int(without.adjust(False).counter) == 0
    grown = restore(Dynamic(64.0, 7, period=10), Dynamic(period=5)).adjust(True)
    assert (value(grown), grown.counter) == (128, 0)  # 7 steps are more than the new period


@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_orbax_saves_numpys_numbers_and_restores_into_them(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    fresh = Dynamic(2.0**12, 3, period=5, hysteresis=3)
    saved = {"fresh": fresh, "stepped": fresh.adjust(False)}
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scales", saved)
        checkpointer.wait_until_finished()
        template = {name: Dynamic(period=7, hysteresis=3) for name in saved}
        restored = checkpointer.restore(tmp_path / "scales", template)
    for name, there in restored.items():
        assert (value(there), there.period) == (4096, 7)
        assert there.counter == saved[name].counter and there.counter.dtype == jnp.int32
    second = restored["stepped"].adjust(False)
    assert [value(second), value(second.adjust(False))] == [4096, 2048]
