"""Layers of NNX with a `dtype`: what rules set, and what they compute in without a rule."""

import functools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, normal, warns_once
from helpers.jaxprs import dots

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")

X, IMAGE, TOKENS = (4, 6), (2, 5, 5, 6), (3,)
CELLS = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")


def recurrent(cell, **options):
    return nnx.RNN(getattr(nnx, cell)(6, 6, **options))


# Makes a layer with a dtype, and names the shape of its input.
LAYERS = {
    "Linear": (functools.partial(nnx.Linear, 6, 3), X),
    "LinearGeneral": (functools.partial(nnx.LinearGeneral, 6, (2, 3)), X),
    "Einsum": (functools.partial(nnx.Einsum, "ab,bc->ac", (6, 3), (3,)), X),
    "Conv": (functools.partial(nnx.Conv, 6, 3, (3, 3)), IMAGE),
    "ConvTranspose": (functools.partial(nnx.ConvTranspose, 6, 3, (3, 3)), IMAGE),
    "Embed": (functools.partial(nnx.Embed, 5, 6), TOKENS),
    "LoRA": (functools.partial(nnx.LoRA, 6, 2, 3), X),
    "BatchNorm": (functools.partial(nnx.BatchNorm, 6, use_running_average=True), X),
    "LayerNorm": (functools.partial(nnx.LayerNorm, 6), X),
    "RMSNorm": (functools.partial(nnx.RMSNorm, 6), X),
    "GroupNorm": (functools.partial(nnx.GroupNorm, 6, num_groups=2), X),
    "InstanceNorm": (functools.partial(nnx.InstanceNorm, 6), IMAGE),
    "MultiHeadAttention": (
        functools.partial(nnx.MultiHeadAttention, 2, 6, decode=False, normalize_qk=True),
        X,
    ),
    **{cell: (functools.partial(recurrent, cell), X) for cell in CELLS},
}


def make(layer, dtype):
    model = LAYERS[layer][0](dtype=dtype, rngs=nnx.Rngs(0))
    params, fresh = nnx.state(model, nnx.Param), np.random.default_rng(0)
    nnx.update(model, jax.tree.map(lambda leaf: normal(fresh, *leaf.shape), params))
    return model


def given(rng, layer):
    shape = LAYERS[layer][1]
    return jnp.arange(shape[0]) if shape == TOKENS else normal(rng, *shape)


def by_hand(layer, x, dtype, field):
    """The result of a layer that was made with a field, its parameters and inputs cast."""
    model, x = make(layer, field), jmpx.cast_tree(x, dtype)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    if layer not in CELLS:
        return model(x).astype(F32)
    carry = model.cell.initialize_carry(x[0].shape, nnx.Rngs(0))
    carry, ys = jmpx.cast_tree(carry, dtype), []
    for step in x:
        carry, y = model.cell(carry, step)
        ys.append(y)
    return jnp.stack(ys).astype(F32)


def assert_close(layer, a, b):
    """Holds two results to be the same; in a compiled loop XLA leaves some of the rounding out."""
    assert a.dtype == b.dtype
    if layer in CELLS:
        np.testing.assert_allclose(a, b, atol=0.04)
    else:
        assert_same_bits(a, b)


def quiet_view(model, policy_map):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jmpx.flax.with_policies(model, policy_map)


def operands(model, policy_map, x):
    """The dtypes of the operands of all products in the view."""
    found = dots(lambda x: quiet_view(nnx.clone(model), policy_map)(x), x)
    return {dtype for product in found for dtype in product.split("x")}


