"""Views of NNX models, against the same layers with everything cast by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32, LOG, MIXED, assert_same_bits, normal, warns_once

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")


def randomized(rng, model):
    """The model, its parameters random numbers that bfloat16 would round, biases too."""
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: normal(rng, *leaf.shape), params))
    return model


def cast_copy(module, dtype):
    """A copy of a module with its parameters cast."""
    copy = nnx.clone(module)
    nnx.update(copy, jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(copy, nnx.Param)))
    return copy


def leaves(tree):
    return {"/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(tree)}


def all_float32(tree):
    return all(leaf.dtype == F32 for leaf in leaves(tree).values())


def floating(tree):
    return {k: v for k, v in leaves(tree).items() if jnp.issubdtype(v.dtype, jnp.floating)}


def assert_same_state(a, b):
    assert_same_bits(floating(a), floating(b))


def make_list(items):
    return nnx.List(items) if hasattr(nnx, "List") else items


class Watched(nnx.Module):
    """A matrix product that notes the dtypes that it meets."""

    def __init__(self, size, rngs, name="w"):
        self.name = name
        self.w = nnx.Param(rngs.params.normal((size, size)))

    def __call__(self, x):
        LOG.append((self.name, x.dtype.name, self.w[...].dtype.name))
        return x @ self.w[...]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def encode(self, x):
        return self.norm(nnx.relu(self.inner(x)))

    def __call__(self, x):
        return self.head(self.encode(x))


def by_hand(model, x, norm=F32, head=BF16):
    """`Net` in bfloat16, but for the norm and the head."""
    x = nnx.relu(cast_copy(model.inner, BF16)(x.astype(BF16)))
    x = cast_copy(model.norm, norm)(x.astype(norm)).astype(BF16)
    return cast_copy(model.head, head)(x.astype(head)).astype(BF16).astype(F32)


RULES = [
    ("", BF16, BF16),
    ("; LayerNorm: full", F32, BF16),
    ("; */norm: full", F32, BF16),
    ("; flax.nnx.LayerNorm: full", F32, BF16),
    ("; */head: full; norm/*: full", F32, F32),
    ("; Linear: f16; LayerNorm: full; Linear: bf16", F32, BF16),  # of two the last one wins
]


@pytest.mark.parametrize(("rules", "norm", "head"), RULES)
def test_it_is_the_hand_cast_computation_to_the_bit(rng, rules, norm, head):
    model, x = randomized(rng, Net(nnx.Rngs(0))), normal(rng, 5, 4)
    before, plain = nnx.clone(model), model(x)
    view = jmpx.flax.with_policies(model, MIXED + rules)
    assert_same_bits(view(x), by_hand(model, x, norm, head))
    assert isinstance(view, Net) and isinstance(view.norm, nnx.LayerNorm)
    assert_same_state(nnx.state(model), nnx.state(before))
    assert_same_bits(model(x), plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_are_those_of_the_hand_cast_computation(rng, jit):
    model, x = randomized(rng, Net(nnx.Rngs(0))), normal(rng, 5, 4)

    def loss(model, x):
        return (jmpx.flax.with_policies(model, f"{MIXED}; LayerNorm: full")(x) ** 2).mean()

    def gradient(loss):
        grad = nnx.value_and_grad(loss)
        return (nnx.jit(grad) if jit else grad)(model, x)

    value, grads = gradient(loss)
    assert value.dtype == F32 and all_float32(grads)
    by_hand_value, expected = gradient(lambda model, x: (by_hand(model, x) ** 2).mean())
    assert_same_bits(value, by_hand_value)
    assert_same_state(grads, expected)
    _, full = gradient(lambda model, x: (model(x) ** 2).mean())
    assert jax.tree.structure(grads) == jax.tree.structure(full)
    for key, reference in leaves(full).items():
        assert np.linalg.norm(leaves(grads)[key] - reference) < 0.05 * np.linalg.norm(reference)


def test_with_the_gradient_functions(rng):
    model, x = randomized(rng, Net(nnx.Rngs(0))), normal(rng, 5, 4)
    graph, params = nnx.split(model)

    def loss(params):
        return jmpx.flax.with_policies(nnx.merge(graph, params), MIXED)(x).mean()

    scaling = jmpx.DynamicLossScale(2.0**10)
    _, finite, grads = jmpx.filter_grad(loss, scaling, policy="full")(params)
    assert finite
    assert_same_state(grads, jax.grad(loss)(params))


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.blocks = make_list([Watched(4, rngs, str(n)) for n in range(3)])
        self.tail = nnx.Sequential(Watched(4, rngs, "first"), nnx.relu, Watched(4, rngs, "last"))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
            LOG.append(x.dtype.name)
        return self.tail(x)


def test_what_each_layer_sees(rng, log):
    model = Deep(nnx.Rngs(0))
    policy_map = f"{MIXED}; */blocks/1: full; */layers/2: c=f16; Sequential: c=f32"
    y = jmpx.flax.with_policies(model, policy_map)(normal(rng, 2, 4))
    assert y.dtype == F32
    assert log == [
        *(("0", "bfloat16", "bfloat16"), "bfloat16"),
        *(("1", "float32", "float32"), "bfloat16"),
        *(("2", "bfloat16", "bfloat16"), "bfloat16"),
        *(("first", "float32", "float32"), ("last", "float16", "float16")),
    ]


def test_without_a_policy_map_it_reads_the_policies_of_classes(rng, log):
    model, x = Deep(nnx.Rngs(0)), normal(rng, 2, 4)
    with jmpx.push_policy(nnx.Sequential, "c=f16,o=bf16"):
        assert jmpx.flax.with_policies(model)(x).dtype == BF16
        assert log[-2:] == [(name, "float16", "float16") for name in ("first", "last")]
        assert log[0] == ("0", "float32", "float32")
        with jmpx.push_policy(Watched, "bf16"):  # rules go before the policies of classes
            jmpx.flax.with_policies(model, "full; blocks/0: f16; */tail: c=f32")(x)
    assert log[-8] == ("0", "float16", "float16") and log[-6] == ("1", "bfloat16", "bfloat16")
    assert log[-2:] == [(name, "bfloat16", "bfloat16") for name in ("first", "last")]
    assert_same_bits(jmpx.flax.with_policies(model)(x), model(x))


def test_public_methods_and_methods_of_its_own(rng, log):
    class Coder(nnx.Module):
        def __init__(self, rngs):
            self.layer = Watched(4, rngs)

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

    x = normal(rng, 2, 4)
    view = jmpx.flax.with_policies(Coder(nnx.Rngs(0)), "c=bf16,o=f16")
    assert view.encode(x, shift=x).dtype == jnp.float16
    assert view._help(x).dtype == view.double(x).dtype == F32
    log.clear()
    assert view(x).dtype == jnp.float16
    assert log == [2 * ("bfloat16",), ("w", "bfloat16", "bfloat16"), "bfloat16"]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first = Watched(4, rngs, "first")
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = Watched(4, rngs, "last")

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


@pytest.mark.parametrize("rules", ["", "; BatchNorm: full"])
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_and_dropout_update_the_model(rng, log, train, rules):
    model, x = randomized(rng, Block(nnx.Rngs(0))), normal(rng, 16, 4)
    (model.train if train else model.eval)()
    reference = nnx.clone(model)
    for _ in range(2):
        y = jmpx.flax.with_policies(model, MIXED + rules)(x)
        assert y.dtype == F32
        assert log == [(name, "bfloat16", "bfloat16") for name in ("first", "last")]

        dtype = F32 if rules else BF16
        h = x.astype(BF16) @ reference.first.w[...].astype(BF16)
        norm = cast_copy(reference.norm, dtype)
        h = norm(h.astype(dtype)).astype(BF16)
        nnx.update(reference.norm, nnx.state(norm, nnx.BatchStat))
        expected = reference.dropout(h) @ reference.last.w[...].astype(BF16)
        assert_same_bits(y, expected.astype(F32))
        assert_same_state(nnx.state(model), nnx.state(reference))
        log.clear()
    assert model.norm.mean[...].dtype == F32
    assert bool((model.norm.mean[...] != 0).any()) == train
    assert int(model.dropout.rngs.count[...]) == (2 if train else 0)  # pyright: ignore[reportOptionalMemberAccess]


def test_a_whole_step_under_jit(rng):
    model, x = randomized(rng, Block(nnx.Rngs(0))), normal(rng, 16, 4)

    @nnx.jit
    def step(model, x):
        def loss(model):
            return (jmpx.flax.with_policies(model, f"{MIXED}; BatchNorm: full")(x) ** 2).mean()

        _, grads = nnx.value_and_grad(loss)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    before = nnx.clone(model)
    step(model, x)
    for key, new in floating(nnx.state(model)).items():
        assert new.dtype == F32 and (new != floating(nnx.state(before))[key]).any(), key
    assert int(model.dropout.rngs.count[...]) == 1  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.thorough
def test_attention(rng):
    model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
    model, x = randomized(rng, model), normal(rng, 2, 5, 8)
    expected = cast_copy(model, BF16)(x.astype(BF16)).astype(F32)
    assert_same_bits(jmpx.flax.with_policies(model, MIXED)(x), expected)
    y = jmpx.flax.with_policies(model, f"{MIXED}; */out: full; LinearGeneral: bf16")(x)
    assert_same_bits(y, expected)


@pytest.mark.thorough
def test_attention_keeps_its_cache(rng):
    model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=True)
    model.init_cache((2, 5, 8), dtype=BF16)
    y = jmpx.flax.with_policies(model, MIXED)(normal(rng, 2, 1, 8))
    assert y.dtype == F32
    assert int(model.cache_index[...]) == 1 and model.cached_key[...].dtype == BF16  # pyright: ignore[reportOptionalSubscript]


def test_random_streams_that_are_passed_count_on(rng):
    class Noisy(nnx.Module):
        def __call__(self, x, rngs):
            return x + jax.random.normal(rngs.noise(), x.shape, x.dtype)

    x, rngs = normal(rng, 4), nnx.Rngs(noise=1)
    view = jmpx.flax.with_policies(Noisy(), "c=bf16")
    first, second = view(x, rngs), view(x, rngs=rngs)
    assert first.dtype == BF16 and (first != second).any() and int(rngs.noise.count[...]) == 2


def test_what_is_shared_stays_shared(rng):
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
    table = model.table[...].astype(BF16)
    assert_same_bits(view(tokens), (table @ table.T + table.sum()).astype(F32))
    grads = nnx.grad(lambda model: jmpx.flax.with_policies(model, MIXED)(tokens).sum())(model)
    assert len(leaves(grads)) == 1 and all_float32(grads)


@pytest.mark.parametrize("lift", [nnx.remat, nnx.jit])
def test_transforms_within_the_model(rng, log, lift):
    class Lifted(nnx.Module):
        def __init__(self, rngs):
            self.block = Watched(4, rngs)
            self.last = Watched(4, rngs, "last")

        def __call__(self, x):
            return self.last(lift(lambda block, x: block(x))(self.block, x))

    model, x = Lifted(nnx.Rngs(0)), normal(rng, 3, 4)
    policy_map = f"{MIXED}; */block: full"

    def loss(model):
        return jmpx.flax.with_policies(model, policy_map)(x).mean()

    grads = nnx.grad(loss)(model)
    assert set(log) == {("w", "float32", "float32"), ("last", "bfloat16", "bfloat16")}
    assert all_float32(grads)


@pytest.mark.parametrize("rule", ["", "; Step: full", "; */layers: full"])
def test_a_scan_over_stacked_layers_keeps_its_carry(rng, log, rule):
    class Step(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.w = nnx.BatchNorm(4, rngs=rngs), Watched(4, rngs)

        def __call__(self, x):
            return x + self.w(self.norm(x))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda key: Step(nnx.Rngs(key)))
            self.layers = make(jax.random.split(rngs(), 3))

        def __call__(self, x):
            scan = nnx.scan(lambda x, f: f(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = scan(x, self.layers)
            LOG.append(x.dtype.name)
            return x

    model, x = Stack(nnx.Rngs(0)), normal(rng, 5, 4)
    y = jmpx.flax.with_policies(model, MIXED + rule)(x)
    inside = "float32" if rule else "bfloat16"
    assert set(log) == {("w", inside, inside), "bfloat16"} and y.dtype == F32
    mean = model.layers.norm.mean[...]
    assert mean.shape == (3, 4) and mean.dtype == F32 and (mean != 0).any()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_recurrent_cell_keeps_its_carry(rng, dtype):
    model = randomized(rng, nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0)))
    carry, x = 2 * (normal(rng, 2, 4).astype(dtype),), normal(rng, 2, 4)
    new, y = jmpx.flax.with_policies(model, "f32; LSTMCell: o=bf16")(carry, x)  # pyright: ignore[reportArgumentType]
    expected, h = model(tuple(c.astype(F32) for c in carry), x)  # pyright: ignore[reportArgumentType]
    assert_same_bits(new, tuple(c.astype(dtype) for c in expected))
    assert_same_bits(y, h.astype(BF16))


def test_it_promotes_nothing_itself(rng):
    class Strict(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.inner(x)))

    model, x = Strict(nnx.Rngs(0)), normal(rng, 5, 4)
    with jax.numpy_dtype_promotion("strict"):
        policy_map = f"{MIXED}; */head: full"
        nnx.grad(lambda model: jmpx.flax.with_policies(model, policy_map)(x).mean())(model)


def test_rules_that_matched_nothing():
    model = Net(nnx.Rngs(0))
    with warns_once(__file__, "'LayerNom: .*did you mean 'LayerNorm'"):
        jmpx.flax.with_policies(model, "c=bf16; LayerNom: full")
    with pytest.warns(UserWarning, match="'norn/.*did you mean 'norm'"):
        jmpx.flax.with_policies(model, "c=bf16; norn/*: full")


def test_a_list_is_not_called_and_takes_no_policy(rng, log):
    with pytest.warns(UserWarning, match="'\\*/blocks: .*matched no path"):
        view = jmpx.flax.with_policies(Deep(nnx.Rngs(0)), "c=bf16; */blocks: full")
    view(normal(rng, 2, 4))
    assert log[0] == ("0", "bfloat16", "bfloat16")


def test_bad_arguments():
    with pytest.raises(TypeError, match="Expected an nnx.Module, got a dict: "):
        jmpx.flax.with_policies({"w": jnp.ones(3)}, "bf16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Unknown dtype 'bf61'"):
        jmpx.flax.with_policies(Net(nnx.Rngs(0)), "c=bf61")
