"""A float32 model with a part in float64, in each framework, where JAX has 64-bit types."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, zoo

import jmpx

MAP = "by=modules,params=f32,c=f32; <Inner>: f64"
LARGE = 2.0**30  # float32 loses a number of about 1 beside it, float64 does not


def solve(m, x):
    """A sum in which all digits of float32 cancel."""
    return (x @ m.param("w", 2, 2) + LARGE) - LARGE


def body(m, x):
    return m.inner("s", solve)(m.linear("first", 2)(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
def test_a_float64_island_in_a_float32_model(framework, rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    net = zoo.build(framework, body, x, rng=rng)
    policy = jmpx.get_policy_map(net.words(MAP))
    apply, arrays = net.split(net.under(policy))
    leaves = {leaf.shape: leaf for leaf in jax.tree.leaves(arrays)}
    first = leaves[(2, 3)].T if framework == "equinox" else leaves[(3, 2)]
    wide: Any = np.float64(x)
    first, bias, second = (np.float64(w) for w in (first, leaves[(2,)], leaves[(2, 2)]))
    exact = (wide @ first + bias) @ second

    def loss_fn(arrays, x):
        y = apply(arrays, x)
        assert y.dtype == jnp.float32  # what surrounds the island
        return jnp.sum(y), y

    with enable_x64():
        grad_fn = jmpx.value_and_grad(loss_fn, jmpx.NoOpLossScale(), has_aux=True, policy=policy)
        (_, y), _, _, grads = jax.jit(grad_fn)(arrays, x)
    np.testing.assert_allclose(y, exact, atol=1e-5)
    found = {leaf.shape: np.asarray(leaf) for leaf in jax.tree.leaves(grads)}
    assert {leaf.dtype.name for leaf in found.values()} == {"float32"}
    ones = np.ones((4, 2))
    of_first = found[(2, 3)].T if framework == "equinox" else found[(3, 2)]
    np.testing.assert_allclose(of_first, wide.T @ ones @ second.T, atol=1e-4)
    of_second = (wide @ first + bias).T @ ones
    np.testing.assert_allclose(found[(2, 2)], of_second, atol=1e-4)
    in_float32 = exact.astype(np.float32) + np.float32(LARGE) - np.float32(LARGE)
    assert not np.allclose(in_float32, exact, atol=0.1)  # it could fail
