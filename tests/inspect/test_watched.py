"""A watched program computes what it computes unwatched, and each equation is seen as it runs."""

import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, normal
from helpers.jaxprs import trace
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program
from jmpx._jaxprs import watched


@jax.custom_jvp
def own_slope(x):
    return jnp.sin(x)


own_slope.defjvp(lambda primals, tangents: (own_slope(*primals), 3 * tangents[0]))


@jax.custom_vjp
def own_pullback(x):
    return jnp.tanh(x)


own_pullback.defvjp(lambda x: (own_pullback(x), x), lambda x, ct: (ct * jnp.cos(x),))


def halved(x):  # the number of trips depends on the data
    return jax.lax.while_loop(lambda carry: jnp.abs(carry).max() > 0.3, lambda carry: carry / 2, x)


def scanned(x, **options):
    def body(carry, y):
        carry = jnp.sin(carry + y)
        return carry, (carry * y, jnp.float32(1))

    carry, (ys, ones) = jax.lax.scan(body, x, jnp.stack([x, 2 * x, 3 * x]), **options)
    return carry + ys.sum(0) + ones[0]


def branched(x):
    return jax.lax.switch(jnp.int32(x.sum()) % 3, (jnp.sin, jnp.cos, lambda x: x * 2), x)


def nested(x):
    def body(i, x):
        return jax.lax.cond(i % 2 == 0, jax.jit(jnp.sin), lambda x: scanned(x) / 4, x)

    return jax.lax.fori_loop(0, 3, body, x)


# What turns an array into one of the same shape, differentiable or not.
PIECES = {
    "pointwise": lambda x: jnp.exp(-x * x) + 1,
    "jit": jax.jit(lambda x: jax.jit(jnp.sin)(x) + jnp.sin(x)),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "custom_jvp": own_slope,
    "custom_vjp": own_pullback,
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "scan": scanned,
    "reversed": functools.partial(scanned, reverse=True),
    "unrolled": functools.partial(scanned, unroll=2),
    "scan of a checkpoint": lambda x: scanned(jax.checkpoint(scanned)(x)),
    "cond": branched,
    "vmap": jax.vmap(lambda x: jnp.where(x > 0, jnp.sqrt(jnp.abs(x) + 1), x)),
    "nested": nested,
    "half": lambda x: (x.astype(jnp.float16) * jnp.float16(0.1)).astype(jnp.float32),
    "product": lambda x: jnp.outer(x, x) @ jnp.cos(x),
    "random": lambda x: x * jax.random.uniform(jax.random.key(3), x.shape),
    "sorted": lambda x: jnp.sort(x)[::-1],
}
NOT_DIFFERENTIABLE = {"while": halved}


def counted(state, site, operands, results, trips):
    """Counts how often each site runs."""
    assert len(trips) == len(site.loops)
    return state | {site.key: state[site.key] + 1}


def check(fn, *args, jits=(jax.jit,)):
    """Holds that a program gives the same bits watched; returns its sites and how often each ran.

    Args:
        fn: the program.
        *args: its arguments.
        jits: what to compile both by.
    """
    jaxpr, arrays = trace(fn, *args), jax.tree.leaves(args)
    found = list(watched.sites(jaxpr))
    assert len({site.key for site in found}) == len(found)
    none = {site.key: jnp.int32(0) for site in found}
    for jit in jits:
        plain = jit(lambda *arrays: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arrays))
        run = jit(
            lambda state, *arrays: watched.evaluate(jaxpr, arrays, counted, state, by_site=True)
        )
        results, counts = run(none, *arrays)
        assert_same_bits(results, plain(*arrays))
    return found, np.asarray([counts[site.key] for site in found])


def at_once(fn):
    return fn


@pytest.mark.sampled(10)
@pytest.mark.parametrize("piece", [*PIECES, *NOT_DIFFERENTIABLE])
def test_a_watched_program_gives_the_same_bits(piece, rng):
    fn = (PIECES | NOT_DIFFERENTIABLE)[piece]
    found, counts = check(fn, normal(rng, 4), jits=(jax.jit, at_once))
    assert found and counts.max() > 0
    assert not any(site.is_backward for site in found)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("piece", PIECES)
def test_so_does_its_gradient(piece, rng):
    fn = PIECES[piece]
    found, _ = check(jax.value_and_grad(lambda x: (fn(x) ** 2).sum()), normal(rng, 4))
    assert any(site.is_backward for site in found) and not found[0].is_backward


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
        x = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0]
        x = jax.lax.while_loop(lambda c: c[0] < 100, lambda c: c * 10, x)  # 0.7: three times
        called = jax.jit(lambda x: jnp.tan(x))
        x = called(called(x))
        return jax.lax.cond(x[0] > 1e9, jnp.cos, jnp.exp, x)

    found, counts = check(fn, jnp.ones(1))
    by_name = {}
    for site, count in zip(found, counts, strict=True):
        by_name.setdefault(site.equation.primitive.name, []).append(int(count))
    assert by_name["sin"] == [5] and by_name["tan"] == [1, 1]  # one site for each call
    assert by_name["cos"] == [0] and by_name["exp"] == [1] and by_name["mul"] == [3]


