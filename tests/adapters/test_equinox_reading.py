"""Views of Equinox models: calls that read parameters cast what is made inside of the model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, assert_same_bits, enable_x64, normal
from helpers.jaxprs import dots

import jmpx
from jmpx.equinox import with_policies

SIZE = 4


class Cell(eqx.Module):
    """A cell that a user wrote."""

    weight: jax.Array

    def __call__(self, x, hidden):
        return jnp.tanh(jnp.stack([x, hidden])[1] * 0.5 + self.weight @ (x + hidden))


class Model(eqx.Module):
    """Calls two layers as `form` says; the second one gets an array that is made inside."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    cell: Cell
    form: Any = eqx.field(static=True)

    def __init__(self, form, key):
        self.first, self.second = (eqx.nn.Linear(SIZE, SIZE, key=k) for k in jax.random.split(key))
        self.cell = Cell(self.second.weight)
        self.form = form

    def __call__(self, x):
        made = jnp.sin(jnp.arange(1.0, SIZE + 1))  # float32, as noise is
        return self.form(self, self.first(x), made)


def scanned(model, x, made):
    step = lambda carry, _: (model.second(carry), None)  # noqa: E731
    return jax.lax.scan(step, made, None, length=2)[0]


def scanned_cell(model, x, made):
    step = lambda carry, x: (model.cell(x, carry), None)  # noqa: E731
    return jax.lax.scan(step, made, jnp.stack([made, made]))[0]


def looped(model, x, made):
    return jax.lax.fori_loop(0, 2, lambda i, carry: model.second(carry), made)


def while_looped(model, x, made):
    step = lambda carry: (carry[0] + 1, model.second(carry[1]))  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0] < 2, step, (0, made))[1]


def branched(model, x, made):
    return jax.lax.cond(x[0] > 0, lambda made: model.second(made), lambda made: made, made)


def switched(model, x, made):
    return jax.lax.switch(1, [lambda: made, lambda: model.second(made)])


def in_a_loop_and_a_jit(model, x, made):
    step = lambda carry, _: (eqx.filter_jit(model.second)(carry), None)  # noqa: E731
    return jax.lax.scan(step, made, None, length=2)[0]


def jitted_in_a_loop_and_outside(model, x, made):
    layer = eqx.filter_jit(model.second)
    layer(made)  # JAX keeps what it has traced
    return jax.lax.scan(lambda carry, _: (layer(carry), None), made, None, length=2)[0]


def checkpointed_in_a_loop(model, x, made):
    step = lambda carry, _: (eqx.filter_checkpoint(model.second)(carry), None)  # noqa: E731
    return jax.lax.scan(step, made, None, length=2)[0]


def pulled_back(model, x, made):
    result, pull = jax.vjp(model.second, made)
    return pull(jnp.ones(SIZE))[0] + result  # a cotangent in float32


FORMS = {
    "plain": lambda model, x, made: model.second(made),
    "vmap": lambda model, x, made: jax.vmap(model.second)(made[None])[0],
    "filter_vmap": lambda model, x, made: eqx.filter_vmap(model.second)(made[None])[0],
    "checkpoint": lambda model, x, made: eqx.filter_checkpoint(model.second)(made),
    "keyword": lambda model, x, made: model.cell(x=made, hidden=made),
    "numpy": lambda model, x, made: model.second(np.ones(SIZE, F32)),
    "map": lambda model, x, made: jax.lax.map(model.second, made[None])[0],
    "scan": scanned,
    "cell": scanned_cell,
    "fori_loop": looped,
    "while_loop": while_looped,
    "cond": branched,
    "switch": switched,
    "jit in a scan": in_a_loop_and_a_jit,
    "jit": jitted_in_a_loop_and_outside,
    "checkpoint in a scan": checkpointed_in_a_loop,
    "vjp": pulled_back,
}
LOOPS = list(FORMS)[6:]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_made_inside_is_multiplied_in_16_bits(form, dtype, key, rng):
    model, x = Model(FORMS[form], key), normal(rng, SIZE)

    def forward(model, x):
        return with_policies(model, f"c={dtype.name},o=f32")(x)

    assert set(dots(forward, model, x)) == {f"{dtype.name}x{dtype.name}"}
    np.testing.assert_allclose(forward(model, x), model(x), atol=0.05)
    if form == "while_loop":
        return  # JAX cannot differentiate it backward
    grads, expected = (
        eqx.filter_grad(lambda model, f=f: jnp.sum(f(model, x) ** 2))(model)
        for f in (forward, lambda model, x: model(x))
    )
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert a.dtype == F32
        np.testing.assert_allclose(a, b, atol=0.2)


