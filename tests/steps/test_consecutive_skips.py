"""`skip_nonfinite(max_consecutive_skips=)`, which ends a run from inside of its steps."""

# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import functools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import QUICK_XLA, assert_same_bits, normal, run_python

import jmpx

WAYS = ["update", "optimizer_update"]
SKIPS = ["cond", "where"]


def step_of(optimizer, way, skip="cond"):
    """A step on its parameters, gradients and flag: `(params, state, grads, finite)`."""

    def by_update(params, state, grads, finite):
        updates, state = optimizer.update(grads, state, params, grads_finite=finite)
        return optax.apply_updates(params, updates), state

    def by_function(params, state, grads, finite):
        return jmpx.optimizer_update(params, optimizer, state, grads, finite, skip_by=skip)

    return {"update": by_update, "optimizer_update": by_function}[way]


def wrapped_by_lambdas(optimizer):
    """Functions around those of `skip_nonfinite`, which show nothing of them."""
    return optax.GradientTransformationExtraArgs(
        lambda params: optimizer.init(params),
        lambda grads, state, params=None, **extra: optimizer.update(grads, state, params, **extra),
    )


def wrapped_by_functools(optimizer):
    @functools.wraps(optimizer.update)
    def update(*args, **options):
        return optimizer.update(*args, **options)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def jitted(optimizer):
    return optax.GradientTransformationExtraArgs(optimizer.init, jax.jit(optimizer.update))


