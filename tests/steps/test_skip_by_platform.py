"""The default of `skip_by`: each platform gets its own way to skip, and one way alone."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false

import importlib.util
import re
from functools import partial

import compiled_step
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_step import count
from helpers import assert_same_bits, lenient, normal
from helpers.maps import mesh_of
from jax.sharding import PartitionSpec as P

import jmpx

PLATFORMS = {"cpu": "cond", "cuda": "where", "rocm": "where", "tpu": "where"}
OPERATION = re.compile(r'^ .*?= "?stablehlo\.(\w+)', re.MULTILINE)


def make(rng, counting=False):
    """Returns a step of Adam, its arguments, and a list in which each run by Python is noted."""
    inner, calls = lenient(optax.adam(1e-2)), []

    def update(grads, state, params=None):
        calls.append(1)
        return inner.update(grads, state, params)

    optimizer = optax.GradientTransformation(inner.init, update)
    optimizer = jmpx.skip_nonfinite(optimizer) if counting else optimizer
    params = {"w": normal(rng, 4, 3), "b": normal(rng, 3)}

    def step(params, state, grads, finite, **skip):
        return jmpx.optimizer_update(params, optimizer, state, grads, finite, **skip)

    grads = jax.tree.map(lambda p: normal(rng, *p.shape), params)
    return step, (params, optimizer.init(params), grads), calls


def operations(step, arguments, platform, **skip):
    """Returns the names of the StableHLO operations of a step, in their order."""
    traced = jax.jit(partial(step, **skip)).trace(*arguments, jnp.array(True))
    return OPERATION.findall(traced.lower(lowering_platforms=(platform,)).as_text())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_platform_gets_its_own_way(platform, rng):
    step, arguments, _ = make(rng, counting=platform in ("cuda", "tpu"))
    by_where = operations(step, arguments, platform, skip_by="where")
    found = operations(step, arguments, platform)
    # The flag that is always True is the selection's, inside of the `lax.cond`, or is before it.
    assert "or" not in by_where and found.count("or") == 1
    is_selection = found[: found.index("or")].count("case") > 2
    assert is_selection == (PLATFORMS[platform] == "cond")
    assert found.count("sqrt") == by_where.count("sqrt") == 2
    assert found.count("select") == by_where.count("select")


@pytest.mark.thorough
@pytest.mark.versions
def test_a_cpu_compiles_what_it_compiles_for_cond(rng):
    step, arguments, _ = make(rng)
    given = *arguments, jnp.array(True)
    programs = [
        str(jax.jit(partial(step, **skip), donate_argnums=(0, 1)).lower(*given).compile().as_text())
        for skip in ({}, {"skip_by": "cond"})
    ]
    assert count(programs[0]) == count(programs[1])
    assert all(text.count(" conditional(") == 1 for text in programs)


def test_a_program_for_two_platforms_holds_both_ways(rng):
    step, arguments, _ = make(rng)
    exported = jax.export.export(jax.jit(step), platforms=("cpu", "tpu"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    found = exported(*shapes, jax.ShapeDtypeStruct((), bool))
    assert "stablehlo.select" in found.mlir_module() and "stablehlo.case" in found.mlir_module()
    run = jax.jit(step)
    for flag in (jnp.array(True), jnp.array(False)):
        # Adam's state is of a class that JAX does not write to a file; it need not here.
        assert_same_bits(found.call(*arguments, flag), run(*arguments, flag))


# One way is what the other is


def under_vmap(step):
    def run(params, state, grads, finite):
        twice = jax.tree.map(lambda x: jnp.stack([x, x]), (params, state, grads))
        new = jax.vmap(step)(*twice, jnp.stack([finite, ~finite]))
        return jax.tree.map(lambda x: x[0], new)

    return jax.jit(run)


def mapped(step):
    specs = {"in_specs": (P(),) * 4, "out_specs": (P(), P())}
    return jax.jit(jax.shard_map(step, mesh=mesh_of(2), **specs))


def in_autocast(step):
    return jax.jit(jmpx.autocast(step, "full"))


@pytest.mark.parametrize("way", [jax.jit, under_vmap, mapped, in_autocast])
def test_the_default_does_what_a_cond_does(way, rng):
    step, arguments, _ = make(rng)
    run, by_cond = way(step), way(partial(step, skip_by="cond"))
    for finite in (True, False):
        given = *arguments, jnp.array(finite)
        found, wanted = run(*given), by_cond(*given)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            # A fusion may round once where two operations round twice.
            np.testing.assert_allclose(a, b, rtol=1e-5)
        assert bool((found[0]["w"] == arguments[0]["w"]).any()) != finite
    assert_same_bits(found, arguments[:2])


def test_it_can_be_differentiated(rng):
    step, (params, state, grads), _ = make(rng)

    def norm(scale, wanted, **skip):
        scaled = jax.tree.map(lambda g: g * scale, grads)
        flag = (scale > 0) == wanted  # depends on what is differentiated, so that it is traced
        new, _ = step(params, state, scaled, flag, **skip)
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(new))

    ways = {}, {"skip_by": "cond"}, {"skip_by": "where"}
    run = jax.jit(lambda *args: [jax.grad(partial(norm, **skip))(*args) for skip in ways])
    for finite in (True, False):
        found, *wanted = run(jnp.float32(1e-7), jnp.array(finite))  # Adam's epsilon counts there
        np.testing.assert_allclose(found, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(found, wanted[1], rtol=1e-5)
        assert (found != 0) == finite


@pytest.mark.parametrize("skip", [{}, {"skip_by": "cond"}, {"skip_by": "where"}])
def test_python_runs_the_optimizer_once_a_trace_and_leaves_no_tracer(skip, rng):
    step, arguments, calls = make(rng)
    with jax.checking_leaks():
        jax.jit(partial(step, **skip)).trace(*arguments, jnp.array(True))
    assert len(calls) == 1


def test_a_callback_of_the_optimizer_runs_once_a_step_and_never_in_a_skipped_one(rng):
    seen = []

    def update(grads, state, params=None):
        jax.debug.callback(lambda: seen.append(1))
        return jax.tree.map(lambda g: -g, grads), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    params = {"w": normal(rng, 3)}

    @jax.jit
    def step(params, finite):
        return jmpx.optimizer_update(params, optimizer, (), params, finite)[0]

    for finite in (True, False):
        jax.block_until_ready(step(params, jnp.array(finite)))
        jax.effects_barrier()
        assert len(seen) == 1


# What reads programs


@pytest.mark.parametrize(("platform", "counting"), [(None, False), ("gpu", True)])
def test_an_audit_counts_the_update_once_and_the_selection(platform, counting, rng):
    step, arguments, _ = make(rng, counting)

    def report(**skip):
        audited = jmpx.inspect.audit(partial(step, **skip), platform=platform)
        return audited(*arguments, jnp.array(True))

    found, by_cond, by_where = report(), report(skip_by="cond"), report(skip_by="where")
    for name in "products saved casts findings uncounted".split():
        assert getattr(found, name) == getattr(by_where, name) == getattr(by_cond, name)
    (scope,) = found.scopes
    # Two more operations: those of the two flags.
    assert (scope._replace(operations=scope.operations - 2),) == by_where.scopes
    assert scope.operations > by_cond.scopes[0].operations


def test_an_audit_counts_one_branch_of_the_users_own():
    on_cpu, on_gpu = jnp.zeros((2, 3)), jnp.zeros((4, 5))

    def fn(x):
        return jax.lax.platform_dependent(
            x,
            cpu=lambda x: (x @ on_cpu).sum(),
            cuda=lambda x: (x.reshape(1, 4) @ on_gpu).sum(),
            default=lambda x: x.sum(),
        )

    for platform, flops in {None: 24, "cpu": 24, "gpu": 40, "tpu": 0}.items():
        report = jmpx.inspect.audit(lambda x: [fn(x)], platform=platform)(jnp.ones((2, 2)))
        assert sum(product.flops for product in report.products) == flops


@pytest.mark.thorough
@pytest.mark.versions
def test_an_infinity_is_found_as_in_a_cond(rng):
    step, (params, state, _), _ = make(rng)
    x = normal(rng, 5, 4)

    def train(params, state, x, **skip):
        loss_fn = lambda p, x: jnp.mean(jnp.square(x @ p["w"] + p["b"]))  # noqa: E731
        grad_fn = jmpx.value_and_grad(loss_fn, jmpx.DynamicLossScale(2.0**4), policy="c=f16")
        _, _, finite, grads = grad_fn(params, x)
        return step(params, state, grads, finite, **skip)

    ranges = [
        str(jmpx.inspect.ranges(jax.jit(partial(train, **skip)))(params, state, x))
        for skip in ({}, {"skip_by": "where"})
    ]
    assert ranges[0] == ranges[1]  # with the selection, which a `lax.cond` has not
    first = lambda fn, *args: jmpx.inspect.first_nonfinite(jax.jit(fn))(*args)  # noqa: E731
    assert first(train, params, state, x) is None
    bad = {**params, "w": params["w"].at[0, 0].set(jnp.inf)}
    found = first(train, bad, state, x)
    assert str(found) == str(first(partial(train, skip_by="cond"), bad, state, x))
    assert "inf" in str(found).lower()


# On a TPU's compiler


@pytest.mark.slow  # a compiler of its own
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.usefixtures("standard_promotion")
def test_a_tpu_compiles_what_it_compiles_for_where():
    names = "jmpx", "jmpx where", "jmpx cond", "handwritten where"
    found, where, cond, by_hand = (
        compiled_step.measure_overhead(name, layers=1, batch=8) | {"compile_cpu_s": 0}
        for name in names
    )
    assert found == where != cond and found["conditionals"] == 0
    assert cond["bytes_accessed"] > 1.02 * found["bytes_accessed"]
    for name in ("instructions", "fusions", "entry_ops", "bytes_accessed"):
        assert found[name] <= 1.01 * by_hand[name]
