"""`gather`: which trees it takes, what it refuses, how it stands with what casts around it."""

import dataclasses
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal, warns_once
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
import jmpx.equinox
import jmpx.mpx as mpx

AXIS, DEVICES = "data", 8
SPLIT = P(AXIS)
ROUNDED = 1 + 2**-12  # neither float16 nor bfloat16 holds it


def over_vmap(run, *args):
    return jax.vmap(run, axis_name=AXIS)(*args)


def over_shard_map(run, *args, in_specs: Any = SPLIT, **options):
    mesh = Mesh(jax.devices()[:DEVICES], AXIS)
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=SPLIT, **options)(*args)


# Trees


def test_every_kind_of_leaf(rng, key):
    seen = []

    def run(w, n, flags, z, keys):
        tree = {
            "w": w,
            "n": n,
            "flags": flags,
            "z": z,
            "key": keys,
            "rate": 0.5,
            "count": 3,
            "none": None,
            "name": "relu",
            "call": jnp.tanh,
            "text": np.array(["a"]),
        }
        out = jmpx.distributed.gather(tree, AXIS, "c=bf16")
        assert all(out[name] is tree[name] for name in ("rate", "name", "call", "text", "key"))
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
        loss = lambda z: jnp.abs(jmpx.distributed.gather(z, AXIS, "c=bf16")).sum()  # noqa: E731
        whole, back = jax.vjp(lambda n: jmpx.distributed.gather(n, AXIS, "c=bf16"), n)
        assert back(np.zeros(whole.shape, jax.dtypes.float0))[0].dtype == jax.dtypes.float0
        return jax.grad(loss)(z)

    np.testing.assert_allclose(over_vmap(run, z, n), DEVICES * jnp.sign(z), rtol=1e-6)


@pytest.mark.thorough
def test_an_equinox_module(rng, key):
    model = eqx.nn.MLP(8, 8, 16, 1, key=key)
    split = lambda x: x.reshape(DEVICES, -1, *x.shape[1:]) if eqx.is_array(x) else x  # noqa: E731
    parts, static = eqx.partition(jax.tree.map(split, model), eqx.is_array)
    x = normal(rng, 8)

    def run(parts):
        whole = jmpx.distributed.gather(eqx.combine(parts, static), AXIS, "c=bf16")
        assert whole.activation is model.activation
        return whole(x.astype(jnp.bfloat16))

    expected = jmpx.cast_tree(model, jnp.bfloat16)(x.astype(jnp.bfloat16))
    np.testing.assert_allclose(over_vmap(run, parts)[3], expected, atol=0.02)


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.mean = nnx.BatchStat(jnp.full(8, ROUNDED))

    def __call__(self, x):
        y = self.linear(x)
        self.mean[...] += y.mean(0)
        return y


def split_params(model):
    """A graph, this model's parameters in parts along a new first axis, and its other state."""
    graph, params, others = nnx.split(model, nnx.Param, ...)
    parts = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), params)
    return graph, parts, others


@pytest.mark.parametrize("of", ["the module", "its state"])
def test_an_nnx_module(of):
    graph, parts, others = split_params(Net())

    def run(parts):
        model = nnx.merge(graph, parts, others)
        if of == "the module":
            whole = jmpx.distributed.gather(model, AXIS, "c=bf16")
            assert whole.mean is model.mean
        else:
            whole = nnx.merge(graph, jmpx.distributed.gather(nnx.state(model), AXIS, "c=bf16"))
        return whole.linear.kernel[...], whole.mean[...]

    kernel, mean = over_vmap(run, parts)
    assert kernel.shape == (DEVICES, 8, 8) and kernel.dtype == jnp.bfloat16
    assert mean.shape == (DEVICES, 8) and (np.asarray(mean) == np.float32(ROUNDED)).all()


@pytest.mark.thorough
def test_statistics_of_an_nnx_module_are_updated(rng):
    graph, parts, others = split_params(Net())
    x = normal(rng, 4, 8)

    def run(parts):
        model = nnx.merge(graph, parts, jax.tree.map(jnp.copy, others))  # of this trace
        loss = lambda model, x: jnp.mean(jmpx.distributed.gather(model, AXIS, "full")(x) ** 2)  # noqa: E731
        options = {"policy": "full", "over": jmpx.Over(AXIS, sharded=True)}
        grads = jmpx.filter_grad(loss, jmpx.NoOpLossScale(), **options)(model, x).grads
        return model.mean[...], grads["linear"]["kernel"][...]

    mean, grads = over_vmap(run, parts)
    model = Net()
    expected = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    np.testing.assert_allclose(mean, np.tile(model.mean[...], (DEVICES, 1)), rtol=1e-5)
    np.testing.assert_allclose(
        grads.reshape(8, 8), expected["linear"]["kernel"][...], rtol=1e-4, atol=1e-6
    )


