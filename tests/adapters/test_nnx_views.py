"""Views of NNX models: parts and methods, `dtype` fields, state, arrays that are made inside."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, normal
from helpers.jaxprs import FULL, LOW, dots
from helpers.nnx_net import (
    Model,
    Square,
    assert_same_state,
    cast_copy,
    linear,
    products_of,
    pure,
    randomized,
    traced,
)

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = normal(np.random.default_rng(0), 2, 4)
CELLS = ("LSTMCell", "SimpleCell")


class Watched(nnx.Module):
    """A matrix product that notes the dtypes that it meets."""

    def __init__(self, name="w"):
        self.name = name
        self.w = nnx.Param(jnp.eye(4) + 0.3)

    def __call__(self, x):
        LOG.append((self.name, x.dtype.name, self.w[...].dtype.name))
        return x @ self.w[...]


class Deep(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Watched(str(n)) for n in range(3)])
        self.tail = nnx.Sequential(Watched("first"), nnx.relu, Watched("last"))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
            LOG.append(x.dtype.name)
        return self.tail(x)


def seen(name, dtype):
    return name, np.dtype(dtype).name, np.dtype(dtype).name


def test_what_the_parts_of_lists_see(log):
    policy_map = f"{MIXED}; */blocks/1: full; */layers/2: c=f16; Sequential: c=f32"
    assert jmpx.flax.with_policies(Deep(), policy_map)(X).dtype == F32
    between = "bfloat16"
    assert log == [
        *(seen("0", BF16), between, seen("1", F32), between, seen("2", BF16), between),
        *(seen("first", F32), seen("last", F16)),
    ]


def test_without_a_policy_map_it_reads_the_policies_of_classes(log):
    model = Deep()
    with jmpx.push_policy(nnx.Sequential, "c=f16,o=bf16"):
        assert jmpx.flax.with_policies(model)(X).dtype == BF16
        assert log[-2:] == [seen("first", F16), seen("last", F16)] and log[0] == seen("0", F32)
        with jmpx.push_policy(Watched, "bf16"):  # rules go before the policies of classes
            jmpx.flax.with_policies(model, "full; blocks/0: f16; */tail: c=f32")(X)
    assert log[-8] == seen("0", F16) and log[-6] == seen("1", BF16)
    assert log[-2:] == [seen("first", BF16), seen("last", BF16)]
    assert_same_bits(jmpx.flax.with_policies(model)(X), model(X))


def test_public_methods_and_methods_of_its_own(log):
    class Coder(nnx.Module):
        def __init__(self):
            self.layer = Watched()

        def _help(self, x):
            return x

        def encode(self, x, *, shift):
            LOG.append((x.dtype.name, shift.dtype.name))
            return self.layer(self._help(x)) + shift

        @staticmethod
        def double(x):
            return 2 * x

        def __call__(self, x):
            h = self.encode(x, shift=x)
            LOG.append(h.dtype.name)
            return self.double(h)

    view = jmpx.flax.with_policies(Coder(), "c=bf16,o=f16")
    assert isinstance(view, Coder) and view.encode(X, shift=X).dtype == F16
    assert view._help(X).dtype == view.double(X).dtype == F32
    log.clear()
    assert view(X).dtype == F16
    assert log == [2 * ("bfloat16",), seen("w", BF16), "bfloat16"]


# State


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first = Watched("first")
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = Watched("last")

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("train", "rules"), [(True, ""), (True, "; BatchNorm: full"), (False, "; BatchNorm: full")]
)
def test_batch_norm_and_dropout_update_the_model(rng, log, train, rules):
    model, x = randomized(rng, Block(nnx.Rngs(0))), normal(rng, 16, 4)
    (model.train if train else model.eval)()
    dtype = F32 if rules else BF16

    def by_hand(model, x):
        norm = cast_copy(model.norm, dtype)
        h = norm((x.astype(BF16) @ model.first.w[...].astype(BF16)).astype(dtype)).astype(BF16)
        nnx.update(model.norm, nnx.state(norm, nnx.BatchStat))
        return (model.dropout(h) @ model.last.w[...].astype(BF16)).astype(F32)

    @nnx.jit
    def run(model, reference, x):
        before = model.norm.mean[...]
        y = jmpx.flax.with_policies(model, MIXED + rules)(x)
        return y, by_hand(reference, x), (model.norm.mean[...] != before).any()

    reference = nnx.clone(model)
    for count in (1, 2):
        y, expected, is_moved = run(model, reference, x)
        assert_same_bits(y, expected)
        assert_same_state(model, reference)
        assert is_moved == train
        assert int(model.dropout.rngs.count[...]) == (count if train else 0)  # pyright: ignore[reportOptionalMemberAccess]
    assert log == [seen("first", BF16), seen("last", BF16)]
    assert model.norm.mean[...].dtype == F32


def test_what_is_shared_stays_shared_in_a_view(rng):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, 4, rngs=rngs)
            self.same = self.embed
            self.table = self.embed.embedding
            self.settings = {"rate": 0.5, "names": ("a", "b")}

        def __call__(self, tokens):
            return self.same.attend(self.embed(tokens)) + self.table[...].sum()

    model, tokens = randomized(rng, Tied(nnx.Rngs(0))), jnp.arange(7)
    view = jmpx.flax.with_policies(model, MIXED)
    assert view.embed is view.same and view.table is view.embed.embedding
    assert view.settings == model.settings

    def run(model):
        y = jmpx.flax.with_policies(model, MIXED)(tokens)
        return y.sum(), y

    (_, y), grads = nnx.jit(nnx.value_and_grad(run, has_aux=True))(model)
    table = model.table[...].astype(BF16)
    expected = jax.jit(lambda table: (table @ table.T + table.sum()).astype(F32))(table)
    assert_same_bits(y, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(grads)] == [F32]


def test_a_scan_over_stacked_layers_keeps_its_carry_and_its_state(log):
    class Step(nnx.Module):
        def __init__(self, key):
            self.norm, self.w = nnx.BatchNorm(4, rngs=nnx.Rngs(key)), Watched()

        def __call__(self, x):
            return x + self.w(self.norm(x))

    def call(model, x):
        scan = nnx.scan(lambda x, f: f(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = scan(x, model.layers)
        LOG.append(x.dtype.name)
        return x

    def run(model):
        return jmpx.flax.with_policies(model, MIXED)(X), model.layers.norm.mean[...]

    model = Model(call, layers=nnx.vmap(Step)(jax.random.split(jax.random.key(0), 3)))
    run, state = pure(run, model)  # pyright: ignore[reportAssignmentType]
    y, mean = jax.jit(run)(state)
    assert set(log) == {seen("w", BF16), "bfloat16"} and y.dtype == F32
    assert mean.shape == (3, 4) and mean.dtype == F32 and (mean != 0).any()


@pytest.mark.thorough
def test_islands_and_states_keep_their_dtypes(log):
    class Stateful(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.eye(4))
            self.sum = nnx.Variable(jnp.full(4, 1 + 2**-20, F32))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x, state, rngs):
            LOG.append((x.dtype.name, state.dtype.name))
            rngs.noise()
            self.sum[...] = self.sum[...] + 0 * self.norm(x @ self.weight[...]).sum(0)
            return x

    state, rngs = nnx.Variable(jnp.ones(3)), nnx.Rngs(noise=0)
    model = Model(
        lambda m, x: m.layer(m.island(noise(x)), state, rngs=rngs),
        layer=Stateful(),
        island=Square(),
    )
    jmpx.flax.with_policies(model, f"{MIXED}; Square: c=f32,o=f32")(X)
    assert log == ["float32", ("bfloat16", "float32")] and int(rngs.noise.count[...]) == 1
    assert model.layer.sum.dtype == model.layer.norm.mean.dtype == F32
    assert (model.layer.sum[...] == 1 + 2**-20).all()


def test_a_state_that_a_call_replaces_keeps_its_dtype():
    class Last(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.eye(4))
            self.last = nnx.Variable(jnp.zeros((2, 4)))

        def __call__(self, x):
            y = x @ self.weight[...]
            if hasattr(self.last, "set_value"):
                self.last.set_value(y)
            else:  # Flax 0.12.0
                self.last.value = y
            return y

    model = Model(lambda m, x: m.layer(noise(x)), layer=Last())
    jmpx.flax.with_policies(model, MIXED)(X)
    assert model.layer.last.dtype == F32 and model.layer.last[...].any()


# Fields


def recurrent(cell, **options):
    return nnx.RNN(getattr(nnx, cell)(6, 6, **options))


# Makes a layer with a dtype.
LAYERS = {
    "Linear": functools.partial(nnx.Linear, 6, 3),
    "Conv": functools.partial(nnx.Conv, 6, 3, (3, 3)),
    "Embed": functools.partial(nnx.Embed, 5, 6),
    "LoRA": functools.partial(nnx.LoRA, 6, 2, 3),
    "BatchNorm": functools.partial(nnx.BatchNorm, 6, use_running_average=True),
    "LayerNorm": functools.partial(nnx.LayerNorm, 6),
    "MultiHeadAttention": functools.partial(
        nnx.MultiHeadAttention, 2, 6, decode=False, normalize_qk=True
    ),
    **{cell: functools.partial(recurrent, cell) for cell in CELLS},
}
# The field, the policy map, the dtype in which the layer computes, and the field by hand.
SET = [
    (F32, "f32; {}: c=f16", F16, F16),
    (F16, "f32; {}: c=bf16", BF16, BF16),
    (BF16, "f32; {}: full", F32, F32),
    (None, "f32; {}: c=bf16", BF16, None),
    (F16, MIXED, F16, F16),  # without a rule the field is the compute dtype
]


@pytest.mark.versions
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "field", "policy_map", "dtype", "field_by_hand"),
    [(layer, *SET[(n + k) % 5]) for n, layer in enumerate(LAYERS) for k in (0, 1)],
)
@pytest.mark.filterwarnings("ignore:The dtype field of")
def test_a_rule_sets_the_field_of_a_layer(layer, field, policy_map, dtype, field_by_hand):
    make, shape = LAYERS[layer], (2, 5, 5, 6) if layer == "Conv" else (4, 6)
    x = jnp.arange(3) if layer == "Embed" else normal(np.random.default_rng(1), *shape)
    model = randomized(np.random.default_rng(0), make(dtype=field, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    hand_graph = nnx.graphdef(make(dtype=field_by_hand, rngs=nnx.Rngs(0)))
    has_no_parameters = layer in (*CELLS, "MultiHeadAttention")  # so its input is rounded before
    before = BF16 if has_no_parameters and policy_map == MIXED else dtype

    def view(state, x):
        return jmpx.flax.with_policies(nnx.merge(graph, state), policy_map.format(layer))(x)

    def by_hand(state, x):
        model = cast_copy(nnx.merge(hand_graph, state), dtype)
        x = jmpx.cast_tree(jmpx.cast_tree(x, before), dtype)
        if layer not in CELLS:
            return model(x).astype(F32)
        carry = model.cell.initialize_carry(x[0].shape, nnx.Rngs(0))
        carry, ys = jmpx.cast_tree(carry, dtype), []
        for step in x:
            carry, y = model.cell(carry, step)
            ys.append(y)
        return jnp.stack(ys).astype(F32)

    y, expected = jax.jit(lambda *args: (view(*args), by_hand(*args)))(state, x)
    assert y.dtype == F32
    if layer in CELLS:  # in a compiled loop XLA leaves some of the rounding out
        np.testing.assert_allclose(y, expected, atol=0.04)
    else:
        assert_same_bits(y, expected)
    assert set(dots(view, state, x)) <= {f"{dtype.name}x{dtype.name}"}
    assert nnx.graphdef(model) == graph


class Handing(nnx.Module):
    """Hands its dtype to two layers, and gives a third one another."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.first = linear(dtype=dtype)
        self.other = linear(dtype=F16)
        self.open = linear()
        self.count = types.SimpleNamespace(dtype=dtype)  # no module

    def __call__(self, x):
        LOG.append((self.dtype, self.first.dtype, self.other.dtype, self.open.dtype))
        return self.open(self.other(self.first(x)))


