"""What a train step compiles to, counted: jmpx's may not be more than the hand-written one."""

import functools

import compiled_step
import jax
import jax.numpy as jnp
import pytest
import steps
from models import ViT
from steps import Point

import jmpx

MODEL = ViT(layers=1, width=16, heads=2, hidden=32, image=8, classes=10)


@functools.cache
def counts(implementation, dtype="float16"):
    with jax.numpy_dtype_promotion("standard"):  # optax promotes in its own code
        lowered = steps.trace(Point(implementation, dtype), MODEL, 2).step.lower()
    # What XLA hands on to LLVM is the same, whose optimizations take half of the time.
    return compiled_step.counts(lowered.compile({"xla_backend_optimization_level": 0}))


# A hand-written step that skips in the same way and checks its gradients at the same place.
SAME = [
    ("jmpx_where", "handwritten"),
    ("jmpx", "handwritten_cond"),
    ("jmpx_counting", "handwritten_cond"),
    ("jmpx_jmp_style", "handwritten_late"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("ours", "by_hand"), SAME)
def test_a_float16_step_costs_what_the_hand_written_one_does(ours, by_hand):
    forms = [counts(form) for form in (by_hand, compiled_step.DIVIDE.get(by_hand)) if form]
    ours, by_hand = counts(ours), forms[0]
    for name in ("bytes_accessed", "temp_bytes"):
        assert ours[name] <= 1.01 * min(form[name] for form in forms), name
    # A division is no part of what reads it: there are fewer instructions, but more kernels.
    assert ours["instructions"] <= 1.01 * by_hand["instructions"]
    assert ours["copies"] <= by_hand["copies"]
    # All flags together are converted and compared once: some operations a step, none a leaf.
    assert ours["converts"] <= by_hand["converts"] + 2
    assert ours["kernels"] <= min(form["kernels"] for form in forms) + 12


def test_the_default_way_to_skip_is_the_smaller_one():
    cond, where = counts("jmpx"), counts("jmpx_where")
    for name in ("instructions", "copies", "bytes_accessed", "temp_bytes"):
        assert cond[name] < where[name], name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ours", ["jmpx", "jmpx_jmp_style"])
def test_without_scaling_and_skipping_nothing_is_added(ours):
    assert counts(ours, "bfloat16") == counts("handwritten", "bfloat16")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skip", ["where", "cond"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_step_grows_with_the_leaves_and_not_with_their_square(mapped, skip):
    def step(params, grads):
        finite = jmpx.all_finite(grads)
        new = [p - jnp.tanh(g) for p, g in zip(params, grads, strict=True)]
        if skip == "where":
            return jmpx.select_tree(finite, new, params)
        return jax.lax.cond(finite, lambda: new, lambda: params)

    def instructions(leaves):
        arrays = [jax.ShapeDtypeStruct((2, 4), jnp.float32)] * leaves
        run = jax.jit(jax.vmap(step) if mapped else step, donate_argnums=0)
        return compiled_step.counts(run.lower(arrays, arrays).compile())["instructions"]

    few, many = instructions(20), instructions(60)
    assert many < 3.3 * few
