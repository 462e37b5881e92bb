"""Gradients of gathers are summed in float32, in every way and framework, against float64."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from helpers.jaxprs import equations_of, program
from helpers.maps import AXIS, mesh_of
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx._jaxprs.gathers import summed_in_float32

ROWS, WIDTH, COUNT = 8, 4, 2048
RNG = np.random.default_rng(0)
# Most tokens are equal: summed in bfloat16, the gradient of their row errs by 64 %.
TOKENS = jnp.asarray(np.where(RNG.random(COUNT) < 0.8, 3, RNG.integers(0, ROWS, COUNT)))
TABLE = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
WEIGHTS = jnp.asarray(RNG.normal(1, 0.5, (COUNT, WIDTH)), jnp.bfloat16).astype(jnp.float32)
EXPECTED = np.zeros((ROWS, WIDTH))
np.add.at(EXPECTED, np.asarray(TOKENS), np.asarray(WEIGHTS, np.float64))


def loss_of(rows):
    return jnp.sum(rows.astype(jnp.float32) * WEIGHTS)


def in_scan(table, shape):
    def turn(total, inputs):
        token, weight = inputs
        return total + jnp.sum(table[token].astype(jnp.float32) * weight), None

    tokens, weights = TOKENS.reshape(shape), WEIGHTS.reshape(*shape, WIDTH)
    return jax.lax.scan(turn, jnp.float32(0), (tokens, weights))[0]


# Functions of a table.
LOOKUPS = {
    "index": lambda table: loss_of(table[TOKENS]),
    "take in jit": lambda table: loss_of(jax.jit(lambda t: jnp.take(t, TOKENS, axis=0))(table)),
    "vmap": lambda table: loss_of(jax.vmap(lambda token: table[token])(TOKENS)),
    "remat": lambda table: loss_of(jax.checkpoint(lambda t: t[TOKENS])(table)),
    "a branch": lambda table: loss_of(
        jax.lax.cond(table[0, 0] < 9, lambda t: t[TOKENS], lambda t: 2 * t[TOKENS], table)
    ),
    "rows in a scan": lambda table: in_scan(table, (COUNT // 4, 4)),
    "a row in a scan": lambda table: in_scan(table, (COUNT,)),
    "jit in a scan": lambda table: jax.jit(in_scan, static_argnums=1)(table, (COUNT // 4, 4)),
    "a tangent": lambda table: jax.jvp(lambda t: loss_of(t[TOKENS]), (table,), (table,))[1],
    "a cotangent": lambda table: jnp.vdot(  # of a row's sum
        jax.grad(lambda t: loss_of(t[TOKENS] * t[TOKENS]) / 2)(table), jnp.ones_like(table)
    ),
    "equal rows twice": lambda table: loss_of(table[TOKENS[:, None]][:, 0]),
}
EMBED = hk.without_apply_rng(hk.transform(lambda: hk.Embed(ROWS, WIDTH)(TOKENS)))
MODEL = nnx.Embed(ROWS, WIDTH, rngs=nnx.Rngs(0))
# Functions of a model, the model, and where its gradients have the table's.
LAYERS = {
    "haiku": (
        lambda params: loss_of(EMBED.apply(params)),
        {"embed": {"embeddings": TABLE}},
        lambda grads: grads["embed"]["embeddings"],
    ),
    "linen": (
        lambda params: loss_of(nn.Embed(ROWS, WIDTH).apply({"params": params}, TOKENS)),
        {"embedding": TABLE},
        lambda grads: grads["embedding"],
    ),
    "nnx": (
        lambda model: loss_of(model(TOKENS)),
        MODEL,
        lambda grads: grads["embedding"][...],
    ),
    "equinox": (
        lambda model: loss_of(jax.vmap(model)(TOKENS)),
        eqx.nn.Embedding(weight=TABLE),
        lambda grads: grads.weight,
    ),
}
DERIVATIVES = {"nnx": nnx.grad, "equinox": eqx.filter_grad}
VIEWS = {
    "haiku": jmpx.haiku.policies,
    "linen": jmpx.flax.policies,
    "nnx": jmpx.flax.with_policies,
    "equinox": jmpx.equinox.with_policies,
}


def check(grads, most=2**-8):
    assert grads.dtype == jnp.float32
    worst = np.abs(grads - EXPECTED).max() / np.abs(EXPECTED).max()
    assert worst <= most, worst


@pytest.mark.sampled(3)
@pytest.mark.versions
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_any_lookup_by_arguments(lookup):
    loss = LOOKUPS[lookup]
    grad_fn = jmpx.grad(loss, jmpx.NoOpLossScale(), policy="by=arguments,c=bf16")
    check(jax.jit(grad_fn)(TABLE).grads)
    check(jax.grad(jmpx.apply_policy(loss, "by=arguments,c=bf16"))(TABLE))  # eagerly


@pytest.mark.sampled(5)
@pytest.mark.versions
@pytest.mark.parametrize("way", ["arguments", "modules", "operations"])
@pytest.mark.parametrize("framework", LAYERS)
def test_layers_of_the_frameworks(framework, way):
    loss, model, table = LAYERS[framework]
    grad_fn = jmpx.grad(loss, jmpx.NoOpLossScale(), policy=f"by={way},c=bf16")
    check(table(grad_fn(model).grads))
    derivative = DERIVATIVES.get(framework, jax.grad)
    check(table(derivative(jmpx.apply_policy(loss, f"by={way},c=bf16"))(model)))


@pytest.mark.parametrize("framework", VIEWS)
def test_contexts_and_views(framework):
    loss, model, table = LAYERS[framework]

    def run(model):
        if framework in DERIVATIVES:
            return loss(VIEWS[framework](model, "c=bf16"))
        with VIEWS[framework]("c=bf16"):
            return loss(model)

    check(table(DERIVATIVES.get(framework, jax.grad)(run)(model)))


def stored(table, way):
    policy = f"by={way},c=bf16,p=bf16"
    loss, scaling = LOOKUPS["index"], jmpx.NoOpLossScale()
    grad_fn = jmpx.grad(loss, scaling, policy=policy, grad_dtype=jnp.float32)
    return grad_fn(table.astype(jnp.bfloat16)).grads


def own_cast(table):
    embed = nn.Embed(ROWS, WIDTH, dtype=jnp.bfloat16)
    loss = lambda p: loss_of(embed.apply({"params": {"embedding": p}}, TOKENS))  # noqa: E731
    return jax.grad(jmpx.apply_policy(loss, "by=operations,c=bf16"))(table)


def sharded(table):
    def local(table, tokens, weights):
        loss = lambda t, w: jnp.sum(t[tokens].astype(jnp.float32) * w.astype(jnp.float32)) * 8  # noqa: E731
        over = jmpx.Over(AXIS)
        policy = "by=arguments,c=bf16"
        grad_fn = jmpx.grad(loss, jmpx.NoOpLossScale(), policy=policy, over=over)
        return grad_fn(table, weights).grads

    specs = {"in_specs": (P(), P(AXIS), P(AXIS)), "out_specs": P()}
    return jax.jit(jax.shard_map(local, mesh=mesh_of(8), **specs))(table, TOKENS, WEIGHTS)


def in_microbatches(table):
    def loss(table, tokens, weights):
        return jnp.sum((table[tokens] * weights).astype(jnp.float32)) * 4

    batch, scaling = jmpx.Batch(microbatches=4), jmpx.NoOpLossScale()
    grad_fn = jmpx.grad(loss, scaling, policy="by=arguments,c=bf16", batch=batch)
    return grad_fn(table, TOKENS, WEIGHTS).grads


# What else casts a table, or finds one in 16 bits.
OTHERS = {
    "stored in 16 bits, by arguments": lambda table: stored(table, "arguments"),
    "stored in 16 bits, by operations": lambda table: stored(table, "operations"),
    "cast by its layer, by operations": own_cast,
    "cast_function": jax.grad(jmpx.mpx.cast_function(LOOKUPS["index"], jnp.bfloat16, jnp.float32)),
    "over devices": sharded,
    "micro-batches": in_microbatches,
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_casts_of_tables(case):
    check(OTHERS[case](TABLE))


def test_a_tied_table_multiplies_in_16_bits():
    """Its gradient is that of the lookup and that of the logits, each against its own reference."""
    x = jnp.asarray(RNG.normal(size=(16, WIDTH)), jnp.bfloat16).astype(jnp.float32)

    def loss(table, x):
        return loss_of(table[TOKENS]) + jnp.sum((x @ table.T).astype(jnp.float32))

    applied = jmpx.apply_policy(loss, "by=arguments,c=bf16")
    products = [e for e in equations_of(jax.grad(applied), TABLE, x) if "dot" in str(e.primitive)]
    assert {a.aval.dtype.name for e in products for a in e.invars} == {"bfloat16"}
    check(jax.grad(applied)(TABLE, x) - np.asarray(x).sum(0), 2**-7)  # rounded twice


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_the_result_is_the_same_to_the_bit(dtype):
    table = jnp.asarray(RNG.normal(size=(256, 8)) * 2.0 ** RNG.integers(-8, 5, (256, 1)), dtype)
    table = table.at[0, :4].set(jnp.asarray([0.0, -0.0, np.nan, np.inf], dtype))
    indices = jnp.asarray([0, 3, 3, 255, 300, -1])
    for mode, fill in ("fill", None), ("clip", None), ("fill", 7):
        expected = jnp.take(table, indices, axis=0, mode=mode, fill_value=fill)
        with summed_in_float32():
            found = jnp.take(table, indices, axis=0, mode=mode, fill_value=fill)
        assert found.dtype == table.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), expected.astype(jnp.float32))
        assert (np.signbit(np.asarray(found)) == np.signbit(np.asarray(expected))).all()


def picks_no_row_twice(x, labels):
    layers = jax.lax.scan(lambda h, w: (h @ w, None), x, jnp.stack([x, x]))[0]
    return layers[..., 0], x[1:, ::2], x[1], jnp.take_along_axis(x, labels[:, None], axis=1)


def in_a_kernel(x, labels):
    def kernel(x, labels, out):
        out[...] = jnp.take(x[...], labels[...], axis=0)

    return pallas.pallas_call(kernel, out_shape=x, interpret=True)(x, labels)


def test_a_program_that_sums_nothing_stays_as_it_is():
    x, labels = jnp.ones((4, 4), jnp.bfloat16), jnp.arange(4)
    functions = picks_no_row_twice, in_a_kernel
    expected = [program(function, x, labels) for function in functions]
    with summed_in_float32():
        assert [program(function, x, labels) for function in functions] == expected
        assert program(lambda t, i: t[i], x, labels) != program(lambda t, i: t[i], x, labels[:1])
