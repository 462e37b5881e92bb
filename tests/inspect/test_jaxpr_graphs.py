"""Programs as flat graphs, as watched equations, and the keys of their structure."""

import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, normal
from helpers.jaxprs import equations, trace
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jmpx._inspect import watched

# Why private names: all reports of jmpx.inspect rest on these, and none shows a single equation.
from jmpx._inspect.first_nonfinite.search import Search
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program
from jmpx._jaxprs.inner import is_backward, structure, structure_of

pytestmark = pytest.mark.versions

# Graphs.


def graph_of(fn, *args):
    return Graph(traced_program(fn, args))


def named(graph, name):
    return [node for node in graph.nodes if node.name == name]


def test_calls_are_inlined(rng):
    @jax.custom_jvp
    def own(x):
        return x * 2

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0] * 2))

    def fn(x, y):
        return own(jax.jit(jnp.dot)(x, jax.checkpoint(jnp.sin)(y)))

    graph = graph_of(fn, normal(rng, 2, 3), normal(rng, 3))
    sine, product, scaled = graph.nodes
    assert [node.name for node in graph.nodes] == ["sin", "dot_general", "mul"]
    assert sine.operands == graph.inputs[1:]
    assert product.operands == [graph.inputs[0], *sine.results]
    assert graph.outputs == scaled.results and graph.outputs[0].is_output
    assert graph.inputs[0].readers == [product]
    number = scaled.operands[1]
    assert (number.kind, number.constant) == ("literal", 2.0)


def test_a_scan_is_tied_together_and_its_constants_are_known(rng):
    table = normal(rng, 3)

    def fn(first, xs):
        def body(carry, x):
            carry = jnp.tanh(carry + x * table)
            return carry, carry * table

        return lax.scan(body, first, xs)

    graph = graph_of(fn, normal(rng, 3), normal(rng, 5, 3))
    (carry,), (part,), (last,), (stack,), (tanh,) = (
        named(graph, name) for name in ("carry", "slice", "result", "stack", "tanh")
    )
    assert carry.operands == [graph.inputs[0], *tanh.results] and part.operands == [graph.inputs[1]]
    assert last.operands == tanh.results and graph.outputs == [*last.results, *stack.results]
    assert (tanh.times, carry.times, part.times, last.times, stack.times) == (5, 5, 5, 1, 1)
    assert stack.results[0].shape == (5, 3)
    used = [v for n in graph.nodes for v in n.operands if v.kind == "const"]
    assert len(used) == 2 and len({id(v) for v in used}) == 1
    assert jnp.array_equal(jnp.asarray(used[0].constant), table)


def test_walks_yield_each_node_once_the_nearest_first(rng):
    def fn(x):
        y = jnp.sin(x)
        return jnp.cos(y) + jnp.tanh(jnp.exp(y))

    graph = graph_of(fn, normal(rng, 3))

    def walked(nodes):
        return " ".join(node.name for node in nodes)

    back = functools.partial(graph.back, graph.outputs)
    assert walked(back(lambda node: node.operands)) == "add cos tanh sin exp"
    assert walked(back(lambda node: node.operands, 3)) == "add"  # three are known before it
    stop = lambda node: () if node.name == "cos" else node.operands  # noqa: E731
    assert walked(back(stop)) == "add cos tanh exp sin"
    assert walked(back(lambda node: ())) == "add" and not walked(graph.back([], lambda node: ()))
    ahead = graph.forward(graph.inputs, lambda node: node.results)
    assert walked(ahead) == "sin cos exp add tanh"
    assert walked(graph.forward(graph.inputs, lambda node: ())) == "sin"


def test_a_walk_follows_a_loop_once_and_a_node_tells_what_holds_it(rng):
    def fn(x):
        return lax.scan(lambda c, _: (jax.jit(jnp.sin)(c), None), x, length=2)[0]

    graph = graph_of(fn, normal(rng, 3))
    names = [node.name for node in graph.back(graph.outputs, lambda node: node.operands)]
    assert names == ["result", "sin", "carry"]
    (sine,) = named(graph, "sin")
    assert [node.name for node in sine.outwards][::2] == ["sin", "scan"]


# Watched programs compute the same as unwatched ones, and each equation is seen as it runs.


@jax.custom_jvp
def own_slope(x):
    return jnp.sin(x)


own_slope.defjvp(lambda primals, tangents: (own_slope(*primals), 3 * tangents[0]))


@jax.custom_vjp
def own_pullback(x):
    return jnp.tanh(x)


own_pullback.defvjp(lambda x: (own_pullback(x), x), lambda x, ct: (ct * jnp.cos(x),))


def scanned(x, **options):
    def body(carry, y):
        carry = jnp.sin(carry + y)
        return carry, (carry * y, jnp.float32(1))

    carry, (ys, ones) = lax.scan(body, x, jnp.stack([x, 2 * x, 3 * x]), **options)
    return carry + ys.sum(0) + ones[0]