# The field, the rule, and the dtype in which it computes.
SET = [(F32, "c=bf16", BF16), (F16, "c=bf16", BF16), (BF16, "full", F32), (None, "c=f16", F16)]


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("field", "rule", "dtype"), SET)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_rule_sets_the_field(rng, layer, field, rule, dtype):
    model, x = make(layer, field), given(rng, layer)
    graph, policy_map = nnx.graphdef(model), f"f32; {layer}: {rule}"
    y = jmpx.flax.with_policies(model, policy_map)(x)
    assert_close(layer, y, by_hand(layer, x, dtype, field and dtype))
    assert operands(model, policy_map, x) <= {dtype.name}
    assert nnx.graphdef(model) == graph


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_rule_the_field_is_the_compute_dtype(rng, layer):
    model, x = make(layer, F16), given(rng, layer)
    y = quiet_view(model, MIXED)(x)
    has_no_parameters = layer in (*CELLS, "MultiHeadAttention")  # so its input is rounded before
    x = jmpx.cast_tree(x, BF16) if has_no_parameters else x
    assert_close(layer, y, by_hand(layer, x, F16, F16))
    assert operands(model, MIXED, x) <= {"float16"}


class Block(nnx.Module):
    """Hands its dtype to two layers, and gives a third one another."""

    def __init__(self, dtype, rngs):
        self.dtype = dtype
        self.first = nnx.Linear(6, 6, dtype=dtype, rngs=rngs)
        self.other = nnx.Linear(6, 6, dtype=F16, rngs=rngs)
        self.open = nnx.Linear(6, 6, rngs=rngs)
        self.count = types.SimpleNamespace(dtype=dtype)  # no module

    def __call__(self, x):
        LOG.append((self.dtype, self.first.dtype, self.other.dtype, self.open.dtype))
        return self.open(self.other(self.first(x)))


@pytest.mark.parametrize(
    ("written", "expected"),
    [(jnp.float32, jnp.bfloat16), (F32, BF16), ("float32", "bfloat16")],
)
def test_layers_inside_follow_if_the_field_was_handed_to_them(rng, log, written, expected):
    model, x = Block(written, nnx.Rngs(0)), normal(rng, 2, 6)
    policy_map = f"{MIXED}; Block: c=bf16; */open: c=f32"
    found = dots(lambda x: jmpx.flax.with_policies(model, policy_map)(x), x)
    products = [tuple(map(np.dtype, product.split("x"))) for product in found]
    assert products == [2 * (BF16,), 2 * (F16,), 2 * (F32,)]
    assert log == [(expected, expected, F16, None)]
    assert model.dtype is model.first.dtype is written


def test_the_policy_of_a_class_sets_the_field(rng):
    model = Block(jnp.float32, nnx.Rngs(0))
    with jmpx.push_policy(nnx.Linear, "c=bf16"):
        view = jmpx.flax.with_policies(model)
    assert [layer.dtype for layer in (view, view.first, view.other)] == [F32, BF16, BF16]


class Integers(nnx.Module):
    def __init__(self):
        self.dtype = jnp.int32

    def __call__(self, x):
        return jnp.arange(3, dtype=self.dtype), x


def test_other_fields_stay(rng):
    numbers, _ = jmpx.flax.with_policies(Integers(), f"{MIXED}; Integers: c=bf16")(F32.type(1))
    assert numbers.dtype == jnp.int32


def test_a_warning_says_where_fields_keep_most_parameters():
    model = Block(jnp.float32, nnx.Rngs(0))
    with warns_once(__file__, "2 of 3 layers .*'Linear: compute=bfloat16'"):
        jmpx.flax.with_policies(model, MIXED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = jmpx.flax.with_policies(model, f"{MIXED}; Linear: compute=bfloat16")
    assert view.first.dtype == view.first.kernel.dtype == BF16


def test_gradients_through_a_field_that_is_set(rng):
    model, x = Block(jnp.float32, nnx.Rngs(0)), normal(rng, 2, 6)

    def loss(model, x):
        return (jmpx.flax.with_policies(model, f"{MIXED}; Linear: c=bf16")(x) ** 2).mean()

    for grad in (nnx.grad(loss), nnx.jit(nnx.grad(loss))):
        grads = jax.tree.leaves(grad(model, x))
        assert {leaf.dtype for leaf in grads} == {F32} and len(grads) == 6
