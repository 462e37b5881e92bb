"""`jmpx.equinox.with_policies`, against casts written by hand."""

import abc
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, leniently, run_python

import jmpx
from jmpx.equinox import with_policies

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
MIXED = "c=bf16,o=f32"
SEEN = []  # what each Probe was called with, in order


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


@pytest.fixture
def key(rng):
    return jax.random.key(int(rng.integers(2**31)))


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), F32)


def randomized(model, rng):
    """The same model with random parameters, biases and scales too."""
    return jax.tree.map(lambda w: normal(rng, *w.shape) if eqx.is_inexact_array(w) else w, model)


def dtypes(tree):
    return [leaf.dtype.name for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]


class Probe(eqx.Module):
    """Notes the dtypes that it sees."""

    weight: jax.Array
    name: str = eqx.field(static=True, default="probe")

    def __call__(self, x):
        SEEN.append((self.name, x.dtype.name, self.weight.dtype.name))
        return x * self.weight


class Special(Probe):
    """A subclass, for rules by a base's name."""


class Net(eqx.Module):
    """Two layers, a norm, and a head, in a list, a dict and a field."""

    layers: list
    parts: dict
    head: eqx.nn.Linear
    calls: jax.Array
    key: jax.Array
    activation: Callable
    rate: float
    name: str = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [eqx.nn.Linear(6, 6, key=keys[0]), eqx.nn.Linear(6, 6, key=keys[1])]
        self.parts = {"norm": eqx.nn.LayerNorm(6), "pair": (Probe(jnp.ones(6)), None)}
        self.head = eqx.nn.Linear(6, 2, key=keys[2])
        self.calls, self.key = jnp.arange(3), keys[3]
        self.activation, self.rate, self.name, self.scale = jax.nn.gelu, 0.5, "net", 2.0

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        x = self.parts["pair"][0](self.parts["norm"](x) * self.rate)
        return self.head(x) * self.scale


def by_hand(model, x, layers=BF16, norm=BF16, head=BF16, output=F32, around=BF16):
    """`Net` with every cast written out, from the stored parameters."""

    def run(module, x, dtype):
        return jmpx.cast_tree(module, dtype)(x.astype(dtype)).astype(around)

    x = x.astype(around)
    for layer in model.layers:
        x = jax.nn.gelu(run(layer, x, layers))
    x = run(model.parts["norm"], x, norm) * model.rate
    x = x * model.parts["pair"][0].weight.astype(around)
    return (run(model.head, x, head) * model.scale).astype(output)


@pytest.fixture
def net(key, rng):
    return randomized(Net(key), rng)


ISLANDS = {
    MIXED: {},
    f"{MIXED}; LayerNorm: full": {"norm": F32},
    f"{MIXED}; */norm: full; /head: f16": {"norm": F32, "head": F16},
    f"{MIXED}; Linear: full; /head: bf16": {"layers": F32},
    f"{MIXED}; /head: bf16; Linear: full": {"layers": F32, "head": F32},
    "full; layers/*: bf16": {"layers": BF16, "norm": F32, "head": F32, "around": F32},
    "c=f16; parts/norm: full": dict.fromkeys(("layers", "head", "around", "output"), F16)
    | {"norm": F32},
}


@pytest.mark.parametrize("policy_map", ISLANDS)
def test_it_computes_what_the_casts_written_by_hand_do(net, rng, policy_map):
    x = normal(rng, 6)
    assert_same_bits(with_policies(net, policy_map)(x), by_hand(net, x, **ISLANDS[policy_map]))


@pytest.mark.parametrize("wrap", [jax.vmap, eqx.filter_vmap, eqx.filter_checkpoint])
def test_a_view_goes_through_transformations(net, rng, wrap):
    policy_map = list(ISLANDS)[2]
    x = normal(rng, 5, 6) if "vmap" in wrap.__name__ else normal(rng, 6)
    expected = wrap(lambda x: by_hand(net, x, **ISLANDS[policy_map]))(x)
    assert_same_bits(wrap(with_policies(net, policy_map))(x), expected)