def branched(x):
    return lax.switch(jnp.int32(x.sum()) % 3, (jnp.sin, jnp.cos, lambda x: x * 2), x)


def nested(x):
    def body(i, x):
        return lax.cond(i % 2 == 0, jax.jit(jnp.sin), lambda x: scanned(x) / 4, x)

    return lax.fori_loop(0, 3, body, x)


# Functions from an array to one of the same shape, differentiable or not.
PIECES = {
    "jit": jax.jit(lambda x: jax.jit(jnp.sin)(x) + jnp.sin(x)),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "custom_jvp": own_slope,
    "custom_vjp": own_pullback,
    "reversed": functools.partial(scanned, reverse=True),
    "unrolled": functools.partial(scanned, unroll=2),
    "scan of a checkpoint": lambda x: scanned(jax.checkpoint(scanned)(x)),
    "cond": branched,
    "vmap": jax.vmap(lambda x: jnp.where(x > 0, jnp.sqrt(jnp.abs(x) + 1), x)),
    "nested": nested,
    "half": lambda x: (x.astype(jnp.float16) * jnp.float16(0.1)).astype(jnp.float32),
    "random": lambda x: x * jax.random.uniform(jax.random.key(3), x.shape),
}


def halved(x):  # the number of trips depends on the data, and there is no gradient
    return lax.while_loop(lambda carry: jnp.abs(carry).max() > 0.3, lambda carry: carry / 2, x)


def is_backward_site(site):
    return any(map(is_backward, site.path))


def check(fn, *args, jits=(jax.jit,)):
    """Holds that a program gives the same bits watched; returns its sites and how often each ran.

    Args:
        fn: the program.
        *args: its arguments.
        jits: what to compile both by.
    """

    def counted(state, site, operands, results):
        assert len(site.trips) == len(site.loops)
        return state | {site.key: state[site.key] + 1}

    jaxpr, arrays = trace(fn, *args), jax.tree.leaves(args)
    found = list(watched.sites(jaxpr))
    assert len({site.key for site in found}) == len(found)
    none = {site.key: jnp.int32(0) for site in found}
    for jit in jits:
        plain = jit(lambda *arrays: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arrays))
        run = jit(lambda state, *arrays: watched.Watcher(counted).evaluate(jaxpr, arrays, state))
        results, counts = run(none, *arrays)
        assert_same_bits(results, plain(*arrays))
    return found, np.asarray([counts[site.key] for site in found])


@pytest.mark.thorough
@pytest.mark.parametrize("fn", [nested, halved])
def test_a_watched_program_gives_the_same_bits(fn, rng):
    found, counts = check(fn, normal(rng, 4), jits=(jax.jit, lambda fn: fn))
    assert found and counts.max() > 0
    assert not any(map(is_backward_site, found))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("piece", PIECES)
def test_so_does_its_gradient(piece, rng):
    fn = PIECES[piece]
    found, _ = check(jax.value_and_grad(lambda x: (fn(x) ** 2).sum()), normal(rng, 4))
    assert any(map(is_backward_site, found)) and not is_backward_site(found[0])


@pytest.mark.thorough
@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=3), st.integers(0, 2**32))
def test_and_any_composition(pieces, seed):
    def fn(x):
        for piece in pieces:
            x = PIECES[piece](x)
        return x.sum()

    check(jax.value_and_grad(fn), normal(np.random.default_rng(seed), 4))


def test_each_site_is_seen_as_often_as_it_runs():
    def fn(x):
        x = lax.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0]
        x = lax.while_loop(lambda c: c[0] < 100, lambda c: c * 10, x)  # 0.7: three times
        called = jax.jit(lambda x: jnp.tan(x))
        x = called(called(x))
        return lax.cond(x[0] > 1e9, jnp.cos, jnp.exp, x)

    found, counts = check(fn, jnp.ones(1))
    by_name = {}
    for site, count in zip(found, counts, strict=True):
        by_name.setdefault(site.equation.primitive.name, []).append(int(count))
    assert by_name["sin"] == [5] and by_name["tan"] == [1, 1]  # one site for each call
    assert by_name["cos"] == [0] and by_name["exp"] == [1] and by_name["mul"] == [3]


def test_scopes_go_with_a_node_and_the_equations_around_with_a_site():
    def fn(x):
        with jax.named_scope("outer"):

            @jax.jit
            def call(x):
                with jax.named_scope("inner"):
                    return lax.scan(lambda c, _: (jnp.sin(c), None), x, length=2)[0].sum()

            return call(x)

    def step(x):
        with jax.named_scope("step"):
            return jax.grad(fn)(x)

    nodes = graph_of(step, jnp.ones(2)).nodes
    (node,) = (node for node in nodes if node.name == "sin")
    assert node.scope.startswith("step/") and node.scope.split("/").index("outer") == 1
    assert any(node.is_backward for node in nodes) and not node.is_backward
    found = list(watched.sites(trace(step, jnp.ones(2))))
    (sin,) = (site for site in found if site.equation.primitive.name == "sin")
    assert [eqn.primitive.name for eqn in sin.path[:-1]] == ["jit", "scan"]
    assert [eqn.primitive.name for eqn in sin.loops] == ["scan"]
    backward = list(filter(is_backward_site, found))
    assert any(site.loops for site in backward) and not is_backward_site(sin)