def test_trips_are_counted_in_the_order_in_which_they_run():
    def fn(x):
        def outer(carry, y):
            inner = jax.lax.fori_loop(0, 4, lambda i, c: c * jnp.float32(2), carry)
            return inner + y, None

        return jax.lax.scan(outer, x, jnp.arange(3, dtype=jnp.float32), reverse=True)[0]

    def watch(state, site, operands, results, trips):
        """Notes the trips in which a product first exceeds 100."""
        if site.equation.primitive.name != "mul":
            return state
        is_first = (results[0] > 100) & (state[0] < 0)
        return jnp.where(is_first, jnp.stack(trips), state)

    jaxpr = trace(fn, jnp.float32(1))
    state = jnp.full(2, -1, jnp.int32)
    # 1, 2, 4, 8, 16 + 2 = 18, 36, 72, 144
    _, trips = watched.evaluate(jaxpr, [jnp.float32(1)], watch, state)
    assert trips.tolist() == [1, 2]


def test_equations_can_run_in_another_way_and_on_other_constants(rng):
    x, w = normal(rng, 3), np.asarray(normal(rng, 3))
    half = jnp.asarray(x, jnp.float16)

    def fn(x):
        return jax.lax.scan(lambda c, _: (c * x + w.astype(np.float16), None), x, length=2)[0]

    def widen(array):
        return jnp.asarray(array, jnp.float32) if array.dtype == jnp.float16 else array

    def no_watch(state, *_):
        return state

    jaxpr = trace(fn, half)
    (result,), _ = watched.evaluate(
        jaxpr, [widen(half)], no_watch, (), run=watched.core.bind, constant=widen
    )
    wide = np.asarray(widen(half))
    expected = (wide * wide + w.astype(np.float16)) * wide + w.astype(np.float16)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    doubled = lambda eqn, operands: [2 * r for r in watched.core.bind(eqn, operands)]  # noqa: E731
    (result,), _ = watched.evaluate(trace(jnp.sin, x), [x], no_watch, (), run=doubled)
    np.testing.assert_array_equal(result, 2 * jnp.sin(x))


def test_scopes_and_the_equations_around_go_with_a_site():
    def fn(x):
        with jax.named_scope("outer"):

            @jax.jit
            def call(x):
                with jax.named_scope("inner"):
                    return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=2)[0].sum()

            return call(x)

    found = list(watched.sites(trace(jax.grad(fn), jnp.ones(2)), watched.Site(None, "step")))
    (sin,) = (site for site in found if site.equation.primitive.name == "sin")
    assert sin.scope.startswith("step/") and sin.scope.split("/").index("outer") == 1
    assert [eqn.primitive.name for eqn in sin.around] == ["jit", "scan"]
    assert [eqn.primitive.name for eqn in sin.loops] == ["scan"]
    backward = [site for site in found if site.is_backward]
    assert any(site.loops for site in backward) and not sin.is_backward


def test_an_equation_that_is_more_than_a_call_is_seen_as_a_whole():
    def solve(matvec, b):
        return b / 2

    def fn(b):  # the jaxpr of the product has the shapes of the solve
        return jax.lax.custom_linear_solve(lambda x: 2 * x, b, solve, solve)

    found, counts = check(fn, jnp.ones(3))
    assert [site.equation.primitive.name for site in found] == ["custom_linear_solve"]
    assert counts.tolist() == [1]
    graph = Graph(traced_program(fn, (jnp.ones(3),)))
    assert [node.name for node in graph.nodes] == ["custom_linear_solve"]


def mapped(x):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    body = lambda x: jax.lax.psum(jnp.sin(x).sum(), "d") * x  # noqa: E731
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)


def test_a_shard_map_needs_a_state_of_all_devices(rng):
    x = np.asarray(normal(rng, 4))
    jaxpr = trace(mapped, x)

    def largest(state, site, operands, results, trips):
        if site.equation.primitive.name != "sin":
            return state
        return jnp.maximum(state, jnp.abs(results[0]).max())

    run = functools.partial(watched.evaluate, jaxpr, watch=largest)
    with pytest.raises(ValueError, match="Cannot watch inside of the jax.shard_map"):
        jax.eval_shape(lambda x: run([x], state=jnp.float32(0)), x)
    reduced = lambda x: run([x], state=jnp.float32(0), reduce=jax.lax.pmax)  # noqa: E731
    (result,), found = jax.jit(reduced)(x)
    assert_same_bits(np.asarray(result), np.asarray(jax.jit(mapped)(x)))
    np.testing.assert_array_equal(found, jnp.abs(jax.jit(jnp.sin)(x)).max())
