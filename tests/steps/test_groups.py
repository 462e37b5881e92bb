"""A batch's sharding: gradients of groups of examples under `jax.jit`, averaged by the policy."""

import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.groups import (
    EXAMPLES,
    assert_near,
    in_float64,
    jitted,
    make_mesh,
    over,
    value_and_grad,
)
from helpers.training import LOSS_SCALES, loss_fn, make_params
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx

# Values


MESHES = {
    "8": ((8,), P("data")),
    "4 x 2": ((4, 2), P("data")),
    "2 x 3": ((2, 3), P("data")),
    "3": ((3,), P("data")),
    "1": ((1,), P("data")),
    "both axes": ((4, 2), P(("data", "model"))),
    "the second axis": ((4, 2), P("model")),
    "other dimensions": ((4, 2), P("data", None)),
}
SHARDS = {
    "copies": {"w": P(), "b": P()},
    "fsdp": {"w": P("data"), "b": P()},
    "columns": {"w": P(None, "data"), "b": P("data")},
    "tensor parallel": {"w": P(None, "model"), "b": P("model")},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("mesh", "scale"), [*((mesh, "Dynamic") for mesh in MESHES), ("8", "NoOp"), ("8", "Static")]
)
def test_values_against_float64(mesh, scale, rng):
    sizes, spec = MESHES[mesh]
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    sharding = NamedSharding(make_mesh(*sizes), spec)
    result = jitted(batch={"sharding": sharding}, scaling=LOSS_SCALES[scale]())(params, x)
    assert result.grads_finite and result.value.shape == ()
    assert_near(result, in_float64(params, x))


