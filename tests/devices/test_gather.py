"""`gather`: parameters gathered in the compute dtype, gradients summed in the reduce one."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, enable_x64, normal
from helpers.collectives import collectives
from helpers.jaxprs import equations
from helpers.maps import AXIS, DEVICES, mapped, mesh_of
from jax.sharding import PartitionSpec as P

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")

BITS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
AXES = {"rows": 0, "columns": -1, "whole": None}
ROUNDED = 1 + 2**-12  # neither float16 nor bfloat16 holds it


def gather(tree, policy: Any = "c=bf16", **options):
    return jmpx.distributed.gather(tree, AXIS, policy, **options)


def over_vmap(run, *args):
    return mapped(run, "vmap")(*args)


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


def gradients(compute, reduces):
    """The value and gradients of a loss of shards, with each of the reduce dtypes."""

    def run(params, x):
        results = {}
        for reduce in reduces:
            policy = f"c={compute},o=f32" + (f",r={reduce}" if reduce else "")
            loss = lambda p, p_=policy: loss_fn(jmpx.cast_to_full(gather(p, p_, axis=AXES)), x)  # noqa: E731
            results[reduce or "unset"] = jax.value_and_grad(loss)(params)
        return results

    return run


def dtypes_of(text, kind):
    return [dtype for dtype, _ in collectives(text, kind)]


# Values


@pytest.mark.parametrize(
    ("how", "compute"),
    [("shard_map", "float16"), ("shard_map without vma", "float32"), ("vmap", "bfloat16")],
)
def test_values_and_gradients_against_float64(how, compute, rng):
    """Values are those of the rounded parameters, gradients are summed over the devices."""
    params = {"rows": normal(rng, 8, 6), "columns": normal(rng, 6, 4), "whole": normal(rng, 4)}
    batch = normal(rng, DEVICES, 3, 8) / 4
    args, reduces = (shards(params), batch), ("", "bfloat16", "float16")
    step = mapped(gradients(compute, reduces), how)
    if how != "vmap":
        text = step.lower(*args).as_text()
        gathers, sums = (collectives(text, kind) for kind in ("all_gather", "reduce_scatter"))
        assert sorted(gathers) == [(BITS[compute], 24)] * 3 + [(BITS[compute], 48)] * 3
        expected = [(BITS[reduce or "float32"], size) for reduce in reduces for size in (24, 48)]
        assert sorted(sums) == sorted(expected) and collectives(text, "all_reduce") == []
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf.astype(compute), np.float64), params)
    with enable_x64():
        reference = jax.jit(jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0)))
        expected_values, each = reference(rounded, np.asarray(batch, np.float64))
    once = float(jnp.finfo(compute).eps)
    results = step(*args)
    for reduce in reduces:
        values, grads = results[reduce or "unset"]
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


@pytest.mark.parametrize(
    ("how", "axis"), [("shard_map", 0), ("shard_map without vma", 1), ("vmap", -1)]
)
def test_in_float32_it_is_all_gather_bit_for_bit(how, axis, rng):
    loss = lambda whole, x: jnp.sum(jnp.tanh(whole @ x))  # noqa: E731
    w, x = normal(rng, DEVICES, 4, 4), normal(rng, DEVICES, 4 * (DEVICES if axis else 1), 3)

    def ours(w, x):
        return loss(gather(w, "full", axis=axis), x)

    def plain(w, x):
        return loss(jax.lax.all_gather(w, AXIS, axis=axis % 2, tiled=True), x)

    both = lambda *args: [jax.value_and_grad(run)(*args) for run in (ours, plain)]  # noqa: E731
    assert_same_bits(*mapped(both, how)(w, x))


def test_a_float16_sum_overflows_only_where_the_mean_does(rng):
    run = lambda w, t: (gather(w, "c=f32,r=f16") * t).sum()  # noqa: E731
    cotangents = jnp.asarray(rng.uniform(3e4, 6e4, (DEVICES, 2 * DEVICES)), jnp.float32)
    step = mapped(jax.grad(run), "pmap")
    grads = step(jnp.ones((DEVICES, 2)), cotangents)
    expected = np.asarray(cotangents, np.float64).sum(0).reshape(DEVICES, 2)
    assert expected.min() > 65504
    np.testing.assert_allclose(grads, expected, rtol=DEVICES * 2.0**-11)
    assert np.isinf(step(jnp.ones((DEVICES, 2)), 4 * cotangents)).all()


@pytest.mark.parametrize(("reduce", "in_float32"), [("", []), (",r=f16", ["f32"])])
def test_only_a_float16_sum_is_divided_and_multiplied_in_float32(reduce, in_float32, rng):
    run = lambda w, t: (gather(w, f"c=f16{reduce}").astype(t.dtype) * t).sum()  # noqa: E731
    w, t = normal(rng, DEVICES, 2), normal(rng, DEVICES, 2 * DEVICES)
    text = mapped(jax.grad(run), "shard_map").lower(w, t).as_text()
    assert re.findall(r"stablehlo\.divide .* : tensor<8x(\w+)>", text) == in_float32
    assert re.findall(r"stablehlo\.multiply .* : tensor<2x(\w+)>", text) == in_float32


@pytest.mark.parametrize(("reduce", "dtype"), [("", "float32"), (",r=bf16", "bfloat16")])
def test_the_dtype_of_the_sum_of_a_vmap(reduce, dtype, rng):
    run = lambda w, t: (gather(w, f"c=f32{reduce}") * t).sum()  # noqa: E731
    w, t = normal(rng, DEVICES, 2, 3), normal(rng, DEVICES, 2 * DEVICES, 3)
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(run), axis_name=AXIS))(w, t)
    sums = [e.invars[0].aval for e in equations(jaxpr) if e.primitive.name == "reduce_sum"]
    assert [aval.dtype.name for aval in sums if aval.ndim == 3][-1] == dtype


@pytest.mark.thorough
def test_gradients_come_in_the_dtype_that_is_stored(rng):
    stored = ["float32", "bfloat16", "float16", "float64", "float8_e5m2"]

    def total(ws, policy):
        return sum(jnp.sum(w.astype(jnp.float32)) for w in gather(ws, policy))

    def run(ws):
        policies = ("c=f32", "c=bf16", "c=bf16,r=f64")
        return [jax.value_and_grad(total)(ws, policy) for policy in policies]

    with enable_x64():
        ws = [jnp.asarray(rng.normal(size=(DEVICES, 2)), dtype) for dtype in stored]
        step = mapped(run, "shard_map")
        text, results = step.lower(ws).as_text(), step(ws)
    assert dtypes_of(text, "all_gather") == ["f32"] * 5 + ["bf16"] * 10
    assert sorted(dtypes_of(text, "reduce_scatter")) == ["f32"] * 8 + ["f64"] * 7
    for _, grads in results:
        assert [grad.dtype.name for grad in grads] == stored
        assert all((np.asarray(grad) == DEVICES).all() for grad in grads)


def test_a_whole_leaf_that_jax_knows_to_be_equal_is_summed_in_the_reduce_dtype(rng):
    """JAX sums it by itself there, for a plain cast in the compute dtype."""

    def mean(b, x, reduce):
        whole = gather(b, f"c=bf16{reduce}", axis=None)
        return jax.lax.pmean(jnp.sum(whole.astype(jnp.float32) * x), AXIS)

    run = lambda b, x: [jax.grad(mean)(b, x, reduce) for reduce in ("", ",r=bf16", ",r=f16")]  # noqa: E731
    specs = {"in_specs": (P(), P(AXIS)), "out_specs": P()}
    step = jax.jit(jax.shard_map(run, mesh=mesh_of(DEVICES), **specs))
    b, x = normal(rng, 3), normal(rng, DEVICES, 3)
    text = step.lower(b, x).as_text()
    assert sorted(collectives(text, "all_reduce")) == [("bf16", 3), ("f16", 3), ("f32", 3)]
    for grad in step(b, x):
        np.testing.assert_allclose(grad, x.mean(0), atol=0.05)


# Transformations


def square(w):
    return jnp.sum(gather(w, "c=bf16,r=f32").astype(jnp.float32) ** 2)


def by_scan(w):
    body = lambda c, _: (c + square(w), None)  # noqa: E731
    return jax.lax.scan(body, 0 * w.sum(), None, length=2)[0] / 2


def by_linearize(w):
    value, linear = jax.linearize(square, w)
    return jax.linear_transpose(linear, w)(jnp.ones_like(value))[0]


GRADIENTS = {
    "jit": jax.jit(jax.grad(square)),
    "checkpoint": jax.grad(jax.checkpoint(square)),
    "a scan of checkpoints": jax.grad(jax.checkpoint(by_scan)),
    "vmap": lambda w: jax.vmap(jax.grad(square))(jnp.stack([w, 2 * w]))[0],
    "linearize": by_linearize,
    "autocast": jax.grad(jmpx.autocast(square, "c=bf16")),
}


@pytest.mark.parametrize("how", ["shard_map", "vmap"])
def test_it_transforms_as_a_function_of_jax_does(how, rng):
    w = normal(rng, DEVICES, 2)
    step = mapped(lambda w: {name: grad(w) for name, grad in GRADIENTS.items()}, how)
    expected = 2 * DEVICES * w.astype(jnp.bfloat16).astype(jnp.float32)
    for name, grads in step(w).items():
        np.testing.assert_allclose(grads, expected, rtol=2.0**-7, err_msg=name)
    if how == "shard_map":
        text = step.lower(w).as_text()
        assert {*dtypes_of(text, "all_gather")} == {"bf16"}
        assert {*dtypes_of(text, "reduce_scatter")} == {"f32"}
    # Tangents go forward.
    _, tangents = mapped(lambda w: jax.jvp(square, (w,), (w,)), how)(w)
    np.testing.assert_allclose(tangents, [2 * np.sum(w * w)] * DEVICES, rtol=0.02)


@pytest.mark.parametrize(("wrap", "gathers"), [(lambda f: f, 1), (jax.checkpoint, 2)])
def test_a_checkpoint_gathers_again_in_the_backward_pass(wrap, gathers, rng):
    """Then no whole parameter is kept between the passes, as ZeRO-3 has it."""
    block = lambda w, x: jnp.tanh(x @ gather(w).astype(x.dtype))  # noqa: E731

    def loss(w, x):
        return jnp.sum(wrap(block)(w, wrap(block)(w, x)) ** 2)

    w, x = normal(rng, DEVICES, 2, 8), normal(rng, DEVICES, 3, 8)
    text = mapped(jax.value_and_grad(loss), "shard_map").lower(w, x).as_text()
    found = collectives(text, "all_gather"), collectives(text, "reduce_scatter")
    assert found == ([("bf16", 64)] * 2 * gathers, [("f32", 64)] * 2)


def test_over_several_axes(rng):
    w, x = normal(rng, DEVICES, 2, 3), normal(rng, DEVICES, 5, 2 * DEVICES)
    names: Any = ("slow", "fast")

    def run(w, x):
        return jnp.sum(jnp.tanh(x @ jmpx.distributed.gather(w, names, "c=f32,r=f16")))

    grads = mapped(jax.grad(run), "shard_map without vma", names=names)(w, x)
    whole = w.reshape(2 * DEVICES, 3)
    expected = jax.jit(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w))))(whole)
    np.testing.assert_allclose(grads.reshape(whole.shape), expected, atol=0.05)


# Trees


def test_every_kind_of_leaf(rng, key):
    seen = []

    def run(w, n, flags, z, keys):
        others = {"rate": 0.5, "key": keys, "name": "relu", "call": jnp.tanh}
        others["text"] = np.array(["a"])
        tree = {"w": w, "n": n, "flags": flags, "z": z, "count": 3, "none": None, **others}
        out = gather(tree)
        assert all(out[name] is leaf for name, leaf in others.items())
        assert out["none"] is None and out["count"] == 3
        seen.append({name: out[name].dtype.name for name in ("w", "n", "flags", "z")})
        return tuple(out[name] for name in ("w", "n", "flags", "z"))

    w, n = normal(rng, DEVICES, 2, 3), jnp.arange(2 * DEVICES).reshape(DEVICES, 2)
    z = jax.lax.complex(normal(rng, DEVICES, 2), normal(rng, DEVICES, 2))
    whole = over_vmap(run, w, n, n % 3 == 0, z, jax.random.split(key, DEVICES))
    assert seen == [{"w": "bfloat16", "n": "int32", "flags": "bool", "z": "complex64"}]
    expected = w.astype(jnp.bfloat16), n, n % 3 == 0, z
    for one, leaf in zip(whole, expected, strict=True):
        for device in one:
            np.testing.assert_array_equal(device, leaf.reshape(-1, *leaf.shape[2:]))


def test_complex_and_integer_leaves_do_not_stop_gradients(rng):
    z = normal(rng, DEVICES, 2).astype(jnp.complex64)
    n = jnp.arange(2 * DEVICES).reshape(DEVICES, 2)

    def run(z, n):
        whole, back = jax.vjp(gather, n)
        assert back(np.zeros(whole.shape, jax.dtypes.float0))[0].dtype == jax.dtypes.float0
        return jax.grad(lambda z: jnp.abs(gather(z)).sum())(z)

    np.testing.assert_allclose(over_vmap(run, z, n), DEVICES * jnp.sign(z), rtol=1e-6)


@pytest.mark.thorough
def test_a_tree_of_axes_may_be_a_prefix(rng):
    params = {"first": {"w": normal(rng, 2, 4), "b": normal(rng, 4)}, "last": [normal(rng, 3)] * 2}
    specs = {"first": {"w": P(None, AXIS), "b": P(AXIS)}, "last": P()}
    run = lambda params: gather(params, "full", axis={"first": {"w": 1, "b": 0}, "last": None})  # noqa: E731
    options = {"in_specs": (specs,), "out_specs": P(), "check_vma": False}
    assert_same_bits(jax.shard_map(run, mesh=mesh_of(DEVICES), **options)(params), params)


def test_where_jax_tracks_nothing_an_equal_array_may_be_gathered():
    options = {"in_specs": P(), "out_specs": P(AXIS), "check_vma": False}
    whole = jax.shard_map(gather, mesh=mesh_of(DEVICES), **options)(jnp.arange(3))
    assert whole.tolist() == [0, 1, 2] * DEVICES**2


def test_an_nnx_module():
    layers = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    layers[1].mean[...] = jnp.full(8, ROUNDED)
    graph, params, others = nnx.split(nnx.Sequential(*layers), nnx.Param, ...)
    parts = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), params)

    def run(parts):
        model = nnx.merge(graph, parts, others)
        models = gather(model), nnx.merge(graph, gather(nnx.state(model)))
        assert models[0].layers[1].mean is model.layers[1].mean
        return [(each.layers[0].kernel[...], each.layers[1].mean[...]) for each in models]

    for kernel, mean in over_vmap(run, parts):
        assert kernel.shape == (DEVICES, 8, 8) and kernel.dtype == jnp.bfloat16
        assert mean.shape == (DEVICES, 8) and (np.asarray(mean) == np.float32(ROUNDED)).all()


def test_the_cast_is_the_one_of_the_policy(rng):
    """A subclass of `Policy` may cast in its own way; the gradient is that of a cast."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Coarse(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jax.tree.map(lambda x: jnp.round(x).astype(jnp.bfloat16), tree)

    w = normal(rng, DEVICES, 2)
    policy = Coarse("float32", "bfloat16", "float32")

    def loss(w):
        whole = gather(w, policy)
        return whole.astype(jnp.float32).sum(), whole

    grads, whole = over_vmap(jax.grad(loss, has_aux=True), w)
    np.testing.assert_array_equal(whole[0], jnp.round(w).reshape(-1).astype(jnp.bfloat16))
    assert (grads == DEVICES).all()


