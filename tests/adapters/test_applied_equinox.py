"""Equinox models under `by=modules`: the models among the arguments run as views of themselves."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import BF16, F16, F32, assert_same_bits, dtypes, warns_once
from helpers.equinox_models import drawn
from helpers.jaxprs import FULL, LOW, dots, program

import jmpx
from jmpx.equinox import with_policies

RULES = "c=bf16,o=f32; LayerNorm: full; */head: c=f32"
APPLIED = f"by=modules,{RULES}"
KEY = jax.random.key(0)


class Block(eqx.Module):
    inner: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, width=4):
        self.inner = eqx.nn.Linear(3, width, key=KEY)
        self.head = eqx.nn.Linear(width, 2, key=KEY)

    def __call__(self, x):
        return self.head(jnp.tanh(self.inner(x)))


class Net(eqx.Module):
    block: Block
    norm: eqx.nn.LayerNorm
    scale: jax.Array

    def __init__(self, width=4):
        self.block, self.norm = Block(width), eqx.nn.LayerNorm(2)
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

    def apply_gradients(self, grads):  # with a method, it looks like a model
        return self


class Data(eqx.Module):
    x: jax.Array
    more: dict


NET = drawn(Net)
X = jnp.arange(3.0)
OPT_STATE = drawn(lambda: optax.adam(0.01).init(eqx.filter(Net(), eqx.is_inexact_array)))
SCALING, RATE = jmpx.DynamicLossScale(8.0), jnp.float32(0.1)


def train_state(net):
    return TrainState(net, OPT_STATE, SCALING, RATE)


def same_arrays(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(tree) == jax.tree.structure(other) and all(a is b for a, b in pairs)


def program_of(function, model, *args):
    """The text of the jaxpr of a function of a model and of other arguments."""
    params, static = eqx.partition(model, eqx.is_array)

    def on_arrays(params, *args):
        return eqx.filter(function(eqx.combine(params, static), *args), eqx.is_array)

    return program(on_arrays, params, *args)


def assert_is_view(applied, of_view, model: Any = NET, x=X, rules=RULES):
    """Holds a function of a model to have the program of another function of the model's view."""
    found = program_of(applied, model, x)
    assert found == program_of(lambda model, x: of_view(with_policies(model, rules), x), model, x)
    assert "bf16" in found


def call_it(model, x):
    return model(x)


