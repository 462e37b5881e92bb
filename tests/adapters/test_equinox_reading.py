"""Calls of Equinox modules that read parameters: they cast what is made inside of the model."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from helpers import BF16, F16, F32, LOG, assert_same_bits, dtypes, enable_x64
from helpers.equinox_models import Around, compiled, drawn
from helpers.jaxprs import dots

import jmpx
from jmpx.equinox import with_policies

KEY = jax.random.key(0)


class Cell(eqx.Module):
    """A cell that a user wrote."""

    weight: jax.Array

    def __call__(self, x, hidden):
        return jnp.tanh(jnp.stack([x, hidden])[1] * 0.5 + self.weight @ (x + hidden))


class Model(eqx.Module):
    """Calls two layers as `form` says; the second one gets an array that is made inside."""

    first: nn.Linear
    second: nn.Linear
    cell: Any
    form: Any = eqx.field(static=True)

    def __init__(self, form, layer=nn.Linear, cell=None):
        self.first, self.second = layer(4, 4, key=KEY), layer(4, 4, key=KEY)
        self.cell = cell or Cell(self.second.weight)
        self.form = form

    def __call__(self, x):
        made = jnp.sin(jnp.arange(1.0, 5))  # float32, as noise is
        result = self.form(self, self.first(x), made)
        LOG.append(result.dtype if hasattr(result, "dtype") else None)
        return result


def scan(layer, carry):
    return jax.lax.scan(lambda carry, _: (layer(carry), None), carry, None, length=2)[0]


def scanned_cell(model, x, made):
    step = lambda carry, x: (model.cell(x, carry), None)  # noqa: E731
    return jax.lax.scan(step, made, jnp.stack([made, made]))[0]


def while_looped(model, x, made):
    step = lambda carry: (carry[0] + 1, model.second(carry[1]))  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0] < 2, step, (0, made))[1]


def jitted_in_a_loop_and_outside(model, x, made):
    layer = eqx.filter_jit(model.second)
    layer(made)  # JAX keeps what it has traced
    return scan(layer, made)


def pulled_back(model, x, made):
    result, pull = jax.vjp(model.second, made)
    return pull(jnp.ones(4))[0] + result  # a cotangent in float32


FORMS = {
    "plain": lambda model, x, made: model.second(made),
    "vmap": lambda model, x, made: jax.vmap(model.second)(made[None])[0],
    "filter_vmap": lambda model, x, made: eqx.filter_vmap(model.second)(made[None])[0],
    "checkpoint": lambda model, x, made: eqx.filter_checkpoint(model.second)(made),
    "keyword": lambda model, x, made: model.cell(x=made, hidden=made),
    "numpy": lambda model, x, made: model.second(np.ones(4, F32)),
}
LOOPS = {
    "scan": lambda model, x, made: scan(model.second, made),
    "cell": scanned_cell,
    "while_loop": while_looped,
    "cond": lambda m, x, made: jax.lax.cond(x[0] > 0, lambda y: m.second(y), lambda y: y, made),
    "jit": jitted_in_a_loop_and_outside,
    "checkpoint in a scan": lambda m, x, made: scan(eqx.filter_checkpoint(m.second), made),
    "vjp": pulled_back,
}
X = jnp.arange(4.0) / 4


@pytest.mark.parametrize("form", [*FORMS, *LOOPS])
def test_what_is_made_inside_is_multiplied_in_16_bits(form):
    dtype = F16 if form in ("plain", "scan") else BF16
    model = drawn(lambda: Model({**FORMS, **LOOPS}[form]))
    view = functools.partial(lambda model, x: with_policies(model, f"c={dtype.name}")(x), model)
    assert set(dots(view, X)) == {f"{dtype.name}x{dtype.name}"}
    assert LOG == [F32 if form in LOOPS else dtype]  # loops keep the dtype of a carry


def reading(args, shapes=((3,), (2,)), in_loop=True, policy="c=bf16", echo=False):
    """The dtypes of the results of a call that reads parameters, in a branch of JAX or outside.

    The results are the arguments if it is to echo them, else arrays in bfloat16.
    """
    found = []

    class Reader(eqx.Module):
        weight: jax.Array

        def __call__(self, *args):
            return args if echo else tuple(jnp.zeros(shape, BF16) for shape in shapes)

    class Outer(Around):
        def __call__(self):
            def read():
                found.extend(dtypes(self.inner(*args)))
                return 0

            return jax.lax.cond(True, read, lambda: 0) if in_loop else read()

    jax.eval_shape(with_policies(Outer(Reader(jnp.ones(2))), policy))
    return found


B, F = jnp.zeros(3, "bfloat16"), jnp.zeros(3)


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ((F,), {"in_loop": False}, ["bfloat16", "bfloat16"]),
        ((F,), {}, ["float32", "float32"]),
        ((B,), {}, ["bfloat16", "bfloat16"]),
        ((B, F), {}, ["float32", "float32"]),
        ((B, jnp.zeros(5)), {}, ["bfloat16", "float32"]),  # a mask, or a cache, beside `x`
        ((F, jnp.zeros(2, "bfloat16")), {}, ["float32", "bfloat16"]),
        ((np.zeros(3),), {}, ["float32", "float32"]),  # NumPy's float64
        ((jnp.arange(3),), {}, ["bfloat16", "bfloat16"]),
        ((B,), {"policy": "full", "echo": True}, ["bfloat16"]),
        ((B, F), {"policy": "full"}, ["bfloat16", "bfloat16"]),  # as without the call
        ((B,), {"policy": "full", "echo": True, "in_loop": False}, ["float32"]),
    ],
)
def test_a_call_that_reads_keeps_the_widest_dtype_in_a_loop(args, options, expected):
    assert reading(args, **options) == expected


def test_a_rule_goes_before_and_mends_a_carry_that_cannot_be_kept():
    seen = []

    class Noted(nn.Linear):
        def __call__(self, x, *, key=None):
            seen.append(x.dtype)
            return super().__call__(x, key=key)

    model = Model(lambda model, x, wide: (model.first(wide), model.second(wide)), Noted)
    first, second = jax.eval_shape(with_policies(model, "c=bf16; */second: full"), X)
    assert seen == [BF16, BF16, F32] and first.dtype == second.dtype == BF16
    model, broken = Model(LOOPS["scan"]), "c=bf16; */second: full"
    with pytest.raises(TypeError, match="carry"):
        jax.eval_shape(with_policies(model, broken), X)
    jax.eval_shape(with_policies(model, f"{broken}; Linear: compute=float32,output=float32"), X)


def test_a_part_of_a_view_is_called_alone():
    part = with_policies(Model(FORMS["plain"]), "c=bf16").second
    assert dots(part, X) == ["bfloat16xbfloat16"]
    call = lambda x: part(x)  # noqa: E731
    slope = lambda x: jax.linearize(jax.jit(call), x)[0]  # noqa: E731
    for run in (part, jax.checkpoint(call), slope):
        assert jax.eval_shape(run, X).dtype == BF16
    branch = lambda x: jax.lax.cond(x[0] > 0, call, lambda x: x, x)  # noqa: E731
    for run in (functools.partial(scan, part), branch):  # each loop and branch counts
        assert jax.eval_shape(run, X).dtype == F32


def test_what_one_method_hands_to_another_is_not_cast():
    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.inner(self.weight.astype(F32) * x.astype(F32))

        def inner(self, x):
            return x

    view = with_policies(Around(Layer(jnp.ones(2))), "c=bf16")
    assert jax.eval_shape(lambda x: view.inner(x), jnp.ones(2)).dtype == F32


# The `dtype` field of a module


def test_a_rule_sets_the_dtype_field():
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
        # Autocast traces what a rule sets in float32, and returns that.
        cast = jmpx.apply_policy(lambda model, x: model(x), f"by=operations,c=bf16{rules}")
        assert cast(model, X)[0].dtype == (F32 if rules else F16)
    assert model.rotary.dtype == jnp.float16 and model.dtype == "float16"


def test_rotary_embeddings_follow_a_rule():
    def both(heads, x):
        view = with_policies(heads, "full; RotaryPositionalEmbedding: full")
        return view(x), nn.RotaryPositionalEmbedding(4, dtype=jnp.float32)(x)

    heads = Around(nn.RotaryPositionalEmbedding(4, dtype=jnp.float16))
    assert_same_bits(*compiled(both, heads, np.ones((3, 4), F32)))


def test_islands_in_float64():
    def both(model):
        view = with_policies(model, "params=f32,c=f32; */second: f64")
        assert dots(view, X) == ["float32xfloat32", "float64xfloat64"]
        expected = jmpx.cast_tree(model.second, jnp.float64)(jnp.sin(jnp.arange(1.0, 5)))
        return view(X), expected.astype(F32)

    with enable_x64():
        assert_same_bits(*compiled(both, drawn(lambda: Model(FORMS["plain"]))))