def test_an_equation_that_is_more_than_a_call_is_seen_as_a_whole():
    def solve(matvec, b):
        return b / 2

    def fn(b):  # the jaxpr of the product has the shapes of the solve
        return lax.custom_linear_solve(lambda x: 2 * x, b, solve, solve)

    found, counts = check(fn, jnp.ones(3))
    assert [site.equation.primitive.name for site in found] == ["custom_linear_solve"]
    assert counts.tolist() == [1]
    assert [node.name for node in graph_of(fn, jnp.ones(3)).nodes] == ["custom_linear_solve"]


def test_a_shard_map_needs_a_state_of_all_devices():
    mesh = Mesh(jax.devices()[:2], "d")
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    x = jnp.ones(4)
    with pytest.raises(ValueError, match="Cannot watch inside of the jax.shard_map"):
        jax.eval_shape(lambda x: watched.Watcher().evaluate(trace(mapped, x), [x]), x)


def test_one_reduction_looks_at_all_between_two_products(rng):
    def fn(params, x):
        for w in params:
            x = x @ w
            for _ in range(10):
                x = jnp.tanh(x) * 2
        return x

    search = Search(trace(fn, [*normal(rng, 6, 8, 8)], normal(rng, 4, 8)))
    watch = functools.partial(search._watch_all, lambda x: x)
    found = trace(watch, [*map(jnp.zeros_like, search.jaxpr.in_avals)])
    reductions = [e for e in equations(found) if e.primitive.name.startswith("reduce")]
    assert len(search.watched) == 21 * 6 and 1 <= len(reductions) <= 14


# Keys: programs that share one, and programs that do not.


def key(fn, *args):
    # A new function each time, as JAX would return the jaxpr that it has for the old one.
    return structure(jax.make_jaxpr(lambda *args: fn(*args))(*args))


def looped(x, scale=2.0, length=3):
    return lax.scan(lambda c, _: (jnp.tanh(c) * scale, c.sum()), x, None, length=length)


X = jnp.linspace(0, 1, 4)
AGAIN = {
    "gradient": lambda x: jax.grad(lambda x: looped(x)[0].sum())(x),
    "jit": lambda x: jnp.clip(jnp.clip(x, 0.2, 0.8), 0.4),
    "branches": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x),
    "rows": lambda x: x.at[jnp.array([0, 2])].add(1.0)[1:],
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "nan": lambda x: jnp.where(x > 0, x, np.float32("nan")),
    "custom_vjp": lambda x: own_pullback(x) * 2,
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_program_that_is_traced_again_has_the_same_key(name):
    first, second = key(AGAIN[name], X), key(AGAIN[name], X)
    assert first == second and hash(first) == hash(second)


def test_another_program_has_another_key():
    y, zero = X + 1, np.float32(0.0)
    keys = [
        key(looped, X),
        key(lambda x: looped(x, 2.5), X),
        key(lambda x: looped(x, -2.0), X),
        key(lambda x: looped(x, length=4), X),
        key(lambda x: looped(x)[::-1], X),
        key(lambda x: looped(x.astype(jnp.bfloat16)), X),
        key(lambda x: looped(x[:3]), X),
        key(lambda x: looped(looped(x)[0]), X),
        key(jax.jit(looped), X),
        # Operands tell programs apart.
        key(lambda x, y: x - y, X, y),
        key(lambda x, y: y - x, X, y),
        key(lambda x, y: x - x, X, y),
        key(lambda x, y: (x - y, x), X, y),
        key(lambda x: x * zero, X),
        key(lambda x: x * -zero, X),
        # A function with a custom rule differs by the program that it runs.
        key(AGAIN["custom_vjp"], X),
        key(lambda x: jnp.tanh(x) * 2, X),
    ]
    assert len(set(keys)) == len(keys)
    constants = [key(lambda x, c=c: jax.jit(lambda x: x + c)(x), X) for c in (y, y + 1, y[:1])]
    assert constants[0] == constants[1] != constants[2]  # they count by shape and dtype


def test_equal_layers_of_one_program_share_a_key():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(x) * 2.0) * 2.0)(X)
    ((x,), eqns) = jaxpr.jaxpr.invars, jaxpr.eqns
    layers = (eqns[:2], [x], eqns[1].outvars), (eqns[2:], eqns[1].outvars, eqns[3].outvars)
    assert structure_of(*layers[0]) == structure_of(*layers[1]) != structure(jaxpr)
