"""Sharded parameters: the gradients of the mean loss, and one decision on all devices."""

import re
from typing import Any

import compiled_step
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal
from helpers.maps import AXIS, DEVICES, everywhere, in_float64, mesh_of, over_devices
from helpers.training import LOSS_SCALES
from jax.sharding import PartitionSpec as P

import jmpx

# Private, to leave out the search for shards: no option does.
from jmpx._devices.shards import Source
from jmpx._steps import differentiation

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")

SCALE = jmpx.StaticLossScale(8)
BOTH = ("data", "fsdp")


def over(sharded=None):
    return jmpx.Over(AXIS, sharded=sharded)


def gather(w, axis_name=AXIS):
    return jax.lax.all_gather(w, axis_name, tiled=True)


# Ways to read a whole parameter of shape (8, 4); of the last two, each device has a copy.
READS = {
    "tiled": gather,
    "untiled": lambda w: jax.lax.all_gather(w, AXIS).reshape(-1, *w.shape[1:]),
    "jmpx": lambda w: jmpx.distributed.gather(w, AXIS, "full"),
    "replica": lambda w: w,
    "cast": lambda w: w,
}
# Which of them are split over the devices.
SPECS = {name: P() if name in ("replica", "cast") else P(AXIS) for name in READS}
MASK = {name: bool(spec) for name, spec in SPECS.items()}


def make_weights(rng):
    return {name: normal(rng, 8, 4) / 2 for name in READS}


def network(params, x, reads=None):
    """The mean over examples of what a network with all of these parameters gives."""
    total = jnp.zeros((len(x), 4), x.dtype)
    for name, w in params.items():
        total = total + jnp.tanh(x @ (reads[name](w) if reads else w))
    return jnp.mean(total.astype(jnp.float32) ** 2)


def read_network(params, x):
    return network(params, x, READS)


def whole(name, grad):
    """The gradient of a whole parameter from those of all devices."""
    if SPECS[name]:
        return np.concatenate(grad)
    assert (grad == grad[:1]).all()
    return grad[0]


def flag_reductions(text):
    """The number of reductions of one integer or bool over devices, in StableHLO."""
    found = re.findall(r'"stablehlo.all_reduce"\(.*?\) : \(tensor<(\S+)>\)', text, re.DOTALL)
    return sum(each in ("i32", "i1") for each in found)


def assert_near(grads, expected, bound):
    """Holds gradients to be near; the bound is relative to the largest number of each."""
    for name, grad in grads.items():
        atol = bound * np.abs(expected[name]).max()
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=atol, err_msg=name)


# The error of a gradient, relative to its largest number: of float32 and its sums, of products in
# bfloat16, and of sums of four numbers in 16 bits.
ERRORS = {"full": 1e-5, "c=bf16": 0.05, "c=f32,r=bf16": 0.02, "c=f32,r=f16": 5e-3}


@pytest.mark.parametrize(
    ("how", "policy", "scale", "microbatches"),
    [
        ("shard_map", "c=f32,r=bf16", "Dynamic", 1),
        ("shard_map without vma", "c=bf16", "Static", 1),
        ("vmap", "full", "NoOp", 2),
        ("pmap", "c=f32,r=f16", "Dynamic", 1),
        pytest.param("shard_map", "full", "Static", 2, marks=pytest.mark.thorough),
        pytest.param("pmap", "c=bf16", "Dynamic", 2, marks=pytest.mark.thorough),
    ],
)
def test_values_against_float64(how, policy, scale, microbatches, rng):
    params, batch = make_weights(rng), normal(rng, 16, 8)
    if policy == "c=bf16":
        del params["jmpx"]  # which casts by itself
    specs, mask = ({name: kind[name] for name in params} for kind in (SPECS, MASK))
    masks = [None, mask] if how == "shard_map" and policy != "full" else [mask]
    options = {"policy": policy, "batch": jmpx.Batch(microbatches=microbatches)}

    def run(params, x):
        if how == "shard_map":
            params["cast"] = everywhere(params["cast"])
        scaling = LOSS_SCALES[scale]()
        make = jmpx.value_and_grad
        return [
            make(read_network, scaling, over=over(mask), **options)(params, x) for mask in masks
        ]

    value, expected = in_float64(network, params, batch)
    for each in over_devices(run, how, params, batch, specs=(specs, P(AXIS))):
        np.testing.assert_allclose(each.value, [value] * DEVICES, rtol=ERRORS[policy])
        assert each.grads_finite.all()
        grads = {name: whole(name, grad) for name, grad in each.grads.items()}
        assert_near(grads, expected, ERRORS[policy])