@pytest.mark.parametrize("form", LOOPS)
def test_loops_keep_the_dtype_of_a_carry(form, key, rng):
    seen = []

    class Noting(Model):
        def __call__(self, x):
            result = super().__call__(x)
            seen.append(result.dtype)
            return result

    jax.eval_shape(with_policies(Noting(FORMS[form], key), "c=bf16"), normal(rng, SIZE))  # pyright: ignore[reportCallIssue]
    assert seen == [F32]


def test_rules_go_before_and_states_pass(key, rng):
    x, made = normal(rng, SIZE), []

    class Noted(eqx.nn.Linear):
        def __call__(self, x, *, key=None):
            made.append(x.dtype)
            return super().__call__(x, key=key)

    def forms(model, x, wide):
        return model.first(wide), model.second(wide)

    model = Model(forms, key)
    layers = [Noted(SIZE, SIZE, key=key) for _ in range(2)]  # pyright: ignore[reportCallIssue]
    model = eqx.tree_at(lambda model: (model.first, model.second), model, layers)
    first, second = with_policies(model, "c=bf16; */second: full")(x)
    assert made == [BF16, BF16, F32] and first.dtype == second.dtype == BF16


@pytest.mark.parametrize("loop", [False, True])
def test_a_part_of_a_view_is_called_alone(loop, key, rng):
    model, x = Model(FORMS["plain"], key), normal(rng, SIZE)
    part = with_policies(model, "c=bf16").second
    if loop:
        step = lambda carry, _: (part(carry), None)  # noqa: E731
        result = jax.lax.scan(step, x, None, length=2)[0]
        assert result.dtype == F32
    else:
        assert part(x).dtype == BF16
        seen = []

        def loss(model):
            seen.append(with_policies(model, "c=bf16").second(x).dtype)
            return jnp.sum(model.second.weight)

        eqx.filter_jit(eqx.filter_grad(loss))(model)
        assert seen == [BF16]
    assert dots(part, x) == ["bfloat16xbfloat16"]


def test_what_one_method_hands_to_another_is_not_cast(key):
    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.inner(self.weight.astype(F32) * x.astype(F32))

        def inner(self, x):
            return x

    class Outer(eqx.Module):
        layer: Layer

        def __call__(self, x):
            return self.layer(x), self.layer.inner(x)

    results = with_policies(Outer(Layer(jnp.ones(2))), "c=bf16")
    seen = jax.eval_shape(lambda x: results.layer(x), jnp.ones(2))
    assert seen.dtype == F32


def test_in_loops_the_widest_argument_of_its_shape_counts(key, rng):
    class Conditioned(eqx.Module):
        scale: jax.Array

        def __call__(self, x, time):
            assert time.dtype == x.dtype  # the float32 one is cast
            return (x * self.scale * time).astype(x.dtype)

    def conditioned(model, x, made):
        step = lambda x, time: (model.cell(x, time), None)  # noqa: E731
        return jax.lax.scan(step, x, jnp.arange(3, dtype=F32))[0]

    model = Model(conditioned, key)
    model = eqx.tree_at(lambda model: model.cell, model, Conditioned(jnp.ones(SIZE)))
    jax.eval_shape(with_policies(model, "c=bf16"), normal(rng, SIZE))

    def form(model, x, made):
        step = lambda carry, x: (model.cell(x, carry), None)  # noqa: E731
        return jax.lax.scan(step, made, jnp.stack([x, x]))[0]

    jax.eval_shape(with_policies(Model(form, key), "c=bf16"), normal(rng, SIZE))


