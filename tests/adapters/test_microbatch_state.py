"""Model state under micro-batches: to the last bit that of one call after the other."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import F32, assert_same_bits, normal
from helpers.nnx_net import assert_same_state

import jmpx
import jmpx.equinox
import jmpx.haiku

COUNT = 3
# Its options come from tables, whose types pyright does not follow.
value_and_grad: Any = jmpx.value_and_grad
# The layers of the frameworks promote dtypes within their own code.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def error(predictions, y):
    return jnp.mean((predictions - y).astype(F32) ** 2)


def haiku_case(key, x):
    def model(x):
        return hk.Linear(2)(hk.BatchNorm(True, True, 0.9)(x, is_training=True))

    net = hk.without_apply_rng(hk.transform_with_state(model))

    def loss(params, state, x, y):
        predictions, state = net.apply(params, state, x)
        return error(predictions, y), (state, predictions.mean())

    return loss, *jax.jit(net.init)(key, x)


class EquinoxNet(eqx.Module):
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear
    calls: eqx.nn.StateIndex

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
        self.head = eqx.nn.Linear(3, 2, key=key)
        self.calls = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x, state):
        h, state = self.norm(x.astype(F32), state)
        return self.head(h.astype(x.dtype)), state


def equinox_case(key, x):
    model, state = eqx.nn.make_with_state(EquinoxNet)(key)

    def loss(model, state, x, y):
        state = state.set(model.calls, state.get(model.calls) + 1)  # the given one is now invalid
        each = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        predictions, state = each(x, state)
        return error(predictions, y), state

    return loss, model, state


def gradients(loss, count, policy, **options):
    batch = jmpx.Batch(microbatches=count)
    return value_and_grad(
        loss, jmpx.NoOpLossScale(), has_aux=True, policy=policy, batch=batch, **options
    )


def one_after_the_other(step, x, y):
    return [step(x[part::COUNT], y[part::COUNT]) for part in range(COUNT)]


def assert_mean_gradients(together, each, atol):
    grads = jax.tree.map(lambda *grads: np.mean(grads, 0), *[result.grads for result in each])
    for got, mean in zip(*map(jax.tree.leaves, (together.grads, grads)), strict=True):
        np.testing.assert_allclose(got, mean, rtol=1e-5, atol=atol)


def assert_same_averages(a, b):
    """XLA of JAX 0.7 may round a product and a sum at once, in one of two programs."""
    if jax.__version_info__ >= (0, 8):
        assert_same_bits(a, b)
        return
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-24 if x.dtype == jnp.float32 else 0)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "policy"), [(haiku_case, "c=bf16"), (equinox_case, "full")])
def test_model_state_is_that_of_one_call_after_the_other(case, policy, rng, key):
    x, y = normal(rng, 4 * COUNT, 3), normal(rng, 4 * COUNT, 2)
    loss, params, first = case(key, x)
    steps = [eqx.filter_jit(gradients(loss, n, policy, state_argnum=1)) for n in (COUNT, 1)]
    together, state = steps[0](params, first, x, y), first

    def one(x, y):
        nonlocal state
        result = steps[1](params, state, x, y)
        state = result.value[1][0] if case is haiku_case else result.value[1]
        return result

    each = one_after_the_other(one, x, y)
    aux = together.value[1]
    assert_same_averages(aux[0] if case is haiku_case else aux, state)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (state, first)), strict=True))
    if case is haiku_case:
        assert_same_bits(aux[1], jnp.stack([result.value[1][1] for result in each]))
    assert_mean_gradients(together, each, atol=1e-7)


# NNX


def nnx_loss(model, x, y):
    predictions = model(x)
    return error(predictions, y), predictions


@pytest.mark.thorough
def test_an_nnx_module_changes_as_by_one_call_after_the_other(rng):
    x, y = normal(rng, 4 * COUNT, 3), normal(rng, 4 * COUNT, 2)
    rngs = nnx.Rngs(0)
    norm, dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    model = nnx.Sequential(norm, dropout, nnx.Linear(3, 2, rngs=rngs))
    reference = nnx.clone(model)
    together, one = (nnx.jit(gradients(nnx_loss, n, "c=bf16")) for n in (COUNT, 1))
    together = together(model, x, y)
    each = one_after_the_other(lambda x, y: one(reference, x, y), x, y)
    assert_same_state(model, reference)
    assert int(dropout.rngs.count[...]) == COUNT  # pyright: ignore[reportOptionalMemberAccess]
    assert_same_bits(together.value[1], jnp.stack([result.value[1] for result in each]))
    assert_mean_gradients(together, each, atol=1e-6)


class Tiny(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.mean = nnx.Variable(jnp.zeros(2))
        self.seen = nnx.Variable(0)
        self.calls = 0


def set_value(name, value):
    def change(model):
        variable = getattr(model, name)
        if hasattr(variable, "set_value"):
            variable.set_value(value)
        else:  # Flax before 0.12
            variable.value = value

    return change


def changing(change):
    def loss(model, x):
        change(model)
        return (model.weight[...] * x).mean(), None

    return loss


REFUSED = {
    "a parameter": set_value("weight", jnp.zeros(2)),
    "a new variable": lambda model: setattr(model, "other", nnx.Variable(jnp.zeros(1))),
    "one less": lambda model: delattr(model, "mean"),
    "a Python attribute": lambda model: setattr(model, "calls", model.calls + 1),
    "a Python number": set_value("seen", 1),
    "a number that becomes an array": set_value("seen", jnp.array(1)),
    "another shape": set_value("mean", jnp.zeros(3)),
    "another dtype": set_value("mean", jnp.zeros(2, int)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_nnx_module_may_change_the_values_of_arrays_alone(what):
    model, loss = Tiny(), changing(REFUSED[what])
    gradients(loss, 1, "full")(nnx.clone(model), jnp.ones((4, 2)))  # one call may
    with pytest.raises(ValueError, match="from one micro-batch to the next"):
        gradients(loss, 2, "full")(model, jnp.ones((4, 2)))
    assert nnx.graphdef(model) == nnx.graphdef(Tiny())
    assert_same_bits(*(jax.tree.map(jnp.asarray, nnx.state(m)) for m in (model, Tiny())))


@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(2, np.float32), jnp.ones(2, jnp.bfloat16)])
def test_an_nnx_module_may_set_an_array_to_another(value):
    model = Tiny()
    gradients(changing(set_value("mean", value)), 2, "full")(model, jnp.ones((4, 2)))
    assert_same_bits(model.mean[...], np.ones(2, np.float32))
