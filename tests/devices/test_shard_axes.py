"""Sharded parameters on meshes of several axes, and on axes of other kinds."""

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.maps import AXIS, MAPS, mesh_of, over_devices
from helpers.shards import (
    READS,
    SPECS,
    flag_reductions,
    gather,
    gradients,
    in_float64,
    make_weights,
    network,
)
from jax.sharding import PartitionSpec as P

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")


def hybrid(params, x, read=lambda w, axis_name: w):
    """Shards over `fsdp`, one of them over both axes, and a parameter that all devices have."""
    h = jnp.tanh(x @ read(params["shard"], "fsdp") + read(params["both"], ("data", "fsdp")))
    return jnp.mean((h * params["replica"]) ** 2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", ["full", "c=f32,r=bf16"])
@pytest.mark.parametrize(("vma", "masked"), [(True, False), (True, True), (False, True)])
def test_shards_of_one_axis_are_averaged_over_the_other(vma, masked, policy, rng):
    params = {"shard": normal(rng, 8, 8), "both": normal(rng, 8), "replica": normal(rng, 8)}
    batch = normal(rng, 16, 8)
    specs = {"shard": P("fsdp"), "both": P(("data", "fsdp")), "replica": P()}
    mask = {"shard": True, "both": True, "replica": False} if masked else None
    grad_fn = gradients(
        lambda params, x: hybrid(params, x, gather),
        jmpx.DynamicLossScale(16.0),
        policy=policy,
        axis_name=("data", "fsdp"),
        sharded=mask,
    )
    mapped = jax.shard_map(
        grad_fn,
        mesh=mesh_of(2, 4, names=("data", "fsdp")),
        in_specs=(specs, P(("data", "fsdp"))),
        out_specs=(P(), P(), P(), specs),
        check_vma=vma,
    )
    step = jax.jit(mapped)
    value, _, finite, grads = step(params, batch)
    expected_value, expected = in_float64(hybrid, params, batch)
    assert finite
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, grad in grads.items():
        bound = (1e-5 if policy == "full" else 0.02) * np.abs(expected[name]).max()
        np.testing.assert_allclose(grad, expected[name], 0, bound, err_msg=name)
    text = step.lower(params, batch).as_text()
    assert flag_reductions(text) == 1
    if policy != "full":  # What is averaged is summed in bfloat16: a shard of 2 x 8 and 8 numbers.
        sums = re.findall(r'stablehlo.all_reduce"\(.*?\) : \(tensor<(\S+)>\)', text, re.DOTALL)
        assert sorted(sums) == ["2x8xbf16", "8xbf16", "f32", "i32"]


def test_a_sum_in_float16_has_room_for_shards(rng):
    """The gather's sum over one axis is divided before the sum in float16 over the other."""
    params, batch = jnp.ones(4), jnp.full((8, 1), 49152.0)
    grad_fn = gradients(
        lambda w, x: (gather(w, "fsdp") * x).sum(),
        jmpx.NoOpLossScale(),
        policy="c=f32,r=f16",
        axis_name=("data", "fsdp"),
    )
    mapped = jax.shard_map(
        grad_fn,
        mesh=mesh_of(2, 4, names=("data", "fsdp")),
        in_specs=(P("fsdp"), P(("data", "fsdp"))),
        out_specs=(P(), P(), P(), P("fsdp")),
    )
    _, _, finite, grads = jax.jit(mapped)(params, batch)
    assert finite and (grads == 49152.0).all()


@pytest.mark.thorough
def test_of_several_untracked_axes_a_gather_says_which(rng):
    params, batch = normal(rng, 8, 4), normal(rng, 2, 4, 3, 8)

    def run(loss_fn, says: bool | Literal["own"] = True):
        grad_fn = gradients(loss_fn, axis_name=("data", "fsdp"), sharded=says)
        inner = jax.vmap(grad_fn, in_axes=(0, 0), axis_name="fsdp")
        return jax.vmap(inner, in_axes=(None, 0), axis_name="data")(params.reshape(4, 2, 4), batch)

    square = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    *_, grads = run(lambda w, x: square(gather(w, "fsdp"), x))
    expected = jax.jit(jax.grad(square))(params, batch.reshape(24, 8))
    for one in np.asarray(grads):
        np.testing.assert_allclose(one.reshape(8, 4), expected, rtol=1e-5, atol=1e-6)
    for loss_fn in (
        lambda w, x: jax.lax.psum((x[:, :2] @ w).sum(), "fsdp"),
        lambda w, x: square(gather(w, "fsdp"), x) * jax.lax.psum(w.sum(), "data"),
    ):
        with pytest.raises(TypeError, match="over which of the axes 'data' and 'fsdp' .* array is"):
            run(loss_fn, "own")


def tensor_parallel(params, x, axis=None):
    """Columns of one weight and rows of the next on each device, and a bias on all."""
    h = jnp.tanh(x @ params["columns"] + params["bias"].mean()) @ params["rows"]
    return jnp.mean((jax.lax.psum(h, axis) if axis else h) ** 2)


@pytest.mark.parametrize(("axis_name", "vma"), [("data", True), (("data", "model"), True)])
def test_tensor_parallelism(axis_name, vma, rng):
    params = {"columns": normal(rng, 8, 4), "rows": normal(rng, 4, 3), "bias": normal(rng, 4)}
    specs = {"columns": P(None, "model"), "rows": P("model"), "bias": P()}
    batch = normal(rng, 6, 8)
    mask = None if axis_name == "data" else {"columns": "own", "rows": "own", "bias": False}
    grad_fn = gradients(
        lambda params, x: tensor_parallel(params, x, "model"),
        jmpx.DynamicLossScale(16.0),
        axis_name=axis_name,
        sharded=mask,
    )
    step = jax.jit(
        jax.shard_map(
            grad_fn,
            mesh=mesh_of(2, 2, names=("data", "model")),
            in_specs=(specs, P("data")),
            out_specs=(P(), P(), P(), specs),
            check_vma=vma,
        )
    )
    value, _, finite, grads = step(params, batch)
    expected_value, expected = in_float64(tensor_parallel, params, batch)
    assert finite and flag_reductions(step.lower(params, batch).as_text()) == 1
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], 1e-4, 1e-6, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["auto", "explicit", "vmap"])
def test_other_meshes(kind, rng):
    """An axis that XLA splits, axes of explicit sharding, and a map in a map."""
    params, batch = make_weights(rng), normal(rng, 16, 8)
    del params["cast"]
    specs = {name: SPECS[name] for name in params}
    axis_type = jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), (AXIS, "model"), axis_types=(axis_type,) * 2)
    run = gradients(
        lambda params, x: network(params, x, READS),
        jmpx.DynamicLossScale(8.0),
    )
    mapped: Any = run
    if kind == "vmap":

        def mean_of_halves(params, x):
            halves = jax.vmap(run, in_axes=(None, 0))(params, x.reshape(2, 2, 8))
            value, _, finite, grads = jax.tree.map(lambda x: x.mean(0), halves)
            return value, None, finite, grads

        mapped = mean_of_halves

    step = jax.jit(
        jax.shard_map(
            mapped,
            mesh=mesh,
            in_specs=(specs, P(AXIS)),
            out_specs=(P(), P(), P(), specs),
            axis_names={AXIS, "model"} if kind == "explicit" else {AXIS},
        )
    )
    if kind == "explicit":
        place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
        params = {name: place(w, specs[name]) for name, w in params.items()}
        batch = place(batch, P(AXIS))
    value, _, finite, grads = step(params, batch)
    expected_value, expected = in_float64(network, params, batch)
    assert finite
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], 1e-4, 1e-6, err_msg=name)