# What is an argument; how the function calls it; what it calls of a view.
ARGUMENTS = {
    "model": (lambda m: m, lambda a: a, lambda m: m),
    "tuple": (lambda m: (3, m), lambda a: a[1], lambda m: m),
    "dict": (lambda m: {"model": [m]}, lambda a: a["model"][0], lambda m: m),
    "train state": (train_state, lambda a: a.model, lambda m: m),
    "method": (lambda m: m.features, lambda a: a, lambda m: m.features),
    "renamed method": (lambda m: m.other, lambda a: a, lambda m: m.other),
    "jitted method": (lambda m: m.jitted, lambda a: a, lambda m: m.jitted),
    "partial": (lambda m: eqx.Partial(m), lambda a: a, lambda m: m),
    "jax partial": (lambda m: jax.tree_util.Partial(call_it, m), lambda a: a, lambda m: m),
    "filter_jit": (eqx.filter_jit, lambda a: a, eqx.filter_jit),
    "filter_checkpoint": (eqx.filter_checkpoint, lambda a: a, eqx.filter_checkpoint),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_model_among_the_arguments_is_a_view(kind):
    make, get, of_view = ARGUMENTS[kind]
    run = jmpx.apply_policy(lambda argument, x: get(argument)(x), APPLIED)
    assert_is_view(lambda model, x: run(make(model), x), lambda view, x: of_view(view)(x))


# The function itself is a model, or a method, or holds one.
FUNCTIONS = {
    "model": (lambda m: m, call_it),
    "filter_vmap": (eqx.filter_vmap, lambda view, x: jax.vmap(view)(x)),
    "partial": (lambda m: functools.partial(call_it, m), call_it),
    "jax partial": (lambda m: jax.tree_util.Partial(call_it, m), call_it),
    "method": (lambda m: m.features, lambda view, x: view.features(x)),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_function_itself_is_a_model_or_a_method_or_holds_one(kind):
    make, of_view = FUNCTIONS[kind]
    x = jnp.stack([X, X]) if kind == "filter_vmap" else X
    assert_is_view(lambda model, x: jmpx.apply_policy(make(model), APPLIED)(x), of_view, x=x)


TRANSFORMED = {
    "jit": lambda f: eqx.filter_jit(f),
    "vmap": lambda f: lambda m, x: jax.vmap(f, in_axes=(None, 0))(m, jnp.stack([x, x])),
    "checkpoint": lambda f: eqx.filter_checkpoint(f),
    "scan": lambda f: (
        lambda m, x: jax.lax.scan(lambda c, x: (c, f(m, x)), 0, jnp.stack([x] * 2))[1]
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_transformations(name):
    transform = TRANSFORMED[name]
    assert_is_view(jmpx.apply_policy(transform(call_it), APPLIED), transform(call_it))
    outside = transform(jmpx.apply_policy(call_it, APPLIED))
    by_hand = transform(lambda model, x: with_policies(model, RULES)(x))
    assert dots(lambda x: outside(NET, x), X) == dots(lambda x: by_hand(NET, x), X)


@pytest.mark.thorough
def test_paths_begin_at_each_of_two_models():
    models, seen = {"a": Net(4), "b": (Net(6), Block(5))}, []

    def f(models, x):
        seen.extend(each.block.head.weight.dtype for each in (models["a"], models["b"][0]))
        seen.append(models["b"][1].head.weight.dtype)
        return models["a"](x), models["b"][0](x)

    policy_map = "by=modules,c=bf16,o=f32; /block/head: f16; /head: f32"  # each rule is used
    result = eqx.filter_eval_shape(jmpx.apply_policy(f, policy_map), models, X)
    assert seen == [F16, F16, F32] and {each.dtype for each in result} == {F32}


def test_what_is_no_model_is_left_alone():
    given, given_data = train_state(NET), Data(X, {"y": X})

    def f(state, data, scale, opt_state):
        assert same_arrays(state.opt_state, given.opt_state)
        assert_same_bits(state.loss_scale, given.loss_scale)
        assert state.rate.dtype == F32 and state.model.scale.dtype == BF16
        assert same_arrays((data, opt_state), (given_data, given.opt_state))
        return state.model(data.x), scale, state

    out, scale, back = jmpx.apply_policy(f, APPLIED)(
        given, given_data, given.loss_scale, given.opt_state
    )
    assert out.dtype == F32
    assert_same_bits((scale, back), (given.loss_scale, given))
    assert same_arrays((back.model, back.opt_state), (given.model, given.opt_state))


def test_what_is_wrapped_in_autocast_is_left_alone():
    def f(model, wrapped, x):
        assert wrapped.block.head.weight.dtype == F32
        return model(x), wrapped(x)

    wrapped = jmpx.autocast(NET, "c=bf16")
    found = dots(lambda x: jmpx.apply_policy(f, APPLIED)(NET, wrapped, x), X)
    assert found == [LOW, FULL, LOW, LOW]


def test_batch_norm_and_its_state():
    def make():
        norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="ema", channelwise_affine=False)
        return eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=KEY), norm, eqx.nn.Lambda(jax.nn.relu)])

    model, state = eqx.nn.make_with_state(make)()

    def loss_fn(model, state, x):
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = batched(x, state)
        return jnp.mean(out**2), state

    def by_hand(model, *args):
        return loss_fn(with_policies(model, "c=bf16,o=f32"), *args)

    def gradient(f, policy):
        scaled = jmpx.value_and_grad(
            f, jmpx.DynamicLossScale(), has_aux=True, policy=policy, state_argnum=1
        )
        return lambda model, x: scaled(model, state, x)

    applied, x = gradient(loss_fn, "by=modules,c=bf16,o=f32"), jnp.ones((5, 3))
    with jax.numpy_dtype_promotion("standard"):  # BatchNorm divides a float by an int32
        found = program_of(applied, model, x)
        assert found == program_of(gradient(by_hand, "full"), model, x)
        (_, after), _, _, grads = eqx.filter_eval_shape(applied, model, x)
    assert dtypes(after) == dtypes(state) and set(dtypes(grads)) == {"float32"}
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))


def test_a_frozen_part_has_no_gradient():
    where = lambda net: net.block.inner.weight  # noqa: E731
    mask = eqx.tree_at(where, jax.tree.map(eqx.is_inexact_array, NET), False)
    trained, frozen = eqx.partition(NET, mask)

    def loss_fn(trained, frozen, x):
        return jnp.sum(eqx.combine(trained, frozen)(x) ** 2)

    grad_fn = jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy=APPLIED)
    grads = eqx.filter_eval_shape(grad_fn, trained, frozen, X).grads
    assert where(grads) is None
    assert jax.tree.structure(grads) == jax.tree.structure(trained)
    assert dots(lambda x: grad_fn(trained, frozen, x).grads, X)[:2] == [LOW, FULL]