@pytest.mark.parametrize("policy_map", ISLANDS)
@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_gradients_have_the_models_structure_and_are_those_by_hand(net, rng, policy_map, jit):
    x = normal(rng, 4, 6)

    def loss(net, forward):
        return jnp.mean(jax.vmap(forward)(x).astype(F32) ** 2)

    @jit
    @eqx.filter_value_and_grad
    def actual(net):
        return loss(net, with_policies(net, policy_map))

    @jit
    @eqx.filter_value_and_grad
    def expected(net):
        return loss(net, lambda x: by_hand(net, x, **ISLANDS[policy_map]))

    (value, grads), (expected_value, expected_grads) = actual(net), expected(net)
    if jit is eqx.filter_jit:  # XLA may fuse the two in other ways
        np.testing.assert_allclose(value, expected_value, rtol=0.02)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
            assert jnp.linalg.norm(a - b) <= 0.05 * jnp.linalg.norm(b)
    else:
        assert_same_bits((value, grads), (expected_value, expected_grads))
    assert type(grads) is Net and type(grads.head) is eqx.nn.Linear
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(net, eqx.is_inexact_array))
    assert set(dtypes(grads)) == {"float32"}


def test_the_model_is_left_as_it_is_and_the_view_looks_like_it(net):
    leaves, structure = jax.tree.flatten(net)
    view = with_policies(net, f"{MIXED}; LayerNorm: full; layers/1: f16")
    assert all(a is b for a, b in zip(jax.tree.leaves(net), leaves, strict=True))
    assert jax.tree.structure(net) == structure and type(net) is Net
    assert isinstance(view, Net) and isinstance(view.parts["norm"], eqx.nn.LayerNorm)
    assert all(isinstance(layer, eqx.nn.Linear) for layer in view.layers)
    assert repr(type(view)) == repr(Net) and type(view).__doc__ == Net.__doc__
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(net)]
    assert [path for path, _ in jax.tree_util.tree_leaves_with_path(view)] == paths
    assert (view.name, view.scale, view.rate, view.parts["pair"][1]) == ("net", 2.0, 0.5, None)
    assert isinstance(view.rate, float) and view.activation is jax.nn.gelu
    assert view.calls is net.calls and view.key is net.key
    assert view.parts["norm"].weight is net.parts["norm"].weight  # float32 already
    expected = ["bfloat16", "bfloat16", "float16", "float16", "float32", "float32", "bfloat16"]
    assert [name for name in dtypes(view) if "float" in name] == [*expected, *["bfloat16"] * 2]


def test_two_views_have_one_tree_definition_so_that_jit_does_not_trace_again(net, rng):
    traces = []

    @eqx.filter_jit
    def forward(view, x):
        traces.append(1)
        return view(x)

    x, maps = normal(rng, 6), [f"{MIXED}; LayerNorm: full"] * 2
    first, second = (forward(with_policies(net, policy_map), x) for policy_map in maps)
    assert_same_bits(first, second)
    assert len(traces) == 1
    view = with_policies(net, maps[0])
    assert_same_bits(first, eqx.filter_jit(view)(x))
    leaves, structure = jax.tree.flatten(view)
    assert_same_bits(jax.tree.unflatten(structure, leaves)(x), view(x))
    assert_same_bits(eqx.nn.inference_mode(view)(x), view(x))


def test_what_each_layer_sees():
    class Outer(eqx.Module):
        probes: dict

        def __call__(self, x):
            for probe in self.probes.values():
                x = probe(x)
            return x

    model = Outer({name: Probe(jnp.ones(2), name) for name in "abc"} | {"d": Special(jnp.ones(2))})
    x = jnp.ones(2)
    result = with_policies(
        model, "c=bf16,o=f32; Probe: f16; Special: full; probes/a: o=f16; */c: f32"
    )
    assert result(x).dtype == F32
    assert SEEN == [
        ("a", "bfloat16", "bfloat16"),  # computes in what surrounds it
        ("b", "float16", "float16"),
        ("c", "float32", "float32"),
        ("probe", "float32", "float32"),
    ]


