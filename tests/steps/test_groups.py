"""A batch's sharding: gradients of groups of examples under `jax.jit`, averaged by the policy."""

import contextlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, normal
from helpers.maps import mesh_of
from helpers.training import (
    EXAMPLES,
    LOSS_SCALES,
    assert_near,
    in_float64,
    loss_fn,
    make_params,
    over,
)  # fmt: skip
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx
import jmpx.mpx as mpx

NO_SCALE = jmpx.NoOpLossScale()
EIGHT = jmpx.Batch(sharding=over(8))


def groups_of(sharding, **options):
    """Options of a gradient function in float32."""
    return {"policy": "c=f32", "batch": jmpx.Batch(sharding=sharding, **options)}


# Values


COPIES = {"w": P(), "b": P()}


@pytest.mark.parametrize(
    ("sizes", "spec", "shards", "scale"),
    [
        ((4, 2), P(("data", "model")), COPIES, "Dynamic"),
        ((2, 3), P("model", None), COPIES, "Static"),
        ((3,), P("data"), {"w": P(None, "data"), "b": P("data")}, "Dynamic"),
        ((2, 3), P("data"), {"w": P("model"), "b": P("model")}, "NoOp"),
    ],
)
def test_values_against_float64(sizes, spec, shards, scale, rng):
    mesh, here = mesh_of(*sizes), scale == "Dynamic"
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    put = {name: NamedSharding(mesh, each) for name, each in shards.items()}
    args = jax.device_put(params, put), jax.device_put(x, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh) if here else contextlib.nullcontext():
        options = groups_of(spec if here else NamedSharding(mesh, spec))
        grad_fn = jmpx.value_and_grad(loss_fn, LOSS_SCALES[scale](), **options)
        result = jax.jit(grad_fn)(*args)
    assert result.grads_finite and result.value.shape == ()
    assert_near(result, in_float64(params, x))


@pytest.mark.parametrize("how", ["named", "spec"])
def test_an_explicit_mesh_through_auto_axes(how, rng):
    mesh = mesh_of(4, 2, axis_type=AxisType.Explicit)
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    spec = P("data") if how == "spec" else NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        grad_fn = jmpx.value_and_grad(loss_fn, NO_SCALE, **groups_of(spec))
        run = jax.sharding.auto_axes(
            lambda *args: tuple(grad_fn(*args))[::3], out_sharding=(P(), {"w": P(), "b": P()})
        )
        value, grads = jax.jit(run)(params, jax.device_put(x, NamedSharding(mesh, P("data"))))
    result = jmpx.types.ValueAndGradients(value, NO_SCALE, value, grads)
    assert_near(result, in_float64(params, x))


@pytest.mark.parametrize("argnums", [-2, (1, 2), [2, 1]])
def test_which_arguments_are_split(argnums, rng):
    shapes = []

    def loss(params, x, y, *, scale):
        shapes.append((x.shape, y.shape, scale.shape))
        return loss_fn(params, x) + 0 * y.sum() * scale.sum()

    grad_fn = jmpx.grad(loss, NO_SCALE, **groups_of(over(8), argnums=argnums))
    params, x, y = make_params(rng), normal(rng, EXAMPLES, 6), normal(rng, EXAMPLES, 3)
    jax.eval_shape(lambda *args: grad_fn(*args, scale=jnp.ones(EXAMPLES)).grads, params, x, y)
    # The function is traced once.
    assert shapes == [((3, 6), (EXAMPLES if argnums == -2 else 3, 3), (EXAMPLES,))]


