"""Meshes whose axes are `Explicit`, as `jax.make_mesh` makes them, in place of `Auto` ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal
from jax.sharding import AxisType, PartitionSpec as P

import jmpx

KINDS = [AxisType.Auto, AxisType.Explicit]
NOOP = jmpx.NoOpLossScale()
SPECS = {  # How the parameters are split.
    "whole": {"w": P(), "b": P(), "v": P()},
    "fsdp": {"w": P("data"), "b": P("data"), "v": P("data")},
    "rows": {"w": P("data"), "b": P(), "v": P("data")},
    "columns": {"w": P(None, "model"), "b": P("model"), "v": P()},
    "tensor": {"w": P(None, "model"), "b": P("model"), "v": P("model", None)},
}


def make_mesh(kind, *sizes):
    return jax.make_mesh(sizes, ("data", "model")[: len(sizes)], axis_types=(kind,) * len(sizes))


def make_params(rng):
    return {"w": normal(rng, 16, 32) / 4, "b": normal(rng, 32), "v": normal(rng, 32, 8) / 6}


def loss_fn(params, x, y):
    """Says shardings where JAX demands it of explicit ones."""
    if jax.typeof(params["v"]).sharding.spec != P(None, None):
        params = {name: jax.sharding.reshard(w, P()) for name, w in params.items()}
    h = jnp.tanh(x @ params["w"] + params["b"])
    rows, columns = jax.typeof(h).sharding.spec
    if columns is not None:
        h = jax.sharding.reshard(h, P(rows))
    return jnp.mean(((h @ params["v"]).astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def gradients(policy="c=f32", **options):
    def run(*args):
        scaling = jmpx.DynamicLossScale(8.0)
        return tuple(jmpx.value_and_grad(loss_fn, scaling, policy=policy, **options)(*args))

    return run


def step(optimizer, to_stored=lambda params: params):
    def run(params, x, y):
        stored = to_stored(params)
        options: Any = {"policy": "c=f32", "grad_dtype": "float32"}
        found = jmpx.grad(loss_fn, jmpx.DynamicLossScale(8.0), **options)(stored, x, y)
        state = optimizer.init(stored)
        return jmpx.optimizer_update(stored, optimizer, state, found.grads, found.grads_finite)

    return run


SGD = optax.sgd(0.1, momentum=0.5)
FUNCTIONS = {
    "microbatches that cannot be split": gradients(microbatches=12),
    "reduce": gradients("c=bf16,r=f32"),
    "reduce, microbatches": gradients("c=bf16,r=f32", microbatches=3),
    "grad_dtype": gradients(grad_dtype="bf16"),
    "stochastic_round": lambda p, x, y: jmpx.optim.stochastic_round(
        p, jnp.bfloat16, jax.random.key(0)
    ),
    "low_precision_params": step(
        jmpx.optim.low_precision_params(SGD, "stochastic"), jmpx.mpx.cast_to_bfloat16
    ),
    "with_state_dtype": step(jmpx.skip_nonfinite(jmpx.optim.with_state_dtype(SGD, jnp.bfloat16))),
    "autocast": lambda p, x, y: jax.value_and_grad(jmpx.autocast(loss_fn, "f16"))(p, x, y),
    "autocast, save": lambda p, x, y: jax.grad(jmpx.autocast(loss_fn, save="products"))(p, x, y),
}
ROUNDED = ("autocast", "autocast, save", "reduce", "reduce, microbatches")


@pytest.mark.thorough
@pytest.mark.versions
def test_an_explicit_mesh_gives_what_an_auto_one_does(rng):
    params, batch = make_params(rng), (normal(rng, 24, 16), normal(rng, 24, 8))

    def run(*args):
        with jax.numpy_dtype_promotion("standard"):  # optax
            return {name: func(*args) for name, func in FUNCTIONS.items()}

    results = []
    for kind in KINDS:
        with jax.set_mesh(make_mesh(kind, 4, 2)):
            placed = {name: jax.device_put(w, SPECS["columns"][name]) for name, w in params.items()}
            results.append(jax.jit(run)(placed, *jax.device_put(batch, P("data"))))
    auto, explicit = results
    assert jax.tree.structure(auto) == jax.tree.structure(explicit)
    for name in auto:
        leaves = zip(jax.tree.leaves(auto[name]), jax.tree.leaves(explicit[name]), strict=True)
        for a, b in leaves:
            assert a.dtype == b.dtype
            tolerance = 0.02 if a.dtype.itemsize < 4 or name in ROUNDED else 1e-4
            a, b = (np.asarray(each, np.float32) for each in (a, b))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


# Micro-batches


def test_micro_batches_keep_their_examples_split(rng):
    """A part has every third example, a share of them on each device."""
    specs = []

    def loss(w, x):
        specs.append(jax.typeof(x).sharding.spec)
        return jnp.mean((x @ w) ** 2), x

    options = {"policy": "c=f32", "batch": jmpx.Batch(microbatches=3)}
    grad_fn = jmpx.value_and_grad(loss, NOOP, has_aux=True, **options)
    w, x = normal(rng, 6, 3), normal(rng, 24, 6)
    with jax.set_mesh(make_mesh(AxisType.Explicit, 4)):
        found = jax.jit(grad_fn)(jax.device_put(w, P()), jax.device_put(x, P("data")))
    assert set(specs) == {P("data", None)}
    np.testing.assert_array_equal(found.value[1], x.reshape(8, 3, 6).swapaxes(0, 1))
    expected = jax.jit(jax.grad(lambda w: loss(w, x)[0]))(w)
    np.testing.assert_allclose(found.grads, expected, rtol=1e-4, atol=1e-6)


def reports(params, x):
    """What the reports say of a step: shares, ranges, and the cause of an infinity."""
    loss = lambda params, x: jnp.mean((x @ params) ** 2)  # noqa: E731
    funcs = [
        lambda *args, policy=policy: jmpx.grad(loss, NOOP, policy=policy)(*args).grads
        for policy in ("c=bf16", "c=bf16,r=f32")
    ]
    divided = lambda params, x: jnp.mean(x @ params / 0.0)  # noqa: E731
    return [
        *(str(jmpx.inspect.ranges(func)(params, x)) for func in funcs),
        str(jmpx.inspect.first_nonfinite(divided)(params, x)),
        *(str(jmpx.inspect.audit(func)(params, x)).splitlines()[2:4] for func in funcs),
        str(jmpx.inspect.compiled(jax.jit(funcs[1]).lower(params, x).compile())),
    ]


@pytest.mark.thorough
@pytest.mark.versions
def test_reports_of_explicit_meshes(rng):
    # Small whole numbers and sizes that are powers of two: sums are exact, in whichever order.
    params, x = (rng.integers(-1, 2, shape).astype(np.float32) for shape in ((16, 8), (32, 16)))
    found = []
    for kind in KINDS:
        with jax.set_mesh(make_mesh(kind, 4)):
            found.append(reports(jax.device_put(params, P()), jax.device_put(x, P("data"))))
    assert found[0] == found[1]


# The table of docs/sharding.md: what works on an Explicit mesh


POLICIES = ["c=bf16,o=f32", "c=bf16,r=f32"]


def plain(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def resharded(params, x):
    return plain({name: jax.sharding.reshard(w, P()) for name, w in params.items()}, x)


def with_out_sharding(spec):
    def model(params, x):
        h = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.dot(h, params["v"], out_sharding=spec)

    return model


def plain_lookup(params, tokens):
    return (params["w"][tokens] + params["b"]) @ params["v"]


def placed_lookup(params, tokens):
    return (params["w"].at[tokens].get(out_sharding=P("data")) + params["b"]) @ params["v"]


# The parameters, the model, and how gradients are computed.
CASES = [
    ("whole", plain, "shard_map"),
    ("rows", plain, "alone"),
    ("fsdp", resharded, "alone"),
    ("tensor", with_out_sharding(P("data")), "alone"),
    ("tensor", with_out_sharding(P()), "shard_map"),
    ("whole", placed_lookup, "alone"),
    ("whole", plain_lookup, "shard_map"),
]


def gradients_of(model, how, policy):
    loss = lambda params, x: jnp.mean(model(params, x).astype(jnp.float32) ** 2)  # noqa: E731
    over = jmpx.Over("data") if how == "shard_map" else None
    run: Any = jmpx.grad(loss, NOOP, policy=policy, over=over)
    if how == "shard_map":
        specs = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
        run = jax.shard_map(run, **specs)
    return jax.jit(lambda params, x: run(params, x).grads)


@pytest.mark.versions
@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(CASES)))
def test_a_cell_of_the_table(index, rng):
    spec, model, how = CASES[index]
    params, policy = make_params(rng), POLICIES[index // 2 % 2]
    tokens = "lookup" in model.__name__
    x = jnp.asarray(rng.integers(0, 16, 24)) if tokens else normal(rng, 24, 16)
    with jax.set_mesh(make_mesh(AxisType.Explicit, 4, 2)):
        placed = {name: jax.device_put(w, SPECS[spec][name]) for name, w in params.items()}
        args = placed, jax.device_put(x, P("data"))
        found = gradients_of(model, how, policy)(*args)
    of_all = lambda p: jnp.mean((plain_lookup if tokens else plain)(p, x) ** 2)  # noqa: E731
    expected = jax.jit(jax.grad(of_all))(params)
    for name, grad in found.items():
        np.testing.assert_allclose(np.asarray(grad), expected[name], rtol=0.05, atol=5e-3)
        assert grad.sharding.is_equivalent_to(placed[name].sharding, grad.ndim)


def test_shards_are_gathered_under_shard_map(rng):
    # JAX 0.12.0.1 does not differentiate an all_gather beside another axis that is Explicit.
    params, x = make_params(rng), normal(rng, 24, 16)
    expected = jax.jit(jax.grad(lambda p: jnp.mean(plain(p, x) ** 2)))(params)

    def loss(shards, x):
        whole = jmpx.distributed.gather(shards, "data", "c=bf16")
        return jnp.mean(plain(whole, x).astype(jnp.float32) ** 2)

    run = jmpx.grad(loss, NOOP, policy="by=arguments,c=bf16", over="data", uncast=0)
    with jax.set_mesh(make_mesh(AxisType.Explicit, 8)):
        placed = jax.device_put((params, x), P("data"))
        grads = lambda *args: run(*args).grads  # noqa: E731
        found = jax.jit(jax.shard_map(grads, in_specs=P("data"), out_specs=P("data")))(*placed)
    for name, grad in found.items():
        np.testing.assert_allclose(np.asarray(grad), expected[name], rtol=0.05, atol=5e-3)
        assert grad.dtype == jnp.float32 and jax.typeof(grad).sharding.spec[0] == "data"
