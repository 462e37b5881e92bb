"""Equinox models under `by=modules`: the models among the arguments run as views of themselves."""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import BF16, F16, F32, assert_same_bits, dtypes, normal, warns_once
from helpers.equinox_net import randomized
from helpers.jaxprs import dots

import jmpx
from jmpx._base.leaves import is_view
from jmpx.equinox import with_policies

RULES = "c=bf16,o=f32; LayerNorm: full; */head: c=f32"
APPLIED = f"by=modules,{RULES}"
optimizer = optax.adam(0.01)


class Block(eqx.Module):
    inner: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key, width):
        keys = jax.random.split(key)
        self.inner = eqx.nn.Linear(3, width, key=keys[0])
        self.head = eqx.nn.Linear(width, 2, key=keys[1])

    def __call__(self, x):
        return self.head(jnp.tanh(self.inner(x)))


class Net(eqx.Module):
    block: Block
    norm: eqx.nn.LayerNorm
    scale: jax.Array

    def __init__(self, key, width=4):
        self.block, self.norm = Block(key, width), eqx.nn.LayerNorm(2)
        self.scale = jnp.ones(())

    def __call__(self, x):
        return self.norm(self.block(x)) * self.scale

    def features(self, x):
        return self.block.inner(x)

    other = features  # has another name in the class

    @eqx.filter_jit
    def jitted(self, x):
        return self.features(x)


class TrainState(eqx.Module):
    model: Net
    opt_state: Any
    loss_scale: jmpx.DynamicLossScale
    rate: jax.Array

    def apply_gradients(self, grads):
        return self


class Nested(eqx.Module):
    state: TrainState
    ema: list

    def step(self):
        return self


class Data(eqx.Module):
    x: jax.Array
    more: dict


@functools.partial(jax.tree_util.register_dataclass, data_fields=["model"], meta_fields=["epoch"])
@dataclasses.dataclass
class Run:
    model: Net
    epoch: int


class Pair(NamedTuple):
    left: Net
    right: Any


@pytest.fixture
def net(key, rng):
    return randomized(Net(key), rng)


@pytest.fixture
def state(net):
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    return TrainState(net, opt_state, jmpx.DynamicLossScale(8.0), jnp.float32(0.1))


def train_state(net):
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    return TrainState(net, opt_state, jmpx.DynamicLossScale(8.0), jnp.float32(0.1))


def call(get):
    return lambda argument, x: get(argument)(x)


def call_it(model, x):
    return model(x)