# Models that are handed back

HANDED_BACK = {
    "model": lambda m: m,
    "layers": lambda m: (m.block.inner, {"norm": [m.norm]}),
    "array": lambda m: [m.scale, m.block.head.bias],
    "method": lambda m: m.features,
    "jitted method": lambda m: m.jitted,
    "rebuilt": lambda m: jax.tree.map(lambda leaf: leaf, m),
    "parts": lambda m: eqx.partition(m, lambda leaf: leaf.ndim == 1),
}


@pytest.mark.parametrize("kind", HANDED_BACK)
def test_a_model_that_is_handed_back_is_the_stored_one(kind):
    get = HANDED_BACK[kind]
    assert same_arrays(jmpx.apply_policy(get, APPLIED)(NET), get(NET))


def test_arrays_that_are_replaced_come_back_in_their_stored_dtypes():
    stored = eqx.tree_at(lambda net: net.norm, NET, jmpx.cast_tree(NET.norm, F16))
    places = lambda net: (net.scale, net.norm.weight, net.block.head.bias)  # noqa: E731

    def f(net):
        new = [jnp.full(leaf.shape, 2, F32) for leaf in places(net)]
        return eqx.tree_at(places, net, new), [eqx.tree_at(places, net, new).norm]

    back, (norm,) = jmpx.apply_policy(f, "by=modules,c=bf16")(stored)
    assert type(back) is Net and jax.tree.structure(back) == jax.tree.structure(stored)
    assert [leaf.dtype for leaf in places(back)] == [F32, F16, F32] and norm.weight.dtype == F16
    assert back.block.inner.weight is stored.block.inner.weight and back.scale == 2


def test_of_two_models_of_one_class_the_wider_dtype_counts():
    def f(models):
        return [eqx.tree_at(lambda net: net.scale, each, jnp.float32(2)) for each in models]

    low = jmpx.cast_tree(NET, F16)
    for models in ([NET, low], [low, NET]):
        back = jmpx.apply_policy(f, "by=modules,c=bf16")(models)
        assert [each.scale.dtype for each in back] == [F32, F32]


def halved(model):
    return jax.tree.map(lambda leaf: leaf * 0.5, model)


