"""`reduce=` of a policy: the dtype in which the gradient functions sum gradients over devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, enable_x64, normal
from helpers.jaxprs import equations
from helpers.maps import AXIS, DEVICES, everywhere, mapped
from helpers.training import LOSS_SCALES, loss_fn, make_params

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")

BITS = {None: "f32", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
NOOP, AXES = jmpx.NoOpLossScale(), ("rows", "columns")


def with_reduce(reduce, rest="c=f32"):
    return rest if reduce is None else f"{rest},reduce={reduce}"


def axes_of(how) -> Any:
    return AXES if how == "two axes" else AXIS


def over_batch(run, how, devices=DEVICES):
    """Maps `run(params, part)` over the parts of a batch, whose first axis has one a device."""
    return mapped(run, how, (None, 0), names=axes_of(how), devices=devices)


def dot(w, x):
    return (w * x).sum()


def dot_gradients(scaling, policy):
    return jmpx.value_and_grad(dot, scaling, policy=policy, over=jmpx.Over(AXIS))


def all_reduces(text):
    """The dtypes in which arrays are summed over devices, from StableHLO: those of many numbers."""
    found = re.findall(
        r'"stablehlo.all_reduce"\(.*?\}\) : \(tensor<(?:([0-9x]+)x)?(complex<\w+>|\w+)>',
        text,
        re.DOTALL,
    )
    return [dtype for shape, dtype in found if shape]


# The error of a sum of four numbers in a dtype, relative to the sum of their sizes.
ERROR = {"float32": 1e-6, "bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11, "float64": 1e-7}


@pytest.mark.parametrize(
    ("how", "reduce", "scale"),
    [
        ("shard_map", None, "Dynamic"),
        ("shard_map without vma", "float32", "NoOp"),
        ("vmap", "bfloat16", "Static"),
        ("pmap", "float16", "Dynamic"),
        ("pmap", "float64", "NoOp"),
        ("two axes", "bfloat16", "Dynamic"),
    ],
)
def test_values_against_float64_and_the_dtype_of_each_sum(how, reduce, scale, rng):
    params, batch = make_params(rng), normal(rng, DEVICES, 2, 6)
    over = jmpx.Over(axes_of(how))
    with enable_x64():
        policy = with_reduce(reduce, "c=f32,o=f32")
        run = jmpx.value_and_grad(loss_fn, LOSS_SCALES[scale](), policy=policy, over=over)
        step = over_batch(run, how)
        if how != "vmap":
            sums = all_reduces(step.lower(params, batch).as_text())
            assert len(sums) >= 2 and set(sums) == {BITS[reduce]}
        value, _, finite, grads = step(params, batch)
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, batch))
        each = jax.jit(jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0)))(*wide)
    assert finite.all()
    np.testing.assert_allclose(value, [each[0].mean()] * DEVICES, rtol=1e-6)
    for name, grad in grads.items():
        parts = np.asarray(each[1][name])
        tolerance = ERROR[reduce or "float32"] * np.abs(parts).mean(0) + 1e-7
        assert grad.dtype == params[name].dtype
        assert (np.abs(grad - parts.mean(0)) <= tolerance).all()
        assert (grad == grad[:1]).all()


@pytest.mark.parametrize(("compute", "make"), [("bf16", jmpx.grad), ("f16", jmpx.value_and_grad)])
def test_both_functions_sum_in_the_dtype_whatever_they_compute_in(compute, make, rng):
    loss = lambda p, x: (loss_fn(p, x), x.sum())  # noqa: E731
    options = {"policy": f"c={compute},o=f32,r=f16", "over": jmpx.Over(AXIS)}
    grad_fn = make(loss, jmpx.DynamicLossScale(2.0**10), True, **options)
    args = make_params(rng), normal(rng, DEVICES, 2, 6)
    step = over_batch(grad_fn, "pmap")
    assert set(all_reduces(step.lower(*args).as_text())) == {"f16"}
    result = step(*args)
    aux = result.aux if make is jmpx.grad else result.value[1]
    np.testing.assert_allclose(aux, args[1].sum((1, 2)), atol=0.1)  # each device's own


@pytest.mark.parametrize("reduce", [None, "bfloat16"])
def test_the_dtype_of_the_sum_of_a_vmap(reduce, rng):
    over, params = jmpx.Over(AXIS), make_params(rng)
    run = jmpx.value_and_grad(loss_fn, NOOP, policy=with_reduce(reduce), over=over)
    jaxpr = jax.make_jaxpr(jax.vmap(run, in_axes=(None, 0), axis_name=AXIS))(
        params, normal(rng, DEVICES, 2, 6)
    )
    shapes = [(DEVICES, *leaf.shape) for leaf in params.values()]
    sums = [e for e in equations(jaxpr) if e.primitive.name.startswith(("psum", "reduce_sum"))]
    summed = [var.aval for e in sums if e.params["axes"] == (0,) for var in e.invars]
    dtypes = [aval.dtype.name for aval in summed if aval.shape in shapes]
    assert dtypes == [reduce or "float32"] * len(params)


def test_the_value_is_averaged_in_float32():
    batch = jnp.asarray([[2048.0], [1.0]] * 2, jnp.float32)
    step = over_batch(dot_gradients(NOOP, "c=f32,r=f16"), "pmap")
    value, *_ = step(jnp.ones(1), batch)
    assert value.dtype == jnp.float32 and (value == 1024.5).all()


@pytest.mark.parametrize("how", ["shard_map", pytest.param("pmap", marks=pytest.mark.thorough)])
def test_unset_it_is_the_mean_written_by_hand(how, rng):
    """The program that there was before `reduce=`: unscale, average, check."""

    def by_hand(params, x):
        scaling = jmpx.DynamicLossScale()
        cast = jmpx.get_policy("c=bf16").cast_to_compute
        if how == "shard_map":  # so that JAX leaves the sums to this function
            params = jax.tree.map(everywhere, params)

        def scaled(params):
            value = loss_fn(*cast((params, x)))
            return scaling.scale(value), value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        value, grads = jax.lax.pmean((value, scaling.unscale(grads)), AXIS)
        finite = jmpx.all_finite(grads)
        return value, scaling.adjust(finite), finite, grads

    scale, policy = jmpx.DynamicLossScale(), "by=arguments,c=bf16"
    ours = jmpx.value_and_grad(loss_fn, scale, policy=policy, over=AXIS)
    args = make_params(rng), normal(rng, DEVICES, 2, 6)
    steps = [over_batch(run, how) for run in (lambda *args: tuple(ours(*args)), by_hand)]
    assert_same_bits(*(step(*args) for step in steps))
    texts = [step.lower(*args).as_text() for step in steps]
    counts = [sorted(re.findall(r"stablehlo\.\w+", text)) for text in texts]
    assert counts[0] == counts[1]


# Values


@pytest.mark.parametrize(("devices", "reduce"), [(1, "float32"), (3, "bfloat16"), (6, "float16")])
def test_the_mean_is_divided_in_float32(devices, reduce, rng):
    """A third of a number of few bits has more bits than the dtype of the sum."""
    batch = jnp.asarray(rng.integers(-20, 20, (devices, 50)), jnp.float32)  # sums are exact
    if reduce == "float16":
        batch = batch * devices  # which divides first
    run = dot_gradients(jmpx.StaticLossScale(4), with_reduce(reduce))
    step = over_batch(run, "shard_map", devices)
    text = step.lower(jnp.ones(50), batch).as_text()
    operations = re.findall(r"stablehlo\.(?:divide|multiply) .* : tensor<50x(\w+)>", text)
    assert len(operations) >= 2 and set(operations) == {"f32"}
    grads = step(jnp.ones(50), batch)[3]
    np.testing.assert_allclose(grads, np.tile(batch.mean(0), (devices, 1)), rtol=3e-7)


def test_a_float16_sum_overflows_only_where_the_mean_does(rng):
    step = over_batch(dot_gradients(NOOP, "c=f32,r=f16"), "vmap")
    batch = jnp.asarray(rng.uniform(3e4, 6e4, (DEVICES, 3)), jnp.float32)  # sums to over 1e5
    *_, finite, grads = step(jnp.ones(3), batch)
    assert finite.all()
    np.testing.assert_allclose(grads, [batch.mean(0)] * DEVICES, rtol=8 * 2.0**-11)
    *_, finite, grads = step(jnp.ones(3), 4 * batch)
    assert not finite.any() and np.isinf(grads).all()


# The gradients of the devices, as a part of the largest number of the dtype. Multiplied by the
# scale of 4, each of them is finite, and their sum or, in float16, one of the quotients is not.
OVERFLOWS = {"float16": [3.0, 0.0, 0.0, 0.0], "bfloat16": [0.225] * 4, "float32": [0.225] * 4}


@pytest.mark.parametrize(
    ("how", "reduce"),
    [("shard_map", "bfloat16"), ("shard_map without vma", "float16"), ("pmap", "float32")],
)
def test_an_overflow_in_the_sum_is_seen_by_all_devices(how, reduce):
    largest = float(jnp.finfo(reduce).max)
    batch = jnp.asarray(OVERFLOWS[reduce], jnp.float32)[:, None] * largest
    scales = jmpx.DynamicLossScale(4.0, 5), jmpx.DynamicLossScale(0.25, min_loss_scale=0.25)

    def run(w, x):
        return [tuple(dot_gradients(each, with_reduce(reduce))(w, x)[1:]) for each in scales]

    larger, (_, smaller_finite, mean) = over_batch(run, how)(jnp.zeros(1), batch)
    adjusted, finite, grads = larger
    assert finite.shape == adjusted.loss_scale.shape == (DEVICES,)
    assert not finite.any() and np.isinf(grads).all()
    assert (adjusted.loss_scale == 2).all() and (adjusted.counter == 0).all()
    assert smaller_finite.all()
    expected = np.mean(OVERFLOWS[reduce]) * largest
    np.testing.assert_allclose(mean, np.full((DEVICES, 1), expected), rtol=0.05)


# All kinds of arguments


def test_complex_gradients_keep_their_dtype(rng):
    params = {"w": normal(rng, 3), "z": normal(rng, 3).astype(jnp.complex64)}

    def loss(params, x):
        return (jnp.abs(params["z"]) * x).sum() + (params["w"] * x).sum()

    def run(params, x):
        options = [{"policy": with_reduce(each), "over": over} for each in (None, "bfloat16")]
        scale = jmpx.StaticLossScale(8)
        return [jmpx.grad(loss, scale, **each)(params, x).grads for each in options]

    over, batch = jmpx.Over(AXIS), normal(rng, DEVICES, 3)
    step = over_batch(run, "shard_map")
    found = all_reduces(step.lower(params, batch).as_text())
    assert sorted(found) == ["bf16", "complex<f32>", "complex<f32>", "f32"]
    exact, rounded = step(params, batch)
    np.testing.assert_allclose(rounded["z"], exact["z"], rtol=1e-6)
    np.testing.assert_allclose(rounded["w"], exact["w"], atol=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("reduce", [None, "float16"])
@pytest.mark.filterwarnings(  # on purpose
    "ignore:The gradient function differentiates parameters that are stored in less:UserWarning"
)
def test_gradients_have_the_dtypes_of_parameters(reduce, rng):
    stored = ["float32", "bfloat16", "float16", "float64"]
    loss = lambda ws, x: sum((w * x.astype(w.dtype)).sum().astype(jnp.float32) for w in ws)  # noqa: E731
    policy = with_reduce(reduce, "by=arguments,c=f32")
    with enable_x64():
        params = [jnp.asarray(normal(rng, 3), dtype) for dtype in stored]
        batch = normal(rng, DEVICES, 3)
        step = over_batch(jmpx.grad(loss, NOOP, policy=policy, over=AXIS), "pmap")
        text, grads = step.lower(params, batch).as_text(), step(params, batch).grads
    assert [grad.dtype.name for grad in grads] == stored
    assert set(all_reduces(text)) == ({"f16"} if reduce else {"f32", "f64"})
    for grad in grads:
        np.testing.assert_allclose(grad[0].astype(np.float32), batch.mean(0), atol=0.05)
