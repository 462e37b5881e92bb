"""Model state under micro-batches: to the last bit that of one call after the other."""

from typing import Any

import equinox as eqx
import flax.linen as nn
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
import jmpx.flax
import jmpx.haiku

COUNT = 4
# Their options come from tables, whose types pyright does not follow.
filter_grad: Any = jmpx.filter_grad
filter_value_and_grad: Any = jmpx.filter_value_and_grad
# The layers of the frameworks promote dtypes within their own code.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def error(predictions, y):
    return jnp.mean((predictions - y).astype(F32) ** 2)


class HaikuNet(hk.Module):
    def __call__(self, x):
        norm = hk.BatchNorm(True, True, 0.9)
        return hk.Linear(2)(norm(hk.Linear(8)(x), is_training=True))


def haiku_case(key, x):
    net = hk.without_apply_rng(hk.transform_with_state(lambda x: HaikuNet()(x)))

    def loss(params, state, x, y):
        predictions, state = net.apply(params, state, x)
        return error(predictions, y), state

    return loss, *net.init(key, x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))


def linen_case(key, x):
    variables = LinenNet().init(key, x)

    def loss(params, stats, x, y):
        predictions, updates = LinenNet().apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return error(predictions, y), (updates["batch_stats"], predictions.mean())

    return loss, variables["params"], variables["batch_stats"]


class EquinoxNet(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear
    calls: eqx.nn.StateIndex

    def __init__(self, key):
        self.inner = eqx.nn.Linear(3, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="ema")
        self.head = eqx.nn.Linear(8, 2, key=key)
        self.calls = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x, state):
        h, state = self.norm(self.inner(x).astype(F32), state)
        return self.head(h.astype(x.dtype)), state


def equinox_case(key, x):
    model, state = eqx.nn.make_with_state(EquinoxNet)(key)

    def loss(model, state, x, y):
        state = state.set(model.calls, state.get(model.calls) + 1)  # the given one is now invalid
        predictions, state = jax.vmap(
            model, in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )(x, state)
        return error(predictions, y), state

    return loss, model, state


CASES = {"haiku": haiku_case, "linen": linen_case, "equinox": equinox_case}


def assert_same_averages(a, b):
    """XLA of JAX 0.7 may round a product and a sum at once, in one of two programs."""
    if jax.__version_info__ >= (0, 8):
        assert_same_bits(a, b)
        return
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-24 if x.dtype == jnp.float32 else 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["c=bf16", "c=f16", "full"])
@pytest.mark.parametrize("framework", CASES)
def test_model_state_is_that_of_one_call_after_the_other(framework, policy, rng, key):
    x, y = normal(rng, 4 * COUNT, 3), normal(rng, 4 * COUNT, 2)
    loss, params, first = CASES[framework](key, x)

    def gradients(count):
        scaling = jmpx.DynamicLossScale(2.0**4)
        grad_fn = filter_value_and_grad(
            loss,
            scaling,
            has_aux=True,
            policy=policy,
            batch=jmpx.Batch(microbatches=count),
            state_argnum=1,
        )
        return eqx.filter_jit(grad_fn)

    together = gradients(COUNT)(params, first, x, y)
    one, state, each = gradients(1), first, []
    for part in zip(np.split(x, COUNT), np.split(y, COUNT), strict=True):
        each.append(one(params, state, *part))
        aux = each[-1].value[1]
        state = aux[0] if framework == "linen" else aux
    aux = together.value[1]
    assert_same_averages(aux[0] if framework == "linen" else aux, state)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (state, first)), strict=True))
    if framework == "linen":
        assert_same_bits(aux[1], jnp.stack([result.value[1][1] for result in each]))
    grads = jax.tree.map(lambda *grads: np.mean(grads, 0), *[result.grads for result in each])
    for got, mean in zip(*map(jax.tree.leaves, (together.grads, grads)), strict=True):
        np.testing.assert_allclose(got, mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("framework", ["haiku", "equinox"])
def test_adapters_cast_inside_of_micro_batches(framework, rng, key):
    """A policy map, by which the model casts itself, and not the gradient function."""
    x, y = normal(rng, 8, 3), normal(rng, 8, 2)
    policy = "c=bf16,o=f32; BatchNorm: full"
    loss, params, state = CASES[framework](key, x)

    def cast(params, state, x, y):
        if framework == "equinox":
            return loss(jmpx.equinox.with_policies(params, policy), state, x, y)
        with jmpx.haiku.policies(policy):
            return loss(params, state, x, y)

    def dtypes_of(count):
        grad_fn = filter_grad(
            cast,
            jmpx.NoOpLossScale(),
            has_aux=True,
            policy=policy,
            batch=jmpx.Batch(microbatches=count),
            state_argnum=1,
        )
        text = str(jax.make_jaxpr(lambda *args: grad_fn(params, *args).aux)(state, x, y))
        return [
            line.split("=")[0].split(":")[1][:4] for line in text.splitlines() if "= dot" in line
        ]

    assert "bf16" in dtypes_of(1) and dtypes_of(2) == dtypes_of(1)


AROUND = {"nnx.jit": nnx.jit, "eager": lambda f: f}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)
        self.mean = nnx.Variable(jnp.zeros(2))
        self.calls = 0

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def state_of(model):
    return jax.tree.map(jnp.asarray, nnx.state(model, nnx.Not(nnx.RngState)))


