"""`gather`: parameters gathered in the compute dtype, gradients summed in the reduce one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, enable_x64, normal
from helpers.collectives import collectives
from helpers.jaxprs import equations
from jax.sharding import Mesh, PartitionSpec as P

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")

AXIS, DEVICES = "data", 8
MAPS = ["shard_map", "shard_map without vma", "vmap", "pmap"]
BITS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
AXES = {"rows": 0, "columns": -1, "whole": None}


def mapped(run, how, axis_name: str | tuple[str, ...] = AXIS):
    """Maps `run(*parts)` over the first axes of its arguments, and stacks its results."""
    if how == "vmap":
        return jax.jit(jax.vmap(run, axis_name=axis_name))
    if how == "pmap":
        return jax.pmap(run, axis_name=axis_name)

    def stacked(*args):
        return jax.tree.map(lambda x: x[None], run(*jax.tree.map(lambda x: x[0], args)))

    grid = np.array(jax.devices()[:DEVICES])
    mesh = Mesh(grid.reshape(2, -1) if isinstance(axis_name, tuple) else grid, axis_name)
    spec = P(axis_name)
    vma = how == "shard_map"
    return jax.jit(jax.shard_map(stacked, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=vma))


def make_params(rng):
    return {"rows": normal(rng, 16, 6), "columns": normal(rng, 6, 8), "whole": normal(rng, 8)}


def shards(params):
    """Splits parameters by `AXES`; the parts of a leaf are along a new first axis."""
    return {
        "rows": params["rows"].reshape(DEVICES, 2, 6),
        "columns": params["columns"].reshape(6, DEVICES, 1).swapaxes(0, 1),
        "whole": jnp.stack([params["whole"]] * DEVICES),
    }


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["rows"])
    return jnp.sum((hidden @ params["columns"] + params["whole"]) ** 2)


reference = jax.jit(jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0)))


def gathered_loss(policy, loss=loss_fn, axis_name=AXIS):
    def run(params, x):
        whole = jmpx.distributed.gather(params, axis_name, policy, axis=AXES)
        return loss(jmpx.cast_to_full(whole), x)

    return run


def dtypes_of(text, kind):
    return {dtype for dtype, _ in collectives(text, kind)}


def with_reduce(compute, reduce):
    return f"c={compute},o=f32" + (f",r={reduce}" if reduce else "")


# Values


@pytest.mark.sampled(5)
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", MAPS)
def test_values_and_gradients_against_float64(how, compute, rng):
    """Values are those of the rounded parameters, gradients are summed over the devices."""
    params, batch = make_params(rng), normal(rng, DEVICES, 3, 16) / 4
    reduces = ("", "bfloat16", "float16")
    run = {r: jax.value_and_grad(gathered_loss(with_reduce(compute, r))) for r in reduces}
    step = mapped(lambda *args: {r: run[r](*args) for r in reduces}, how)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf.astype(compute), np.float64), params)
    with enable_x64():
        expected_values, each = reference(rounded, np.asarray(batch, np.float64))
    once = float(jnp.finfo(compute).eps)
    for reduce, (values, grads) in step(shards(params), batch).items():
        np.testing.assert_allclose(values, expected_values, rtol=1e-5)
        error = once + DEVICES * float(jnp.finfo(reduce or "float32").eps)
        for name in ("rows", "columns"):
            parts = np.asarray(each[name])
            expected = shards({**params, name: parts.sum(0)})[name]
            sizes = shards({**params, name: np.abs(parts).sum(0)})[name]
            assert grads[name].dtype == jnp.float32
            assert (np.abs(grads[name] - expected) <= error * sizes + 1e-5).all()
        # JAX leaves the gradient of a whole leaf to each device.
        np.testing.assert_allclose(grads["whole"], each["whole"], rtol=once, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("how", MAPS)
def test_in_float32_it_is_all_gather_bit_for_bit(how, axis, rng):
    loss = lambda whole, x: jnp.sum(jnp.tanh(whole @ x))  # noqa: E731
    w, x = normal(rng, DEVICES, 16, 16), normal(rng, DEVICES, 16 * (DEVICES if axis else 1), 3)

    def ours(w, x):
        return loss(jmpx.distributed.gather(w, AXIS, "full", axis=axis), x)

    def plain(w, x):
        return loss(jax.lax.all_gather(w, AXIS, axis=axis % 2, tiled=True), x)

    results = [mapped(jax.value_and_grad(run), how)(w, x) for run in (ours, plain)]
    assert_same_bits(*results)


@pytest.mark.parametrize("how", MAPS)
def test_a_float16_sum_overflows_only_where_the_mean_does(how, rng):
    run = lambda w, t: (jmpx.distributed.gather(w, AXIS, "c=f32,r=f16") * t).sum()  # noqa: E731
    cotangents = jnp.asarray(rng.uniform(3e4, 6e4, (DEVICES, 2 * DEVICES)), jnp.float32)
    step = mapped(jax.grad(run), how)
    grads = step(jnp.ones((DEVICES, 2)), cotangents)
    expected = np.asarray(cotangents, np.float64).sum(0).reshape(DEVICES, 2)
    assert expected.min() > 65504
    np.testing.assert_allclose(grads, expected, rtol=DEVICES * 2.0**-11)
    assert np.isinf(step(jnp.ones((DEVICES, 2)), 4 * cotangents)).all()


@pytest.mark.parametrize("reduce", [None, "bfloat16", "float16"])
def test_only_a_float16_sum_is_divided_and_multiplied_in_float32(reduce, rng):
    policy = with_reduce("float16", reduce)
    run = lambda w, t: (jmpx.distributed.gather(w, AXIS, policy).astype(t.dtype) * t).sum()  # noqa: E731
    w, t = normal(rng, DEVICES, 2), normal(rng, DEVICES, 2 * DEVICES)
    text = mapped(jax.grad(run), "shard_map").lower(w, t).as_text()
    in_float32 = ["f32"] if reduce == "float16" else []
    assert re.findall(r"stablehlo\.divide .* : tensor<16x(\w+)>", text) == in_float32
    assert re.findall(r"stablehlo\.multiply .* : tensor<2x(\w+)>", text) == in_float32


# Dtypes of the collectives


@pytest.mark.sampled(6)
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("reduce", [None, "float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("how", ["shard_map", "shard_map without vma", "pmap"])
def test_the_dtypes_of_gathers_and_reductions(how, reduce, compute, rng):
    with enable_x64():
        step = mapped(jax.grad(gathered_loss(with_reduce(compute, reduce))), how)
        text = step.lower(shards(make_params(rng)), normal(rng, DEVICES, 3, 16)).as_text()
    gathers, sums = (collectives(text, kind) for kind in ("all_gather", "reduce_scatter"))
    assert sorted(gathers) == [(BITS[compute], 48), (BITS[compute], 96)]
    assert sorted(sums) == [(BITS[reduce or "float32"], 48), (BITS[reduce or "float32"], 96)]
    assert collectives(text, "all_reduce") == []


@pytest.mark.parametrize("reduce", [None, "bfloat16", "float16"])
def test_the_dtype_of_the_sum_of_a_vmap(reduce, rng):
    run = lambda w, t: (jmpx.distributed.gather(w, AXIS, with_reduce("f32", reduce)) * t).sum()  # noqa: E731
    w, t = normal(rng, DEVICES, 2, 3), normal(rng, DEVICES, 2 * DEVICES, 3)
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(run), axis_name=AXIS))(w, t)
    sums = [e.invars[0].aval for e in equations(jaxpr) if e.primitive.name == "reduce_sum"]
    assert [aval.dtype.name for aval in sums if aval.ndim == 3][-1] == (reduce or "float32")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64", "float8_e5m2"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_gradients_come_in_the_dtype_that_is_stored(compute, stored, rng):
    with enable_x64():
        w = jnp.asarray(rng.normal(size=(DEVICES, 2)), stored)
        run = lambda w: jmpx.distributed.gather(w, AXIS, f"c={compute}").sum()  # noqa: E731
        step = mapped(jax.value_and_grad(run), "shard_map")
        text, (_, grads) = step.lower(w).as_text(), step(w)
        assert dtypes_of(text, "all_gather") == {BITS[compute]}
        assert dtypes_of(text, "reduce_scatter") == {"f64" if stored == "float64" else "f32"}
        assert grads.dtype == jnp.dtype(stored) and (grads == DEVICES).all()


@pytest.mark.parametrize("reduce", [None, "bfloat16", "float16"])
def test_a_whole_leaf_that_jax_knows_to_be_equal_is_summed_in_the_reduce_dtype(reduce, rng):
    """JAX sums it by itself there, for a plain cast in the compute dtype."""
    mesh = Mesh(jax.devices()[:DEVICES], AXIS)

    def run(b, x):
        whole = jmpx.distributed.gather({"b": b}, AXIS, with_reduce("bfloat16", reduce), axis=None)
        return jax.lax.pmean(jnp.sum(whole["b"].astype(jnp.float32) * x), AXIS)

    specs = {"in_specs": (P(), P(AXIS)), "out_specs": P()}
    step = jax.jit(jax.shard_map(jax.grad(run), mesh=mesh, **specs))
    b, x = normal(rng, 3), normal(rng, DEVICES, 3)
    assert collectives(step.lower(b, x).as_text(), "all_reduce") == [(BITS[reduce or "float32"], 3)]
    np.testing.assert_allclose(step(b, x), x.mean(0), atol=0.05)


# Transformations


def square(w):
    return jnp.sum(jmpx.distributed.gather(w, AXIS, "c=bf16,r=f32").astype(jnp.float32) ** 2)


def by_scan(w):
    body = lambda c, _: (c + square(w), None)  # noqa: E731
    return jax.lax.scan(body, 0 * w.sum(), None, length=2)[0] / 2


def by_linearize(w):
    value, linear = jax.linearize(square, w)
    return jax.linear_transpose(linear, w)(jnp.ones_like(value))[0]


GRADIENTS = {
    "jit": jax.jit(jax.grad(square)),
    "checkpoint": jax.grad(jax.checkpoint(square)),
    "scan": jax.grad(by_scan),
    "a scan of checkpoints": jax.grad(jax.checkpoint(by_scan)),
    "vmap": lambda w: jax.vmap(jax.grad(square))(jnp.stack([w, 2 * w]))[0],
    "linearize": by_linearize,
    "autocast": jax.grad(jmpx.autocast(square, "c=bf16")),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("how", ["shard_map", "vmap"])
def test_it_transforms_as_a_function_of_jax_does(how, name, rng):
    w = normal(rng, DEVICES, 2)
    step = mapped(GRADIENTS[name], how)
    expected = 2 * DEVICES * w.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(step(w), expected, rtol=2.0**-7)
    if how != "vmap":
        text = step.lower(w).as_text()
        assert dtypes_of(text, "all_gather") == {"bf16"}
        assert dtypes_of(text, "reduce_scatter") == {"f32"}


@pytest.mark.parametrize("how", MAPS)
def test_tangents_go_forward(how, rng):
    w, t = normal(rng, DEVICES, 2), normal(rng, DEVICES, 2)
    _, tangents = mapped(lambda w, t: jax.jvp(square, (w,), (t,)), how)(w, t)
    np.testing.assert_allclose(tangents, [2 * np.sum(w * t)] * DEVICES, rtol=0.02, atol=0.1)


@pytest.mark.parametrize(("wrap", "gathers"), [(lambda f: f, 1), (jax.checkpoint, 2)])
def test_a_checkpoint_gathers_again_in_the_backward_pass(wrap, gathers, rng):
    """Then no whole parameter is kept between the passes, as ZeRO-3 has it."""
    block = lambda w, x: jnp.tanh(x @ jmpx.distributed.gather(w, AXIS, "c=bf16").astype(x.dtype))  # noqa: E731

    def loss(w, x):
        return jnp.sum(wrap(block)(w, wrap(block)(w, x)) ** 2)

    w, x = normal(rng, DEVICES, 2, 16), normal(rng, DEVICES, 3, 16)
    text = mapped(jax.value_and_grad(loss), "shard_map").lower(w, x).as_text()
    found = collectives(text, "all_gather"), collectives(text, "reduce_scatter")
    assert found == ([("bf16", 256)] * 2 * gathers, [("f32", 256)] * 2)


@pytest.mark.parametrize("how", ["shard_map", "shard_map without vma"])
def test_over_several_axes(how, rng):
    w, x = normal(rng, DEVICES, 2, 3), normal(rng, DEVICES, 5, 2 * DEVICES)
    names = ("slow", "fast")

    def run(w, x):
        return jnp.sum(jnp.tanh(x @ jmpx.distributed.gather(w, names, "c=f32,r=f16")))

    grads = mapped(jax.grad(run), how, names)(w, x)
    whole = w.reshape(2 * DEVICES, 3)
    each = [jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(whole, part) for part in x]
    np.testing.assert_allclose(grads.reshape(whole.shape), np.sum(each, 0), atol=0.05)
