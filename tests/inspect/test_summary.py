"""What a report counts: products, what is saved, casts and scopes."""

import math

import autocast as readme_table
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.flops import shape_of
from helpers.four_frameworks import BATCH, FRAMEWORKS, WIDTHS, X
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from models import Transformer

import jmpx
from jmpx._inspect.audit import summary
from jmpx._inspect.audit.data import Cast, Products, Scope
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program

N = 8
W, BF16_W = shape_of(N, N), shape_of(N, N, dtype=jnp.bfloat16)
PRODUCT = 2 * N**3


def graph_of(fn, *args):
    return Graph(traced_program(fn, args))


def arguments(model, rng, *size):
    """The shapes of a model's parameters and of a batch."""
    return jax.eval_shape(lambda: (model.init(rng), *model.batch(rng, *size)))


# Products.


def test_products_by_dtypes_most_flops_first():
    def fn(a, b):
        mixed = lax.dot(a, b), lax.dot(b, a)
        return *mixed, lax.dot(a, a), lax.dot(b[:4], b)

    found = summary.products(graph_of(fn, W, BF16_W))
    assert found == (
        Products("bfloat16 x float32", 2 * PRODUCT, 2),
        Products("float32 x float32", PRODUCT, 1),
        Products("bfloat16 x bfloat16", PRODUCT // 2, 1),
    )


def test_loops_run_as_often_as_their_lengths_say():
    def row(x, w):
        return x @ w, None

    def table(x, w):
        return lax.scan(row, x, w)[0], x.sum(axis=1)

    def fn(x, w):
        return lax.scan(table, x, w)

    found = summary.products(graph_of(fn, W, shape_of(3, 5, N, N)))
    assert found == (Products("float32 x float32", 15 * PRODUCT, 15),)


def test_a_while_loop_counts_for_one_trip():
    def fn(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)

    found = summary.products(graph_of(fn, W, W))
    assert found == (Products("float32 x float32", PRODUCT, 1),)


def test_every_branch_counts():
    def fn(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: (x @ x) @ x, x)

    assert summary.products(graph_of(fn, W)) == (Products("float32 x float32", 3 * PRODUCT, 3),)


def test_shards_count_for_one_device():
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    fn = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    assert summary.products(graph_of(fn, W, W))[0].flops == PRODUCT // 2


def test_a_scanned_model_multiplies_as_often_as_one_that_is_written_out(rng):
    found = []
    for scanned in (False, True):
        model = Transformer(layers=3, width=16, hidden=32, heads=2, scanned=scanned)
        found.append(summary.products(graph_of(model.loss, *arguments(model, rng, 2, 8))))
    assert found[0] == found[1]


def test_operations_whose_products_are_unknown_are_named(rng):
    def fn(x):
        return jnp.linalg.eigh(x)[1] @ jax.pure_callback(np.sin, x, jnp.exp(x)), jnp.cumsum(x)

    graph = graph_of(fn, W)
    assert summary.uncounted(graph) == ("pure_callback",)
    assert summary.products(graph)[0].flops == PRODUCT
    model = Transformer(layers=1, width=16, hidden=32, heads=2)
    for loss in (model.loss, jmpx.autocast(model.loss)):
        assert summary.uncounted(graph_of(loss, *arguments(model, rng, 2, 8))) == ()


# What is saved for the backward pass.


def residuals(fn, params, *args):
    """The bytes of what JAX gives to the backward pass, arguments and constants apart."""
    return readme_table.residual_bytes(lambda params: fn(params, *args), params)


@jax.custom_vjp
def doubled_sine(x):
    return 2 * jnp.sin(x)


doubled_sine.defvjp(
    lambda x: (doubled_sine(x), (jnp.cos(x), x)), lambda saved, g: (2 * saved[0] * g,)
)


def layers(body):
    """A loss whose layers are a scan, over eight weights."""
    return lambda w, x: lax.scan(lambda x, w: (body(x, w), None), x, w)[0].sum()


def tanh_layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w)