@pytest.mark.parametrize(
    ("written", "expected"),
    [(jnp.float32, jnp.bfloat16), (F32, BF16), ("float32", "bfloat16")],
)
def test_layers_inside_follow_if_the_field_was_handed_to_them(log, written, expected):
    model, policy_map = Handing(written), f"{MIXED}; Handing: c=bf16; */open: c=f32"
    assert products_of(model, policy_map, X) == [LOW, "float16xfloat16", FULL]
    assert log == [(expected, expected, F16, None)]
    assert model.dtype is model.first.dtype is written
    loss = lambda model: (jmpx.flax.with_policies(model, policy_map)(X) ** 2).mean()  # noqa: E731
    run, state = pure(loss, model)
    grads = jax.tree.leaves(jax.eval_shape(jax.grad(run), state))
    assert {leaf.dtype for leaf in grads} == {F32} and len(grads) == 6
    with jmpx.push_policy(nnx.Linear, "c=bf16"):
        view = jmpx.flax.with_policies(model)
    assert [np.dtype(part.dtype) for part in (view, view.first, view.other)] == [F32, BF16, BF16]


# Arrays that are made inside


class Weights(nnx.Module):
    """Keeps its parameters in a list."""

    def __init__(self):
        self.weights = nnx.List([nnx.Param(jnp.eye(4)), nnx.Param(jnp.eye(4))])

    def __call__(self, x):
        return x @ self.weights[0][...] @ self.weights[1][...]


