"""Meshes whose axes are `Explicit`, as `jax.make_mesh` makes them, in place of `Auto` ones."""

import contextlib

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import normal
from helpers.groups import in_float64, make_mesh
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

KINDS = [AxisType.Auto, AxisType.Explicit]
# How the parameters are split. The loss says where JAX demands it of explicit shardings.
SPECS = {
    "whole": {"w": P(), "b": P(), "v": P()},
    "fsdp": {"w": P("data"), "b": P(), "v": P("data")},
    "columns": {"w": P(None, "model"), "b": P("model"), "v": P()},
}


def loss_fn(params, x, y):
    if jax.typeof(params["v"]).sharding.spec != P(None, None):
        params = {name: jax.sharding.reshard(w, P()) for name, w in params.items()}
    h = jnp.tanh(x @ params["w"] + params["b"])
    rows, columns = jax.typeof(h).sharding.spec
    if columns is not None:
        h = jax.sharding.reshard(h, P(rows))
    return jnp.mean(((h @ params["v"]).astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def gradients(policy="c=f32", **options):
    def run(params, x, y):
        scaling = jmpx.DynamicLossScale(8.0)
        return tuple(
            jmpx.filter_value_and_grad(loss_fn, scaling, policy=policy, **options)(params, x, y)
        )

    return run


def step(optimizer, to_stored=lambda params: params):
    def run(params, x, y):
        stored, scaling = to_stored(params), jmpx.DynamicLossScale(8.0)
        found = jmpx.filter_grad(loss_fn, scaling, policy="c=f32", grad_dtype="float32")(
            stored, x, y
        )
        state = optimizer.init(stored)
        return jmpx.optimizer_update(stored, optimizer, state, found.grads, found.grads_finite)

    return run


def averaged(params, x, y):
    averages = jmpx.optim.ema(0.9)
    return averages.update(params, averages.init(params))


SGD = optax.sgd(0.1, momentum=0.5)
TREES = {
    "cast_tree": lambda p, x, y: jmpx.cast_tree(p, "bf16"),
    "cast_function": lambda p, x, y: jmpx.mpx.cast_function(
        lambda p: jax.tree.map(jnp.sin, p), "bf16"
    )(p),
    "force_full_precision": lambda p, x, y: jmpx.force_full_precision(lambda x: x + 1)(x),
    "all_finite": lambda p, x, y: jmpx.all_finite((p, x)),
    "select_tree": lambda p, x, y: jmpx.select_tree(
        jmpx.all_finite(p), p, jmpx.cast_tree(p, "f32")
    ),
    "scale": lambda p, x, y: jmpx.DynamicLossScale(8.0).unscale(jmpx.cast_tree(p, jnp.float16)),
    "ema": averaged,
    "split_master": lambda p, x, y: jmpx.optim.split_master(p),
    "merge_master": lambda p, x, y: jmpx.optim.merge_master(*jmpx.optim.split_master(p)),
    "stochastic_round": lambda p, x, y: jmpx.optim.stochastic_round(
        p, jnp.bfloat16, jax.random.key(0)
    ),
    "gradients": gradients(),
    "gradients, 16 bits": gradients("c=bf16"),
    "grad_dtype": gradients(grad_dtype="bf16"),
    "microbatches": gradients(batch=jmpx.Batch(microbatches=2)),
    "microbatches that cannot be split": gradients(batch=jmpx.Batch(microbatches=12)),
    "sharding": gradients(batch=jmpx.Batch(sharding=P("data"))),
    "sharding, two axes": gradients(batch=jmpx.Batch(sharding=P(("data", "model")))),
    "sharding, microbatches": gradients(batch=jmpx.Batch(microbatches=2, sharding=P("data"))),
    "optimizer_update": step(SGD),
    "skip_nonfinite": step(jmpx.skip_nonfinite(SGD)),
    "with_state_dtype": step(jmpx.optim.with_state_dtype(SGD, jnp.bfloat16)),
    "low_precision_params": step(
        jmpx.optim.low_precision_params(SGD, "stochastic"), jmpx.mpx.cast_to_bfloat16
    ),
    "autocast": lambda p, x, y: jax.value_and_grad(jmpx.autocast(loss_fn, "f16"))(p, x, y),
    "autocast, save": lambda p, x, y: jax.grad(jmpx.autocast(loss_fn, save="products"))(p, x, y),
    "full_precision": lambda p, x, y: jmpx.autocast(jmpx.full_precision(lambda x: x + 1))(x),
}


ROUNDED = ("gradients, 16 bits", "autocast", "autocast, save")


def on_mesh(kind, spec, func, params, *batch):
    mesh = make_mesh(4, 2, axis_type=kind)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    with jax.set_mesh(mesh):
        params = {name: place(w, spec[name]) for name, w in params.items()}
        return jax.jit(lambda *args: func(*args))(params, *(place(x, P("data")) for x in batch))


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", TREES)
def test_an_explicit_mesh_gives_what_an_auto_one_does(name, spec, rng):
    params = {"w": normal(rng, 16, 32) / 4, "b": normal(rng, 32), "v": normal(rng, 32, 8) / 6}
    batch = normal(rng, 24, 16), normal(rng, 24, 8)
    with jax.numpy_dtype_promotion("standard"):  # optax
        auto, explicit = (on_mesh(kind, SPECS[spec], TREES[name], params, *batch) for kind in KINDS)
    assert jax.tree.structure(auto) == jax.tree.structure(explicit)
    for a, b in zip(jax.tree.leaves(auto), jax.tree.leaves(explicit), strict=True):
        assert a.dtype == b.dtype
        is_rounded = a.dtype.itemsize < 4 or name in ROUNDED
        tolerance = 0.02 if is_rounded else 1e-4
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance
        )
    if isinstance(explicit, tuple) and isinstance(explicit[-1], dict):  # gradients
        for key, grad in explicit[-1].items():
            assert grad.sharding.is_equivalent_to(
                NamedSharding(grad.sharding.mesh, SPECS[spec][key]), grad.ndim
            )


def mean_of(model, x, y):
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


def haiku_loss(key):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8])(x)))

    def loss(params, x, y):
        with jmpx.haiku.policies("c=bf16,o=f32"):
            return mean_of(lambda x: net.apply(params, x), x, y)

    return net.init(key, jnp.ones((1, 16))), loss