DOTS = jax.checkpoint_policies.dots_saveable
LOSSES = {
    "plain": lambda w, x: jnp.exp(jnp.sin(x @ w[0])).sum(),
    "casts": lambda w, x: jnp.sin(x.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16)).sum(),
    "jit": lambda w, x: jax.jit(lambda w: jnp.where(w > 0, jnp.exp(w), 0.0))(w).sum(),
    "custom_vjp": lambda w, x: doubled_sine(jnp.exp(w)).sum(),
    "vmap": lambda w, x: jax.vmap(jax.nn.softmax)(x @ w[0])[0, 0],
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: jnp.sin(jnp.sin(w)), jnp.exp, w).sum(),
    "fori": lambda w, x: lax.fori_loop(0, 5, lambda i, x: jnp.sin(x @ w[0]), x).sum(),
    "scan": layers(tanh_layer),
    "checkpoint": lambda w, x: jax.checkpoint(tanh_layer)(jnp.sin(x), w[0]).sum(),
    "checkpoint_of_dots": lambda w, x: jax.checkpoint(tanh_layer, policy=DOTS)(x, w[0]).sum(),
    "checkpoint_in_scan": layers(jax.checkpoint(tanh_layer)),
    "scan_in_checkpoint": lambda w, x: jax.checkpoint(layers(tanh_layer))(jnp.sin(w), x),
    "autocast": jmpx.autocast(layers(tanh_layer)),
    "autocast_checkpoint": jmpx.autocast(layers(jax.checkpoint(tanh_layer, policy=DOTS))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_saved_bytes_are_those_that_jax_gives_to_the_backward_pass(name, rng):
    args = normal(rng, N, N, N), normal(rng, N, N)
    assert sum(summary.saved(graph_of(LOSSES[name], *args)).values()) == residuals(
        LOSSES[name], *args
    )


SMALL = Transformer(layers=1, width=32, heads=2, hidden=64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model, size",
    [(SMALL, (2, 16)), pytest.param(Transformer(), (8, 128), marks=pytest.mark.slow)],
    ids=["small", "readme"],
)
def test_saved_bytes_are_those_of_the_table_in_the_readme(model, size, rng):
    params = jax.eval_shape(lambda: model.init(rng))
    found = {}
    for way, loss in readme_table.losses(model, model.batch(rng, *size)).items():
        saved = summary.saved(graph_of(loss, params))
        assert list(saved.values()) == sorted(saved.values(), reverse=True)
        assert sum(saved.values()) == readme_table.residual_bytes(loss, params)
        found[way] = saved
    assert found["float32"]["float32"] > 2 * found["autocast"]["float32"]
    assert found["autocast"]["bfloat16"] > 0
    assert sum(found["autocast, save"].values()) < sum(found["autocast"].values()) / 2


def test_saved_bytes_of_each_dtype():
    def loss(w, x):
        h = jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32)  # x is no parameter
        return jnp.sum(jnp.square((h @ w).astype(jnp.float16)).astype(jnp.float32) * x)

    # The product keeps h, the square twice its operand; the sum keeps nothing, x is an argument.
    size = N * N
    assert summary.saved(graph_of(loss, W, W)) == {"float32": 4 * size, "float16": 2 * size}


def test_a_step_keeps_the_same_as_its_loss(rng):
    loss = LOSSES["scan"]

    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grads, value

    def accumulate(w, xs):
        def microbatch(total, x):
            return total + jax.grad(loss)(w, x), None

        return lax.scan(microbatch, jnp.zeros_like(w), xs)[0]

    w, x = normal(rng, N, N, N), normal(rng, N, N)
    found = [summary.saved(graph_of(fn, w, x)) for fn in (loss, step, jax.jit(step))]
    found.append(summary.saved(graph_of(accumulate, w, normal(rng, 3, N, N))))
    assert found[0] and all(each == found[0] for each in found)


def test_without_a_backward_pass_nothing_is_saved(rng):
    assert summary.saved(graph_of(lambda x: jnp.exp(jnp.sin(x)), normal(rng, N))) == {}


