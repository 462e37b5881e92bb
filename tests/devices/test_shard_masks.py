"""`sharded=`: the mask that says which parameters are shards."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers import normal
from helpers.maps import AXIS, DEVICES
from helpers.shards import gradients

import jmpx


def make_model(kind, rng, key):
    """Parameters of a layer with 3 inputs and 2 outputs, a function of them, and masks of them.

    The masks say that the weight is a part of the device's own, and the bias is none.
    """
    mask = {"w": "own", "b": False}
    if kind == "dict":
        return {"w": normal(rng, 3, 2), "b": normal(rng, 2)}, lambda p, x: x @ p["w"] + p["b"], mask
    if kind == "Equinox":
        model = eqx.nn.Linear(3, 2, key=key)
        mask = jax.tree.map(lambda leaf: leaf.ndim == 2 and "own", model)
        return model, lambda model, x: jax.vmap(model)(x), mask
    if kind == "Haiku":
        net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
        params = net.init(key, jnp.ones((1, 3)))
        return params, net.apply, {"linear": mask}
    if kind == "Linen":
        layer = linen.Dense(2)
        mask = {"params": {"kernel": "own", "bias": False}}
        return layer.init(key, jnp.ones((1, 3))), lambda p, x: jnp.asarray(layer.apply(p, x)), mask
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2 and "own", nnx.state(model, nnx.Param))
    return model, lambda model, x: model(x), mask


FRAMEWORKS = ["dict", "Equinox", "Haiku", "Linen", "NNX"]


@pytest.mark.thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_masks_of_nested_parameters(framework, rng, key):
    """Each device has a whole model: what the mask calls its own is divided, not averaged."""
    model, call, mask = make_model(framework, rng, key)
    batch = normal(rng, DEVICES, 2, 3)
    loss_fn = lambda model, x: jnp.mean(call(model, x).astype(jnp.float32) ** 2)  # noqa: E731

    def grads_of(mask):
        def run(x):
            grads = jmpx.filter_grad(
                loss_fn, jmpx.NoOpLossScale(), policy="full", over=jmpx.Over(AXIS, sharded=mask)
            )(model, x).grads
            return jax.tree.leaves(grads)

        return jax.vmap(run, axis_name=AXIS)(batch)

    shards, mixed, means = (grads_of(each) for each in ("own", mask, False))
    assert len(means) == len(jax.tree.leaves(mask)) == 2
    for says, shard, either, mean in zip(jax.tree.leaves(mask), shards, mixed, means, strict=True):
        np.testing.assert_allclose(shard.sum(0), mean[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(either, shard if says else mean)
        assert np.abs(shard - mean).max() > 1e-3


PARAMS = {"a": [np.ones(2, np.float32), {"b": np.ones(2, np.float32)}], "n": 3, "c": np.ones(2)}
SAYS = "Expected sharded to have the structure of the first argument, or of its first levels, got"
BAD_MASKS = [
    ({"a": True}, ValueError, rf"{SAYS} {{'a': True}} for PyTreeDef.*: give a bool"),
    ({"a": [True], "n": False, "c": True}, ValueError, SAYS),
    ({"a": True, "n": False, "c": None}, ValueError, SAYS),
    ({"a": 1, "n": True, "c": True}, TypeError, "pytree of bools, got the leaf 1: say True for"),
    (AXIS, TypeError, "the leaf 'data': say True for .* \"own\" for a part that no device gathers"),
    (np.ones(10**6, bool), TypeError, r"got the leaf array\(.{1,99}: say"),
    ({"a": True, "n": False, "c": True, "d": True}, ValueError, SAYS),
    ([True, True, True], ValueError, SAYS),
    ({"a": (True, True), "n": False, "c": True}, ValueError, SAYS),
]


@pytest.mark.parametrize(("mask", "error", "message"), BAD_MASKS)
def test_masks_that_do_not_fit(mask, error, message):
    def run(x):
        return gradients(lambda params, x: x.sum(), sharded=mask)(PARAMS, x)

    with pytest.raises(error, match=message) as info:
        jax.vmap(run, axis_name=AXIS)(jnp.ones((2, 3)))
    assert "\n" not in str(info.value).split("\n-----")[0]


@pytest.mark.parametrize("mask", ["own", False, {"a": [True, {"b": False}], "n": True, "c": "own"}])
def test_masks_that_are_prefixes(mask):
    run = lambda x: gradients(lambda p, x: x.sum() * p["c"].sum(), sharded=mask)(PARAMS, x)[0]  # noqa: E731
    assert jax.vmap(run, axis_name=AXIS)(jnp.ones((2, 3))).tolist() == [6, 6]


@pytest.mark.parametrize("make", [jmpx.filter_grad, jmpx.filter_value_and_grad])
@pytest.mark.parametrize("mask", [True, False, {"w": False}])
def test_a_mask_without_an_axis(make, mask):
    with pytest.raises(TypeError, match=r'got sharded: write over=jmpx.Over\("data", sharded='):
        make(jnp.sum, jmpx.NoOpLossScale(), sharded=mask)