def test_a_rule_mends_a_carry_that_cannot_be_kept(key, rng):
    view = with_policies(Model(FORMS["scan"], key), "c=bf16; */second: full")
    with pytest.raises(TypeError, match="carry"):
        view(normal(rng, SIZE))
    mended = "c=bf16; */second: full; Linear: compute=float32,output=float32"
    with_policies(Model(FORMS["scan"], key), mended)(normal(rng, SIZE))


class Around(eqx.Module):
    cell: Any

    def __call__(self, x, hidden):
        return self.cell(x, hidden)


@pytest.mark.parametrize("cls", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_cell_returns_its_state_as_it_came(cls, dtype, key, rng):
    seen = []

    class Noted(cls):
        def __call__(self, input, hidden, *, key=None):
            seen.extend(leaf.dtype for leaf in jax.tree.leaves(hidden))
            return super().__call__(input, hidden, key=key)

    class Inside(Around):
        def __call__(self, x, hidden):
            made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), hidden)
            result = super().__call__(x, made)
            assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {dtype}
            return result

    cell = Noted(3, 5, key=key)
    hidden = jnp.zeros(5, dtype) if cls is eqx.nn.GRUCell else (jnp.zeros(5, dtype),) * 2
    x, inside = normal(rng, 3), with_policies(Inside(cell), "c=bf16")
    inside(x, hidden)
    for alone in (with_policies(cell, "c=bf16"), inside.cell):
        by_position, by_name = alone(x, hidden), alone(input=x, hidden=hidden)
        assert_same_bits(by_position, by_name)
        assert {leaf.dtype for leaf in jax.tree.leaves(by_name)} == {dtype}
    assert set(seen) == {BF16}


# The `dtype` field of a module


def test_a_rule_sets_the_dtype_field(key):
    class Rotary(eqx.Module):
        dtype: Any = eqx.field(static=True)

        def __call__(self, x):
            return jnp.ones((), self.dtype)

    class Outer(eqx.Module):
        rotary: Rotary
        other: Rotary
        dtype: Any = eqx.field(static=True)

        def __call__(self, x):
            return [self.rotary(x), self.other(x)]

    model = Outer(Rotary(jnp.float16), Rotary(jnp.float32), "float16")
    for rules, expected in {
        "": (F16, F32),
        "; */rotary: full": (F32, F32),
        "; Outer: bf16": (BF16, F32),
        "; Outer: full; */other: f16": (F32, F16),
    }.items():
        view = with_policies(model, f"c=bf16{rules}")
        assert (np.dtype(view.rotary.dtype), np.dtype(view.other.dtype)) == expected
    assert model.rotary.dtype == jnp.float16 and model.dtype == "float16"


def test_rotary_embeddings_follow_a_rule(rng):
    class Heads(eqx.Module):
        rotary: eqx.nn.RotaryPositionalEmbedding

        def __call__(self, x):
            return self.rotary(x)

    x = normal(rng, 3, 4)
    heads = Heads(eqx.nn.RotaryPositionalEmbedding(4, dtype=jnp.float16))
    result = with_policies(heads, "full; RotaryPositionalEmbedding: full")(x)
    assert_same_bits(result, eqx.nn.RotaryPositionalEmbedding(4, dtype=jnp.float32)(x))


# 64 bits


def test_islands_in_float64(rng):
    with enable_x64():
        model = Model(FORMS["plain"], jax.random.key(0))
        model = jax.tree.map(lambda leaf: leaf.astype(F32), model)
        x = jnp.asarray(rng.normal(size=SIZE), F32)

        def forward(model, x):
            view = with_policies(model, "params=f32,c=f32; */second: f64")
            return view(x)

        made = jnp.sin(jnp.arange(1.0, SIZE + 1))
        expected = jmpx.cast_tree(model.second, jnp.float64)(made)
        result = forward(model, x)
        assert result.dtype == F32
        assert dots(forward, model, x) == ["float32xfloat32", "float64xfloat64"]
        assert_same_bits(result, expected.astype(F32))