def test_by_default_keys_numbers_and_keyword_arguments_go_whole(rng, key):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    seen = []

    def loss(params, batch, key, number, *, scale):
        seen.append((batch["x"].shape, batch["keys"].shape, key.shape, number, scale.shape))
        aux = {"rows": batch["x"][:, 0], "same": jnp.ones(2), "n": 3, "name": "aux", "f": max}
        return loss_fn(params, batch["x"]) + jax.random.normal(key) * number, {**aux, "none": None}

    batch = {"x": x, "keys": jax.random.split(key, EXAMPLES), "none": None, "text": "unread"}
    grad_fn = jmpx.value_and_grad(loss, NO_SCALE, has_aux=True, **groups_of(over(8)))
    result = eqx.filter_jit(grad_fn)(params, batch, key, 0, scale=jnp.ones(()))
    value, aux = result.value
    assert_near(result._replace(value=value), in_float64(params, x))
    assert seen == [((3, 6), (3,), (), 0, ())]
    # Aux gets an axis of groups.
    np.testing.assert_array_equal(aux.pop("rows"), x.reshape(8, 3, 6)[:, :, 0])
    np.testing.assert_array_equal(aux.pop("same"), np.ones((8, 2)))
    assert aux == {"n": 3, "name": "aux", "none": None, "f": max}


def test_an_error_of_the_function_is_its_own(rng):
    loss = lambda params, x: jax.vmap(lambda x: x, out_axes=None)(x).sum()  # noqa: E731
    with pytest.raises(ValueError, match="out_axes") as error:
        jmpx.grad(loss, NO_SCALE, **groups_of(over(8)))(make_params(rng), jnp.ones((8, 6)))
    assert "sharding" not in str(error.value)


# The sum


def linear(w, x):
    return (w * x.mean(0)).sum()


def summed_in(reduce):
    options = {"policy": f"c=f32,r={reduce}", "batch": EIGHT}
    return jax.jit(jmpx.grad(linear, NO_SCALE, **options))


@pytest.mark.parametrize(("reduce", "divisor"), [("bfloat16", 1), ("float16", 8)])
def test_a_sum_in_fewer_bits_is_rounded_to_them(reduce, divisor, rng):
    x = jnp.asarray(rng.integers(1, 2**15, (8, 50)), jnp.float32)
    exact, rounded = (summed_in(r)(jnp.ones(50), x).grads for r in ("float32", reduce))
    sums = rounded * (8 / divisor)
    assert (sums == sums.astype(reduce).astype(jnp.float32)).all() and (rounded != exact).any()
    np.testing.assert_allclose(rounded, exact, rtol=8 * float(jnp.finfo(reduce).eps))
    np.testing.assert_allclose(exact, np.asarray(x, np.float64).mean(0), rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("compute", "reduce"), [("c=f16", None), ("c=bf16", "bfloat16")])
def test_the_mean_is_that_of_a_loop_over_the_groups(compute, reduce, rng):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    scaling = jmpx.DynamicLossScale(2.0**8)
    options = {"policy": compute if reduce is None else f"{compute},r={reduce}", "batch": EIGHT}
    grad_fn = jax.jit(jmpx.value_and_grad(loss_fn, scaling, **options))
    result = grad_fn(params, x)
    assert result.grads_finite and result.scaling.counter == 1
    alone = jax.jit(jmpx.value_and_grad(loss_fn, scaling, policy=compute))
    each = [alone(params, part) for part in x.reshape(8, 3, 6)]
    mean = jax.tree.map(lambda *parts: np.mean(np.stack(parts), 0), *each)
    sizes = jax.tree.map(lambda *parts: np.abs(np.stack(parts)).mean(0), *each).grads
    np.testing.assert_allclose(result.value, mean.value, rtol=1e-6)
    tolerance = 8 * float(jnp.finfo(reduce).eps) if reduce else 1e-5
    for name, grad in result.grads.items():
        assert (np.abs(grad - mean.grads[name]) <= tolerance * sizes[name]).all()
    for group in (0, 4, 7):  # an overflow in one skips the step for all
        bad = grad_fn(params, x.at[3 * group, 0].set(jnp.inf))
        assert not bad.grads_finite and bad.grads_finite.shape == ()
        assert bad.scaling.loss_scale == 2.0**7 and bad.scaling.counter == 0


def test_without_mixed_precision_the_mean_is_plain(rng):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    options = {"use_mixed_precision": False, "batch": EIGHT}
    result = jax.jit(mpx.filter_value_and_grad(loss_fn, NO_SCALE, **options))(params, x)
    assert_near(result, in_float64(params, x))


