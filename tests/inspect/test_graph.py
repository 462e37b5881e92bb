"""A program as a flat graph: what it computes, how often, where, and on which line."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import normal
from helpers.four_frameworks import FRAMEWORKS, WIDTHS, X
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
from jmpx._inspect.graph import Graph, Value
from jmpx._inspect.programs import traced_program


def graph_of(fn, *args):
    return Graph(traced_program(fn, args))


def named(graph, name):
    return [node for node in graph.nodes if node.name == name]


def line_of(fn, marker):
    """Returns the number of the line of a function that ends with a comment."""
    lines, start = inspect.getsourcelines(inspect.unwrap(fn))
    (found,) = (i for i, line in enumerate(lines, start) if line.rstrip().endswith(f"# {marker}"))
    return found


def origins(value, seen=None):
    """Returns the inputs, constants and literals that contribute to a value."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return set()
    seen.add(id(value))
    if value.node is None:
        return {value}
    return set().union(*(origins(operand, seen) for operand in value.node.operands))


def test_calls_are_inlined(rng):
    @jax.custom_jvp
    def own(x):
        return x * 2

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0] * 2))

    def fn(x, y):
        return own(jax.jit(jnp.dot)(x, jax.checkpoint(jnp.sin)(y)))

    graph = graph_of(fn, normal(rng, 2, 3), normal(rng, 3))
    assert [node.name for node in graph.nodes] == ["sin", "dot_general", "mul"]
    sine, product, scaled = graph.nodes
    assert sine.operands == [graph.inputs[1]] and product.operands == [
        graph.inputs[0],
        *sine.results,
    ]
    assert graph.outputs == scaled.results and graph.outputs[0].is_output
    assert graph.inputs[0].readers == [product]
    number = scaled.operands[1]
    assert (number.kind, number.constant) == ("literal", 2.0)


def test_a_scan_is_tied_together(rng):
    def body(carry, x):
        carry = jnp.tanh(carry + x)
        return carry, carry * 2

    def fn(first, xs, w):
        last, ys = lax.scan(lambda c, x: body(c, x * w), first, xs)
        return last, ys

    first, xs, w = normal(rng, 3), normal(rng, 5, 3), normal(rng, 3)
    graph = graph_of(fn, first, xs, w)
    (carry,), (part,), (last,), (stack,) = (
        named(graph, name) for name in ("carry", "slice", "result", "stack")
    )
    (tanh,) = named(graph, "tanh")
    assert carry.operands == [graph.inputs[0], *tanh.results] and part.operands == [graph.inputs[1]]
    assert last.operands == tanh.results and graph.outputs == [*last.results, *stack.results]
    assert (tanh.times, carry.times, part.times, last.times, stack.times) == (5, 5, 5, 1, 1)
    assert stack.results[0].shape == (5, 3)
    assert origins(graph.outputs[0]) >= set(graph.inputs)


def test_nested_scans_multiply_and_while_loops_are_marked(rng):
    def inner(x):
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]

    def fn(x):
        x = lax.scan(lambda c, _: (inner(c), None), x, length=4)[0]
        return lax.while_loop(lambda c: jnp.sum(jnp.cos(c)) < 1, lambda c: jnp.exp(c), x)

    graph = graph_of(fn, normal(rng, 3))
    (sine,), (cosine,), (exp,) = (named(graph, name) for name in ("sin", "cos", "exp"))
    assert (sine.times, sine.in_while) == (12, False)
    assert (exp.times, exp.in_while, cosine.in_while) == (1, True, True)


def test_branches_are_joined(rng):
    def fn(p, x):
        return lax.cond(p, jnp.sin, lambda x: x * 2, x)

    graph = graph_of(fn, True, normal(rng, 3))
    (join,), (sine,), (scaled,) = (named(graph, name) for name in ("join", "sin", "mul"))
    assert {id(v) for v in join.operands} == {id(v) for n in (sine, scaled) for v in n.results}
    assert graph.outputs == join.results