@pytest.mark.parametrize("seen_through", ["call", "vmap", "filter_vmap", "scan", "checkpoint"])
def test_an_island_inside_a_method_is_a_boundary_under_transformations(rng, seen_through):
    class Outer(eqx.Module):
        norm: eqx.nn.LayerNorm
        probe: Probe

        def __call__(self, x):
            if seen_through == "scan":
                params, static = eqx.partition(self.norm, eqx.is_array)
                step = lambda carry, x: (carry, eqx.combine(params, static)(x))  # noqa: E731
                x = jax.lax.scan(step, x[0], x)[1]
            else:
                wrap = eqx.filter_checkpoint if seen_through == "checkpoint" else lambda f: f
                vmap = eqx.filter_vmap if seen_through == "filter_vmap" else jax.vmap
                x = vmap(wrap(self.norm))(x) if seen_through != "call" else self.norm(x[0])
            return self.probe(x)

    model = randomized(Outer(eqx.nn.LayerNorm(4), Probe(jnp.ones(4))), rng)
    x = normal(rng, 3, 4)
    result = with_policies(model, f"{MIXED}; /norm: full")(x)
    inside = jax.vmap(model.norm)(x.astype(BF16).astype(F32)).astype(BF16)
    expected = (inside * model.probe.weight.astype(BF16)).astype(F32)
    assert_same_bits(result, expected[0] if seen_through == "call" else expected)
    assert SEEN == [("probe", "bfloat16", "bfloat16")]


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


class Around(eqx.Module):
    inner: eqx.Module

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def call(name, model, x):
    return model(x, x, x) if name == "Attention" else model(x)


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
        SEEN.append((embedding.weight.dtype.name, embedding.weight is linear.weight))
        return jax.vmap(linear)(jax.vmap(embedding)(tokens))


@pytest.mark.parametrize("shared", ["", "; /shared: bf16", "; */pytree/*: bf16", "; Shared: f32"])
def test_shared(rng, key, shared):
    model, tokens = Tied(key), jnp.asarray(rng.integers(0, 7, 5))

    def loss(model, view):
        return jnp.sum(view(model)(tokens).astype(F32) ** 2)

    if shared == "; Shared: f32":
        view, cast, dtype = MIXED + shared, jmpx.cast_to_full, F32
    else:
        view, cast, dtype = MIXED + shared, jmpx.cast_to_bfloat16, BF16
    result = with_policies(model, view)(tokens)
    assert SEEN == [(jnp.dtype(dtype).name, True)]
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
        linear = jmpx.cast_to_bfloat16(model.linear)
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
    assert {seen[1] for seen in SEEN} == {"bfloat16"}


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


