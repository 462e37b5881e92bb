"""Layers of Equinox under a policy map: their state, their loops, and what contains them."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, dtypes, leniently
from helpers.equinox_models import Around, compiled, drawn
from helpers.jaxprs import program

import jmpx
from jmpx.equinox import with_policies

KEY = jax.random.key(0)
X = np.arange(4, dtype=np.float32) / 3
linear = functools.partial(nn.Linear, 4, 4, key=KEY)
LAYERS = {
    "Linear": (linear, (4,)),
    "LayerNorm": (lambda: nn.LayerNorm((3, 4)), (3, 4)),
    "Attention": (lambda: nn.MultiheadAttention(2, 4, key=KEY), (5, 4)),
    "MLP": (lambda: nn.MLP(4, "scalar", 8, 2, key=KEY), (4,)),
    "Conv2d": (lambda: nn.Conv2d(3, 2, 3, padding=1, key=KEY), (3, 6, 6)),
    "Dropout": (lambda: nn.Dropout(0.3, inference=True), (4,)),
    "Sequential": (lambda: nn.Sequential([linear(), nn.Lambda(jax.nn.relu), nn.Identity()]), (4,)),
    "WeightNorm": (lambda: nn.WeightNorm(linear()), (4,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_as_those_that_are_cast(name):
    (make, shape), dtype = LAYERS[name], F16 if name in ("Linear", "Conv2d") else BF16
    layer, x = drawn(make), np.ones(shape, np.float32)
    params, static = eqx.partition(layer, eqx.is_inexact_array)

    def run(model, x, cast=lambda x: x):
        return model(*[cast(x) for _ in range(3 if name == "Attention" else 1)])

    def viewed(params, x):
        return run(with_policies(eqx.combine(params, static), f"c={dtype.name},o=f32"), x)

    def island(params, x):
        model = Around(eqx.combine(params, static))
        return run(with_policies(model, f"full; {type(layer).__name__}: {dtype.name}"), x)

    def cast(params, x):
        model = eqx.combine(jmpx.cast_tree(params, dtype), static)
        return run(model, x, lambda x: x.astype(dtype)).astype(F32)

    expected = program(cast, params, x)
    assert program(viewed, params, x) == program(island, params, x) == expected


class Tied(eqx.Module):
    shared: nn.Shared

    def __init__(self):
        pair = nn.Embedding(7, 4, key=KEY), nn.Linear(4, 7, False, key=KEY)
        self.shared = nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def __call__(self, tokens):
        embedding, linear = self.shared()
        LOG.append((embedding.weight.dtype, embedding.weight is linear.weight))
        return jax.vmap(linear)(jax.vmap(embedding)(tokens))


@pytest.mark.parametrize(
    ("shared", "dtype"),
    [("", BF16), ("; /shared: bf16", BF16), ("; */pytree/*: bf16", BF16), ("; Shared: f32", F32)],
)
def test_shared(shared, dtype):
    rounded = (lambda y: y.astype(BF16)) if dtype == F32 else (lambda y: y)

    def both(model, tokens):
        result = with_policies(model, MIXED + shared)(tokens)
        embedding, linear = jmpx.cast_tree(model, dtype).shared()
        inside = rounded(jax.vmap(embedding)(tokens)).astype(dtype)
        return result, rounded(jax.vmap(linear)(inside)).astype(F32)

    assert_same_bits(*compiled(both, drawn(Tied), np.arange(5)))
    assert LOG[-1] == (dtype, True)


def test_a_tied_island_computes_in_its_dtype():
    def both(model):
        view = with_policies(model, "c=bf16; Linear: c=f32,o=f32; Tied: o=f32,c=bf16")
        weight = model.shared.pytree[0].weight.astype(BF16).astype(F32)
        return view(jnp.arange(7)), jax.vmap(lambda x: weight @ x)(weight)

    assert_same_bits(*compiled(both, drawn(Tied)))


# Layers with state


class Stateful(eqx.Module):
    linear: nn.Linear
    norm: nn.BatchNorm

    def __init__(self, mode):
        self.linear = nn.Linear(4, 3, key=KEY)
        self.norm = nn.BatchNorm(3, "batch", mode=mode)

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        LOG.append(x.dtype)
        return x, state


def batched(model, *args):
    return jax.vmap(model, (0, None), (0, None), axis_name="batch")(*args)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "rules"),
    [("ema", ""), ("batch", "; BatchNorm: full; /norm: c=f16")],
)
@leniently  # BatchNorm divides a float by an int32
def test_batch_norm_keeps_its_statistics(mode, rules, rng):
    stored, state = nn.make_with_state(Stateful)(mode)
    before, xs = dtypes(state), jnp.asarray(rng.normal(size=(2, 8, 4)), F32)
    clone = lambda state: jax.tree.map(lambda leaf: leaf, state)  # noqa: E731
    expected_state, linear = state, jmpx.cast_tree(stored.linear, BF16)
    for model in (stored, nn.inference_mode(stored)):
        for x in xs:
            result, state = batched(with_policies(model, MIXED + rules), x, clone(state))
            inside = jax.vmap(linear)(x.astype(BF16)).astype(F32)
            expected, expected_state = batched(model.norm, inside, clone(expected_state))
            assert_same_bits(result, expected.astype(BF16).astype(F32))
            assert dtypes(state) == before and "float32" in before
            assert_same_bits(state, expected_state)
    assert set(LOG) == {BF16}


@leniently
def test_batch_norm_that_is_stored_in_16_bits_stays_so():
    model, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="ema", dtype=F16)
    run = functools.partial(batched, with_policies(model, MIXED))
    result, new = eqx.filter_eval_shape(run, jnp.ones((8, 3)), state)
    assert result.dtype == F32 and set(dtypes(new)) == {"bool", "float16"}


@pytest.mark.thorough
@leniently
def test_spectral_norm():
    def make():
        return nn.Sequential([nn.SpectralNorm(nn.Linear(4, 3, key=KEY), "weight", key=KEY)])

    model, state = nn.make_with_state(make)()
    x, before, clone = jnp.arange(4.0), dtypes(state), jax.tree.map(lambda leaf: leaf, state)
    expected, _ = model.layers[0](x.astype(BF16).astype(F32), clone)
    result, new = with_policies(model, MIXED)(x, state)
    assert_same_bits(result, expected.astype(BF16).astype(F32))
    assert dtypes(new) == before


# Cells and loops over layers


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cls", "rules", "inside", "dtype"),
    [(nn.GRUCell, "", BF16, F32), (nn.LSTMCell, "; /inner: f16", F16, BF16)],
)
def test_the_carry_of_a_loop_keeps_its_dtype(cls, rules, inside, dtype):
    cell = cls(3, 5, key=KEY)
    hidden = jnp.zeros(5, dtype) if cls is nn.GRUCell else (jnp.zeros(5, dtype),) * 2

    class Recurrent(Around):
        def __call__(self, xs):
            return jax.lax.scan(lambda hidden, x: (self.inner(x, hidden), None), hidden, xs)[0]

    def by_hand(xs):
        cast = functools.partial(jmpx.cast_tree, dtype=inside)
        step = lambda hidden, x: jmpx.cast_tree(cast(cell)(cast(x), cast(hidden)), dtype)  # noqa: E731
        xs = xs.astype(BF16)
        return jmpx.cast_to_full(jax.lax.scan(lambda c, x: (step(c, x), None), hidden, xs)[0])

    xs = jnp.arange(21.0).reshape(7, 3) / 21
    assert_same_bits(with_policies(Recurrent(cell), MIXED + rules)(xs), by_hand(xs))


@pytest.mark.parametrize(("cls", "dtype"), [(nn.GRUCell, BF16), (nn.LSTMCell, F32)])
def test_a_cell_returns_its_state_as_it_came(cls, dtype):
    seen = []

    class Noted(cls):
        def __call__(self, input, hidden, *, key=None):
            seen.extend(dtypes(hidden))
            return super().__call__(input, hidden, key=key)

    hidden = jnp.zeros(5, dtype) if cls is nn.GRUCell else (jnp.zeros(5, dtype),) * 2

    class Inside(Around):
        def __call__(self, x):
            result = self.inner(x, hidden)
            assert set(dtypes(result)) == {dtype.name}
            return result

    cell = drawn(lambda: Noted(3, 5, key=KEY))
    inside = with_policies(Inside(cell), "c=bf16")
    jax.eval_shape(inside, jnp.ones(3))
    for alone in (with_policies(cell, "c=bf16"), inside.inner):
        run = lambda x, alone=alone: (alone(x, hidden), alone(input=x, hidden=hidden))  # noqa: E731
        assert set(dtypes(jax.eval_shape(run, jnp.ones(3)))) == {dtype.name}
    assert set(seen) == {"bfloat16"}


@pytest.mark.thorough
def test_an_ensemble_and_a_scan_over_layers():
    layers = eqx.filter_vmap(lambda key: nn.Linear(4, 4, key=key))(jax.random.split(KEY, 3))

    class Deep(eqx.Module):
        layers: nn.Linear

        def __call__(self, x):
            arrays, static = eqx.partition(self.layers, eqx.is_array)
            step = lambda x, layer: (eqx.combine(layer, static)(x), None)  # noqa: E731
            return jax.lax.scan(step, x, arrays)[0]

        def ensemble(self, x):
            return eqx.filter_vmap(lambda layer: layer(x))(self.layers)

    x, view = jnp.arange(4.0), with_policies(Deep(layers), f"{MIXED}; Linear: full")
    expected, outs = x.astype(BF16), []
    for i in range(3):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], layers)
        expected = layer(expected.astype(F32)).astype(BF16)
        outs.append(layer(x.astype(BF16).astype(F32)))
    np.testing.assert_allclose(view(x), expected.astype(F32), rtol=2**-7)
    assert view.ensemble(x).dtype == F32
    np.testing.assert_allclose(view.ensemble(x), jnp.stack(outs), rtol=2**-7)


# Containers, which are never called: their policies are those of the modules in them.


class Container(eqx.Module):
    encoder: Any
    parts: list
    offset: jax.Array


@pytest.fixture
def box():
    return drawn(lambda: Container(linear(), [nn.LayerNorm(4)], jnp.arange(1.0, 5)))


def test_of_a_mere_container_the_default_is_that_of_the_modules_in_it(box):
    def both(box, x):
        view = with_policies(box, f"{MIXED}; LayerNorm: full")
        assert view.offset.dtype == view.parts[1].dtype == BF16 and view.parts[2] == 3.0
        expected = jmpx.cast_tree(box.encoder, BF16)(x.astype(BF16)).astype(F32)
        return (view.encoder(x), view.parts[0](x)), (expected, box.parts[0](x))

    box = dataclasses.replace(box, parts=[*box.parts, np.ones(2, np.float32), 3.0])
    assert_same_bits(*compiled(both, box, X))


def test_a_container_hands_its_policy_on_to_the_modules_in_it(box):
    class Model(eqx.Module):
        box: Container

        def __call__(self, x):
            return self.box.parts[0](self.box.encoder(x)) * self.box.offset

    def both(box, x):
        view = with_policies(Model(box), f"{MIXED}; Linear: f16; /box: full; /box/encoder: f16")
        view = eqx.tree_at(lambda view: view.box.offset, view, jnp.ones(4, BF16))
        inside = jmpx.cast_tree(box.encoder, F16)(x.astype(BF16).astype(F16)).astype(BF16)
        return view(x), box.parts[0](inside.astype(F32)).astype(BF16).astype(F32)

    assert_same_bits(*compiled(both, box, X))


def test_an_outermost_container_hands_its_policy_on(box):
    rules = "c=bf16; {}: c=f32,o=f16; LayerNorm: bf16"
    outer = Container(box, [], jnp.ones(1))
    of_box = with_policies(box, rules.format("Container"))
    for view in (of_box, with_policies(outer, rules.format("/encoder")).encoder):
        assert view.offset.dtype == view.encoder.weight.dtype == F32
        assert_same_bits(view.encoder(X), box.encoder(X).astype(F16))
        assert view.parts[0].weight.dtype == BF16