def linen_loss(key):
    net = nn.Dense(8)

    def loss(params, x, y):
        with jmpx.flax.policies("c=bf16,o=f32"):
            return mean_of(lambda x: net.apply(params, x), x, y)

    return net.init(key, jnp.ones((1, 16))), loss


def equinox_loss(key):
    def loss(model, x, y):
        return mean_of(jax.vmap(jmpx.equinox.with_policies(model, "c=bf16,o=f32")), x, y)

    return eqx.nn.Linear(16, 8, key=key), loss


def nnx_loss(key):
    graph, state = nnx.split(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))

    def loss(state, x, y):
        view = jmpx.flax.with_policies(nnx.merge(graph, state), "c=bf16,o=f32")
        return mean_of(view, x, y)

    return state, loss


@pytest.mark.thorough
@pytest.mark.parametrize("make", [haiku_loss, linen_loss, equinox_loss, nnx_loss])
@pytest.mark.parametrize("sharding", [None, P("data")])
def test_policies_of_frameworks(make, sharding, rng, key):
    params, loss = make(key)
    batch, results = (normal(rng, 24, 16), normal(rng, 24, 8)), []
    for kind in KINDS:
        mesh = make_mesh(4, axis_type=kind)
        with jax.set_mesh(mesh):
            args = (
                jax.device_put(params, NamedSharding(mesh, P())),
                *(jax.device_put(x, NamedSharding(mesh, P("data"))) for x in batch),
            )
            grad_fn = jmpx.filter_grad(
                loss,
                jmpx.NoOpLossScale(),
                policy="full",
                batch=jmpx.Batch(sharding=sharding),
            )
            results.append(jax.tree.leaves(jax.jit(lambda *a, f=grad_fn: f(*a).grads)(*args)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


# Groups


@pytest.mark.parametrize("how", ["set_mesh", "named"])
def test_groups_of_an_explicit_mesh_against_float64(how, rng):
    """Without `auto_axes` by the user; a scale from outside, aux, and state that stays split."""
    mesh = make_mesh(4, 2, axis_type=AxisType.Explicit)
    params, x = {"w": normal(rng, 6, 3), "b": normal(rng, 3)}, normal(rng, 24, 6)
    state, offset = normal(rng, 2, 3), normal(rng, 3)

    def loss(params, x, state, offset=0.0, name=None):
        h = x @ params["w"] + params["b"] + offset
        return jnp.mean(h**2), (state * 2 + h.mean(0).astype(jnp.float32), {"h": h, "text": "aux"})

    sharding = P("data") if how == "set_mesh" else NamedSharding(mesh, P("data"))

    def run(params, x, state, offset, scaling):
        found = jmpx.filter_value_and_grad(
            loss, scaling, has_aux=True, policy="c=f32", state_argnum=2,
            batch=jmpx.Batch(argnums=1, sharding=sharding),
        )(params, x, state, offset=offset, name="text")  # fmt: skip
        (value, (state, aux)), scaling, finite, grads = found
        assert aux["text"] == "aux" and aux["h"].shape == (4, 6, 3)
        return value, scaling, finite, grads, state, aux["h"]

    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    args = (
        {"w": place(params["w"], "model"), "b": place(params["b"])},
        place(x, "data"),
        place(state, "model"),
        place(offset),
        place(jmpx.DynamicLossScale(8.0)),
    )
    with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
        value, scaling, finite, grads, new_state, h = jax.jit(run)(*args)
    expected, expected_grads = in_float64(
        params, x, offset, loss=lambda p, x, offset: loss(p, x, 0.0, offset)[0]
    )
    assert finite and scaling.counter == 1
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], rtol=1e-5, atol=1e-6)
    assert jax.typeof(grads["w"]).sharding.spec == P("model", None)
    assert jax.typeof(new_state).sharding.spec == P("model", None)
    activations = x @ params["w"] + params["b"] + offset
    np.testing.assert_allclose(new_state, state * 2 + activations.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(h.reshape(24, 3), activations, rtol=1e-4, atol=1e-5)


def test_micro_batches_keep_their_examples_split(rng):
    """In order: the first part has the first examples, a share of them on each device."""
    mesh = make_mesh(4, axis_type=AxisType.Explicit)
    specs = []

    def loss(w, x):
        specs.append(jax.typeof(x).sharding.spec)
        return jnp.mean((x @ w) ** 2), x

    def run(w, x):
        found = jmpx.filter_value_and_grad(
            loss,
            jmpx.NoOpLossScale(),
            has_aux=True,
            policy="c=f32",
            batch=jmpx.Batch(microbatches=3),
        )(w, x)
        return found.value[1], found.grads

    w, x = normal(rng, 6, 3), normal(rng, 24, 6)
    with jax.set_mesh(mesh):
        args = jax.device_put(w, P()), jax.device_put(x, P("data"))
        aux, grad = jax.jit(run)(*args)
    assert set(specs) == {P("data", None)}
    np.testing.assert_array_equal(np.asarray(aux).reshape(24, 6), x)
    expected = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def reports(params, x):
    """What the reports say of a step: shares, ranges, and the cause of an infinity."""

    def run(params, x, **options):
        loss = lambda params, x: jnp.mean((x @ params) ** 2)  # noqa: E731
        return jmpx.filter_grad(loss, jmpx.NoOpLossScale(), policy="c=bf16", **options)(params, x)

    step = lambda params, x: run(params, x).grads  # noqa: E731
    over_data = jmpx.Batch(sharding=P("data"))
    groups = lambda params, x: run(params, x, batch=over_data).grads  # noqa: E731
    divided = lambda params, x: jnp.mean(x @ params / 0.0)  # noqa: E731
    return [
        *(str(jmpx.inspect.ranges(func)(params, x)) for func in (step, groups)),
        str(jmpx.inspect.first_nonfinite(divided)(params, x)),
        *(str(jmpx.inspect.audit(func)(params, x)).splitlines()[2:4] for func in (step, groups)),
        str(jmpx.inspect.collectives(jax.jit(groups).lower(params, x).compile())),
    ]


@pytest.mark.thorough
def test_reports(rng):
    # Small whole numbers and sizes that are powers of two: sums are exact, in whichever order.
    params, x = (rng.integers(-1, 2, shape).astype(np.float32) for shape in ((16, 8), (32, 16)))
    found = []
    for kind in KINDS:
        mesh = make_mesh(4, axis_type=kind)
        with jax.set_mesh(mesh):
            args = (
                jax.device_put(v, NamedSharding(mesh, s))
                for v, s in [(params, P()), (x, P("data"))]
            )
            found.append(reports(*args))
    assert found[0] == found[1]
