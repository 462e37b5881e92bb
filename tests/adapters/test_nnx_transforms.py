"""NNX's transformations hand variables out as new arrays: parameters stay as they were stored."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32, assert_same_bits, normal
from helpers.maps import mesh_of
from helpers.nnx_net import linear, squares, state_of
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.flax
import jmpx.mpx

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = normal(np.random.default_rng(0), 4, 4)
WAYS = {way: f"by={way},c=bf16,o=f32" for way in ("arguments", "modules", "operations")}
WAYS["full"] = "full"
WAYS["rules"] = "c=bf16,o=f32; Linear: full"


def stacked():
    model = linear(4, 4)
    nnx.update(model, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), nnx.state(model)))
    return model


def call(model, h):
    return model(h)


def skip(model, h):
    return h


def custom(model, x):
    f = nnx.custom_vjp(call)
    f.defvjp(lambda m, x: (f(m, x), None), lambda res, g: (g[0][0], g[1]))
    return f(model, x)


def trip(carry):
    return carry[0], carry[0](carry[1])


TRANSFORMS = {
    "jit": nnx.jit(call),
    "remat": nnx.remat(call),
    "remat in jit": nnx.jit(nnx.remat(call)),
    "shard_map": lambda m, x: nnx.shard_map(
        call, mesh=mesh_of(2, names=("d",)), in_specs=(P(), P("d")), out_specs=P("d")
    )(m, x),
    "shard_map of parts": lambda m, x: nnx.shard_map(
        lambda m, x: x + m.bias[...].sum(),
        mesh=mesh_of(2, names=("d",)),
        in_specs=(P("d"), P("d")),
        out_specs=P("d"),
    )(m, x),
    "vmap": nnx.vmap(call, in_axes=(None, 0)),
    "vmap of jit": nnx.vmap(nnx.jit(call), in_axes=(None, 0)),
    "vmap of layers": lambda m, x: nnx.vmap(nnx.jit(call), in_axes=(0, None))(m, x).sum(0),
    "scan": nnx.scan(nnx.remat(call), in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2),
    "scan of layers": nnx.scan(nnx.jit(call), in_axes=(0, nnx.Carry), out_axes=nnx.Carry),
    "cond": lambda m, x: nnx.cond(x.sum() > 0, nnx.jit(call), skip, m, x),
    "switch": lambda m, x: nnx.switch(x.ndim - 1, [skip, nnx.jit(call)], m, x),
    "fori_loop": lambda m, x: nnx.fori_loop(0, 2, lambda _, c: trip(c), (m, x))[1],
    "while_loop": lambda m, x: nnx.while_loop(lambda c: c[1].sum() > 9, trip, (m, x))[1],
    "grad": lambda m, x: nnx.grad(nnx.jit(squares))(m, x)["kernel"][...],
    "custom_vjp": custom,
    # JAX's own, which know of no variables.
    "jax.jit": lambda m, x: jax.jit(lambda s: nnx.merge(nnx.graphdef(m), s)(x))(nnx.state(m)),
}


def loss(f):
    return lambda model, x: (f(model, x).astype(F32) ** 2).mean()


def functions(f, way):
    """What runs `f` by a way: a call, a gradient, and one of micro-batches."""
    policy = WAYS[way]
    grad = lambda **o: jmpx.grad(loss(f), jmpx.NoOpLossScale(), policy=policy, **o)  # noqa: E731
    return [jmpx.apply_policy(f, policy), grad(), grad(batch=jmpx.Batch(microbatches=2))]


@pytest.mark.sampled(37)
@pytest.mark.filterwarnings("ignore:.*casts nothing by policy", "ignore:.*trace custom_vjp_call")
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_parameters_keep_their_bits(name, way, jitted):
    f = TRANSFORMS[name]
    for run in functions(f, way)[: 1 if name == "while_loop" else None]:  # has no gradient
        model = stacked() if "layers" in name else linear(4, 4)
        before = state_of(model)
        (nnx.jit(run) if jitted else run)(model, X)
        assert_same_bits(state_of(model), before)


def set_to(model, *values):
    for value in values:
        model.kernel[...] = value


# What a function may do to a parameter that is cast, because it ends as it was.
KEPT = {
    "slices": lambda m: set_to(m, jax.lax.scan(lambda c, k: (c, k), 0, m.kernel[...])[1]),
    "a carry": lambda m: set_to(m, jax.lax.fori_loop(0, 2, lambda _, k: k, m.kernel[...])),
    "a branch": lambda m: set_to(
        m,
        jax.lax.cond(m.bias[...].sum() > 0, jnp.copy, jax.lax.optimization_barrier, m.kernel[...]),
    ),
    "wider": lambda m: set_to(m, m.kernel[...].astype(F32).astype(BF16)),
    "there and back": lambda m: set_to(m, m.kernel[...] / 2, m.kernel[...]),
}
SET = {
    "half": lambda m: set_to(m, m.kernel[...] / 2),
    "in jit": nnx.jit(lambda m: set_to(m, m.kernel[...] / 2)),
    "an update": lambda m: nnx.update(m, jax.tree.map(lambda leaf: leaf + 1, nnx.state(m))),
    "another": lambda m: setattr(m, "kernel", nnx.Param(m.kernel[...].T)),
    "one number": lambda m: set_to(m, m.kernel[...].at[0, 0].set(2)),
    "turned slices": lambda m: set_to(
        m, jax.lax.scan(lambda c, k: (k, c), m.kernel[0], m.kernel[...])[1]
    ),
    "a carry that ends": lambda m: set_to(
        m, jax.lax.fori_loop(0, 2, lambda _, c: (c[1], c[1]), (m.kernel[...], -m.kernel[...]))[0]
    ),
    "one branch": lambda m: set_to(
        m, jax.lax.cond(m.bias[...].sum() == 0, jnp.sin, jnp.copy, m.kernel[...])
    ),
    "narrower": lambda m: set_to(m, m.kernel[...].astype(jnp.float8_e5m2).astype(BF16)),
    "of a constant": lambda m: set_to(m, jnp.zeros((4, 4), BF16)),
}
AROUND = {
    "apply_policy": lambda f: jmpx.apply_policy(f, "by=arguments,c=bf16"),
    "cast_function": lambda f: jmpx.mpx.cast_function(f, BF16),
    "filter_grad": lambda f: functions(f, "arguments")[1],
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", [*KEPT, *SET])
def test_a_cast_parameter_may_be_set_to_itself_alone(name, around, jitted):
    change, model = {**KEPT, **SET}[name], linear(4, 4)
    before = state_of(model)
    run = AROUND[around](lambda m, x: (m(x), change(m))[0])
    refused = pytest.raises(ValueError, match=r"Cannot set a parameter .* copy in bfloat16 of")
    with contextlib.nullcontext() if name in KEPT else refused:
        (nnx.jit(run) if jitted else run)(model, X)
    assert_same_bits(state_of(model), before)