@pytest.mark.thorough
def test_haiku_parameters_with_a_tree_of_axes(rng, key):
    def forward(x):
        return hk.Linear(8)(jnp.tanh(hk.Linear(16)(x)))

    net, x = hk.without_apply_rng(hk.transform(forward)), normal(rng, 2, 8)
    params = net.init(key, x)
    axes = {"linear": {"w": 1, "b": 0}, "linear_1": None}
    specs = {"linear": {"w": P(None, AXIS), "b": P(AXIS)}, "linear_1": P()}

    def run(params):
        return net.apply(jmpx.distributed.gather(params, AXIS, "full", axis=axes), x)

    result = over_shard_map(run, params, in_specs=(specs,))
    np.testing.assert_allclose(result, np.tile(net.apply(params, x), (DEVICES, 1)), rtol=1e-5)


def test_the_cast_is_the_one_of_the_policy(rng):
    """A subclass of `Policy` may cast in its own way; the gradient is that of a cast."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Coarse(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jax.tree.map(lambda x: jnp.round(x).astype(jnp.bfloat16), tree)

    w = normal(rng, DEVICES, 2)
    policy = Coarse("float32", "bfloat16", "float32")

    def run(w):
        def loss(w):
            whole = jmpx.distributed.gather(w, AXIS, policy)
            return whole.astype(jnp.float32).sum(), whole

        return jax.grad(loss, has_aux=True)(w)

    grads, whole = over_vmap(run, w)
    np.testing.assert_array_equal(whole[0], jnp.round(w).reshape(-1).astype(jnp.bfloat16))
    assert (grads == DEVICES).all()


# What is refused

TREE = {"w": jnp.ones((2, 3)), "b": jnp.ones(3), "n": jnp.ones(())}
AXES = {"w": 0, "b": 0, "n": None}
REFUSED = {
    "an unknown axis": ({"axis_name": "daat"}, ValueError, "Cannot find the mapped axis 'daat':"),
    "one of two": ({"axis_name": ("data", "model")}, ValueError, "the mapped axis 'model'"),
    "rules": (
        {"policy": "c=bf16; LayerNorm: full"},
        ValueError,
        "Unexpected rule 'LayerNorm: full'",
    ),
    "a policy map": (
        {"policy": jmpx.get_policy_map("c=bf16; */head: full")},
        TypeError,
        "Expected a policy, got the policy map",
    ),
    "a wrong policy": ({"policy": "c=bf61"}, ValueError, "Unknown dtype 'bf61' .* 'bf16'"),
    "no policy": ({"policy": None}, TypeError, "Expected a policy"),
    "eight bits": ({"policy": "c=float8_e5m2"}, ValueError, "Cannot compute in float8_e5m2"),
    "float64": ({"policy": "c=f32,r=f64"}, ValueError, "Cannot cast to float64 while"),
    "no such axis": (
        {"axis": {"w": 0, "b": 1, "n": None}},
        ValueError,
        r"Cannot gather tree\['b'\], float32\[3\], because it has no axis 1: pass",
    ),
    "a scalar": (
        {"axis": 0},
        ValueError,
        r"Cannot gather tree\['n'\], float32\[\], because it has no axis 0",
    ),
    "a negative one": ({"axis": {**AXES, "w": -3}}, ValueError, r"tree\['w'\].* no axis -3"),
    "another structure": (
        {"axis": {"w": 0, "b": 0}},
        ValueError,
        "Expected axis to be a prefix .* of ints and None, got {'b': 0, 'w': 0}: write",
    ),
    "too deep": ({"axis": {**AXES, "w": {"x": 0}}}, ValueError, "Expected axis to be a prefix"),
    "a mask": ({"axis": {**AXES, "w": True}}, ValueError, "Expected axis to be .*, got {.*True"),
    "a string": ({"axis": "rows"}, ValueError, "Expected axis to be .*, got 'rows': write"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("over", [over_vmap, over_shard_map])
def test_one_sentence_says_what_is_wrong(over, name):
    options, kind, match = REFUSED[name]
    options = {"axis_name": AXIS, "policy": "c=bf16", "axis": AXES, **options}
    run = lambda x: jmpx.distributed.gather(TREE, **options) and x  # noqa: E731
    with pytest.raises(kind, match=match) as error:
        over(run, jnp.ones(DEVICES)) if over is over_vmap else over(
            run, jnp.ones(DEVICES), check_vma=False
        )
    assert "\n" not in str(error.value) and str(error.value)[-1] in ".?"


def test_outside_of_a_map():
    with pytest.raises(ValueError, match="mapped axis 'data': call this inside of jax.shard_map"):
        jmpx.distributed.gather(TREE, AXIS, "c=bf16", axis=AXES)


def test_the_nearest_axis_of_the_mesh_is_suggested():
    run = lambda w: jmpx.distributed.gather(w, "daat", "c=bf16")  # noqa: E731
    with pytest.raises(ValueError, match=r"of the mesh here are \['data'\]; did you mean 'data'\?"):
        over_shard_map(run, jnp.ones(DEVICES))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_an_array_that_jax_knows_to_be_equal_is_refused(dtype):
    def run(x, w):
        return jmpx.distributed.gather({"w": w}, AXIS, "c=bf16")["w"] * 0 + 1

    arrays, specs = (jnp.ones(DEVICES), jnp.ones(4, dtype)), (P(AXIS), P())
    match = rf"Cannot gather tree\['w'\], {jnp.dtype(dtype).name}\[4\], because JAX knows it to be"
    with pytest.raises(ValueError, match=match + r" equal over \['data'\]: pass its parts"):
        over_shard_map(run, *arrays, in_specs=specs)
    # Where JAX does not track it, it cannot know.
    over_shard_map(run, *arrays, in_specs=specs, check_vma=False)


# Casts around it


def loss_fn(w, x):
    return jmpx.distributed.gather(w, AXIS, "c=f32").sum() * x.astype(jnp.float32).sum()


def gradient(w, x, **options):
    # Float16 without a loss scale would be another warning.
    return mpx.filter_grad(loss_fn, jmpx.StaticLossScale(1), **options)(w, x).grads


W, X = jnp.full((DEVICES, 1), ROUNDED, jnp.float32), jnp.full((DEVICES, 1), ROUNDED, jnp.float32)


@pytest.mark.parametrize("policy", ["c=bf16", "half", None, "16-mixed"])
def test_parameters_that_are_rounded_before_warn_once(policy):
    with warns_once(
        __file__, "cast its arguments to 16 bits before jmpx.distributed.gather inside of it"
    ):
        over_vmap(lambda w, x: gradient(w, x, policy=policy), W, X)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "full"},
        {"policy": "c=bf16", "uncast": 0},
        {"policy": "c=bf16; Head: full"},  # a policy map: the gather counts as what casts
        {"policy": "c=bf16", "use_mixed_precision": False},
    ],
    ids=str,
)
def test_the_remedies_are_silent_and_right(options):
    grads = over_vmap(lambda w, x: gradient(w, x, **options), W, X)
    x = X.astype(jnp.bfloat16) if "uncast" in options else X
    np.testing.assert_array_equal(grads, np.full((DEVICES, 1), x.astype(np.float32).sum()))


def test_a_tree_without_floats_casts_nothing():
    def run(x):
        loss = lambda x: x.sum() + jmpx.distributed.gather(jnp.arange(2), AXIS, "c=f32").sum()  # noqa: E731
        return jmpx.filter_grad(loss, jmpx.NoOpLossScale(), policy="c=bf16")(x).grads

    with jax.numpy_dtype_promotion("standard"):
        assert (over_vmap(run, X) == 1).all()


@pytest.mark.parametrize("reduce", ["float32", "bfloat16", "float16"])
def test_an_autocast_around_keeps_the_dtypes(reduce, rng):
    policy = f"c=bf16,r={reduce}"
    plain = lambda w, x: jnp.sum(x @ jmpx.distributed.gather(w, AXIS, policy).astype(x.dtype))  # noqa: E731
    w, x = normal(rng, DEVICES, 2, 3), normal(rng, DEVICES, 5, 2 * DEVICES)

    def run(w, x):
        return jax.grad(jmpx.autocast(plain, "c=bf16"))(w[0], x[0])[None]

    mesh = Mesh(jax.devices()[:DEVICES], AXIS)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=P(AXIS))
    text = jax.jit(mapped).lower(w, x).as_text()
    scatter = text.partition("stablehlo.reduce_scatter")[2].partition("->")[0]
    bits = {"float32": "xf32>", "bfloat16": "xbf16>", "float16": "xf16>"}[reduce]
    assert bits in scatter.rpartition("(")[2]
    np.testing.assert_allclose(jax.jit(mapped)(w, x).reshape(-1, 3)[:, 0], x.sum((0, 1)), atol=0.5)