# Casts.


def test_casts_by_count_and_bytes():
    def layer(x, _):
        return x.astype(jnp.bfloat16).astype(jnp.float32), None

    def fn(x, i):
        kept = i.astype(jnp.float32), (x > 0).astype(jnp.float32), x.astype(jnp.float32)
        return lax.scan(layer, x, None, length=5)[0], x[:1].astype(jnp.float16), *kept

    found = summary.casts(graph_of(fn, W, shape_of(N, dtype=jnp.int32)))
    assert found == (
        Cast("bfloat16", "float32", 5, 5 * 4 * N * N),
        Cast("float32", "bfloat16", 5, 5 * 2 * N * N),
        Cast("float32", "float16", 1, 2 * N),
    )


# Scopes.


def by_path(graph):
    found = summary.scopes(graph)
    rows = {row.path: row for row in found}
    assert len(rows) == len(found)
    return rows


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_model_has_a_row_for_each_module(name):
    _, model, adapted, own = FRAMEWORKS[name]
    run = adapted("c=f32; */inner: c=bf16; */head: c=f16,o=f32")
    graph = graph_of(lambda model, x: jnp.mean(run(model, x) ** 2), model, X)
    rows = by_path(graph)
    layers = ("first", "float32", 2), ("inner", "bfloat16", 3), ("outer", "float32", 3)
    for layer, dtype, passes in (*layers, ("head", "float16", 3)):
        path = own["net/"] + ("block/" if layer in ("inner", "outer") else "") + layer
        row = rows.pop(path)
        assert row.module == (f"{own['Own']}Head" if layer == "head" else own["Linear"])
        assert (row.dtypes, row.flops) == (dtype, passes * 2 * BATCH * math.prod(WIDTHS[layer]))
        assert f"compute={dtype}" in row.policy
    # The block calls tanh, and its layers are not in its row. The loss is in no module.
    block = rows.pop(own["net/"] + "block")
    assert (block.module, block.dtypes, block.flops) == (f"{own['Own']}Block", "float32", 0)
    assert rows.pop("").policy == ""
    # The outermost module casts its arguments at most, in frameworks whose models are objects.
    assert all((row.module, row.flops) == (f"{own['Own']}Net", 0) for row in rows.values())


def test_named_scopes_have_rows_and_no_class(rng):
    def loss(w, x):
        with jax.named_scope("encoder"):
            x = x @ w
            with jax.named_scope("attention"):
                low = x.astype(jnp.bfloat16)
                mixed = (jax.nn.softmax((low @ low).astype(jnp.float32)) @ w).sum()
        with jax.named_scope("lookup"):
            return mixed + jnp.concatenate([x, x])[::-1].sum()

    graph = graph_of(loss, normal(rng, N, N), normal(rng, N, N))
    rows = by_path(graph)
    assert [row.path for row in rows.values() if row.path] == [
        "encoder",
        "encoder/attention",
        "lookup",
    ]
    assert rows["encoder"].flops == 2 * PRODUCT
    assert rows["encoder/attention"].flops == 2 * 3 * PRODUCT
    assert {*rows["encoder/attention"].dtypes.split(", ")} == {"bfloat16", "float32"}
    assert all((row.module, row.policy) == ("", "") for row in rows.values())
    assert sum(row.operations for row in rows.values()) == len(graph.nodes)


def test_a_scope_in_a_loop_counts_each_trip():
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    graph = graph_of(lambda x, w: lax.scan(layer, x, w)[0], W, shape_of(5, N, N))
    assert summary.scopes(graph) == (Scope("layer", "", "", 10, "float32", 5 * PRODUCT),)


def test_what_only_moves_data_has_the_dtypes_that_it_makes():
    def fn(table, i):
        with jax.named_scope("table"):
            return table.astype(jnp.bfloat16).T, i.T, table[0]

    graph = graph_of(fn, W, shape_of(N, N, dtype=jnp.int32))
    assert summary.scopes(graph)[0].dtypes == "bfloat16, float32"