# Model state


def test_state_is_averaged_and_equal_state_keeps_its_bits(rng):
    devices, params, x = 6, make_params(rng), normal(rng, EXAMPLES, 6)
    largest = np.finfo(np.float32).max
    state = {
        "mean": normal(rng, 6),
        "kept": jnp.asarray([*rng.normal(size=99), -0.0, largest, -largest, np.inf], jnp.float32),
        "decayed": jnp.float32(rng.uniform()),
        "half": normal(rng, 6).astype(jnp.bfloat16),
        "count": jnp.int32(3),
        "flag": jnp.array(True),
        "complex": jnp.complex64(1 + 2j),
        "key": jax.random.key(3),
        "name": "state",
    }

    def loss(params, state, x):
        new = {
            **state,
            "mean": 0.9 * state["mean"] + 0.1 * x.mean(0),
            "decayed": state["decayed"] * 0.9,
            "half": (state["half"].astype(jnp.float32) + x.mean(0)).astype(jnp.bfloat16),
            "count": state["count"] + 1,
        }
        return loss_fn(params, x), (new, x)

    options = {"has_aux": True, "state_argnum": 1, **groups_of(over(devices))}
    grad_fn = eqx.filter_jit(jmpx.value_and_grad(loss, NO_SCALE, **options))
    (_, (new, other)), *_ = grad_fn(params, state, x)
    assert other.shape == (devices, EXAMPLES // devices, 6)
    wide = np.asarray(state["mean"], np.float64) * 0.9 + 0.1 * np.asarray(x, np.float64).mean(0)
    np.testing.assert_allclose(new.pop("mean"), wide, rtol=1e-5, atol=1e-6)
    half = new.pop("half")
    assert half.dtype == jnp.bfloat16
    expected = state["half"].astype(np.float32) + x.mean(0)
    np.testing.assert_allclose(half.astype(np.float32), expected, atol=0.03)
    assert new.pop("name") == "state"
    assert (jax.random.key_data(new.pop("key")) == jax.random.key_data(state["key"])).all()
    same = {name: state[name] for name in ("kept", "flag", "complex")}
    changed = {"decayed": state["decayed"] * 0.9, "count": jnp.int32(4)}
    assert_same_bits(new, {**same, **changed})


def assert_means(got, parts, tolerance):
    for a, *b in zip(*map(jax.tree.leaves, (got, *parts)), strict=True):
        np.testing.assert_allclose(a, np.mean(np.stack(b), 0), rtol=tolerance, atol=1e-6)


def make_net(rngs):
    linear, dropout = nnx.Linear(6, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    return nnx.Sequential(linear, nnx.BatchNorm(8, rngs=rngs), dropout)


@pytest.mark.thorough
@pytest.mark.versions
def test_statistics_and_random_streams_of_nnx(rng):
    x = normal(rng, EXAMPLES, 6)
    with jax.numpy_dtype_promotion("standard"):
        loss = lambda model, x: (model(x).astype(jnp.float32) ** 2).mean()  # noqa: E731
        models = [make_net(nnx.Rngs(0)) for _ in range(5)]
        options = groups_of(over(4), microbatches=3)
        grad_fn = jmpx.value_and_grad(loss, NO_SCALE, **options)
        result = nnx.jit(grad_fn)(models[0], x)
        options["batch"] = jmpx.Batch(microbatches=3)
        alone = nnx.jit(jmpx.value_and_grad(loss, NO_SCALE, **options))
        each = [alone(m, part) for m, part in zip(models[1:], x.reshape(4, 6, 6), strict=True)]
    assert_means((result.value, result.grads), [(one.value, one.grads) for one in each], 1e-5)
    statistics = [nnx.state(model, nnx.BatchStat) for model in models]
    assert_means(statistics[0], statistics[1:], 1e-5)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(statistics)} == {"float32"}
    streams: Any = models[0].layers[2].rngs
    assert streams.count[...] == 3