ROUNDED = {
    "changed": lambda m: eqx.tree_at(lambda m: m.scale, m, m.scale * 2),
    "vmap": lambda m: jax.vmap(lambda x: jax.tree.map(lambda leaf: leaf * x, m))(jnp.ones(2, BF16)),
    "scan": lambda m: jax.lax.scan(lambda m, x: (halved(m), x), m, jnp.ones(2))[0],
    "layer": lambda m: eqx.filter_jit(lambda m: m)(m.block.head),
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_model_that_comes_back_rounded_is_told(kind):
    apply = jmpx.apply_policy(ROUNDED[kind], "by=modules,c=bf16,o=f32")
    with warns_once(__file__, r"rounded to bfloat16, .*return the model from outside of that"):
        back = apply(NET)
    assert set(dtypes(back)) == {"float32"}
    assert type(back) is (eqx.nn.Linear if kind == "layer" else Net)


def test_a_dtype_field_comes_back_as_it_was():
    rotary = eqx.nn.RotaryPositionalEmbedding(4)
    heads = eqx.nn.Sequential([rotary, eqx.nn.Linear(4, 4, key=KEY)])
    policy_map = "by=modules,c=bf16,o=f32; RotaryPositionalEmbedding: f16"
    for f in (lambda m: m), (lambda m: jax.tree.map(lambda leaf: leaf, m)):
        assert same_arrays(jmpx.apply_policy(f, policy_map)(heads), heads)


# Views inside of views, and parts of models


def test_a_view_of_a_view_is_that_view():
    def f(model, x):
        for part in model, model.block, model.block.inner:
            assert with_policies(part, RULES) is part
        return model(x), jmpx.apply_policy(call_it, APPLIED)(model, x)

    assert dots(lambda x: jmpx.apply_policy(f, APPLIED)(NET, x), X) == [LOW, FULL] * 2


def test_a_part_of_a_view_that_does_not_cast_stays_so():
    class Outer(eqx.Module):
        parts: eqx.nn.Sequential

        def __call__(self, x):
            assert with_policies(self.parts, "c=bf16,o=f32") is self.parts
            result = jmpx.apply_policy(call_it, "by=modules,c=bf16,o=f32")(self.parts, x)
            assert result.dtype == BF16  # as the part itself returns it
            return result

    model = Outer(eqx.nn.Sequential([eqx.nn.Linear(3, 3, key=KEY)]))
    assert with_policies(model, "c=bf16,o=f32")(X).dtype == F32


@pytest.mark.parametrize("test", [eqx.is_array, eqx.is_inexact_array, lambda leaf: False])
def test_both_parts_of_a_model_are_joined(test):
    layers = eqx.nn.Lambda(NET), eqx.nn.MLP(2, 2, 4, 1, key=KEY), eqx.nn.Dropout(inference=True)
    joined = jmpx.apply_policy(lambda *parts, x: eqx.combine(*parts)(x), APPLIED)
    split = lambda m, x: joined(*eqx.partition(m, test), x=x)  # noqa: E731
    assert_is_view(split, call_it, eqx.nn.Sequential(layers))


class Activated(eqx.Module):
    """A leaf that is no array comes first, and another one is named as the fields of Flax."""

    activation: Callable
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dtype: Any = jnp.float32

    def __call__(self, x):
        return self.norm(self.activation(self.linear(x)))


ACTIVATED = drawn(lambda: Activated(jax.nn.gelu, eqx.nn.Linear(3, 2, key=KEY), eqx.nn.LayerNorm(2)))
ARRAYS, STATIC = eqx.partition(ACTIVATED, eqx.is_array)


def run_joined(arrays, static, x):
    return eqx.combine(arrays, static)(x)


def closing_over(static):
    forward = lambda arrays, x: run_joined(arrays, static, x)  # noqa: E731
    return lambda arrays, x: forward(arrays, x)


PLACES = {
    "argument": lambda: lambda arrays, x: run_joined(arrays, STATIC, x),
    "partial": lambda: functools.partial(lambda s, a, x: run_joined(a, s, x), STATIC),
    "keyword": lambda: functools.partial(run_joined, static=STATIC),
    "default": lambda: lambda arrays, x, static=STATIC: run_joined(arrays, static, x),
    "global": lambda: lambda arrays, x: eqx.combine(arrays, STATIC)(x),
    "closed over": lambda: closing_over(STATIC),
    "decorated": lambda: jax.named_call(closing_over(STATIC)),
}


@pytest.mark.parametrize("rule", ["Linear: full", "LayerNorm: full", "*/linear: full"])
@pytest.mark.parametrize("by", ["modules", "operations"])
def test_a_part_of_a_model_is_joined_wherever_the_other_part_is(by, rule):
    def program_of(forward):
        applied = jmpx.apply_policy(forward, f"by={by},c=bf16; {rule}")
        loss_fn = lambda arrays, x: jnp.sum(applied(arrays, x=x) ** 2)  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss_fn))(ARRAYS, X))

    programs = {place: program_of(make()) for place, make in PLACES.items()}
    assert programs == dict.fromkeys(PLACES, programs["argument"])


@pytest.mark.parametrize("by", ["modules", "operations"])
def test_gradient_functions_join_parts(by):
    def program_of(forward):
        loss_fn = lambda arrays, x: jnp.sum(forward(arrays, x) ** 2)  # noqa: E731
        policy = f"by={by},c=bf16; Linear: full"
        return str(
            jax.make_jaxpr(jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy=policy))(ARRAYS, X)
        )

    assert program_of(PLACES["closed over"]()) == program_of(PLACES["argument"]())


@pytest.mark.parametrize("by", ["modules", "operations"])
def test_a_part_out_of_reach_is_told(by):
    class Trainer:
        static = STATIC

    trainer, message = Trainer(), r"(?s)structure error.*|Custom node type"
    forward = lambda arrays, x: run_joined(arrays, trainer.static, x)  # noqa: E731
    with pytest.raises(ValueError, match=message) as caught:
        jmpx.apply_policy(forward, f"by={by},c=bf16; Linear: full")(ARRAYS, X)
    (note,) = [n for n in caught.value.__notes__ if n.startswith("jmpx gives the modules")]
    assert "equinox.combine" in note
    other = jmpx.apply_policy(lambda m, x: jax.tree.map(jnp.add, m, {"x": x}), f"by={by},c=bf16")
    with pytest.raises(ValueError, match=message) as caught:  # an error of the user's own
        other(ARRAYS, X)
    assert not any("jmpx gives" in note for note in getattr(caught.value, "__notes__", []))