def noise(x):
    return jax.random.normal(jax.random.key(0), x.shape)


def vae(model, x):
    mean = model.encoder(x)
    return model.decoder(mean + noise(mean))


def of_noise(make):
    return lambda: Model(lambda m, x: m.layer(noise(x)), layer=make())


MODELS = {
    "vae": lambda: Model(vae, encoder=linear(), decoder=linear()),
    "NumPy": lambda: Model(lambda m, x: m.layer(np.ones((2, 4))), layer=linear()),
    "float32 norm": lambda: Model(
        lambda m, x: m.layer(m.norm(x)),
        norm=nnx.LayerNorm(4, dtype=F32, rngs=nnx.Rngs(0)),
        layer=linear(),
    ),
    "own": of_noise(Square),
    "list": of_noise(Weights),
    "attention": of_noise(lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))),
    "attend": lambda: Model(
        lambda m, x: m.layer.attend(jnp.ones(4)), layer=nnx.Embed(3, 4, rngs=nnx.Rngs(0))
    ),
    "remat": lambda: Model(
        lambda m, x: nnx.remat(lambda layer, x: layer(x))(m.layer, noise(x)), layer=linear()
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_inside_does_not_widen_what_follows(name):
    products = traced(MODELS[name](), MIXED, X)
    # JAX sums the products of attention in float32, so that their cotangents are in it.
    assert products - {"float32xbfloat16"} == {LOW}
    assert len(products) == 1 or name == "attention"
    if name == "remat":
        assert traced(MODELS[name](), f"{MIXED}; */layer: full", X) == {FULL}


def test_without_a_policy_around_nothing_is_cast(log):
    model = Model(lambda m, x: m.second(m.first(x)), first=Square(), second=linear())
    with jmpx.push_policy(nnx.Linear, "c=bf16"):
        assert jmpx.flax.with_policies(model)(X).dtype == BF16
    assert log == ["float32"]
