"""Gradients of JMP, MPX and jmpx on steps that change the loss scale.

They are to be divided by the scale that the loss was multiplied by, not by the one that the step
leaves behind.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
LARGEST = 64  # of x: at a scale of 2**10, its gradient is beyond float16's 65504
START, PERIOD, STEPS = 2.0**8, 3, 24


def product(w, x):
    """Its gradient x and all products of x with a power of two are exact in float16."""
    return jnp.sum((w * x).astype(jnp.float32))


def by_jmpx(w, x, scale, counter):
    scaling = jmpx.DynamicLossScale(scale, counter, PERIOD)
    scaling, _, grads = jmpx.grad(product, scaling, policy="by=arguments,c=f16")(w, x)
    return grads, scaling.loss_scale, scaling.counter


def by_jmp(w, x, scale, counter):
    import jmp

    cast = jmp.get_policy("params=float32,compute=float16,output=float32").cast_to_compute
    loss_scale = jmp.DynamicLossScale(scale, counter, PERIOD)
    grads = jax.grad(lambda w: loss_scale.scale(product(cast(w), cast(x))))(w)
    grads = loss_scale.unscale(grads)
    loss_scale = loss_scale.adjust(jmp.all_finite(grads))
    return grads, loss_scale.loss_scale, loss_scale.counter


def by_mpx(w, x, scale, counter):
    import mpx

    mpx.set_half_precision_datatype(jnp.float16)
    scaling = mpx.DynamicLossScaling(scale, jnp.float32(1), period=PERIOD, counter=counter)
    scaling, _, grads = mpx.filter_grad(product, scaling)(w, x)
    return grads, scaling.loss_scaling, scaling.counter


RATIOS = {  # of steps that grow the scale, shrink it, leave it
    "jmpx": (by_jmpx, (1, 1, 1)),
    "jmp": (by_jmp, (1, 1, 1)),
    "mpx": (by_mpx, (0.5, 2, 1)),  # it divides by the scale of the next step
}


@pytest.mark.parametrize("name", RATIOS)
def test_gradients_on_steps_that_change_the_scale(name):
    pytest.importorskip(name)
    library, expected = RATIOS[name]
    rng = np.random.default_rng(0)
    x = jnp.asarray([*rng.integers(1, LARGEST, size=30), LARGEST, 0.125], jnp.float32)
    update = jax.jit(library)
    scale, counter = jnp.float32(START), jnp.int32(0)
    ratios = {1: [], -1: [], 0: []}  # by the direction in which the scale changed
    for _ in range(STEPS):
        grads, new_scale, counter = update(jnp.zeros_like(x), x, scale, counter)
        ratio = np.asarray(grads) / np.asarray(x)  # the gradient in float32 is x
        ratios[int(np.sign(new_scale - scale))].append(ratio[np.isfinite(ratio)])
        scale = new_scale
    for found, ratio in zip(ratios.values(), expected, strict=True):
        assert len(found) >= 4
        assert {*np.concatenate(found).tolist()} == {ratio}