def test_shards_have_their_shapes(rng):
    mesh = Mesh(jax.devices()[:4], "data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def fn(x):
        return jnp.sin(x)

    graph = graph_of(fn, normal(rng, 8, 3))
    (sine,) = named(graph, "sin")
    assert sine.operands[0].shape == (2, 3) and graph.outputs[0].shape == (8, 3)
    assert origins(graph.outputs[0]) == set(graph.inputs)


def test_constants_are_known(rng):
    table = normal(rng, 3)
    graph = graph_of(lambda x: x * table + table, normal(rng, 3))
    used: list[Value] = [v for n in graph.nodes for v in n.operands if v.kind == "const"]
    assert used and {id(v) for v in used} == {id(used[0])}
    constant = used[0].constant
    assert constant is not None and jnp.array_equal(constant, table)


def test_the_backward_pass_is_known(rng):
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x))

    graph = graph_of(loss, normal(rng, 3, 2), normal(rng, 4, 3))
    products = named(graph, "dot_general")
    assert [node.is_backward for node in products] == [False, True, True]  # one is recomputed
    assert [node.is_backward for node in named(graph, "cos")] == [True]


def located(x):
    y = jnp.where(x > 0, x, -1e4)
    z = jnp.where(x > 1, y, -1e9)  # the second mask
    return jnp.sum(z @ z.T)  # the product


def located_in_jit(x):
    return jax.jit(located)(x)


def located_in_scan(x):
    return lax.scan(lambda carry, _: (carry + located(x), None), 0.0, length=2)[0]


def located_in_vmap(x):
    return jnp.sum(jax.vmap(located)(x[None]))


@pytest.mark.parametrize("fn", [located, located_in_jit, located_in_scan, located_in_vmap])
def test_places_are_lines_of_the_user(rng, fn):
    jnp.where(normal(rng, 3, 3) > 0, normal(rng, 3, 3), -1e9)  # JAX has traced it before, elsewhere
    graph = graph_of(fn, normal(rng, 3, 3))
    product = line_of(located, "the product")
    for node in named(graph, "dot_general"):
        place = graph.place(node)
        assert place and (place.line, place.function) == (product, "located")
        assert Path(place.file) == Path(__file__) and str(place).endswith(f"{product} (located)")
    masks = [
        graph.place(node)
        for node in graph.nodes
        for value in node.operands
        if value.kind == "literal" and value.constant == -1e9
    ]
    assert masks and {place and place.line for place in masks} == {
        line_of(located, "the second mask")
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("under", ["nothing", "policies", "autocast"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_products_are_in_their_modules(name, under):
    apply, model, adapted, own = FRAMEWORKS[name]
    policy = "c=bf16,o=f32; */outer: full"
    ways = {"nothing": apply, "policies": adapted(policy), "autocast": jmpx.autocast(apply, policy)}

    def loss(model, x):
        return jnp.mean(ways[under](model, x))

    graph = graph_of(loss, model, X)
    found = {}
    for node in named(graph, "dot_general"):
        selector = graph.selector(node)
        assert selector is not None
        found.setdefault(graph.path(node), set()).add(selector)
    paths = [own["net/"] + each for each in ("first", "block/inner", "block/outer", "head")]
    assert list(found) == paths and len(paths) == len(WIDTHS)
    # Each selector selects its module and no other, on the road that it was found on.
    for path, (selector,) in found.items():
        policy = f"c=bf16,o=f32; {selector}: full"
        road = jmpx.autocast(apply, policy) if under == "autocast" else adapted(policy)
        again = graph_of(lambda model, x, road=road: jnp.mean(road(model, x)), model, X)
        wide = {
            again.path(node)
            for node in named(again, "dot_general")
            if {value.dtype.name for value in node.operands} == {"float32"}
        }
        assert wide == {path}


def test_named_scopes_are_paths_outside_of_modules(rng):
    def fn(x):
        with jax.named_scope("enc"), jax.named_scope("mlp"):
            return jnp.einsum("ij,jk->ik", x, x)

    (product,) = named(graph := graph_of(fn, normal(rng, 3, 3)), "dot_general")
    assert graph.path(product) == "enc/mlp" and graph.selector(product) == "enc/mlp"
    assert graph.policy(product) == ""
