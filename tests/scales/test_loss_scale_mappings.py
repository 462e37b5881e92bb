"""Loss scales from mappings, and what is written of leaves that are not numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpx
from jmpx import DynamicLossScale as Dynamic

# Mappings


def read(fields):
    return jmpx.get_mixed_precision({"policy": "f16", "loss_scale": fields}).loss_scale


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Missing key 'type' at loss_scale: "),
        ({"type": 3}, "at loss_scale.type, got 3"),
        ({"Type": "dynamc"}, "Unknown kind 'dynamc' at loss_scale.Type"),
        ({"type": "dynamic", "Perod": 3}, "Unknown key 'Perod' at loss_scale.Perod.*'period'"),
        ({"type": "dynamic", "init": [3]}, r"got \[3\] at loss_scale.init"),
        ({"type": "dynamic", "init": True}, "got True at loss_scale.init"),
        ({"type": "dynamic", "init": "3+4"}, r"got '3\+4' at loss_scale.init"),
        ({"type": "dynamic", "init": math.nan}, "got nan at loss_scale.init"),
        ({"type": "dynamic", "init": 10**400}, "'init' to be a number .*at loss_scale.init"),
        ({"type": "dynamic", "init": None}, "got None at loss_scale.init"),
        ({"type": "dynamic", "period": 1.5}, "got 1.5 at loss_scale.period"),
        ({"type": "dynamic", "MAX": 1, "min": 2}, "at loss_scale.type: Expected max_loss_scale"),
        ({"type": "dynamic", "init": 3, "INIT": 3}, "Duplicate key 'init' at loss_scale.INIT"),
        ({"type": "static"}, "at loss_scale.type: its factor is missing"),
        ({"type": "static", "init": 3, "period": 2}, "Unexpected 'period' at loss_scale.period"),
    ],
)  # fmt: skip
def test_errors_of_mappings_name_the_place(fields, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        read(fields)
    assert "\n" not in str(error.value)


def test_numbers_of_a_mapping_may_be_numpys():
    fields = {
        "type": "dynamic",
        "init": np.float32(8),
        "period": np.int64(3),
        "max": jnp.asarray(9.0),
    }
    assert read(fields) == Dynamic(8, period=3, max_loss_scale=9)
    with pytest.raises(TypeError, match="Expected 'init' to be a number"):
        jax.jit(lambda x: jmpx.get_loss_scale({"type": "dynamic", "init": x}))(2.0)


# Leaves that are not numbers


def sharded(loss_scale):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.device_put(loss_scale, replicated)


def written_in_jit(loss_scale):
    seen = []
    jax.jit(lambda x: seen.append(str(loss_scale)) or x)(1)
    return seen[0]


def test_a_loss_scale_on_devices_is_written():
    scale = Dynamic(1024, 3, period=5, hysteresis=2)
    text = "dynamic,init=1024,period=5,hysteresis=2,counter=3"
    for there in (scale, jax.tree.map(jnp.asarray, scale), sharded(scale)):
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
    "sharding": lambda: jax.tree.map(lambda leaf: leaf.sharding, sharded(Dynamic())),
    "axes": lambda: jax.tree.map(lambda _: 0, Dynamic()),
    "none": lambda: jax.tree.map(lambda _: None, Dynamic()),
    "word": lambda: jax.tree.map(lambda _: "x", Dynamic()),
    "batch": lambda: jax.vmap(Dynamic)(jnp.array([2.0, 4.0])),
    "nan": lambda: dataclasses.replace(Dynamic(), loss_scale=np.float32(math.nan)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_leaves_that_are_no_numbers_are_written_by_repr(name):
    loss_scale = OPAQUE[name]()
    assert str(loss_scale) == repr(loss_scale) and "DynamicLossScale(" in str(loss_scale)
    with pytest.raises(TypeError, match="Expected .* of the loss scale to be ") as error:
        loss_scale.to_dict()
    assert "finite, got nan" in str(error.value) or "outside of jax.jit" in str(error.value)


def test_a_donated_scale_cannot_be_written():
    with pytest.raises(
        TypeError, match="Expected loss_scale of .* before a step donates it"
    ) as error:
        donated().to_dict()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.checkpoint])
def test_traced_leaves_are_written_by_repr(transform):
    seen = []

    def loss(x):
        scale = Dynamic(x)
        with pytest.raises(TypeError, match="Expected loss_scale of .* to be one number"):
            scale.to_dict()
        seen.append((str(scale), repr(scale)))
        return x

    transform(loss)(jnp.ones(2) if transform is jax.vmap else 2.0)
    ((text, written),) = seen
    assert text == written and "Trace" in text


def test_no_backend_starts():
    loss_scale = jmpx.get_loss_scale("dynamic")
    assert isinstance(loss_scale, Dynamic)
    assert [type(leaf) for leaf in jax.tree.leaves(loss_scale)] == [np.ndarray, np.ndarray]
