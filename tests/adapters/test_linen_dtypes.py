"""Policy maps over Linen's `dtype` fields, and over arrays that are made inside of a model."""

# Flax types the result of `apply` as a union with the state that it updated.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, MIXED, assert_same_bits, dtypes, normal, warns_once
from helpers.jaxprs import equations_of
from helpers.linen import cast, init

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")

F16 = jnp.float16
LOW = {"bf16": jnp.bfloat16, "f16": F16}


def products(fn, *args):
    """Returns the dtypes in which products run, by the number of columns of the second operand."""
    eqns = [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name == "dot_general"]
    return {eqn.invars[1].aval.shape[-1]: eqn.invars[0].aval.dtype.name for eqn in eqns}


def under(policy_map, model, x, **kwargs):
    def run(variables):
        with jmpx.flax.policies(policy_map):
            return model.apply(variables, x, **kwargs)

    return run


# A rule sets the field


class Block(nn.Module):
    """A block as public code writes it; a layer of it has another field, and one has none."""

    dtype: Any = jnp.float32
    other: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.Dense(6, dtype=self.other)(x)
        return nn.Dense(7)(x)


class SetupBlock(nn.Module):
    dtype: Any = jnp.float32
    other: Any = jnp.float32

    def setup(self):
        self.one = nn.Dense(5, dtype=self.dtype)
        self.norm = nn.LayerNorm(dtype=self.dtype)
        self.two = nn.Dense(6, dtype=self.other)
        self.three = nn.Dense(7)
        self.kind = jnp.dtype(self.dtype).name

    def __call__(self, x):
        assert self.kind == jnp.dtype(self.dtype).name
        return self.three(self.two(self.norm(self.one(x))))


BLOCKS = pytest.mark.parametrize("block", [Block, SetupBlock], ids=["compact", "setup"])


@pytest.mark.sampled(4)
@BLOCKS
@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("other", [F32, F16, BF16])
def test_a_rule_sets_the_field_and_those_that_were_handed_down(rng, block, name, other):
    model, x = block(other=other), normal(rng, 3, 4)
    variables, low = init(rng, model, x), jnp.dtype(LOW[name]).name
    rule = f"f32; {block.__name__}: c={name}"
    # The second layer follows the rule only if its field has the value that was handed down.
    assert products(under(rule, model, x), variables) == {
        5: low,
        6: low if other in (F32, LOW[name]) else jnp.dtype(other).name,
        7: low,
    }
    assert (model.dtype, model.other) == (F32, other)
    y, by_hand = under(rule, model, x)(variables), block(LOW[name], LOW[name])
    if other in (F32, LOW[name]):
        expected = by_hand.apply(cast(variables, LOW[name]), x.astype(LOW[name]))
        assert_same_bits(y, expected.astype(F32))


@BLOCKS
def test_float32_rules_over_16_bit_fields(rng, block):
    model, x = block(BF16, BF16), normal(rng, 3, 4)
    variables = init(rng, model, x)
    rule = f"c=bf16; {block.__name__}: full"
    assert set(products(under(rule, model, x), variables).values()) == {"float32"}
    expected = block().apply(variables, x)
    assert_same_bits(under(rule, model, x)(variables), expected.astype(BF16))


@pytest.mark.parametrize("value", ["float32", np.dtype("float32"), jnp.float32, np.float32])
def test_the_field_is_of_the_kind_that_the_user_wrote(rng, value):
    seen = []

    class Layer(nn.Module):
        dtype: Any

        def __call__(self, x):
            seen.append(self.dtype)
            raise ZeroDivisionError

    model = Layer(value)
    with pytest.raises(ZeroDivisionError), jmpx.flax.policies("f32; Layer: bf16"):
        bound = model.bind({})
        bound(normal(rng, 3))
    kind = str if isinstance(value, str) else np.dtype if isinstance(value, np.dtype) else type
    assert seen == [BF16 if kind is not str else "bfloat16"]
    assert isinstance(seen[0], kind) and model.dtype is bound.dtype is value  # put back


@pytest.mark.parametrize("value", [None, jnp.int32, "text"])
def test_other_fields_stay(rng, value):
    class Layer(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x):
            assert self.dtype is value
            return nn.Dense(4)(x)

    model, x = Layer(value), normal(rng, 3, 4)
    variables = init(rng, model, x)
    assert products(under("f32; Layer: bf16", model, x), variables) == {4: "bfloat16"}


