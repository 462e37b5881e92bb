"""Models of NNX under `by=modules`: the models among the arguments run as views of themselves."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import BF16, F32, assert_same_bits, normal
from helpers.nnx_net import Net, assert_same_state, make, squares

import jmpx
import jmpx._stateful
import jmpx.flax
from jmpx._adapters import pooled
from jmpx._flax_nnx import adapter
from jmpx._modules import _mark_call
from jmpx._policy_map import get_policy_map

pytestmark = pytest.mark.usefixtures("standard_promotion")

RULES = "c=bf16,o=f32; BatchNorm: full"


def apply_policy(func, policy):
    def transform(pure, state, args, kwargs):
        return pure(state, *args, **kwargs)

    def viewed(fn, *args, **kwargs):
        with pooled(get_policy_map(policy), "jmpx.apply_policy") as policy_map:
            views = adapter.views(policy_map)
            fn, args, kwargs = _mark_call(views.view, (fn, args, kwargs))
            return views.stored(fn(*args, **kwargs))

    @functools.wraps(func, updated=())
    def call(*args, **kwargs):
        return jmpx._stateful.call(transform, viewed, (func, *args), kwargs)

    return call


class TrainState(nnx.Module):
    def __init__(self, model):
        self.model = model
        self.optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        self.metrics = nnx.metrics.Average()
        self.rngs = nnx.Rngs(3)


class Pair(nnx.Module):
    """Holds models, and is never called."""

    def __init__(self, model):
        self.model = model


ARGUMENTS = {
    "model": (lambda m: m, lambda m, x: m(x)),
    "tuple": (lambda m: (m, 3), lambda t, x: t[0](x)),
    "dict": (lambda m: {"a": [m]}, lambda t, x: t["a"][0](x)),
    "nnx.List": (lambda m: nnx.List([m]), lambda t, x: t[0](x)),
    "nnx.Dict": (lambda m: nnx.Dict(a=m), lambda t, x: t.a(x)),
    "train state": (TrainState, lambda t, x: t.model(x)),
    "model and optimizer": (
        lambda m: nnx.ModelAndOptimizer(m, optax.sgd(0.1)),
        lambda t, x: t.model(x),
    ),
    "holder": (Pair, lambda t, x: t.model(x)),
    "same model twice": (lambda m: (m, m), lambda t, x: t[0].head(t[1].encode(x)).astype(F32)),
    "part and whole": (lambda m: (m.head, m), lambda t, x: t[0](t[1].encode(x)).astype(F32)),
    "method": (lambda m: m.__call__, lambda f, x: f(x)),
    "partial": (lambda m: functools.partial(lambda m, x: m(x), m), lambda f, x: f(x)),
    "partial of a method": (lambda m: functools.partial(m.__call__), lambda f, x: f(x)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_models_are_found(rng, kind):
    model, x = make(rng), normal(rng, 6, 3)
    reference = nnx.clone(model)
    put, call = ARGUMENTS[kind]
    given = put(model)

    def loss_fn(given, x):
        assert model.inner.kernel.dtype == F32
        y = call(given, x)
        assert y.dtype == F32
        return (y**2).mean()

    loss = apply_policy(loss_fn, RULES)(given, x)
    expected = squares(jmpx.flax.with_policies(reference, RULES), x)
    assert_same_bits(loss, expected)
    assert type(model) is Net
    assert type(model.inner) is nnx.Linear
    assert type(given) is type(put(nnx.clone(model)))
    assert model.calls == 1
    assert model.between[...].dtype == BF16
    assert_same_state(model.norm, reference.norm)
    assert_same_state(model.dropout, reference.dropout)
    assert_same_bits(nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param))


def step(loss_fn):
    def grads(model, x):
        loss, _, _, grads = jmpx.filter_value_and_grad(
            loss_fn, jmpx.NoOpLossScale(), policy="full"
        )(model, x)
        return loss, grads

    return grads


def test_gradients_and_programs_are_those_of_a_view(rng):
    model, x = make(rng), normal(rng, 6, 3)

    def viewed(model, x):
        return squares(jmpx.flax.with_policies(model, RULES), x)

    applied = apply_policy(squares, RULES)
    results, texts = [], []
    for loss_fn in viewed, applied:
        copy = nnx.clone(model)
        results.append(nnx.jit(step(loss_fn))(copy, x))
        copy = nnx.clone(model)
        graph, state = nnx.split(copy)

        def pure(state, x, loss_fn=loss_fn, graph=graph):
            model = nnx.merge(graph, state)
            result = step(loss_fn)(model, x)
            model.calls, model.between = 0, None
            del model.between
            return result, nnx.state(model)

        texts.append(jax.jit(pure).lower(state, x).as_text())
    assert_same_bits(*results)
    assert texts[0] == texts[1]


TRANSFORMS = {
    "nnx.jit": lambda f: nnx.jit(f),
    "nnx.remat": lambda f: nnx.remat(f),
    "nnx.grad": lambda f: lambda m, x: nnx.value_and_grad(f)(m, x)[0],
    "filter_grad": lambda f: lambda m, x: step(f)(m, x)[0],
    "nnx.vmap": lambda f: (
        lambda m, x: nnx.vmap(f, in_axes=(nnx.StateAxes({nnx.RngState: None, ...: None}), 0))(
            m, x
        ).mean()
    ),
}


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(rng, name, place):
    model, x = Plain(nnx.Rngs(0)), normal(rng, 6, 3)
    before = nnx.state(nnx.clone(model))
    transform = TRANSFORMS[name]
    if place == "outside":
        run = transform(apply_policy(squares, "c=bf16,o=f32"))
    else:
        run = apply_policy(transform(squares), "c=bf16,o=f32")
    loss = run(model, x)
    view = jmpx.flax.with_policies(model, "c=bf16,o=f32")
    assert jnp.allclose(loss, squares(view, x), rtol=1e-2)
    assert type(model.first) is nnx.Linear
    assert_same_bits(nnx.state(model), before)
