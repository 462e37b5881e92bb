"""One transformer in four frameworks: a policy gives the program of casts by hand, no cast more."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from helpers.by_hand import FRAMEWORKS, loss_by_hand, loss_of, loss_with

import jmpx

WIDTH = 8
X = jnp.zeros((2, 4, WIDTH))


def operations(fn, *args):
    """Counts the operations of a function, with their types, lowered for a TPU."""
    traced = jax.jit(lambda *args: fn(*args)).trace(*args)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    lines = [re.sub(r"[%@][\w.#:]+", "", line).strip() for line in text.splitlines()]
    return collections.Counter(line for line in lines if "stablehlo" in line or "chlo" in line)


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_program_of_a_policy_is_that_of_casts_by_hand(framework):
    params, _, by_hand, with_policy = FRAMEWORKS[framework](WIDTH, X)
    found = operations(jax.value_and_grad(loss_with(with_policy)), params, X)
    assert found == operations(jax.value_and_grad(loss_by_hand(by_hand)), params, X)
    low = [n for line, n in found.items() if "dot_general" in line and "xf32" not in line]
    assert sum(low) == 23  # of six layers and the attention: all but one are three


def test_the_program_of_a_gradient_function_is_that_of_casts_by_hand():
    params, plain, _, _ = FRAMEWORKS["haiku"](WIDTH, X)

    def loss_fn(params, x):
        return loss_of(plain(params, x).astype(jnp.float32))

    def by_hand(params, x):
        return loss_fn(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x)))

    def step(params, x):
        grad_fn = jmpx.value_and_grad(loss_fn, jmpx.NoOpLossScale(), policy="by=arguments,c=bf16")
        loss, _, _, grads = grad_fn(params, x)
        return loss, grads

    assert operations(step, params, X) == operations(jax.value_and_grad(by_hand), params, X)