@pytest.mark.parametrize("vma", [True, False])
def test_the_flag_is_common_over_an_axis_that_is_not_averaged(vma, rng):
    """Each device of `model` has a part of a tensor, and one of them overflows."""
    w, batch = jnp.zeros((4, 3)), normal(rng, 4, 4).at[:, 3].set(60000.0)
    grad_fn = gradients(
        lambda w, x: jnp.sum(jax.lax.psum(x @ w + 1, "model").astype(jnp.float32)) * 8,
        jmpx.DynamicLossScale(4.0),
        policy="c=f16",
    )

    def run(w, x):
        _, scaling, finite, grads = grad_fn(w, x)
        return jax.tree.map(lambda x: x[None], (scaling, finite, jmpx.all_finite(grads)))

    mapped = jax.shard_map(
        run,
        mesh=mesh_of(2, 2, names=("data", "model")),
        in_specs=(P("model"), P("data", "model")),
        out_specs=P(("data", "model")),
        check_vma=vma,
    )
    scaling, finite, own = jax.jit(mapped)(w, batch)
    assert own.tolist() == [True, False] * 2
    assert not finite.any() and (scaling.loss_scale == 2).all()


@pytest.mark.parametrize(("mask", "how"), [(None, "shard_map"), *((True, how) for how in MAPS)])
def test_groups_of_an_axis_are_refused(mask, how, rng):
    """Devices 0 and 2 may have copies of one shard, which nothing tells."""
    groups = [[0, 1], [2, 3]]

    def loss_fn(w, x):
        half = jax.lax.all_gather(w, AXIS, axis_index_groups=groups, tiled=True)
        return jnp.mean((x @ jnp.concatenate([half, half])) ** 2)

    with pytest.raises(
        TypeError, match="Cannot tell whether .* along a mesh axis, without axis_index_groups"
    ):
        run = gradients(loss_fn, sharded=mask)
        over_devices(run, how, normal(rng, 8, 3), normal(rng, 12, 8))