def test_shards_of_complex_numbers_and_of_integers(rng):
    real, imaginary, x = normal(rng, 8, 3), normal(rng, 8, 3), normal(rng, 12, 8)
    params = {"c": jax.lax.complex(real, imaginary), "int": jnp.arange(8), "none": None}

    def loss_fn(params, x, read=gather):
        y = jnp.abs(x.astype(jnp.complex64) @ read(params["c"]))
        return jnp.mean(y**2) * read(params["int"]).sum().astype(y.dtype)

    run = jmpx.grad(loss_fn, SCALE, policy="full", over=over(True))
    grads = over_devices(lambda *args: run(*args).grads, "vmap", params, x)
    alone = lambda c: loss_fn({**params, "c": c}, x, lambda w: w)  # noqa: E731
    expected = jax.jit(jax.grad(alone))(params["c"])
    assert grads["int"] is None and grads["none"] is None and grads["c"].dtype == jnp.complex64
    np.testing.assert_allclose(grads["c"].reshape(8, 3), expected, 1e-5, 1e-3)


# One decision


# JAX 0.7 warns of a pmap in a jit.
@pytest.mark.filterwarnings("ignore:.*includes a pmap:UserWarning")
@pytest.mark.parametrize(
    ("how", "kind", "expected"),
    [("shard_map", "replica", 0), ("shard_map without vma", "tiled", 1), ("pmap", "jmpx", 1)],
)
def test_the_number_of_reductions_of_the_flag(how, kind, expected, rng):
    weights = {f"{kind} {i}": normal(rng, 8, 4) for i in range(3)}
    loss = lambda params, x: network(params, x, dict.fromkeys(weights, READS[kind]))  # noqa: E731
    options = {"policy": "full", "over": over(MASK[kind])}
    run = jmpx.value_and_grad(loss, jmpx.DynamicLossScale(8.0), **options)
    lowered = lambda *args: over_devices(run, how, *args, specs=(SPECS[kind], P(AXIS)))  # noqa: E731
    text = jax.jit(lowered).lower(weights, normal(rng, 12, 8)).as_text()
    assert flag_reductions(text) == expected


@pytest.mark.parametrize("vma", [True, False])
def test_the_flag_is_common_over_an_axis_that_is_not_averaged(vma, rng):
    """Each device of `model` has a part of a tensor, and one of them overflows."""
    w, batch = jnp.zeros((4, 3)), normal(rng, 4, 4).at[:, 3].set(60000.0)
    loss = lambda w, x: jnp.sum(jax.lax.psum(x @ w + 1, "model").astype(jnp.float32)) * 8  # noqa: E731
    scaling = jmpx.DynamicLossScale(4.0)
    grad_fn = jmpx.grad(loss, scaling, policy="c=f16", over=jmpx.Over("data"))

    def run(w, x):
        scaling, finite, grads = grad_fn(w, x)
        return jax.tree.map(lambda x: x[None], (scaling, finite, jmpx.all_finite(grads)))

    mesh = mesh_of(2, 2)
    specs = {"in_specs": (P("model"), P("data", "model")), "out_specs": P(("data", "model"))}
    mapped = jax.shard_map(run, mesh=mesh, **specs, check_vma=vma)
    scaling, finite, own = jax.jit(mapped)(w, batch)
    assert own.tolist() == [True, False] * 2
    assert not finite.any() and (scaling.loss_scale == 2).all()


