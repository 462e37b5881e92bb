"""Arrays that a model of NNX makes inside, and the carries of its loops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32, LOG, MIXED, assert_same_bits, normal
from helpers.jaxprs import LOW, dots

import jmpx
import jmpx.flax

standard_promotion = pytest.mark.usefixtures("standard_promotion")


class Model(nnx.Module):
    """Calls a function with itself."""

    encoder: Any
    decoder: Any
    layer: Any
    head: Any

    def __init__(self, call, **parts):
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *args):
        return self.call(self, *args)


def linear(*sizes, **options):
    return nnx.Linear(*(sizes or (4, 4)), **options, rngs=nnx.Rngs(0))


class Square(nnx.Module):
    """Reads a parameter of its own."""

    def __init__(self, cast=False):
        self.weight = nnx.Param(jnp.eye(4) + 0.3)
        self.cast = cast

    def __call__(self, x, other=None):
        LOG.append(x.dtype.name)
        y = jnp.tanh(x @ self.weight[...])
        y = y if other is None else y + other
        return y.astype(x.dtype) if self.cast else y


class Weights(nnx.Module):
    """Keeps its parameters in a list."""

    def __init__(self):
        weights = [nnx.Param(jnp.eye(4)), nnx.Param(jnp.eye(4))]
        self.weights = nnx.List(weights) if hasattr(nnx, "List") else weights

    def __call__(self, x):
        return x @ self.weights[0][...] @ self.weights[1][...]


def noise(x):
    return jax.random.normal(jax.random.key(0), x.shape)


def image(x):
    return jnp.ones((2, 3, 3, 4))


def vae(model, x):
    mean = model.encoder(x)
    return model.decoder(mean + noise(mean))


def attend(model, x):
    return model.layer.attend(jnp.ones(4))


attention = functools.partial(nnx.MultiHeadAttention, 2, 4, decode=False, rngs=nnx.Rngs(0))
MODELS = {
    "vae": lambda: Model(vae, encoder=linear(), decoder=linear()),
    "one-hot": lambda: Model(lambda m, x: m.layer(jax.nn.one_hot(2, 4)), layer=linear()),
    "NumPy": lambda: Model(lambda m, x: m.layer(np.ones((2, 4))), layer=linear()),
    "float32 norm": lambda: Model(
        lambda m, x: m.layer(m.norm(x)),
        norm=nnx.LayerNorm(4, dtype=F32, rngs=nnx.Rngs(0)),
        layer=linear(),
    ),
    "own": lambda: Model(lambda m, x: m.layer(noise(x)), layer=Square()),
    "list": lambda: Model(lambda m, x: m.layer(noise(x)), layer=Weights()),
    "attention": lambda: Model(lambda m, x: m.layer(noise(x)), layer=attention()),
    "low rank": lambda: Model(
        lambda m, x: m.layer(noise(x)),
        layer=nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(0)),
    ),
    "convolution": lambda: Model(
        lambda m, x: m.layer(m.conv(image(x))),
        conv=nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0)),
        layer=linear(),
    ),
    "attend": lambda: Model(attend, layer=nnx.Embed(3, 4, rngs=nnx.Rngs(0))),
    "remat": lambda: Model(
        lambda m, x: nnx.remat(lambda layer, x: layer(x))(m.layer, noise(x)), layer=linear()
    ),
    "jit": lambda: Model(
        lambda m, x: nnx.jit(lambda layer, x: layer(x))(m.layer, noise(x)), layer=linear()
    ),
}


def traced(model, policy_map, *args):
    """The operands of the products of a view and of its gradient."""
    graph, state = nnx.split(model)

    def loss(state):
        y = jmpx.flax.with_policies(nnx.merge(graph, state), policy_map)(*args)
        return sum(leaf.astype(F32).sum() for leaf in jax.tree.leaves(y))

    return set(dots(jax.grad(loss, allow_int=True), state))


@standard_promotion
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_inside_does_not_widen_what_follows(rng, name):
    products = traced(MODELS[name](), MIXED, normal(rng, 2, 4))
    # JAX sums the products of attention in float32, so that their cotangents are in it.
    assert products - {"float32xbfloat16"} == {LOW}
    assert len(products) == 1 or name == "attention"


@standard_promotion
def test_the_numbers_are_those_of_a_cast_by_hand(rng):
    model, x = MODELS["vae"](), normal(rng, 3, 4)
    y = jmpx.flax.with_policies(model, MIXED)(x)
    for layer in (model.encoder, model.decoder):
        nnx.update(layer, jax.tree.map(lambda a: a.astype(BF16), nnx.state(layer)))
    mean = model.encoder(x.astype(BF16))
    z = mean.astype(F32) + noise(mean)
    assert_same_bits(y, model.decoder(z.astype(BF16)).astype(F32))


@standard_promotion
def test_islands_and_states_keep_their_dtypes(rng, log):
    class Stateful(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.eye(4))
            self.sum = nnx.Variable(jnp.full(4, 1 + 2**-20, F32))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x, state, rngs):
            LOG.append((x.dtype.name, state.dtype.name, rngs.noise.count.dtype.name))
            self.sum[...] = self.sum[...] + 0 * self.norm(x @ self.weight[...]).sum(0)
            return x

    state, rngs = nnx.Variable(jnp.ones(3)), nnx.Rngs(noise=0)
    model = Model(
        lambda m, x: m.layer(m.island(noise(x)), state, rngs), layer=Stateful(), island=Square()
    )
    view = jmpx.flax.with_policies(model, f"{MIXED}; Square: c=f32,o=f32")
    view(normal(rng, 2, 4))
    assert log == ["float32", ("bfloat16", "float32", "uint32")]
    assert model.layer.sum.dtype == model.layer.norm.mean.dtype == F32
    assert (model.layer.sum[...] == 1 + 2**-20).all()


@standard_promotion
def test_a_state_that_a_call_replaces_keeps_its_dtype(rng):
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

    def scanned(model, x):
        axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
        scan = nnx.scan(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0)
        return scan(model.layer, jnp.ones((3, 2, 4)))

    for call in (lambda m, x: m.layer(noise(x)), scanned):
        model = Model(call, layer=Last())
        jmpx.flax.with_policies(model, MIXED)(normal(rng, 2, 4))
        assert model.layer.last.dtype == F32 and model.layer.last[...].any()


def test_without_a_policy_around_nothing_is_cast(rng, log):
    model = Model(lambda m, x: m.second(m.first(x)), first=Square(), second=linear())
    with jmpx.push_policy(nnx.Linear, "c=bf16"):
        assert jmpx.flax.with_policies(model)(normal(rng, 2, 4)).dtype == BF16
    assert log == ["float32"]


# Loops

LOOPS = {
    "scan": lambda f, h: jax.lax.scan(lambda h, _: (f(h), None), h, None, length=3)[0],
    "fori": lambda f, h: jax.lax.fori_loop(0, 3, lambda _, h: f(h), h),
    "while": lambda f, h: jax.lax.while_loop(lambda h: h.sum() > 1e9, f, h),
    "cond": lambda f, h: jax.lax.cond(True, f, lambda h: h, h),
    "switch": lambda f, h: jax.lax.switch(1, [lambda h: h, f], h),
    "checkpoint": lambda f, h: jax.lax.scan(
        jax.checkpoint(lambda h, _: (f(h), None)), h, None, length=2
    )[0],
}
NNX_LOOPS = {
    "scan": lambda m, h: nnx.scan(
        lambda m, h: m(h), in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=3
    )(m, h),
    "fori": lambda m, h: nnx.fori_loop(0, 3, lambda _, c: (c[0], c[0](c[1])), (m, h))[1],
    "while": lambda m, h: nnx.while_loop(
        lambda c: c[1].sum() > 1e9, lambda c: (c[0], c[0](c[1])), (m, h)
    )[1],
    "cond": lambda m, h: nnx.cond(True, lambda m, h: m(h), lambda m, h: h, m, h),
    "switch": lambda m, h: nnx.switch(1, [lambda m, h: h, lambda m, h: m(h)], m, h),
}


@standard_promotion
@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [(MIXED, F32), (MIXED, BF16), ("c=f16", F32), ("c=f16; Square: c=bf16,o=f32", F32)],
)
@pytest.mark.parametrize("loop", [*LOOPS, *(f"nnx.{name}" for name in NNX_LOOPS)])
def test_loops_and_branches_keep_the_dtype_of_a_carry(loop, policy, dtype):
    def call(model, x):
        h = jnp.ones((2, 4), dtype)
        if loop.startswith("nnx."):
            h = NNX_LOOPS[loop.removeprefix("nnx.")](model.layer, h)
        else:
            h = LOOPS[loop](model.layer, h)
        LOG.append(h.dtype)
        return h

    model = Model(call, layer=Square())
    products = dots(lambda x: jmpx.flax.with_policies(nnx.clone(model), policy)(x), jnp.ones(4))
    assert LOG[-1] == dtype and "float32" not in "".join(products)


@standard_promotion
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_stacked_layers_beside_a_float32_argument(rng, dtype, cast):
    """A mask or a cache in float32 does not widen a carry of another shape."""
    make = nnx.vmap(lambda _: Square(cast))
    wide = jnp.ones(4)

    def call(model, x):
        scan = nnx.scan(lambda m, h: m(h, wide), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        h = scan(model.layers, jnp.ones((2, 4), dtype))
        assert h.dtype == dtype
        return h

    model = Model(call, layers=make(jnp.arange(3)))
    assert traced(model, MIXED, normal(rng, 2, 4)) == {LOW}


# Recurrent cells

CELLS = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")


def cell(name):
    return getattr(nnx, name)(4, 4, dtype=None, rngs=nnx.Rngs(0))  # that of `SimpleCell` is float32


def decode(model, x):
    """A decoder that reads its own predictions, with a carry that is made inside."""
    carry = model.cell.initialize_carry(x.shape, nnx.Rngs(0))

    def step(state, _):
        carry, last = state
        carry, y = model.cell(carry, last)
        y = model.head(y)
        return (carry, y), y

    first = jnp.zeros(x.shape)
    (carry, _), ys = jax.lax.scan(step, (carry, first), None, length=3)
    LOG.append({leaf.dtype.name for leaf in jax.tree.leaves(carry)})
    return ys


def reset(model, x):
    """Episodes end within a sequence, as in reinforcement learning."""
    carry = model.cell.initialize_carry(x.shape, nnx.Rngs(0))

    def step(carry, x):
        carry = jax.tree.map(lambda h: jnp.where(x[:, :1] > 0, jnp.zeros(h.shape), h), carry)
        carry, y = model.cell(carry, x)
        return carry, model.head(y)

    return jax.lax.scan(step, carry, jnp.stack(3 * [x]))[1]


def unrolled(model, x):
    carry = model.cell.initialize_carry(x.shape, nnx.Rngs(0))
    for _ in range(3):
        carry, y = model.cell(carry=carry, inputs=x)
    return model.head(y)


def layer(model, x):
    return model.head(nnx.RNN(model.cell)(jnp.stack(3 * [x], 1)))


def ragged(model, x):
    rnn = nnx.RNN(model.cell, return_carry=True, reverse=True, keep_order=True)
    return rnn(jnp.stack(3 * [x], 1), seq_lengths=jnp.array([2, 3]))[1]


def both_ways(model, x):
    rnn = nnx.Bidirectional(nnx.RNN(model.cell), nnx.RNN(model.cell, time_major=False))
    return rnn(jnp.stack(3 * [x], 1))


@standard_promotion
@pytest.mark.sampled(36)
@pytest.mark.parametrize("policy", ["c=bf16,o=f32", "c=f16", "c=bf16; {}: c=bf16,o=f32"])
@pytest.mark.parametrize("run", [decode, reset, unrolled, layer, ragged, both_ways])
@pytest.mark.parametrize("name", CELLS)
def test_cells_multiply_in_16_bits_in_all_loops(rng, run, name, policy):
    model, x = Model(run, cell=cell(name), head=linear()), normal(rng, 2, 4)
    policy, expected = policy.format(name), model(x)
    low = jmpx.get_policy(policy.partition(";")[0]).compute_dtype
    assert traced(model, policy, x) == {f"{jnp.dtype(low)}x{jnp.dtype(low)}"}
    y = jmpx.flax.with_policies(model, policy)(x)
    np.testing.assert_allclose(y.astype(F32), expected, atol=0.05)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_cell_inside_returns_its_carry_as_it_came(rng, name, dtype):
    """The same numbers as of a view of the cell alone."""
    model, x = cell(name), normal(rng, 2, 4)
    shape = jax.tree.map(jnp.shape, model.initialize_carry(x.shape, nnx.Rngs(0)))
    carry = jax.tree.map(lambda s: normal(rng, *s), shape, is_leaf=lambda s: s == x.shape)
    carry = jmpx.cast_tree(carry, dtype)
    around = Model(lambda m, x: m.cell(carry, x), cell=model)
    (new, y), alone = (
        jmpx.flax.with_policies(around, "c=bf16")(x),
        jmpx.flax.with_policies(model, "c=bf16")(carry, x),
    )
    assert_same_bits((jmpx.cast_tree(alone[0], BF16), alone[1]), (new, y))
    assert {leaf.dtype for leaf in jax.tree.leaves(alone[0])} == {dtype}


@standard_promotion
def test_a_rule_mends_a_users_own_loop(rng):
    model, x = Model(lambda m, x: LOOPS["scan"](m.layer, x), layer=Square()), normal(rng, 2, 4)
    policy = f"{MIXED}; Square: c=f16,o=f32"
    with pytest.raises(TypeError, match="equal types"):
        jmpx.flax.with_policies(model, policy)(x)
    jmpx.flax.with_policies(model, f"{policy}; Square: c=f16,o=bf16")(x)


@pytest.mark.thorough
@standard_promotion
@pytest.mark.parametrize(("rule", "dtype"), [("", BF16), ("; MultiHeadAttention: full", F32)])
def test_attention_decodes_with_a_cache_in_its_compute_dtype(rng, rule, dtype):
    """Flax writes no other dtype to it."""
    attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((2, 3, 4), dtype=dtype)
    model, x = Model(lambda m, x: m.head(m.attention(x)), attention=attention, head=linear()), []
    for _ in range(3):
        x.append(normal(rng, 2, 1, 4))
        y = jmpx.flax.with_policies(model, MIXED + rule)(x[-1])
    assert attention.cached_key is not None and attention.cached_key.dtype == dtype
    full = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    expected = model.head(full(x[-1], jnp.concatenate(x, 1)))
    np.testing.assert_allclose(y, expected, atol=0.03)