WRAPPERS = {
    "none": lambda optimizer: optimizer,
    "lambdas": wrapped_by_lambdas,
    "functools": wrapped_by_functools,
    "extra args": optax.with_extra_args_support,
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("way", WAYS)
def test_it_raises_with_check_progress_and_accepts_no_update(way, skip, wrapper, limit, rng):
    limited = jmpx.skip_nonfinite(
        optax.sgd(0.1, momentum=0.9), skip_by=skip, max_consecutive_skips=limit
    )
    step = step_of(WRAPPERS[wrapper](limited), way, skip)
    free = step_of(jmpx.skip_nonfinite(optax.sgd(0.1, momentum=0.9), skip_by=skip), way, skip)
    params = {"w": normal(rng, 3)}
    carry = reference = params, limited.init(params)
    rows = 0
    for finite in [True, *[False] * limit, True, *[False] * (limit + 1)]:
        grads = {"w": normal(rng, 3).at[1].set(1.0 if finite else jnp.nan)}
        reference = free(*reference, grads, finite)
        rows = 0 if finite else rows + 1
        if rows > limit:
            with pytest.raises(FloatingPointError, match=f"={limit}, because") as error:
                step(*carry, grads, finite)
            with pytest.raises(FloatingPointError, match=f"Skipped {rows} optimizer steps"):
                jmpx.inspect.check_progress(
                    reference[1], jmpx.NoOpLossScale(), max_consecutive=limit
                )
            assert str(error.value).startswith(f"Skipped {rows} optimizer steps in a row, ")
            assert "\n" not in str(error.value)
            return
        before, carry = carry, step(*carry, grads, finite)
        assert_same_bits(carry, reference)  # the state has the fields and counts that it had
        jmpx.inspect.check_progress(carry[1], jmpx.NoOpLossScale(), max_consecutive=limit)
        if not finite:
            assert_same_bits(carry[0], before[0])
    raise AssertionError("no step was beyond the limit")


def test_the_state_is_the_one_without_a_limit():
    params = {"w": jnp.ones(2)}
    for made in (3, None):
        state = jmpx.skip_nonfinite(optax.sgd(0.1), max_consecutive_skips=made).init(params)
        assert state._fields == (
            "inner_state",
            "grads_finite",
            "total_skipped",
            "consecutive_skipped",
        )
        assert_same_bits(state, jmpx.skip_nonfinite(optax.sgd(0.1)).init(params))


@pytest.mark.parametrize(
    ("limit", "error", "expected"),
    [
        (0, ValueError, "Expected max_consecutive_skips to be between 1 and .* got 0"),
        (-1, ValueError, "got -1"),
        (2**31, ValueError, "got 2147483648"),
        (True, TypeError, "Expected max_consecutive_skips to be a whole number, got True"),
        (5.0, TypeError, "got 5.0"),
        (jnp.int32(3), TypeError, "whole number"),
    ],
)
def test_bad_limits(limit, error, expected):
    with pytest.raises(error, match=expected) as caught:
        jmpx.skip_nonfinite(optax.sgd(0.1), max_consecutive_skips=limit)
    assert "\n" not in str(caught.value)


# In compiled programs. The error of a callback stays in JAX's runtime of some versions, and comes
# again from whatever waits next, so that all of this runs in a process of its own.
PROGRAM = """
import functools, json, os, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jmpx
from test_consecutive_skips import jitted, step_of, wrapped_by_lambdas

jax.config.update("jax_numpy_dtype_promotion", "strict")
LIMIT = 3
mesh = Mesh(jax.devices(), "d")
everywhere, parts = PartitionSpec(), PartitionSpec("d")
params = {"w": jnp.ones(4)}

def plain(step):
    return jax.jit(step)

def unused(step):  # the results are dropped
    return jax.jit(lambda *args: (step(*args), 0)[1])

def scanned(step):
    def body(carry, inputs):
        return step(*carry, *inputs), None
    def run(params, state, grads, finite):
        inputs = jax.tree.map(lambda x: x[None], (grads, finite))
        return jax.lax.scan(body, (params, state), inputs)
    return jax.jit(run)

def in_a_cond(step):
    def run(params, state, grads, finite):
        yes = params["w"][0] == 1
        return jax.lax.cond(
            yes, lambda: step(params, state, grads, finite), lambda: (params, state))
    return jax.jit(run)

def mapped(step):
    def run(params, state, grads, finite):
        states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
        states = states._replace(consecutive_skipped=states.consecutive_skipped.at[0].set(0))
        return jax.vmap(step, in_axes=(None, 0, None, None))(params, states, grads, finite)
    return jax.jit(run)

def sharded(step):
    places = [NamedSharding(mesh, spec) for spec in (parts, everywhere, parts, everywhere)]
    return jax.jit(step, in_shardings=places)

def per_device(step, vma=True):
    return jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(parts, everywhere, parts, everywhere),
        out_specs=(parts, everywhere), check_vma=vma))

def pmapped(step):
    stack = lambda x: jnp.stack([x] * len(jax.devices()))
    run = jax.pmap(step)
    return lambda *args: run(*jax.tree.map(stack, args))

def remat(step):
    def loss(rate, params, state, grads, finite):
        grads = jax.tree.map(lambda g: g * rate, grads)
        new, _ = jax.checkpoint(step)(params, state, grads, finite)
        return new["w"].sum()
    run = jax.jit(jax.grad(loss))
    return lambda *args: run(1.0, *args)

CONTEXTS = dict(plain=plain, unused=unused, scanned=scanned, in_a_cond=in_a_cond, mapped=mapped,
                sharded=sharded, per_device=per_device, pmapped=pmapped, remat=remat,
                untracked=functools.partial(per_device, vma=False))

def attempt(run, consecutive, finite):
    state = optimizer.init(params)._replace(consecutive_skipped=jnp.int32(consecutive))
    grads = {"w": jnp.ones(4).at[2].set(1.0 if finite else jnp.nan)}
    try:
        jax.block_until_ready(run(params, state, grads, jnp.array(finite)))
        return ""
    except jax.errors.JaxRuntimeError as error:
        return str(error).strip().splitlines()[-1]

results = []
way, skip = sys.argv[1:]
optimizer = jmpx.skip_nonfinite(optax.sgd(0.1), skip_by=skip, max_consecutive_skips=LIMIT)
steps = {name: context(step_of(optimizer, way, skip)) for name, context in CONTEXTS.items()}
for wrap in (wrapped_by_lambdas, jitted):
    steps[wrap.__name__] = plain(step_of(wrap(optimizer), way, skip))
for name, run in steps.items():
    results.append([name, attempt(run, 2, False), attempt(run, 3, True), attempt(run, 3, False)])
print(json.dumps(results), flush=True)
os._exit(0)  # JAX would print the errors once more
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("way", "skip"), [("update", "where"), ("optimizer_update", "cond")])
def test_it_raises_in_compiled_programs(way, skip):
    flags = f"--xla_force_host_platform_device_count=2 {QUICK_XLA}"
    path = pathlib.Path(__file__).parent
    paths = os.pathsep.join(map(str, [path, path.parent, *sys.path]))
    result = run_python("-c", PROGRAM, way, skip, xla_flags=flags, PYTHONPATH=paths)
    assert result.returncode == 0, result.stderr
    outcomes = json.loads(result.stdout.splitlines()[-1])
    assert len(outcomes) == 12
    for name, at_the_limit, taken, beyond in outcomes:
        assert at_the_limit == taken == "", name
        assert "FloatingPointError: Skipped 4 optimizer steps in a row, more than" in beyond, name
        assert "max_consecutive_skips=3, because gradients were not finite: lower the" in beyond


def test_a_limit_may_be_an_integer_of_numpy():
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.1), max_consecutive_skips=np.int64(3))
    params = jnp.ones(2)
    jaxpr = jax.make_jaxpr(optimizer.update)(params, optimizer.init(params))
    assert "debug_callback" in str(jaxpr)