def test_an_overflow_on_one_device_skips_the_step_on_all(rng):
    """The flag and the scale are common, and so is the choice between old and new parameters."""
    optimizer, scaling = optax.sgd(0.1, momentum=0.9), jmpx.DynamicLossScale(2.0**4)

    def loss(shards, x):
        whole = jmpx.distributed.gather(shards, AXIS, "c=f16")
        return jnp.mean((x @ whole["w"]).astype(jnp.float32) ** 2)

    def run(params, state, x):
        options = {"policy": "by=arguments,c=f16", "over": AXIS, "uncast": 0}
        scale, finite, grads = jmpx.grad(loss, scaling, **options)(params, x)
        params, state = jmpx.optimizer_update(params, optimizer, state, grads, finite)
        return params, state, scale.loss_scale, finite[None]

    params, x = {"w": normal(rng, 16, 3)}, normal(rng, 16, 16)
    state = optimizer.init(params)
    split = jax.tree.map(lambda leaf: P(AXIS) if leaf.ndim else P(), state)
    ins, outs = (P(AXIS), split, P(AXIS)), (P(AXIS), split, P(), P(AXIS))
    mapped = jax.shard_map(run, mesh=mesh_of(8), in_specs=ins, out_specs=outs)
    step = jax.jit(mapped)
    new, _, scale, finite = step(params, state, x)
    assert finite.all() and scale == 16 and (new["w"] != params["w"]).all()
    new, after, scale, finite = step(params, state, x.at[3, 2].set(6e4))  # of the second device
    assert finite.shape == (8,) and not finite.any() and scale == 8
    np.testing.assert_array_equal(new["w"], params["w"])
    assert not after[0].trace["w"].any()


# Meshes of several axes, and axes of other kinds


def on_two_axes(grad_fn, names, specs, spec, vma=True):
    whole: Any = P()
    outs = jmpx.types.ValueAndGradients(whole, whole, whole, specs)
    options = {"in_specs": (specs, spec), "out_specs": outs, "check_vma": vma}
    sizes = (2, 4) if "fsdp" in names else (2, 2)
    return jax.jit(jax.shard_map(grad_fn, mesh=mesh_of(*sizes, names=names), **options))


def hybrid(params, x, read=lambda w, axis_name: w):
    """Shards over `fsdp`, one of them over both axes, and a parameter that all devices have."""
    h = jnp.tanh(x @ read(params["shard"], "fsdp") + read(params["both"], BOTH))
    return jnp.mean((h * params["replica"]) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("vma", "masked", "policy"), [(True, False, "c=f32,r=bf16"), (False, True, "full")]
)
def test_shards_of_one_axis_are_averaged_over_the_other(vma, masked, policy, rng):
    params = {"shard": normal(rng, 8, 8), "both": normal(rng, 8), "replica": normal(rng, 8)}
    batch = normal(rng, 16, 8)
    specs = {"shard": P("fsdp"), "both": P(BOTH), "replica": P()}
    mask = {"shard": True, "both": True, "replica": False} if masked else None
    loss, scaling = lambda params, x: hybrid(params, x, gather), jmpx.DynamicLossScale(16.0)
    options = {"policy": policy, "over": jmpx.Over(BOTH, sharded=mask)}
    grad_fn = jmpx.value_and_grad(loss, scaling, **options)
    step = on_two_axes(grad_fn, BOTH, specs, P(BOTH), vma)
    value, _, finite, grads = step(params, batch)
    expected_value, expected = in_float64(hybrid, params, batch)
    assert finite
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert_near(grads, expected, 1e-5 if policy == "full" else 0.02)
    text = step.lower(params, batch).as_text()
    assert flag_reductions(text) == 1
    if policy != "full":  # What is averaged is summed in bfloat16: a shard of 2 x 8 and 8 numbers.
        sums = re.findall(r'stablehlo.all_reduce"\(.*?\) : \(tensor<(\S+)>\)', text, re.DOTALL)
        assert sorted(sums) == ["2x8xbf16", "8xbf16", "f32", "i32"]