def nnx_loss(model, x, y):
    predictions = model(x)
    return error(predictions, y), predictions


def nnx_gradients(count, loss=nnx_loss, **options):
    options = {"policy": "c=bf16", **options}
    return filter_value_and_grad(
        loss, jmpx.NoOpLossScale(), has_aux=True, batch=jmpx.Batch(microbatches=count), **options
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("around", AROUND)
def test_an_nnx_module_changes_as_by_one_call_after_the_other(around, rng):
    x, y = normal(rng, 4 * COUNT, 3), normal(rng, 4 * COUNT, 2)
    model, reference = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    together = AROUND[around](nnx_gradients(COUNT))(model, x, y)
    one = AROUND[around](nnx_gradients(1))
    each = [
        one(reference, *part) for part in zip(np.split(x, COUNT), np.split(y, COUNT), strict=True)
    ]
    # Without nnx.jit, XLA compiles the loop, but one operation at a time outside of it.
    assert_same_state(model, reference, exactly=around == "nnx.jit")
    assert int(model.dropout.rngs.count[...]) == COUNT  # pyright: ignore[reportOptionalMemberAccess]
    np.testing.assert_allclose(
        together.value[1], [result.value[1] for result in each], rtol=1e-5, atol=1e-6
    )
    grads = jax.tree.map(lambda *grads: np.mean(grads, 0), *[result.grads for result in each])
    for got, mean in zip(*map(jax.tree.leaves, (together.grads, grads)), strict=True):
        np.testing.assert_allclose(got, mean, rtol=1e-5, atol=1e-6)
    state_of(model)  # which would fail on tracers


def test_a_stream_of_random_numbers_of_its_own_goes_on():
    rngs = nnx.Rngs(0)

    def loss(w, x, rngs):
        draws = jax.random.uniform(rngs.params(), x.shape)
        return (w * x * draws).mean(), draws

    got = nnx_gradients(COUNT, loss, policy="full")(jnp.ones(()), jnp.ones(8), rngs)
    assert int(rngs.params.count[...]) == COUNT
    assert len(np.unique(got.value[1])) == 8


def set_value(variable, value):
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:  # Flax before 0.12
        variable.value = value


def set_to(value):
    return lambda model: set_value(model.mean, value)


def double_parameter(model):
    model.inner.kernel[...] = 2 * model.inner.kernel[...]


def add_variable(model):
    model.other = nnx.Variable(jnp.zeros(1))


def delete_variable(model):
    del model.mean


def count_calls(model):
    model.calls += 1


REFUSED = {
    "a parameter": double_parameter,
    "a new variable": add_variable,
    "one less": delete_variable,
    "a Python attribute": count_calls,
    "a Python number": lambda model: set_value(model.seen, 1),
    "a number that becomes an array": lambda model: set_value(model.seen, jnp.array(1)),
    "another shape": set_to(jnp.zeros(3)),
    "another dtype": set_to(jnp.zeros(2, int)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "around"),
    [
        *((what, "eager") for what in REFUSED),
        *((what, "nnx.jit") for what in REFUSED if "number" not in what),  # it makes them arrays
    ],
)
def test_an_nnx_module_may_change_the_values_of_arrays_alone(what, around, rng):
    def loss(model, x, y):
        REFUSED[what](model)
        return nnx_loss(model, x, y)

    x, y = normal(rng, 8, 3), normal(rng, 8, 2)
    model = Net(nnx.Rngs(0))
    model.seen = nnx.Variable(0)  # pyright: ignore[reportAttributeAccessIssue]
    before = state_of(model)
    nnx_gradients(1, loss)(nnx.clone(model), x, y)  # one call may
    with pytest.raises(ValueError, match="from one micro-batch to the next") as caught:
        AROUND[around](nnx_gradients(2, loss))(model, x, y)
    assert str(caught.value).count(".") == 1
    assert_same_bits(state_of(model), before)  # nothing is half-written


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(2, np.float32), jnp.ones(2, jnp.bfloat16)])
def test_an_nnx_module_may_set_an_array_to_another(value, rng):
    def loss(model, x, y):
        set_value(model.mean, value)
        return nnx_loss(model, x, y)

    model = Net(nnx.Rngs(0))
    nnx_gradients(2, loss)(model, normal(rng, 8, 3), normal(rng, 8, 2))
    (mean,) = jax.tree.leaves(state_of(model)["mean"])
    assert_same_bits(mean, np.ones(2, np.float32))
