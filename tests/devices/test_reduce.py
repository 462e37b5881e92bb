"""`reduce=` of a policy: the dtype in which the gradient functions sum gradients over devices."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, enable_x64, normal, warns_once
from helpers.jaxprs import equations
from helpers.maps import everywhere
from helpers.training import LOSS_SCALES, loss_fn, make_params
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
import jmpx.mpx as mpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")

AXIS, DEVICES = "data", 8
MAPS = ["shard_map", "shard_map without vma", "vmap", "pmap", "two axes"]
BITS = {None: "f32", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


def with_reduce(reduce, rest="c=bf16"):
    return rest if reduce is None else f"{rest},reduce={reduce}"


def axes_of(how):
    return ("rows", "columns") if how == "two axes" else AXIS


def mapped(run, how, devices=DEVICES):
    """Maps `run(params, part)` over the parts of a batch, whose first axis has one for each device.

    Returns:
        A jitted function of parameters and such a batch, whose results are stacked.
    """
    if how == "vmap":
        return jax.jit(jax.vmap(run, in_axes=(None, 0), axis_name=AXIS))
    if how == "pmap":
        chosen = jax.devices()[:devices]
        return jax.pmap(run, axis_name=AXIS, in_axes=(None, 0), devices=chosen)

    def stacked(params, batch):
        return jax.tree.map(lambda x: x[None], run(params, batch[0]))

    names = axes_of(how)
    grid = np.array(jax.devices()[:devices])
    mesh = Mesh(grid.reshape(2, -1) if how == "two axes" else grid, names)
    parts = P(names)
    vma = how != "shard_map without vma"
    return jax.jit(
        jax.shard_map(stacked, mesh=mesh, in_specs=(P(), parts), out_specs=parts, check_vma=vma)
    )


def gradients(loss, scaling, how=AXIS, **options):
    """A function of parameters and inputs that returns a tuple, which `shard_map` can hand on."""
    grad_fn = mpx.filter_value_and_grad(loss, scaling, over=jmpx.Over(axes_of(how)), **options)
    return lambda params, x: tuple(grad_fn(params, x))


def all_reduces(text):
    """The dtypes in which arrays are summed over devices, from StableHLO: those of many numbers."""
    found = re.findall(
        r'"stablehlo.all_reduce"\(.*?\}\) : \(tensor<(?:([0-9x]+)x)?(complex<\w+>|\w+)>',
        text,
        re.DOTALL,
    )
    return [dtype for shape, dtype in found if shape]


# The dtype of the sums


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("compute", "scale"),
    [("bfloat16", "NoOp"), ("bfloat16", "Static"), ("float16", "Dynamic"), ("float32", "Dynamic")],
)
@pytest.mark.parametrize("reduce", BITS)
@pytest.mark.parametrize("how", ["shard_map", "shard_map without vma", "pmap", "two axes"])
def test_the_dtype_of_each_all_reduce(how, reduce, compute, scale, rng):
    with enable_x64():
        policy = with_reduce(reduce, f"c={compute},o=f32")
        run = gradients(loss_fn, LOSS_SCALES[scale](), how, policy=policy)
        batch = normal(rng, DEVICES, 2, 6)
        text = mapped(run, how).lower(make_params(rng), batch).as_text()
    sums = all_reduces(text)
    assert len(sums) >= 2 and set(sums) == {BITS[reduce]}


@pytest.mark.parametrize("reduce", [None, "float32", "bfloat16", "float16"])
def test_the_dtype_of_the_sum_of_a_vmap(reduce, rng):
    run = gradients(loss_fn, jmpx.NoOpLossScale(), policy=with_reduce(reduce, "c=f32"))
    params = make_params(rng)
    jaxpr = jax.make_jaxpr(jax.vmap(run, in_axes=(None, 0), axis_name=AXIS))(
        params, normal(rng, DEVICES, 2, 6)
    )
    shapes = [(DEVICES, *leaf.shape) for leaf in params.values()]
    sums = [e for e in equations(jaxpr) if e.primitive.name.startswith(("psum", "reduce_sum"))]
    summed = [var.aval for e in sums if e.params["axes"] == (0,) for var in e.invars]
    dtypes = [aval.dtype.name for aval in summed if aval.shape in shapes]
    assert dtypes == [reduce or "float32"] * len(params)


def test_the_value_is_averaged_in_float32(rng):
    run = gradients(lambda w, x: (w * x).sum(), jmpx.NoOpLossScale(), policy="c=f32,r=f16")
    batch = jnp.asarray([[2048.0], [1.0]] * 4, jnp.float32)
    value, *_ = mapped(run, "pmap")(jnp.ones(1), batch)
    assert value.dtype == jnp.float32 and (value == 1024.5).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", MAPS)
def test_unset_it_is_the_mean_written_by_hand(how, rng):
    """The program that there was before `reduce=`: unscale, average, check."""

    def by_hand(params, x):
        scaling = jmpx.DynamicLossScale()
        cast = jmpx.get_policy("c=bf16").cast_to_compute
        if how in ("shard_map", "two axes"):  # so that JAX leaves the sums to this function
            params = jax.tree.map(lambda p: everywhere(p, axes_of(how)), params)

        def scaled(params):
            value = loss_fn(*cast((params, x)))
            return scaling.scale(value), value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        value, grads = jax.lax.pmean((value, scaling.unscale(grads)), axes_of(how))
        finite = jmpx.all_finite(grads)
        return value, scaling.adjust(finite), finite, grads

    ours = gradients(loss_fn, jmpx.DynamicLossScale(), how, policy="c=bf16")
    args = make_params(rng), normal(rng, DEVICES, 2, 6)
    assert_same_bits(mapped(ours, how)(*args), mapped(by_hand, how)(*args))
    counts = [
        sorted(re.findall(r"stablehlo\.\w+", mapped(run, how).lower(*args).as_text()))
        for run in (ours, by_hand)
    ]
    assert counts[0] == counts[1]


# Values


# The error of a sum of eight numbers in a dtype, relative to the sum of their sizes.
ERROR = {"float32": 1e-6, "bfloat16": 8 * 2.0**-8, "float16": 8 * 2.0**-11, "float64": 1e-7}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("how", "scale"), [*((how, "Dynamic") for how in MAPS), ("pmap", "NoOp"), ("pmap", "Static")]
)
@pytest.mark.parametrize("reduce", BITS)
def test_values_against_float64(how, reduce, scale, rng):
    params, batch = make_params(rng), normal(rng, DEVICES, 2, 6)
    with enable_x64():
        run = gradients(
            loss_fn, LOSS_SCALES[scale](), how, policy=with_reduce(reduce, "c=f32,o=f32")
        )
        value, _, finite, grads = mapped(run, how)(params, batch)
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, batch))
        one_device = jax.jit(jax.value_and_grad(loss_fn))
        each = [one_device(wide[0], part) for part in wide[1]]
    assert finite.all()
    np.testing.assert_allclose(value, np.mean([v for v, _ in each]), rtol=1e-6)
    for name, grad in grads.items():
        parts = np.stack([g[name] for _, g in each])
        tolerance = ERROR[reduce or "float32"] * np.abs(parts).mean(0) + 1e-7
        assert grad.dtype == params[name].dtype
        assert (np.abs(grad - parts.mean(0)) <= tolerance).all()
        assert (grad == grad[:1]).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("reduce", "divisor"), [("bfloat16", 1), ("float16", DEVICES)])
@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_a_sum_in_fewer_bits_is_rounded_to_them(how, reduce, divisor, rng):
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    batch = jnp.asarray(rng.integers(1, 2**15, (DEVICES, 50)), jnp.float32)
    results = []
    for each in (None, reduce):
        run = gradients(loss, jmpx.NoOpLossScale(), how, policy=with_reduce(each, "c=f32"))
        results.append(mapped(run, how)(jnp.ones(50), batch)[3][0])
    exact, rounded = results
    sums = rounded * (DEVICES / divisor)
    assert (sums == sums.astype(reduce).astype(jnp.float32)).all()
    assert (rounded != exact).any()
    error = 8 * float(jnp.finfo(reduce).eps)
    np.testing.assert_allclose(rounded, exact, rtol=error)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reduce", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("devices", [1, 3, 6])
def test_the_mean_is_divided_in_float32(devices, reduce, rng):
    """A third of a number of few bits has more bits than the dtype of the sum."""
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    batch = jnp.asarray(rng.integers(-20, 20, (devices, 50)), jnp.float32)  # sums are exact
    if reduce == "float16":
        batch = batch * devices  # which divides first
    run = gradients(loss, jmpx.StaticLossScale(4), policy=with_reduce(reduce, "c=f32"))
    step = mapped(run, "shard_map", devices)
    text = step.lower(jnp.ones(50), batch).as_text()
    operations = re.findall(r"stablehlo\.(?:divide|multiply) .* : tensor<50x(\w+)>", text)
    assert len(operations) >= 2 and set(operations) == {"f32"}
    grads = step(jnp.ones(50), batch)[3]
    np.testing.assert_allclose(grads, np.tile(batch.mean(0), (devices, 1)), rtol=3e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", MAPS)
def test_a_float16_sum_overflows_only_where_the_mean_does(how, rng):
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    run = gradients(loss, jmpx.NoOpLossScale(), how, policy="c=f32,r=f16")
    batch = jnp.asarray(rng.uniform(3e4, 6e4, (DEVICES, 3)), jnp.float32)  # sums to over 2e5
    *_, finite, grads = mapped(run, how)(jnp.ones(3), batch)
    assert finite.all()
    np.testing.assert_allclose(grads, [batch.mean(0)] * DEVICES, rtol=8 * 2.0**-11)
    *_, finite, grads = mapped(run, how)(jnp.ones(3), 4 * batch)
    assert not finite.any() and np.isinf(grads).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", MAPS)
def test_the_loss_scale_protects_a_float16_sum_from_underflow(how, rng):
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    tiny = jnp.asarray(rng.uniform(1, 2, (DEVICES, 3)) * 2.0**-30, jnp.float32)
    for scaling, survives in [
        (jmpx.NoOpLossScale(), False),
        (jmpx.StaticLossScale(2.0**24), True),
        (jmpx.DynamicLossScale(2.0**24), True),
    ]:
        run = gradients(loss, scaling, how, policy="c=f32,r=f16")
        *_, finite, grads = mapped(run, how)(jnp.ones(3), tiny)
        assert finite.all()
        expected = tiny.mean(0) if survives else jnp.zeros(3)
        np.testing.assert_allclose(grads, [expected] * DEVICES, rtol=8 * 2.0**-11)


# The gradients of the devices, as a part of the largest number of the dtype. Multiplied by the
# scale of 4, each of them is finite, and their sum or, in float16, one of the quotients is not.
OVERFLOWS = {
    "float16": [3.0] + 7 * [0.0],
    "bfloat16": 8 * [0.225],
    "float32": 8 * [0.225],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("reduce", OVERFLOWS)
@pytest.mark.parametrize("how", MAPS)
def test_an_overflow_in_the_sum_is_seen_by_all_devices(how, reduce):
    largest = float(jnp.finfo(reduce).max)
    batch = jnp.asarray(OVERFLOWS[reduce], jnp.float32)[:, None] * largest
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    scaling, policy = jmpx.DynamicLossScale(4.0, 5), with_reduce(reduce, "c=f32")
    run = gradients(loss, scaling, how, policy=policy)
    _, adjusted, finite, grads = mapped(run, how)(jnp.zeros(1), batch)
    assert finite.shape == adjusted.loss_scale.shape == (DEVICES,)
    assert not finite.any() and np.isinf(grads).all()
    assert (adjusted.loss_scale == 2).all() and (adjusted.counter == 0).all()
    smaller = gradients(loss, jmpx.DynamicLossScale(0.25, min_loss_scale=0.25), how, policy=policy)
    _, _, finite, grads = mapped(smaller, how)(jnp.zeros(1), batch)
    assert finite.all()
    mean = np.mean(OVERFLOWS[reduce]) * largest
    np.testing.assert_allclose(grads, np.full((DEVICES, 1), mean), rtol=0.05)


@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_the_next_smaller_scale_lets_the_step_pass(how):
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    batch = jnp.full((DEVICES, 2), 5e4)
    scaling = jmpx.DynamicLossScale(8.0)
    for expected in (False, False, False, True):
        run = gradients(loss, scaling, how, policy="c=f32,r=f16")
        _, adjusted, finite, grads = mapped(run, how)(jnp.ones(2), batch)
        assert (finite == expected).all()
        scaling = jax.tree.map(lambda leaf: leaf[0], adjusted)
    np.testing.assert_allclose(grads, np.full((DEVICES, 2), 5e4), rtol=2.0**-10)


# All kinds of arguments


def test_complex_gradients_keep_their_dtype(rng):
    params = {"w": normal(rng, 3), "z": normal(rng, 3).astype(jnp.complex64)}

    def loss(params, x):
        return (jnp.abs(params["z"]) * x).sum() + (params["w"] * x).sum()

    batch = normal(rng, DEVICES, 3)
    texts, results = [], []
    for reduce in (None, "bfloat16"):
        run = gradients(loss, jmpx.StaticLossScale(8), policy=with_reduce(reduce, "c=f32"))
        texts.append(mapped(run, "shard_map").lower(params, batch).as_text())
        results.append(mapped(run, "shard_map")(params, batch)[3])
    assert [sorted(all_reduces(text)) for text in texts] == [
        ["complex<f32>", "f32"],
        ["bf16", "complex<f32>"],
    ]
    np.testing.assert_allclose(results[1]["z"], results[0]["z"], rtol=1e-6)
    np.testing.assert_allclose(results[1]["w"], results[0]["w"], atol=0.1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("reduce", BITS)
def test_gradients_have_the_dtypes_of_parameters(reduce, stored, rng):
    with enable_x64():
        params = jnp.asarray(normal(rng, 3), stored)
        loss = lambda w, x: (w * x.astype(w.dtype)).sum()  # noqa: E731
        run = gradients(loss, jmpx.NoOpLossScale(), policy=with_reduce(reduce, f"c={stored}"))
        batch = normal(rng, DEVICES, 3)
        text = mapped(run, "pmap").lower(params, batch).as_text()
        grads = mapped(run, "pmap")(params, batch)[3]
    assert grads.dtype == jnp.dtype(stored)
    unset = "f64" if stored == "float64" else "f32"
    assert set(all_reduces(text)) == {BITS[reduce] if reduce else unset}
    np.testing.assert_allclose(grads[0].astype(np.float32), batch.mean(0), atol=0.05)


@pytest.mark.parametrize("make", [jmpx.filter_grad, jmpx.filter_value_and_grad])
@pytest.mark.parametrize("has_aux", [False, True])
def test_both_functions_with_and_without_aux(make, has_aux, rng):
    loss = (lambda p, x: (loss_fn(p, x), x.sum())) if has_aux else loss_fn
    over = jmpx.Over(AXIS)
    grad_fn = make(loss, jmpx.DynamicLossScale(), has_aux, policy="c=bf16,r=f16", over=over)
    args = make_params(rng), normal(rng, DEVICES, 2, 6)
    run = lambda params, x: grad_fn(params, x).grads  # noqa: E731
    assert set(all_reduces(mapped(run, "pmap").lower(*args).as_text())) == {"f16"}
    if has_aux:
        result = jax.pmap(grad_fn, AXIS, in_axes=(None, 0))(*args)
        aux = result.aux if make is jmpx.filter_grad else result.value[1]
        np.testing.assert_allclose(aux, args[1].sum((1, 2)), atol=0.1)  # each device's own


def test_an_equinox_model(rng, key):
    model = eqx.nn.MLP(6, 1, 8, 1, key=key)
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        return (jax.vmap(eqx.combine(arrays, static))(x).astype(jnp.float32) ** 2).mean()

    batch = normal(rng, DEVICES, 2, 6)
    results = []
    for reduce in (None, "bfloat16"):
        run = gradients(loss, jmpx.NoOpLossScale(), policy=with_reduce(reduce, "c=f32"))
        results.append(mapped(run, "shard_map")(arrays, batch)[3])
        text = mapped(run, "shard_map").lower(arrays, batch).as_text()
        assert set(all_reduces(text)) == {BITS[reduce]}
    for exact, rounded in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(rounded, exact, rtol=0.1, atol=0.05 * np.abs(exact).max())


def test_an_nnx_module(rng):
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)

    def run(params, x):
        model = nnx.merge(graphdef, params)
        loss = lambda model, x: (model(x).astype(jnp.float32) ** 2).mean()  # noqa: E731
        grad_fn = jmpx.filter_value_and_grad(
            loss, jmpx.NoOpLossScale(), policy="c=bf16,o=f32,r=bf16", over=jmpx.Over(AXIS)
        )
        value, _, finite, grads = grad_fn(model, x)
        return value, finite, nnx.to_pure_dict(grads)

    batch = normal(rng, DEVICES, 2, 6)
    text = mapped(run, "shard_map").lower(params, batch).as_text()
    assert set(all_reduces(text)) == {"bf16"}
    _, finite, grads = mapped(run, "shard_map")(params, batch)
    assert finite.all() and grads["kernel"].shape == (DEVICES, 6, 3)

    def reference(kernel, x):
        return ((x @ kernel + params["bias"][...]) ** 2).mean()

    each = [jax.grad(reference)(model.kernel[...], x) for x in batch]
    np.testing.assert_allclose(grads["kernel"][0], np.mean(each, axis=0), atol=0.05)


# Where nothing is reduced


@pytest.mark.parametrize("make", [jmpx.filter_grad, jmpx.filter_value_and_grad])
@pytest.mark.parametrize("policy", ["c=f32,r=bf16", "reduce=f16", "r=half", "r=f32; Linear?: full"])
def test_without_an_axis_one_warning(make, policy):
    with warns_once(
        __file__, "reduce=.* reduces nothing without a mean over devices: give over=jmpx.Over"
    ):
        make(jnp.sum, jmpx.NoOpLossScale(), policy=policy)


@pytest.mark.parametrize("options", [{"policy": "c=bf16"}, {"policy": None}])
def test_without_reduce_no_warning(options):
    jmpx.filter_grad(jnp.sum, jmpx.NoOpLossScale(), **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", MAPS)
def test_without_mixed_precision_it_is_the_plain_mean(how, rng):
    run = gradients(
        loss_fn, jmpx.DynamicLossScale(), how, policy="c=f16,r=f16", use_mixed_precision=False
    )
    args = make_params(rng), normal(rng, DEVICES, 2, 6)
    lowered = mapped(run, how).lower(*args).as_text()
    assert "f16" not in re.sub(r"bf16|loc\(.*", "", lowered)
    grads = mapped(run, how)(*args)[3]
    one_device = jax.jit(jax.grad(loss_fn))
    each = [one_device(args[0], x) for x in args[1]]
    for name, grad in grads.items():
        np.testing.assert_allclose(grad[0], np.mean([g[name] for g in each], 0), atol=1e-6)
    # It reduces nothing in a dtype, and warns of nothing: nothing of the policy is used.
    mpx.filter_grad(loss_fn, jmpx.NoOpLossScale(), False, False, policy="r=f16")


def test_float64_is_refused_without_x64(rng):
    run = gradients(loss_fn, jmpx.NoOpLossScale(), policy="c=f32,r=f64")
    with pytest.raises(ValueError, match="Cannot cast to float64 while JAX's 64-bit types are"):
        mapped(run, "pmap")(make_params(rng), normal(rng, DEVICES, 2, 6))