def test_a_sum_in_float16_has_room_for_shards():
    """The gather's sum over one axis is divided before the sum in float16 over the other."""
    loss = lambda w, x: (gather(w, "fsdp") * x).sum()  # noqa: E731
    options = {"policy": "c=f32,r=f16", "over": jmpx.Over(BOTH)}
    grad_fn = jmpx.value_and_grad(loss, jmpx.NoOpLossScale(), **options)
    step = on_two_axes(grad_fn, BOTH, P("fsdp"), P(BOTH))
    _, _, finite, grads = step(jnp.ones(4), jnp.full((8, 1), 49152.0))
    assert finite and (grads == 49152.0).all()


def test_of_several_untracked_axes_a_gather_says_which(rng):
    params, batch = normal(rng, 8, 4), normal(rng, 2, 4, 3, 8)
    square = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    loss = lambda w, x: square(gather(w, "fsdp"), x)  # noqa: E731
    grad_fn = jmpx.grad(loss, SCALE, policy="full", over=jmpx.Over(BOTH, True))
    inner = jax.vmap(grad_fn, axis_name="fsdp")
    run = jax.jit(jax.vmap(inner, in_axes=(None, 0), axis_name="data"))
    expected = jax.jit(jax.grad(square))(params, batch.reshape(24, 8))
    for one in run(params.reshape(4, 2, 4), batch).grads:
        np.testing.assert_allclose(one.reshape(8, 4), expected, rtol=1e-5, atol=1e-6)


def tensor_parallel(params, x, axis=None):
    """Columns of one weight and rows of the next on each device, and a bias on all."""
    h = jnp.tanh(x @ params["columns"] + params["bias"].mean()) @ params["rows"]
    return jnp.mean((jax.lax.psum(h, axis) if axis else h) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize("axis_name", ["data", ("data", "model")])
def test_tensor_parallelism(axis_name, rng):
    params = {"columns": normal(rng, 8, 4), "rows": normal(rng, 4, 3), "bias": normal(rng, 4)}
    specs = {"columns": P(None, "model"), "rows": P("model"), "bias": P()}
    batch = normal(rng, 6, 8)
    mask = None if axis_name == "data" else {"columns": "own", "rows": "own", "bias": False}
    loss = lambda params, x: tensor_parallel(params, x, "model")  # noqa: E731
    options = {"policy": "full", "over": jmpx.Over(axis_name, sharded=mask)}
    grad_fn = jmpx.value_and_grad(loss, jmpx.DynamicLossScale(16.0), **options)
    step = on_two_axes(grad_fn, ("data", "model"), specs, P("data"))
    value, _, finite, grads = step(params, batch)
    expected_value, expected = in_float64(tensor_parallel, params, batch)
    assert finite and flag_reductions(step.lower(params, batch).as_text()) == 1
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], 1e-4, 1e-6, err_msg=name)


@pytest.mark.thorough
@pytest.mark.versions
def test_a_map_in_a_map(rng):
    params, batch = make_weights(rng), normal(rng, 16, 8)
    grad_fn = jmpx.value_and_grad(read_network, SCALE, policy="full", over=over())

    def run(params, x):
        results = jax.vmap(grad_fn, in_axes=(None, 0))(params, x.reshape(2, 2, 8))
        return jax.tree.map(lambda x: x.mean(0), results.grads)

    found = over_devices(run, "shard_map", params, batch, specs=(SPECS, P(AXIS)))
    grads = {name: whole(name, grad) for name, grad in found.items()}
    assert_near(grads, in_float64(network, params, batch)[1], 1e-4)


# Masks of nested parameters