@pytest.mark.parametrize("cls", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
@pytest.mark.parametrize("rules", ["", "; /cell: full", "; /cell: f16"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_carry_of_a_loop_keeps_its_dtype(cls, rules, dtype, rng, key):
    class Recurrent(eqx.Module):
        cell: eqx.Module

        def __call__(self, xs, hidden):
            step = lambda hidden, x: (self.cell(x, hidden), None)  # noqa: E731
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


class Coder(eqx.Module):
    """Methods of many kinds."""

    weight: jax.Array
    function: Callable = jax.nn.relu  # a field, though it binds as a method does
    limit: ClassVar[float] = 3.0

    @property
    def norm(self):
        return jnp.sum(self.weight)

    @property
    def alias(self):
        return self.encode

    def encode(self, x):
        SEEN.append(("encode", x.dtype.name, self.weight.dtype.name))
        return x * self.weight

    def decode(self, x, *, shift=None):
        y = x / self.weight
        return {"y": y if shift is None else y + shift, "n": 3, "f": 0.5, "i": jnp.arange(2)}

    decode_by_one = functools.partialmethod(decode, shift=1.0)

    @eqx.filter_jit
    def jitted(self, x):
        return self.encode(x)

    @staticmethod
    def static(x):
        return x

    @classmethod
    def make(cls, x):
        return x

    def _private(self, x):
        return x

    def __getitem__(self, i):
        return self.weight[i]

    def __call__(self, x):
        outs = [self.encode(x), jax.vmap(self.encode)(x[None])[0], self.alias(x), self.jitted(x)]
        outs += [eqx.filter_vmap(self.encode)(x[None])[0], eqx.filter_checkpoint(self.encode)(x)]
        assert type(self) is Coder
        SEEN.append({out.dtype.name for out in outs})
        return self.decode(outs[0])["y"]


def test_methods_are_cast_once_at_the_outermost_entry(rng):
    model = Coder(normal(rng, 4))
    view, x = with_policies(model, MIXED), normal(rng, 4)
    rounded, weight = x.astype(BF16), model.weight.astype(BF16)
    assert_same_bits(view(x), ((rounded * weight) / weight).astype(F32))
    assert SEEN.pop() == {"bfloat16"}  # no result was cast to float32 in between
    assert set(SEEN) == {("encode", "bfloat16", "bfloat16")}
    for encode in view.encode, view.alias, view.jitted:
        assert_same_bits(encode(x), (rounded * weight).astype(F32))
    assert_same_bits(jax.vmap(view.encode)(x[None])[0], (rounded * weight).astype(F32))
    assert eqx.filter_jit(view.encode)(x).dtype == F32
    decoded = view.decode(x, shift=x)
    assert_same_bits(decoded["y"], (rounded / weight + rounded).astype(F32))
    assert (decoded["n"], decoded["f"], decoded["i"].dtype) == (3, 0.5, jnp.int32)
    assert_same_bits(view.decode_by_one(x)["y"], (rounded / weight + BF16(1)).astype(F32))


def test_all_else_of_a_class_is_left_alone(rng):
    model = Coder(normal(rng, 4))
    view, x = with_policies(model, MIXED), normal(rng, 4)
    assert view.norm.dtype == view[0].dtype == view.weight.dtype == BF16
    assert view.function is jax.nn.relu and view.limit == 3.0
    assert view.static(x) is view.make(x) is view._private(x) is x
    assert view.encode.__name__ == "encode" and view.decode.__doc__ is None


def test_inheritance_converters_checks_and_hooks(rng):
    made = []

    class Base(eqx.Module):
        weight: jax.Array = eqx.field(
            converter=lambda w: made.append("converter") or jnp.asarray(w)
        )

        def __init_subclass__(cls, *, label, **kwargs):
            super().__init_subclass__(**kwargs)
            made.append(label)

        def __check_init__(self):
            made.append("check")

        def __call__(self, x):
            return x * self.weight

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Equinox's, of the two kinds of __init__

        class Derived(Base, label="derived"):
            shift: jax.Array

            def __init__(self, weight):
                made.append("init")
                self.weight, self.shift = weight, jnp.ones(3)

            def __post_init__(self):
                raise AssertionError

            def __call__(self, x):
                return super().__call__(x) + self.shift

    model, x = Derived([1.0, 2.0, 3.0]), normal(rng, 3)
    before = list(made)
    view = with_policies(model, MIXED)
    assert_same_bits(view(x), (x.astype(BF16) * model.weight.astype(BF16) + BF16(1)).astype(F32))
    assert made == before == ["derived", "init", "converter", "check"]


T = TypeVar("T")


class Abstract(eqx.Module, Generic[T]):
    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(self, x):
        raise NotImplementedError

    @property
    def double(self):
        return 2 * self.size


class Concrete(Abstract[int]):
    weight: jax.Array
    size: int = eqx.field(static=True, kw_only=True)
    bias: float = 0.5
    label: str = eqx.field(init=False, static=True, default="b")
    missing: None = None
    pair: tuple = dataclasses.field(default_factory=lambda: (1, {"a b": jnp.ones(2)}))

    def __call__(self, x):
        assert self.pair[1]["a b"].dtype == BF16
        return x * self.weight + self.bias


class Metaclass(type(eqx.Module)):
    """A user's own."""


class Meta(Concrete, metaclass=Metaclass):
    class Config:
        factor = 2


@pytest.mark.parametrize("cls", [Concrete, Meta])
def test_classes_with_abstract_bases_generics_defaults_and_a_metaclass(cls, rng):
    model, x = cls(normal(rng, 3), size=7), normal(rng, 3)
    view = with_policies(model, MIXED)
    expected = (x.astype(BF16) * model.weight.astype(BF16) + 0.5).astype(F32)
    assert_same_bits(view(x), expected)
    assert (view.size, view.double, view.bias, view.missing, view.pair[0]) == (7, 14, 0.5, None, 1)
    assert isinstance(view, Abstract) and type(view).__name__ == cls.__name__
    assert_same_bits(copy.deepcopy(view)(x), expected)
    assert_same_bits(dataclasses.replace(model, weight=x).weight, x)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.weight = x


def test_wrappers_of_equinox_as_fields_and_as_the_model(rng, key):
    linear = eqx.nn.Linear(3, 2, key=key)
    x, cast = normal(rng, 4, 3), jmpx.cast_to_bfloat16(linear)
    expected = jax.vmap(cast)(x.astype(BF16)).astype(F32)
    for model in eqx.filter_vmap(linear), Around(eqx.filter_vmap(linear)):
        assert_same_bits(with_policies(model, MIXED)(x), expected)
    scaled = eqx.Partial(lambda weight, x: x * weight, x[0])
    expected = (x[1].astype(BF16) * x[0].astype(BF16)).astype(F32)
    assert_same_bits(with_policies(scaled, MIXED)(x[1]), expected)
    coder = Coder(x[0])
    assert_same_bits(with_policies(coder.encode, MIXED)(x[1]), expected)


def test_a_module_in_two_places_has_the_policies_of_both(rng):
    class Twice(eqx.Module):
        first: Probe
        second: Probe

        def __call__(self, x):
            return self.first(x) + self.second(x)

    probe = Probe(normal(rng, 3))
    with_policies(Twice(probe, probe), f"{MIXED}; /second: full")(jnp.ones(3))
    assert [dtypes[1:] for dtypes in SEEN] == [("bfloat16",) * 2, ("float32",) * 2]


def test_modules_and_data_as_arguments_and_results(rng):
    class Data(eqx.Module):
        x: jax.Array
        mask: jax.Array

    class Outer(eqx.Module):
        inner: eqx.Module
        norm: eqx.nn.LayerNorm
        rule: Callable

        def __call__(self, data):
            assert isinstance(data, Data) and data.x.dtype == BF16
            return self.inner(data, self.norm, self.rule)

    class Inner(eqx.Module):
        weight: jax.Array

        def __call__(self, data, norm, rule):
            assert norm.weight.dtype == F32 and self.weight.dtype == F16 == data.x.dtype
            assert rule is jax.nn.relu
            return Data(norm(data.x), data.mask)

    model = randomized(Outer(Inner(jnp.ones(3)), eqx.nn.LayerNorm(3), jax.nn.relu), rng)
    data = Data(normal(rng, 3), jnp.array([True, False, True]))
    result = with_policies(model, f"{MIXED}; /inner: f16; /norm: c=f32,o=f16")(data)
    expected = model.norm(data.x.astype(BF16).astype(F16).astype(F32)).astype(F16)
    assert_same_bits(result, Data(expected.astype(BF16).astype(F32), data.mask))


class Container(eqx.Module):
    encoder: eqx.nn.Linear
    parts: list
    offset: jax.Array


def test_of_a_mere_container_the_default_is_that_of_the_modules_in_it(rng, key):
    parts = [eqx.nn.LayerNorm(4), np.ones(2, np.float32), 3.0]
    model = randomized(Container(eqx.nn.Linear(4, 4, key=key), parts, jnp.ones(2)), rng)
    view, x = with_policies(model, f"{MIXED}; LayerNorm: full"), normal(rng, 4)
    assert view.offset.dtype == view.parts[1].dtype == BF16 and view.parts[2] == 3.0
    expected = jmpx.cast_to_bfloat16(model.encoder)(x.astype(BF16)).astype(F32)
    assert_same_bits(view.encoder(x), expected)
    assert_same_bits(view.parts[0](x), model.parts[0](x))
    assert isinstance(view, Container)


def test_a_container_hands_its_policy_on_to_the_modules_in_it(rng, key):
    class Model(eqx.Module):
        box: Container

        def __call__(self, x):
            return self.box.parts[0](self.box.encoder(x)) * self.box.offset

    box = Container(eqx.nn.Linear(4, 4, key=key), [eqx.nn.LayerNorm(4)], jnp.ones(4))
    model, x = randomized(Model(box), rng), normal(rng, 4)
    view = with_policies(model, f"{MIXED}; Container: full; LayerNorm: f16")
    assert view.box.offset.dtype == F32
    view = with_policies(model, f"{MIXED}; Linear: f16; /box: full; /box/encoder: f16")
    view = eqx.tree_at(lambda view: view.box.offset, view, jnp.ones(4, BF16))
    inside = jmpx.cast_to_float16(model.box.encoder)(x.astype(BF16).astype(F16)).astype(BF16)
    inside = model.box.parts[0](inside.astype(F32)).astype(BF16)
    assert_same_bits(view(x), inside.astype(F32))


def test_none_reads_the_registry_only(net, rng):
    x = normal(rng, 6)
    assert_same_bits(with_policies(net)(x), net(x))
    assert jax.tree.structure(with_policies(net)) == jax.tree.structure(net)
    with jmpx.push_policy(eqx.nn.Linear, "c=bf16,o=f32"):
        view = with_policies(net)
        expected = by_hand(net, x, layers=BF16, norm=F32, head=BF16, around=F32)
        assert_same_bits(view(x), expected)
    assert_same_bits(view(x), expected)  # a view keeps the policies that it was made with
    with jmpx.push_policy(Net, MIXED), jmpx.push_policy(eqx.nn.LayerNorm, "c=f32,o=bf16"):
        assert_same_bits(with_policies(net)(x), by_hand(net, x, norm=F32))
    with jmpx.push_policy(Probe, "bf16"):  # subclasses do not inherit it
        assert with_policies(Special(x)).weight is x


def test_rules_go_before_the_registry_and_that_before_the_default(net, rng):
    x = normal(rng, 6)
    with jmpx.push_policy(eqx.nn.LayerNorm, "c=f32,o=bf16"):
        assert_same_bits(with_policies(net, MIXED)(x), by_hand(net, x, norm=F32))
        view = with_policies(net, f"{MIXED}; LayerNorm: f16")
        assert_same_bits(view(x), by_hand(net, x, norm=F16))
    with jmpx.push_policy(Net, "c=bf16,o=f16"):
        assert with_policies(net, MIXED)(x).dtype == F16
        assert with_policies(net, f"{MIXED}; Net: o=f32")(x).dtype == F32


def test_casts_go_through_the_policy(net, rng):
    calls = []

    class Loud(jmpx.Policy):
        def cast_to_compute(self, tree):
            calls.append("compute")
            return super().cast_to_compute(tree)

        def cast_to_output(self, tree):
            calls.append("output")
            return super().cast_to_output(tree)

    x, view = normal(rng, 6), with_policies(net, Loud(F32, BF16, F32))
    assert set(calls) == {"compute"}
    calls.clear()
    assert_same_bits(view(x), by_hand(net, x))
    assert set(calls) == {"compute", "output"}


def test_rules_that_match_nothing_are_told_once():
    model = Coder(jnp.ones(2))
    with pytest.warns(
        UserWarning, match=r"'Codr: .*' .* matched no class; did you mean 'Coder'"
    ) as w:
        with_policies(model, "c=bf16; Codr: full")
    assert len(w) == 1 and w[0].filename == __file__
    with pytest.warns(UserWarning, match=r"'weight/\*: .*' .* matched no path"):  # a leaf
        assert with_policies(model, "c=bf16; weight/*: full").weight.dtype == BF16
    nested = eqx.nn.Sequential([model])
    with pytest.warns(UserWarning, match="did you mean 'layers/0'"):
        with_policies(nested, "c=bf16; layer/0: full")
    with pytest.warns(UserWarning, match="'op.exp: .*' .* are those of jmpx.autocast"):
        with_policies(nested, "c=bf16; layers/0: full; op.exp: full")


@pytest.mark.parametrize("scale", [2.0**10, 2.0**20])
def test_a_float16_train_step_with_a_dynamic_loss_scale(net, rng, scale):
    x, y = normal(rng, 16, 6), normal(rng, 16, 2)

    def loss_fn(net, x, y):
        return jnp.mean((jax.vmap(with_policies(net, "c=f16,o=f32; LayerNorm: full"))(x) - y) ** 2)

    def reference(net, x, y):
        options = dict.fromkeys(("layers", "head", "around"), F16)
        return jnp.mean((jax.vmap(lambda x: by_hand(net, x, **options, norm=F32))(x) - y) ** 2)

    scaling = jmpx.DynamicLossScale(scale)
    step = jmpx.filter_value_and_grad(loss_fn, scaling, policy="full")
    value, new_scaling, finite, grads = step(net, x, y)
    expected, _, expected_finite, expected_grads = jmpx.filter_value_and_grad(
        reference, scaling, policy="full"
    )(net, x, y)
    assert_same_bits((value, finite, grads), (expected, expected_finite, expected_grads))
    assert bool(finite) == (scale == 2.0**10)
    assert float(new_scaling.loss_scale) == (scale if finite else scale / 2)
    assert type(grads) is Net and set(dtypes(grads)) == {"float32"}


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


def test_abstract_shapes(net):
    shapes = eqx.filter_eval_shape(lambda net: net, net)
    assert dtypes(eqx.filter_eval_shape(with_policies(net, "f16"), jnp.ones(6))) == []
    out = eqx.filter_eval_shape(lambda net, x: with_policies(net, "f16")(x), shapes, jnp.ones(6))
    assert out.dtype == F16 and out.shape == (2,)


@pytest.mark.parametrize(
    "model", [None, {"w": jnp.ones(2)}, [Probe(jnp.ones(2))], jax.nn.relu, Probe]
)
def test_a_model_of_no_equinox(model):
    with pytest.raises(TypeError, match=r"Expected an equinox.Module .*: pass the model itself"):
        with_policies(model, "bf16")


def test_bad_input(net):
    view = with_policies(net, f"{MIXED}; /head: full")
    for model in view, eqx.nn.Sequential([view.head]):
        with pytest.raises(
            TypeError, match="got a view at .*: call jmpx.equinox.with_policies once"
        ):
            with_policies(model, MIXED)
    with pytest.raises(TypeError, match="policy map"):
        with_policies(net, 3)
    with pytest.raises(ValueError, match="bf61"):
        with_policies(net, "c=bf61")


def test_a_missing_equinox_says_how_to_install_it():
    code = "import sys; sys.modules['equinox'] = None; import jmpx.equinox"
    result = run_python("-c", code)
    assert result.returncode == 1
    message = "jmpx.equinox needs Equinox, which is not installed: pip install 'jmpx[equinox]'."
    assert result.stderr.splitlines()[-1] == f"ModuleNotFoundError: {message}"