# Casts around it


W = X = jnp.full((DEVICES, 1), ROUNDED, jnp.float32)


def gradient_of_gathered(w, x, **options):
    loss = lambda w, x: gather(w, "c=f32").sum() * x.astype(jnp.float32).sum()  # noqa: E731
    # Float16 without a loss scale would be another warning.
    return jmpx.grad(loss, jmpx.StaticLossScale(1), **options)(w, x).grads


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "by=arguments,full"},
        {"policy": "by=arguments,c=bf16", "uncast": 0},
        {
            "policy": "by=modules,c=bf16; Head: full"
        },  # a policy map: the gather counts as what casts
    ],
    ids=str,
)
def test_the_remedies_are_silent_and_right(options):
    grads = over_vmap(lambda w, x: gradient_of_gathered(w, x, **options), W, X)
    x = X.astype(jnp.bfloat16) if "uncast" in options else X
    np.testing.assert_array_equal(grads, np.full((DEVICES, 1), x.astype(np.float32).sum()))


def test_a_tree_without_floats_casts_nothing():
    def run(x):
        loss = lambda x: x.sum() + gather(jnp.arange(2), "c=f32").sum()  # noqa: E731
        return jmpx.grad(loss, jmpx.NoOpLossScale(), policy="c=bf16")(x).grads

    with jax.numpy_dtype_promotion("standard"):
        assert (over_vmap(run, X) == 1).all()


def test_an_autocast_around_keeps_the_dtypes(rng):
    w, x = normal(rng, DEVICES, 2, 3), normal(rng, DEVICES, 5, 2 * DEVICES)

    def run(w, x):
        losses = [
            lambda w, x, r=r: jnp.sum(x @ gather(w, f"c=bf16,r={r}").astype(x.dtype))
            for r in ("f32", "bf16", "f16")
        ]
        return [jax.grad(jmpx.autocast(loss, "c=bf16"))(w, x) for loss in losses]

    step = mapped(run, "shard_map")
    assert dtypes_of(step.lower(w, x).as_text(), "reduce_scatter") == ["f32", "bf16", "f16"]
    for grads in step(w, x):
        np.testing.assert_allclose(grads.reshape(-1, 3)[:, 0], x.sum((0, 1)), atol=0.5)
