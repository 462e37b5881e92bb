"""Layers of Equinox and their state under a policy map, one by one and in loops."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, dtypes, leniently, normal
from helpers.equinox_net import Around, Probe, randomized

import jmpx
from jmpx.equinox import with_policies


def layer_cases():
    keys = iter(jax.random.split(jax.random.key(0), 20))
    nn = eqx.nn
    linear = nn.Linear(4, 4, key=next(keys))
    yield "Linear", linear, (4,)
    yield "Linear scalar", nn.Linear("scalar", 3, key=next(keys)), ()
    yield "LayerNorm", nn.LayerNorm((3, 4)), (3, 4)
    yield "GroupNorm", nn.GroupNorm(2, 4), (4, 3)
    yield "Attention", nn.MultiheadAttention(2, 4, key=next(keys)), (5, 4)
    yield "MLP", nn.MLP(4, "scalar", 8, 2, key=next(keys)), (4,)
    yield "Conv2d", nn.Conv2d(3, 2, 3, padding=1, key=next(keys)), (3, 6, 6)
    yield "ConvTranspose1d", nn.ConvTranspose1d(3, 2, 3, key=next(keys)), (3, 6)
    yield "PReLU", nn.PReLU(0.25), (4,)
    yield "Dropout", nn.Dropout(0.3, inference=True), (4,)
    lambdas = [nn.Lambda(jax.nn.relu), nn.Identity(), nn.Linear(4, 2, key=next(keys))]
    yield "Sequential", nn.Sequential([linear, *lambdas]), (4,)
    yield "WeightNorm", nn.WeightNorm(linear), (4,)


CASES = {name: (model, shape) for name, model, shape in layer_cases()}


def call(name, model, x):
    return model(x, x, x) if name == "Attention" else model(x)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_layers_of_equinox(name, dtype, rng):
    model, shape = randomized(CASES[name][0], rng), CASES[name][1]
    x = normal(rng, *shape)
    expected = call(name, jmpx.cast_tree(model, dtype), x.astype(dtype))
    assert expected.dtype == dtype
    policy = jmpx.Policy(F32, dtype, F32)
    assert_same_bits(call(name, with_policies(model, policy), x), expected.astype(F32))
    island = with_policies(Around(model), f"full; {type(model).__name__}: {jnp.dtype(dtype).name}")
    assert_same_bits(call(name, island, x), expected.astype(F32))


@pytest.mark.thorough
def test_dropout_and_embedding(rng, key):
    x = normal(rng, 50)
    view = with_policies(eqx.nn.Dropout(0.4), "bf16")
    assert view.p == 0.4 and isinstance(view.p, float)
    assert_same_bits(view(x, key=key), eqx.nn.Dropout(0.4)(x.astype(BF16), key=key))
    embedding = eqx.nn.Embedding(7, 3, key=key)
    tokens = jnp.asarray(rng.integers(0, 7, 5))
    result = jax.vmap(with_policies(embedding, MIXED))(tokens)
    assert_same_bits(result, embedding.weight[tokens].astype(BF16).astype(F32))


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        keys = jax.random.split(key)
        pair = eqx.nn.Embedding(7, 4, key=keys[0]), eqx.nn.Linear(4, 7, False, key=keys[1])
        self.shared = eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def __call__(self, tokens):
        embedding, linear = self.shared()
        LOG.append((embedding.weight.dtype.name, embedding.weight is linear.weight))
        return jax.vmap(linear)(jax.vmap(embedding)(tokens))


@pytest.mark.thorough
@pytest.mark.parametrize("shared", ["", "; /shared: bf16", "; */pytree/*: bf16", "; Shared: f32"])
def test_shared(rng, key, shared):
    model, tokens = Tied(key), jnp.asarray(rng.integers(0, 7, 5))

    def loss(model, view):
        return jnp.sum(view(model)(tokens).astype(F32) ** 2)

    if shared == "; Shared: f32":
        view, cast, dtype = MIXED + shared, jmpx.cast_to_full, F32
    else:
        view, cast, dtype = MIXED + shared, jmpx.mpx.cast_to_bfloat16, BF16
    result = with_policies(model, view)(tokens)
    assert LOG == [(jnp.dtype(dtype).name, True)]
    rounded = (lambda y: y.astype(BF16)) if dtype == F32 else (lambda y: y)
    embedding, linear = cast(model).shared()
    inside = rounded(jax.vmap(embedding)(tokens)).astype(dtype)
    assert_same_bits(result, rounded(jax.vmap(linear)(inside)).astype(F32))
    grads = eqx.filter_grad(loss)(model, lambda model: with_policies(model, view))
    assert dtypes(grads) == ["float32"]


def test_a_tied_island_computes_in_its_dtype(rng, key):
    model = Tied(key)
    logits = with_policies(model, "c=bf16; Linear: c=f32,o=f32; Tied: o=f32,c=bf16")(jnp.arange(7))
    weight = model.shared.pytree[0].weight.astype(BF16)
    expected = jax.vmap(lambda x: weight.astype(F32) @ x)(weight.astype(F32))
    assert_same_bits(logits, expected)


class Stateful(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    probe: Probe

    def __init__(self, mode, key):
        self.linear = eqx.nn.Linear(4, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode=mode)
        self.probe = Probe(jnp.ones(3))

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return self.probe(x), state


def batched(model, *args):
    return jax.vmap(model, (0, None), (0, None), axis_name="batch")(*args)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mode", ["ema", "batch"])
@pytest.mark.parametrize("rules", ["", "; BatchNorm: full", "; BatchNorm: bf16", "; /norm: c=f16"])
@leniently  # BatchNorm divides a float by an int32
def test_batch_norm_keeps_its_statistics(mode, rules, rng, key):
    model, state = eqx.nn.make_with_state(Stateful)(mode, key)
    before, xs = dtypes(state), normal(rng, 3, 8, 4)
    expected_state = state
    clone = lambda state: jax.tree.map(lambda leaf: leaf, state)  # noqa: E731
    for x in xs:
        result, state = batched(with_policies(model, MIXED + rules), x, clone(state))
        linear = jmpx.cast_tree(model.linear, jnp.bfloat16)
        inside = jax.vmap(linear)(x.astype(BF16)).astype(F32)
        expected, expected_state = batched(model.norm, inside, expected_state)
        assert_same_bits(result, expected.astype(BF16).astype(F32))
        assert dtypes(state) == before and "float32" in before
        assert_same_bits(state, expected_state)
    inference = eqx.nn.inference_mode(model)
    result, after = batched(with_policies(inference, MIXED + rules), xs[0], clone(state))
    inside = jax.vmap(linear)(xs[0].astype(BF16)).astype(F32)
    expected, _ = batched(eqx.nn.inference_mode(model.norm), inside, clone(state))
    assert_same_bits(result, expected.astype(BF16).astype(F32))
    assert_same_bits(after, state)
    assert {seen[1] for seen in LOG} == {"bfloat16"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [F16, BF16])
@leniently
def test_batch_norm_that_is_stored_in_16_bits_stays_so(dtype, rng):
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    model, state = make(3, "batch", mode="ema", dtype=dtype)
    result, new = batched(with_policies(model, MIXED), normal(rng, 8, 3), state)
    assert result.dtype == F32 and set(dtypes(new)) == {"bool", jnp.dtype(dtype).name}


@leniently
def test_batch_norm_in_a_sequential_and_in_a_train_step(rng, key):
    def make(key):
        norm = eqx.nn.BatchNorm(3, "batch", mode="ema", channelwise_affine=False)
        return eqx.nn.Sequential([eqx.nn.Linear(4, 3, key=key), norm, eqx.nn.Lambda(jax.nn.relu)])

    model, state = eqx.nn.make_with_state(make)(key)

    def loss_fn(model, state, x):
        y, state = batched(with_policies(model, "c=f16,o=f32"), x, state)
        return jnp.mean(y**2), state

    grad_fn = jmpx.filter_value_and_grad(
        loss_fn, jmpx.DynamicLossScale(), has_aux=True, policy="full"
    )
    before, x = dtypes(state), normal(rng, 8, 4)
    (_, state), _, finite, grads = eqx.filter_jit(grad_fn)(model, state, x)
    assert finite and dtypes(state) == before and set(dtypes(grads)) == {"float32"}
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))


@pytest.mark.thorough
@leniently
def test_spectral_norm(rng, key):
    def make(key):
        layer = eqx.nn.Linear(4, 3, key=key)
        return eqx.nn.Sequential([eqx.nn.SpectralNorm(layer, "weight", key=key)])

    model, state = eqx.nn.make_with_state(make)(key)
    before, x = dtypes(state), normal(rng, 4)
    norm, clone = model.layers[0], jax.tree.map(lambda leaf: leaf, state)
    expected, _ = norm(x.astype(BF16).astype(F32), clone)
    result, new = with_policies(model, MIXED)(x, state)
    assert_same_bits(result, expected.astype(BF16).astype(F32))
    assert dtypes(new) == before


@pytest.mark.sampled(9)
@pytest.mark.parametrize("cls", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
@pytest.mark.parametrize("rules", ["", "; /cell: full", "; /cell: f16"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_carry_of_a_loop_keeps_its_dtype(cls, rules, dtype, rng, key):
    class Recurrent(eqx.Module):
        cell: eqx.Module

        def __call__(self, xs, hidden):
            step = lambda hidden, x: (self.cell(x, hidden), None)  # pyright: ignore[reportCallIssue]  # noqa: E731
            return jax.lax.scan(step, jmpx.cast_tree(hidden, dtype), xs)[0]

    hidden = jnp.zeros(5) if cls is eqx.nn.GRUCell else (jnp.zeros(5), jnp.zeros(5))
    cell, xs = cls(3, 5, key=key), normal(rng, 7, 3)
    result = with_policies(Recurrent(cell), MIXED + rules)(xs, hidden)
    inside = {"": BF16, "; /cell: full": F32, "; /cell: f16": F16}[rules]
    cast = functools.partial(jmpx.cast_tree, dtype=inside)

    def step(hidden, x):
        x = cast(x.astype(BF16))
        return jmpx.cast_tree(cast(cell)(x, cast(hidden)), dtype), None

    expected = jax.lax.scan(step, jmpx.cast_tree(hidden, dtype), xs)[0]
    assert_same_bits(result, jmpx.cast_to_full(expected))


def test_an_ensemble_and_a_scan_over_layers(rng, key):
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(jax.random.split(key, 3))

    class Deep(eqx.Module):
        layers: eqx.nn.Linear

        def __call__(self, x):
            arrays, static = eqx.partition(self.layers, eqx.is_array)
            step = lambda x, layer: (eqx.combine(layer, static)(x), None)  # noqa: E731
            return jax.lax.scan(step, x, arrays)[0]

        def ensemble(self, x):
            return eqx.filter_vmap(lambda layer: layer(x))(self.layers)

    x, view = normal(rng, 4), with_policies(Deep(layers), f"{MIXED}; Linear: full")
    expected, outs = x.astype(BF16), []
    for i in range(3):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], layers)
        expected = layer(expected.astype(F32)).astype(BF16)
        outs.append(layer(x.astype(BF16).astype(F32)))
    np.testing.assert_allclose(view(x), expected.astype(F32), rtol=2**-7)
    ensemble = view.ensemble(x)
    assert ensemble.dtype == F32
    np.testing.assert_allclose(ensemble, jnp.stack(outs), rtol=2**-7)