def test_masks_of_nested_parameters(rng):
    """Each device has a whole model: what the mask calls its own is divided, not averaged."""
    model = {"layer": [normal(rng, 3, 2), {"b": normal(rng, 2)}], "n": 3, "name": "net"}
    call = lambda p, x: x @ p["layer"][0] + p["layer"][1]["b"]  # noqa: E731
    mask = {"layer": ["own", {"b": False}], "n": True, "name": False}
    batch = normal(rng, DEVICES, 2, 3)
    loss_fn = lambda model, x: jnp.mean(call(model, x) ** 2)  # noqa: E731

    def run(x):
        grads = [
            jmpx.grad(loss_fn, SCALE, policy="full", over=over(each))(model, x).grads
            for each in ("own", mask, False)
        ]
        return list(map(jax.tree.leaves, grads))

    shards, mixed, means = jax.jit(jax.vmap(run, axis_name=AXIS))(batch)
    for says, shard, either, mean in zip(("own", False), shards, mixed, means, strict=True):
        np.testing.assert_allclose(shard.sum(0), mean[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(either, shard if says else mean)
        assert np.abs(shard - mean).max() > 1e-3


# The search for shards leaves the program as it is, and is not there without an axis


@jax.custom_vjp
def tenfold_backwards(x):
    return x


tenfold_backwards.defvjp(lambda x: (x, None), lambda _, g: (10 * g,))


@jax.custom_jvp
def hundredfold_tangents(x):
    return x


hundredfold_tangents.defjvp(lambda x, t: (x[0], 100 * t[0]))


@pytest.mark.parametrize("how", ["shard_map", "vmap"])
def test_custom_derivatives_hold(how, rng):
    w, batch = normal(rng, 8, 3), normal(rng, 12, 8)

    def loss_fn(w, x, first=tenfold_backwards, second=hundredfold_tangents):
        h = jax.checkpoint(lambda x: jax.jit(first)(x @ w))(x)
        return jax.lax.scan(lambda c, row: (c + second(row).sum(), None), 0 * h[0, 0], h)[0]

    run = jmpx.grad(loss_fn, SCALE, policy="full", over=over())
    grads = over_devices(run, how, w, batch, specs=(P(), P(AXIS))).grads
    expected = 1000 * batch.sum(0)[:, None] / DEVICES
    np.testing.assert_allclose(grads, np.tile(expected, (DEVICES, 1, 3)), rtol=1e-5, atol=1e-4)


@pytest.mark.thorough
def test_it_compiles_to_the_same_and_calls_the_function_once(rng, monkeypatch):
    calls = []

    def loss_fn(params, x):
        calls.append(x)
        for w in params:
            x = jax.nn.gelu(jax.nn.softmax(x @ w))
        return (x.astype(jnp.float32) ** 2).mean(), {"x": x, "name": "aux", "n": 3}

    options = {"policy": "c=f16", "over": over()}
    grad_fn = jmpx.value_and_grad(loss_fn, SCALE, has_aux=True, **options)

    def run(params, x):
        (value, aux), _, finite, grads = grad_fn(params, x)
        assert aux["name"] == "aux" and aux["n"] == 3
        return value, aux["x"], finite, grads

    specs = {"in_specs": (P(), P(AXIS)), "out_specs": (P(), P(AXIS), P(), P())}
    mapped = jax.shard_map(run, mesh=mesh_of(4), **specs)
    params, batch = [normal(rng, 8, 8) for _ in range(2)], normal(rng, 12, 8)

    def compile_and_run():
        calls.clear()
        compiled = jax.jit(lambda *args: mapped(*args)).lower(params, batch).compile()
        return compiled_step.count(compiled.as_text()), compiled(params, batch), len(calls)  # pyright: ignore[reportArgumentType]

    counts, results, times = compile_and_run()
    without = lambda func, *_: (func, Source(None))  # noqa: E731
    monkeypatch.setattr(differentiation, "find_exchanges", without)
    plain_counts, plain_results, plain_times = compile_and_run()
    assert counts == plain_counts and times == plain_times == 1
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(plain_results), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_an_axis_nothing_is_searched(rng, monkeypatch):
    def refuse(*args):
        raise AssertionError("searched")

    monkeypatch.setattr(differentiation, "find_exchanges", refuse)
    loss = lambda w, x: (x @ w).mean()  # noqa: E731
    jmpx.grad(loss, SCALE, policy="full")(normal(rng, 8, 3), normal(rng, 12, 8))