# What is an argument; how the function calls it; what it calls of a view.
ARGUMENTS = {
    "model": (lambda m: m, lambda a: a, lambda m: m),
    "tuple": (lambda m: (3, m), lambda a: a[1], lambda m: m),
    "dict": (lambda m: {"model": [m]}, lambda a: a["model"][0], lambda m: m),
    "dataclass": (lambda m: Run(m, 1), lambda a: a.model, lambda m: m),
    "named tuple": (lambda m: Pair(m, None), lambda a: a.left, lambda m: m),
    "train state": (train_state, lambda a: a.model, lambda m: m),
    "nested state": (lambda m: Nested(train_state(m), [m]), lambda a: a.state.model, lambda m: m),
    "method": (lambda m: m.features, lambda a: a, lambda m: m.features),
    "renamed method": (lambda m: m.other, lambda a: a, lambda m: m.other),
    "jitted method": (lambda m: m.jitted, lambda a: a, lambda m: m.jitted),
    "partial": (lambda m: eqx.Partial(m), lambda a: a, lambda m: m),
    "jax partial": (lambda m: jax.tree_util.Partial(call_it, m), lambda a: a, lambda m: m),
    "filter_jit": (eqx.filter_jit, lambda a: a, eqx.filter_jit),
    "filter_checkpoint": (eqx.filter_checkpoint, lambda a: a, lambda m: m),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_model_among_the_arguments_is_a_view(kind, net, rng):
    make, get, of_view = ARGUMENTS[kind]
    x = normal(rng, 3)
    result = jmpx.apply_policy(call(get), APPLIED)(make(net), x)
    assert_same_bits(result, of_view(with_policies(net, RULES))(x))
    assert result.dtype == F32


@pytest.mark.thorough
def test_the_function_itself_is_a_model_or_a_method_or_holds_one(net, rng):
    x, view = normal(rng, 4, 3), with_policies(net, RULES)
    expected = jax.vmap(view)(x)
    assert_same_bits(jmpx.apply_policy(net, APPLIED)(x[0]), view(x[0]))
    assert_same_bits(jmpx.apply_policy(eqx.filter_vmap(net), APPLIED)(x), expected)
    held = functools.partial(lambda model, x: jax.vmap(model)(x), net)
    assert_same_bits(jmpx.apply_policy(held, APPLIED)(x), expected)
    assert_same_bits(jmpx.apply_policy(net.features, APPLIED)(x[0]), view.features(x[0]))
    result = jmpx.apply_policy(lambda model, x: model(x), APPLIED)(eqx.filter_vmap(net), x)
    assert_same_bits(result, expected)


TRANSFORMED = {
    "jit": lambda f: eqx.filter_jit(f),
    "vmap": lambda f: lambda m, x: jax.vmap(f, in_axes=(None, 0))(m, jnp.stack([x, x])),
    "checkpoint": lambda f: eqx.filter_checkpoint(f),
    "scan": lambda f: (
        lambda m, x: jax.lax.scan(lambda c, x: (c, f(m, x)), 0, jnp.stack([x] * 2))[1]
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("outside", [True, False])
def test_under_transformations(name, outside, net, rng):
    transform, x = TRANSFORMED[name], normal(rng, 2, 3)

    def forward(model, x):
        return jax.vmap(model)(x)

    def by_hand(model, x):
        return forward(with_policies(model, RULES), x)

    if outside:
        apply = transform(jmpx.apply_policy(forward, APPLIED))
        expected = transform(by_hand)
    else:
        apply = jmpx.apply_policy(transform(forward), APPLIED)
        expected = lambda model, x: transform(forward)(with_policies(model, RULES), x)  # noqa: E731
    assert_same_bits(apply(net, x), expected(net, x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", [RULES, "c=f16,o=f32; Block: full; */inner: f16", "c=bf16,o=f32"])
def test_gradients_and_programs_are_those_of_views_inside_of_the_loss(rules, net, rng):
    x, y, scaling = normal(rng, 5, 3), normal(rng, 5, 2), jmpx.DynamicLossScale(4.0)

    def loss_fn(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def by_hand(model, x, y):
        return loss_fn(with_policies(model, rules), x, y)

    applied = jmpx.filter_value_and_grad(loss_fn, scaling, policy=f"by=modules,{rules}")
    expected = jmpx.filter_value_and_grad(by_hand, scaling, policy="full")
    assert_same_bits(applied(net, x, y), expected(net, x, y))
    params, static = eqx.partition(net, eqx.is_array)

    def lowered(function):
        def step(params, x, y):
            _, _, finite, grads = function(eqx.combine(params, static), x, y)
            return finite, eqx.filter(grads, eqx.is_array)

        return jax.jit(step).lower(params, x, y).as_text()

    assert lowered(applied) == lowered(expected)
    grads = applied(net, x, y)[3]
    assert type(grads.block.inner) is eqx.nn.Linear and set(dtypes(grads)) == {"float32"}


def test_paths_begin_at_each_of_two_models(key, rng):
    models = {"a": Net(key, 4), "b": (Net(key, 6), Block(key, 5))}
    seen = []

    def f(models, x):
        seen.extend(each.block.head.weight.dtype for each in (models["a"], models["b"][0]))
        seen.append(models["b"][1].head.weight.dtype)
        return models["a"](x), models["b"][0](x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each rule is used
        policy_map = "c=bf16,o=f32; /block/head: f16; /head: f32"
        result = jmpx.apply_policy(f, policy_map)(models, jnp.ones(3))
    assert seen == [F16, F16, F32] and {each.dtype for each in result} == {F32}
    with warns_once(__file__, "'/heads: .*' .* matched no"):
        jmpx.apply_policy(f, "c=bf16; /heads: f32; /head: f32")(models, jnp.ones(3))


def test_what_is_no_model_is_left_alone(state, net, rng):
    data = Data(normal(rng, 3), {"y": normal(rng, 2)})

    def f(state, data, scale, opt_state):
        assert same_arrays(state.opt_state, given.opt_state)
        assert_same_bits(state.loss_scale, given.loss_scale)
        assert state.rate.dtype == F32 and state.model.scale.dtype == BF16
        assert same_arrays((data, opt_state), (given_data, given.opt_state))
        return state.model(data.x), scale

    given, given_data = state, data
    out, scale = jmpx.apply_policy(f, APPLIED)(state, data, state.loss_scale, state.opt_state)
    assert out.dtype == F32
    assert_same_bits(scale, state.loss_scale)


def test_what_is_wrapped_in_autocast_is_left_alone(net, rng):
    x = normal(rng, 3)

    def f(model, wrapped, x):
        assert wrapped.block.head.weight.dtype == F32
        return model(x), wrapped(x)

    wrapped = jmpx.autocast(net, "c=bf16")
    _, out = jmpx.apply_policy(f, APPLIED)(net, wrapped, x)
    assert_same_bits(out, wrapped(x))


class WithNorm(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __call__(self, x, state):
        return self.norm(self.inner(x), state)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm_and_its_state(mode, key, rng):
    def make():
        norm = eqx.nn.BatchNorm(2, axis_name="batch", mode=mode)
        return WithNorm(eqx.nn.Linear(3, 2, key=key), norm)

    model, state = eqx.nn.make_with_state(make)()
    x, y = normal(rng, 5, 3), normal(rng, 5, 2)

    def loss_fn(model, state, x, y):
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = batched(x, state)
        return jnp.mean((out - y) ** 2), state

    def by_hand(model, *args):
        return loss_fn(with_policies(model, "c=bf16,o=f32"), *args)

    cases: list[tuple[Any, str]] = [(loss_fn, "by=modules,c=bf16,o=f32"), (by_hand, "full")]
    actual, expected = (
        jmpx.filter_value_and_grad(
            f, jmpx.DynamicLossScale(), has_aux=True, policy=policy, state_argnum=1
        )(model, state, x, y)
        for f, policy in cases
    )
    assert_same_bits(actual, expected)
    assert {"float32"} <= set(dtypes(actual[0][1])) <= {"float32", "bool", "int32"}


@pytest.mark.parametrize("policy_map", ["c=bf16,o=f32", "c=bf16,o=f32; Tied: full"])
def test_class_policies_and_shared_layers(policy_map, key, rng):
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            layers = eqx.nn.Linear(3, 3, key=key), eqx.nn.Linear(3, 3, key=key)
            where, get = (lambda pair: pair[1].weight), (lambda pair: pair[0].weight)
            self.shared = eqx.nn.Shared(layers, where, get)

        def __call__(self, x):
            first, second = self.shared()
            return second(first(x))

    model, x = randomized(Tied(key), rng), normal(rng, 3)
    params, static = eqx.partition(model, eqx.is_array)
    apply = jmpx.apply_policy(lambda m, x: m(x), f"by=modules,{policy_map}")
    with jmpx.push_policy(eqx.nn.Linear, "c=f16"):
        assert_same_bits(apply(model, x), with_policies(model, policy_map)(x))
        products = dots(lambda params: apply(eqx.combine(params, static), x), params)
    assert set(products) == {"float16xfloat16"}


def test_a_frozen_part_has_no_gradient(net, rng):
    where = lambda net: net.block.inner.weight  # noqa: E731
    mask = eqx.tree_at(where, jax.tree.map(eqx.is_inexact_array, net), False)
    trained, frozen = eqx.partition(net, mask)

    def loss_fn(trained, frozen, x):
        return jnp.sum(eqx.combine(trained, frozen)(x) ** 2)

    x = normal(rng, 3)
    grad_fn = jmpx.filter_grad(loss_fn, jmpx.NoOpLossScale(), policy=APPLIED)
    grads = grad_fn(trained, frozen, x)[-1]
    whole = jmpx.filter_grad(lambda m, x: jnp.sum(m(x) ** 2), jmpx.NoOpLossScale(), policy=APPLIED)
    expected = eqx.filter(whole(net, x)[-1], mask)
    assert where(grads) is None
    assert_same_bits(grads, expected)


# Models that are handed back


def same_arrays(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(tree) == jax.tree.structure(other) and all(a is b for a, b in pairs)


HANDED_BACK = {
    "model": lambda m: m,
    "layers": lambda m: (m.block.inner, {"norm": [m.norm]}),
    "array": lambda m: [m.scale, m.block.head.bias],
    "method": lambda m: m.features,
    "jitted method": lambda m: m.jitted,
    "rebuilt": lambda m: jax.tree.map(lambda leaf: leaf, m),
    "parts": lambda m: eqx.partition(m, lambda leaf: leaf.ndim == 1),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", HANDED_BACK)
def test_a_model_that_is_handed_back_is_the_stored_one(kind, net):
    get = HANDED_BACK[kind]
    assert same_arrays(jmpx.apply_policy(get, APPLIED)(net), get(net))


def test_a_train_state_is_handed_back_as_it_came(state, rng):
    x = normal(rng, 3)
    _, back = jmpx.apply_policy(lambda state, x: (state.model(x), state), APPLIED)(state, x)
    assert_same_bits(back, state)
    assert same_arrays((back.model, back.opt_state), (state.model, state.opt_state))


def test_arrays_that_are_replaced_come_back_in_their_stored_dtypes(net):
    stored = eqx.tree_at(lambda net: net.norm, net, jmpx.cast_tree(net.norm, F16))
    places = lambda net: (net.scale, net.norm.weight, net.block.head.bias)  # noqa: E731

    def f(net):
        new = [jnp.full(leaf.shape, 2, F32) for leaf in places(net)]
        return eqx.tree_at(places, net, new), [eqx.tree_at(places, net, new).norm]

    back, (norm,) = jmpx.apply_policy(f, "by=modules,c=bf16")(stored)
    assert type(back) is Net and jax.tree.structure(back) == jax.tree.structure(stored)
    assert [leaf.dtype for leaf in places(back)] == [F32, F16, F32] and norm.weight.dtype == F16
    assert back.block.inner.weight is stored.block.inner.weight and back.scale == 2


def halved(model):
    return jax.tree.map(lambda leaf: leaf * 0.5, model)


ROUNDED = {
    "changed": lambda m: eqx.tree_at(lambda m: m.scale, m, m.scale * 2),
    "average": lambda m: halved(m),
    "jit": lambda m: eqx.filter_jit(lambda m: m)(m),
    "vmap": lambda m: jax.vmap(lambda x: jax.tree.map(lambda leaf: leaf * x, m))(jnp.ones(2, BF16)),
    "scan": lambda m: jax.lax.scan(lambda m, x: (halved(m), x), m, jnp.ones(2))[0],
    "layer": lambda m: eqx.filter_jit(lambda m: m)(m.block.head),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ROUNDED)
def test_a_model_that_comes_back_rounded_is_told(kind, net):
    apply = jmpx.apply_policy(ROUNDED[kind], "by=modules,c=bf16,o=f32")
    with warns_once(__file__, r"rounded to bfloat16, .*return the model from outside of that"):
        back = apply(net)
    assert set(dtypes(back)) == {"float32"}
    leaves = jax.tree.leaves(back, is_leaf=is_view)
    assert not any(map(is_view, leaves))


def test_a_dtype_field_comes_back_as_it_was(key):
    class Heads(eqx.Module):
        rotary: eqx.nn.RotaryPositionalEmbedding
        inner: eqx.nn.Linear

        def __call__(self, x):
            return self.inner(self.rotary(x)[0])

    heads = Heads(eqx.nn.RotaryPositionalEmbedding(4), eqx.nn.Linear(4, 4, key=key))
    policy_map = "by=modules,c=bf16,o=f32; RotaryPositionalEmbedding: f16"
    for f in (lambda m: m), (lambda m: jax.tree.map(lambda leaf: leaf, m)):
        assert same_arrays(jmpx.apply_policy(f, policy_map)(heads), heads)


# Views inside of views


def test_a_view_of_a_view_is_that_view(net, rng):
    x = normal(rng, 3)

    def f(model, x):
        for part in model, model.block, model.block.inner:
            assert with_policies(part, RULES) is part
        return model(x), jmpx.apply_policy(lambda m, x: m(x), APPLIED)(model, x)

    first, second = jmpx.apply_policy(f, APPLIED)(net, x)
    assert_same_bits(first, second)


def test_a_part_of_a_view_that_does_not_cast_stays_so(key, rng):
    class Outer(eqx.Module):
        parts: eqx.nn.Sequential

        def __call__(self, x):
            assert with_policies(self.parts, "c=bf16,o=f32") is self.parts
            result = jmpx.apply_policy(lambda m, x: m(x), "by=modules,c=bf16,o=f32")(self.parts, x)
            assert result.dtype == BF16  # as the part itself returns it
            return result

    model = Outer(eqx.nn.Sequential([eqx.nn.Linear(3, 3, key=key)]))
    assert with_policies(model, "c=bf16,o=f32")(normal(rng, 3)).dtype == F32


def test_a_view_under_another_map_is_an_error(net):
    def f(model):
        return jmpx.apply_policy(lambda m: m(jnp.ones(3)), "by=modules,c=f16")(model)

    with pytest.raises(ValueError, match="a view already, under 'params=.*compute=bfloat16"):
        jmpx.apply_policy(f, APPLIED)(net)


# Parts of a model


def loss_of_parts(params, static, x):
    return jnp.sum(eqx.combine(params, static)(x) ** 2)


@pytest.mark.parametrize("test", [eqx.is_array, eqx.is_inexact_array, lambda leaf: False])
def test_both_parts_of_a_model_are_joined(test, net, key, rng):
    class Model(eqx.Module):
        net: Net
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __call__(self, x):
            return self.dropout(self.mlp(self.net(x)), inference=True)

    model = Model(net, eqx.nn.MLP(2, 2, 4, 1, key=key), eqx.nn.Dropout(0.5))
    x, parts = normal(rng, 3), eqx.partition(model, test)
    actual = jmpx.apply_policy(loss_of_parts, APPLIED)(*parts, x)
    assert_same_bits(actual, jnp.sum(with_policies(model, RULES)(x) ** 2))


def test_a_part_from_outside_is_told(net, rng):
    params, static = eqx.partition(net, eqx.is_array)
    f = jmpx.apply_policy(lambda params, x: loss_of_parts(params, static, x), APPLIED)
    with pytest.raises(ValueError, match="structure|type") as caught:
        f(params, normal(rng, 3))
    assert "pass both parts as arguments" in " ".join(caught.value.__notes__)


def test_a_model_that_is_closed_over_is_told(net, rng):
    f = jmpx.apply_policy(lambda x: net(x), APPLIED)
    with pytest.warns(UserWarning, match="casts nothing .* pass the whole model as an argument"):
        f(normal(rng, 3))
