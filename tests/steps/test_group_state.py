"""Model state of groups: averaged over groups, kept, or refused."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, normal
from helpers.groups import EXAMPLES, assert_near, value_and_grad
from helpers.training import loss_fn, make_params

import jmpx
import jmpx.flax


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", [2, 3, 6])
def test_state_is_averaged_and_equal_state_keeps_its_bits(devices, rng):
    params, x = make_params(rng), normal(rng, EXAMPLES, 6)
    largest = np.finfo(np.float32).max
    state = {
        "mean": normal(rng, 6),
        "kept": jnp.asarray([*rng.normal(size=99), -0.0, largest, -largest, np.inf], jnp.float32),
        "decayed": jnp.float32(rng.uniform()),
        "half": normal(rng, 6).astype(jnp.bfloat16),
        "count": jnp.int32(3),
        "flag": jnp.array(True),
        "complex": jnp.complex64(1 + 2j),
        "key": jax.random.key(3),
        "name": "state",
    }

    def loss(params, state, x):
        old = state["mean"]
        new = {
            **state,
            "mean": 0.9 * old + 0.1 * x.mean(0),
            "decayed": state["decayed"] * 0.9,
            "half": (state["half"].astype(jnp.float32) + x.mean(0)).astype(jnp.bfloat16),
            "count": state["count"] + 1,
        }
        return loss_fn(params, x), new

    for has_more in (False, True):
        run = loss if not has_more else lambda *a: (loss(*a)[0], (loss(*a)[1], a[2]))
        grad_fn = value_and_grad(run, devices, has_aux=True, state_argnum=1)
        (_, aux), *_ = eqx.filter_jit(grad_fn)(params, state, x)
        new = aux[0] if has_more else aux
        if has_more:
            assert aux[1].shape == (devices, EXAMPLES // devices, 6)
        wide = np.asarray(state["mean"], np.float64) * 0.9 + 0.1 * np.asarray(x, np.float64).mean(0)
        np.testing.assert_allclose(new.pop("mean"), wide, rtol=1e-5, atol=1e-6)
        half = new.pop("half")
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            half.astype(np.float32), state["half"].astype(np.float32) + x.mean(0), atol=0.03
        )
        assert new.pop("name") == "state"
        assert (jax.random.key_data(new.pop("key")) == jax.random.key_data(state["key"])).all()
        same = {name: state[name] for name in ("kept", "flag", "complex")}
        changed = {"decayed": state["decayed"] * 0.9, "count": jnp.int32(4)}
        assert_same_bits(new, {**same, **changed})


BATCH_STATE = {
    "int32": (jnp.int32(0), lambda x: (x[:, 0] > 0).sum()),
    "bool": (jnp.array(True), lambda x: x.sum() > 0),
    "complex": (jnp.complex64(0), lambda x: jax.lax.complex(x.sum(), x.max())),
    "key": (jax.random.key(0), lambda x: jax.random.key((x[0, 0] > 0).astype(jnp.uint32))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", BATCH_STATE)
def test_state_that_has_no_mean_is_refused(kind, rng):
    state, new = BATCH_STATE[kind]
    loss = lambda params, state, x: (loss_fn(params, x), new(x).astype(state.dtype))  # noqa: E731
    if kind == "key":
        loss = lambda params, state, x: (loss_fn(params, x), new(x))  # noqa: E731
    with pytest.raises(ValueError, match=r"^Cannot average .*not floating and depends") as error:
        value_and_grad(loss, has_aux=True, state_argnum=1)(
            make_params(rng), state, normal(rng, EXAMPLES, 6)
        )
    assert "\n" not in str(error.value)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.inner(x)))


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 3])
def test_statistics_and_random_streams_of_nnx(microbatches, rng):
    x = normal(rng, EXAMPLES, 6)
    with jax.numpy_dtype_promotion("standard"):
        loss = lambda model, x: (model(x).astype(jnp.float32) ** 2).mean()  # noqa: E731
        models = [Net(nnx.Rngs(0)) for _ in range(5)]
        result = nnx.jit(value_and_grad(loss, 4, batch={"microbatches": microbatches}))(
            models[0], x
        )
        options = {"policy": "c=f32", "batch": jmpx.Batch(microbatches=microbatches)}
        alone = nnx.jit(jmpx.filter_value_and_grad(loss, jmpx.NoOpLossScale(), **options))
        each = [alone(m, part) for m, part in zip(models[1:], x.reshape(4, 6, 6), strict=True)]
    mean = lambda *xs: np.mean(np.stack(xs).astype(np.float64), 0)  # noqa: E731
    reference = mean(*[one.value for one in each]), jax.tree.map(mean, *[o.grads for o in each])
    assert_near(result, reference, 1e-5)
    statistics = [nnx.state(m, nnx.BatchStat) for m in models]
    for got, *parts in zip(*map(jax.tree.leaves, statistics), strict=True):
        np.testing.assert_allclose(got, mean(*parts), rtol=1e-5, atol=1e-7)
        assert got.dtype == jnp.float32
    streams: Any = models[0].dropout.rngs
    assert streams.count[...] == microbatches


@pytest.mark.parametrize("how", ["new", "another shape"])
def test_an_activation_in_a_variable_is_refused(how, rng):
    def loss(model, x):
        model.last = nnx.Intermediate(model.inner(x))
        return (model.last[...] ** 2).mean()

    model, x = Net(nnx.Rngs(0)), normal(rng, EXAMPLES, 6)
    if how == "another shape":
        setattr(model, "last", nnx.Intermediate(jnp.zeros((EXAMPLES, 8))))  # noqa: B010
    with pytest.raises(ValueError, match="in a variable of an NNX module.*has_aux=True") as error:
        value_and_grad(loss)(model, x)
    assert "\n" not in str(error.value)


def haiku_model(x):
    net = hk.transform_with_state(
        lambda x: hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), is_training=True)
    )
    params, state = net.init(jax.random.key(0), x)
    return params, state, lambda params, state, x: net.apply(params, state, None, x)


def linen_model(x):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(4)(x))

    variables = Net().init(jax.random.key(0), x)

    def apply(params, state, x):
        y, new = Net().apply({"params": params, **state}, x, mutable=["batch_stats"])
        return y, new

    return variables["params"], {"batch_stats": variables["batch_stats"]}, apply


def equinox_model(x):
    class Net(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

    k = jax.random.key(0)
    model, state = eqx.nn.make_with_state(
        lambda: Net(eqx.nn.Linear(6, 4, key=k), eqx.nn.BatchNorm(4, "batch", mode="batch"))
    )()

    def apply(model, state, x):
        one = lambda x, state: model.norm(model.linear(x), state)  # noqa: E731
        return jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    return model, state, apply


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [haiku_model, linen_model, equinox_model])
def test_running_statistics_through_state_argnum(make, rng):
    x = normal(rng, EXAMPLES, 6)
    with jax.numpy_dtype_promotion("standard"):
        params, state, apply = make(x)

        def loss(params, state, x):
            y, new = apply(params, state, x)
            return (y**2 * jnp.arange(4.0)).mean(), new

        options = {"has_aux": True, "state_argnum": 1}
        grad_fn = eqx.filter_jit(value_and_grad(loss, 4, **options))
        (value, new), _, _, grads = grad_fn(params, state, x)
        alone = eqx.filter_jit(
            jmpx.filter_value_and_grad(loss, jmpx.NoOpLossScale(), policy="c=f32", **options)
        )
        each = [alone(params, state, part) for part in x.reshape(4, 6, 6)]
    mean = lambda *xs: np.mean(np.stack(xs), 0)  # noqa: E731
    pairs = [
        (grads, [one.grads for one in each]),
        (value, [one.value[0] for one in each]),
    ]
    for got, parts in pairs:
        for a, *b in zip(*map(jax.tree.leaves, (got, *parts)), strict=True):
            np.testing.assert_allclose(a, mean(*b), rtol=1e-4, atol=1e-6)
    for before, a, *b in zip(
        *map(jax.tree.leaves, (state, new, *[o.value[1] for o in each])), strict=True
    ):
        assert a.shape == before.shape and a.dtype == before.dtype
        np.testing.assert_allclose(a, mean(*b), rtol=1e-5, atol=1e-6)