LIFTS = {
    "jit": nn.jit,
    "remat": nn.remat,
    "vmap": lambda cls: nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
    "remat of jit": lambda cls: nn.remat(nn.jit(cls)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LIFTS)
@BLOCKS
def test_fields_of_lifted_modules(rng, block, name):
    model, x = LIFTS[name](block)(), normal(rng, 3, 4)
    variables = init(rng, model, x)
    run = under(f"f32; {block.__name__}: bf16", model, x)
    assert set(products(run, variables).values()) == {"bfloat16"}
    full = products(lambda v: model.apply(v, x), variables)  # nn.jit has not kept the trace
    assert set(full.values()) == {"float32"}


def test_policies_of_classes_set_the_field_too(rng):
    model, x = nn.Dense(4, dtype=F32), normal(rng, 3, 4)
    variables = init(rng, model, x)
    with jmpx.push_policy(nn.Dense, "c=bf16"):
        assert products(under(None, model, x), variables) == {4: "bfloat16"}


@pytest.mark.thorough
def test_attention_and_cells_under_a_rule(rng):
    x = normal(rng, 2, 5, 4)
    for model in (nn.MultiHeadDotProductAttention(2, dtype=F32), nn.RNN(nn.LSTMCell(4, dtype=F32))):
        variables = init(rng, model, x)
        rules = "f32; MultiHeadDotProductAttention?: c=bf16; LSTMCell?: bf16"
        assert set(products(under(rules, model, x), variables).values()) == {"bfloat16"}


# Without a rule the field is the compute dtype


@pytest.mark.sampled(3)
@pytest.mark.parametrize("field", [F32, BF16, F16])
@pytest.mark.parametrize("compute", ["bf16", "f16"])
@pytest.mark.filterwarnings("ignore:The dtype field of")
def test_parameters_are_cast_once_to_the_field(rng, field, compute):
    model, x = nn.Dense(3, dtype=field), normal(rng, 3, 4)
    variables = init(rng, model, x)
    y = under(f"c={compute},o=f32", model, x)(variables)
    expected = model.apply(cast(variables, field), x.astype(field))  # no other rounding before
    assert_same_bits(y, expected.astype(F32))


def test_a_warning_where_fields_keep_most_parameters(rng):
    model, x = Block(), normal(rng, 3, 4)
    variables = init(rng, model, x)
    with warns_once(
        __file__, "3 of 4 layers.*'Dense: compute=bfloat16; LayerNorm: compute=bfloat16'"
    ):
        with jmpx.flax.policies(MIXED):
            model.apply(variables, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        under(f"{MIXED}; Dense: compute=bfloat16; LayerNorm: compute=bfloat16", model, x)(variables)


# Arrays that are made inside


class Noisy(nn.Module):
    """Noise and one-hots in float32 before each layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5)(x + jax.random.normal(self.make_rng("noise"), x.shape, F32))
        x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Conv(6, (1,))(nn.LayerNorm()(nn.Dense(8)(x)))
        y = nn.Embed(7, 9)(jnp.arange(3)) + nn.DenseGeneral(9)(jax.nn.one_hot(jnp.arange(3), 4))
        return nn.Dense(10)(x), nn.Dense(11)(y)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOW)
def test_what_is_made_inside_does_not_widen_the_layers(rng, name):
    model, x, low = Noisy(), normal(rng, 3, 4), jnp.dtype(LOW[name]).name
    rngs = {"params": jax.random.key(0), "noise": jax.random.key(1)}
    variables = model.init(rngs, x)
    apply = {"rngs": {"noise": jax.random.key(2)}, "mutable": ["batch_stats"]}
    run = under(f"c={name},o=f32", model, x, **apply)
    assert set(products(run, variables).values()) == {low}
    (ys, updates), (full, _) = run(variables), model.apply(variables, x, **apply)
    assert set(dtypes(ys)) == set(dtypes(updates)) == {"float32"}
    for y, expected in zip(ys, full, strict=True):
        np.testing.assert_allclose(y, expected, atol=0.1)
    with jmpx.flax.policies(f"c={name}"):
        assert_same_bits(model.init(rngs, x), variables)  # dtypes and numbers as before


class Wide(nn.Module):
    """A layer that reads a parameter itself, and notes the dtypes of its inputs."""

    @nn.compact
    def __call__(self, x, y=None, *, index=None):
        w = self.param("w", nn.initializers.ones, (4,))
        self.sow("seen", "dtypes", jnp.zeros(0, x.dtype))
        return x * w if index is None else (x * w)[index]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", [jnp.ones, np.ones], ids=["jax", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floating_inputs_alone_are_cast(made, dtype):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = Wide()(made((3, 4), dtype), "text", index=jnp.arange(2))
            return y, x

    with jmpx.flax.policies("c=bf16"):
        variables = {"params": Net().init(jax.random.key(0), jnp.arange(3))["params"]}
        (y, x), seen = Net().apply(variables, jnp.arange(3), mutable=["seen"])
    assert (y.dtype, x.dtype) == (BF16, jnp.int32) and y.shape == (2, 4)
    assert set(dtypes(seen)) == {"bfloat16"}


def test_rules_and_parents_that_own_nothing_keep_theirs(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            noise = jnp.ones(x.shape, F32)
            island = nn.Dense(4, name="island")(x + noise)
            assert self.is_initializing() or (island.dtype, noise.dtype) == (BF16, F32)
            return nn.Dense(5, name="layer")(noise)

    x = normal(rng, 3, 4)
    run = under("c=bf16; */island: full", Net(), x)
    assert products(run, init(rng, Net(), x)) == {4: "float32", 5: "bfloat16"}


@pytest.mark.thorough
@pytest.mark.parametrize("made_in_context", [False, True])
def test_a_cache_keeps_its_dtype(rng, made_in_context):
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(x + jnp.ones(x.shape, F32))
            return nn.MultiHeadDotProductAttention(2, decode=True)(x)

    model, x = Decoder(), normal(rng, 2, 5, 4)
    variables = model.init(jax.random.key(0), x)
    if made_in_context:
        with jmpx.flax.policies("c=bf16"):
            variables = model.init(jax.random.key(0), x)
    with jmpx.flax.policies("c=bf16"):
        y, state = model.apply(variables, x[:, :1], mutable=["cache"])
    floats = {name for name in dtypes(state) if "float" in name}
    assert y.dtype == BF16 and floats == {"bfloat16" if made_in_context else "float32"}
