"""Skipped steps in a row are counted, whatever wraps the optimizer of `skip_nonfinite`."""

# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import functools

import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same_bits, normal

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
def test_check_progress_raises_whatever_wraps_the_optimizer(way, skip, wrapper, limit, rng):
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.1, momentum=0.9), skip_by=skip)
    step, free = step_of(WRAPPERS[wrapper](optimizer), way, skip), step_of(optimizer, way, skip)
    params = {"w": normal(rng, 3)}
    carry = reference = params, optimizer.init(params)
    check = lambda state: jmpx.inspect.check_progress(  # noqa: E731
        state, jmpx.NoOpLossScale(), max_consecutive=limit
    )
    for finite in [True, *[False] * limit, True, *[False] * limit]:
        grads = {"w": normal(rng, 3).at[1].set(1.0 if finite else jnp.nan)}
        reference = free(*reference, grads, finite)
        before, carry = carry, step(*carry, grads, finite)
        assert_same_bits(carry, reference)
        check(carry[1])
        if not finite:
            assert_same_bits(carry[0], before[0])
    _, state = step(*carry, grads, False)
    with pytest.raises(FloatingPointError, match=f"Skipped {limit + 1} optimizer steps"):
        check(state)
