"""For bfloat16 nobody needs a gradient function: derivatives of JAX, Equinox and NNX do.

The loss under the default policy gives float32 gradients, and multiplies in 16 bits forward and
backward, as the casts by hand do that it is held against.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import zoo
from helpers.jaxprs import dots

import jmpx

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)


def body(m, x):
    return m.linear("last", 8)(jnp.tanh(m.linear("first", 8)(x)))


def plain(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def functions_of(framework):
    """Returns a model as a function of its parameters and data, these, and how to derive it."""
    if framework == "plain JAX":
        params = {
            "w": RNG.normal(size=(4, 8)),
            "b": RNG.normal(size=8),
            "v": RNG.normal(size=(8, 8)),
        }
        return plain, jax.tree.map(jnp.float32, params), jax.value_and_grad
    net = zoo.drawn(framework, body, *X.shape)
    if framework == "nnx":
        return lambda model, x: model(x), net.model, nnx.value_and_grad
    derivative = eqx.filter_value_and_grad if framework == "equinox" else jax.value_and_grad
    return net.apply, net.model, derivative


@pytest.mark.sampled(3)
@pytest.mark.versions
@pytest.mark.parametrize("framework", ["plain JAX", *zoo.FRAMEWORKS])
@pytest.mark.parametrize("policy", ["c=bf16", "by=operations,c=bf16,o=f32,save=products"])
def test_a_plain_derivative_of_the_loss_is_enough(framework, policy):
    apply, model, derivative = functions_of(framework)

    def loss_fn(model, x, y):
        return jnp.mean((apply(model, x).astype(jnp.float32) - y) ** 2)

    loss, grads = derivative(jmpx.apply_policy(loss_fn, policy))(model, X, Y)
    expected, exact = derivative(loss_fn)(model, X, Y)
    assert loss.dtype == jnp.float32 and abs(loss - expected) < 0.01 * expected
    errors = []
    for grad, true in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert grad.dtype == jnp.float32
        errors.append(np.linalg.norm(grad - true) / np.linalg.norm(true))
    assert 0 < max(errors) < 0.02, errors  # 16 bits were used, and no more was lost
    if framework != "nnx":
        run = jmpx.apply_policy(loss_fn, policy)
        is_array = eqx.is_array if framework == "equinox" else lambda leaf: True
        arrays, static = eqx.partition(model, is_array)
        pure = lambda arrays: derivative(run)(eqx.combine(arrays, static), X, Y)[1]  # noqa: E731
        assert set(dots(pure, arrays)) == {"bfloat16xbfloat16"}
        return
    graphdef, state = nnx.split(model)

    def of_state(state):
        return derivative(jmpx.apply_policy(loss_fn, policy))(nnx.merge(graphdef, state), X, Y)[1]

    assert set(dots(of_state, state)) == {"bfloat16xbfloat16"}