def test_it_runs_without_jit(rng):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    assert_near(value_and_grad()(params, x), in_float64(params, x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("how", ["named", "set_mesh"])
def test_sharded_parameters(how, shards, rng):
    mesh = make_mesh(3, 1) if shards == "tensor parallel" else make_mesh(3)
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    put = {name: NamedSharding(mesh, spec) for name, spec in SHARDS[shards].items()}
    args = jax.device_put(params, put), jax.device_put(x, NamedSharding(mesh, P("data")))
    with contextlib.nullcontext() if how == "named" else jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data")) if how == "named" else P("data")
        result = jitted(batch={"sharding": sharding})(*args)
    assert_near(result, in_float64(params, x))


@pytest.mark.parametrize("how", ["named", "spec"])
def test_an_explicit_mesh_through_auto_axes(how, rng):
    mesh = make_mesh(4, 2, axis_type=AxisType.Explicit)
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    spec = P("data") if how == "spec" else NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        grad_fn = value_and_grad(batch={"sharding": spec})
        run = jax.sharding.auto_axes(
            lambda *args: tuple(grad_fn(*args))[::3], out_sharding=(P(), {"w": P(), "b": P()})
        )
        value, grads = jax.jit(run)(params, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert_near(
        jmpx.types.ValueAndGradients(value, jmpx.NoOpLossScale(), value, grads),
        in_float64(params, x),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("argnums", [1, -2, (1, 2), [2, 1], (1, -1)])
def test_which_arguments_are_split(argnums, rng):
    params, x, y = make_params(rng), normal(rng, EXAMPLES, 6), normal(rng, EXAMPLES, 3)
    shapes = []

    def loss(params, x, y, *, scale):
        shapes.append((x.shape, y.shape, scale.shape))
        return loss_fn(params, x) + 0 * y.sum() * scale.sum()

    grad_fn = value_and_grad(loss, batch={"argnums": argnums})
    assert_near(grad_fn(params, x, y, scale=jnp.ones(EXAMPLES)), in_float64(params, x))
    whole = argnums in (1, -2)
    assert shapes == [((3, 6), (EXAMPLES if whole else 3, 3), (EXAMPLES,))]


def test_by_default_keys_numbers_and_keyword_arguments_go_whole(rng, key):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    seen = []

    def loss(params, batch, key, number, *, scale):
        seen.append((batch["x"].shape, batch["keys"].shape, key.shape, number, scale.shape))
        return loss_fn(params, batch["x"]) + jax.random.normal(key) * number

    batch = {"x": x, "keys": jax.random.split(key, EXAMPLES), "none": None, "text": "unread"}
    result = value_and_grad(loss)(params, batch, key, 0, scale=jnp.ones(()))
    assert_near(result, in_float64(params, x))
    assert seen == [((3, 6), (3,), (), 0, ())]


# The sum


@pytest.mark.parametrize(("reduce", "divisor"), [("bfloat16", 1), ("float16", 8)])
def test_a_sum_in_fewer_bits_is_rounded_to_them(reduce, divisor, rng):
    loss = lambda w, x: (w * x.mean(0)).sum()  # noqa: E731
    x = jnp.asarray(rng.integers(1, 2**15, (8, 50)), jnp.float32)
    exact = jitted(loss)(jnp.ones(50), x).grads
    rounded = jitted(loss, policy=f"c=f32,r={reduce}")(jnp.ones(50), x).grads
    sums = rounded * (8 / divisor)
    assert (sums == sums.astype(reduce).astype(jnp.float32)).all() and (rounded != exact).any()
    np.testing.assert_allclose(rounded, exact, rtol=8 * float(jnp.finfo(reduce).eps))
    np.testing.assert_allclose(exact, np.asarray(x, np.float64).mean(0), rtol=1e-6)


def test_a_float16_sum_overflows_only_where_the_mean_does(rng):
    loss = lambda w, x: (w * x.mean(0)).sum()  # noqa: E731
    x = jnp.asarray(rng.uniform(3e4, 6e4, (8, 3)), jnp.float32)  # sums to over 2e5
    grad_fn = jitted(loss, policy="c=f32,r=f16")
    fine, beyond = grad_fn(jnp.ones(3), x), grad_fn(jnp.ones(3), 4 * x)
    assert fine.grads_finite and not beyond.grads_finite
    np.testing.assert_allclose(fine.grads, x.mean(0), rtol=8 * 2.0**-11)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["c=f16", "c=f16,r=f16", "c=bf16,r=f32"])
def test_an_overflow_in_one_group_skips_the_step_for_all(policy, rng):
    params, x = make_params(rng), normal(rng, 8, 6)
    scaling = jmpx.DynamicLossScale(2.0**10)
    grad_fn = jitted(policy=policy, scaling=scaling)
    good = grad_fn(params, x)
    assert good.grads_finite and good.scaling.counter == 1
    for group in range(8):
        bad = grad_fn(params, x.at[group, 0].set(jnp.inf))
        assert not bad.grads_finite and bad.grads_finite.shape == ()
        assert bad.scaling.loss_scale == 2.0**9 and bad.scaling.counter == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["c=f16", "c=bf16,reduce=bfloat16", "c=f16,reduce=float16"])
def test_the_mean_is_that_of_a_loop_over_the_groups(policy, rng):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    scaling, (compute, _, reduce) = jmpx.DynamicLossScale(2.0**8), policy.partition(",reduce=")
    result = jitted(policy=policy, scaling=scaling)(params, x)
    grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy=compute)
    alone = jax.jit(lambda *args: grad_fn(*args))
    each = [alone(params, part) for part in x.reshape(8, 3, 6)]
    mean = jax.tree.map(lambda *parts: np.mean(np.stack(parts), 0), *each)
    sizes = jax.tree.map(lambda *parts: np.abs(np.stack(parts)).mean(0), *each).grads
    np.testing.assert_allclose(result.value, mean.value, rtol=1e-6)
    tolerance = 8 * float(jnp.finfo(reduce).eps) if reduce else 1e-5
    for name, grad in result.grads.items():
        assert (np.abs(grad - mean.grads[name]) <= tolerance * sizes[name]).all()


def test_without_mixed_precision_the_mean_is_plain(rng):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    result = jitted(use_mixed_precision=False, policy=None)(params, x)
    assert_near(result, in_float64(params, x))


# What else comes back


@pytest.mark.thorough
def test_aux_gets_an_axis_of_groups(rng):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)

    def loss(params, x):
        aux = {"rows": x[:, 0], "sum": x.sum(), "same": jnp.ones(2), "n": 3, "name": "aux"}
        return loss_fn(params, x), {**aux, "none": None, "f": max}

    (value, aux), *_ = value_and_grad(loss, has_aux=True)(params, x)
    parts = x.reshape(8, 3, 6)
    np.testing.assert_array_equal(aux.pop("rows"), parts[:, :, 0])
    np.testing.assert_allclose(aux.pop("sum"), parts.sum((1, 2)), rtol=1e-5)
    np.testing.assert_array_equal(aux.pop("same"), np.ones((8, 2)))
    assert aux == {"n": 3, "name": "aux", "none": None, "f": max}
    scaling, finite, grads, aux = jmpx.filter_grad(
        loss, jmpx.NoOpLossScale(), True, batch=jmpx.Batch(sharding=over(8))
    )(params, x)
    assert aux["rows"].shape == (8, 3)


def test_the_function_is_traced_once(rng):
    calls = collections.Counter()

    def loss(params, x):
        calls[x.shape] += 1
        return loss_fn(params, x)

    grad_fn = value_and_grad(loss)
    step = jax.jit(lambda *args: grad_fn(*args))
    for _ in range(3):
        step(make_params(rng), normal(rng, EXAMPLES, 6))
    assert calls == {(3, 6): 1}
