"""Layers of Equinox under a policy map: their state, loops, and what is made inside of a model."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, dtypes, enable_x64, leniently
from helpers.jaxprs import dots, program

import jmpx
from jmpx.equinox import with_policies

KEY = jax.random.key(0)
nn = eqx.nn
LINEAR = nn.Linear(4, 4, key=KEY)
LAYERS = {
    "Linear": (LINEAR, (4,)),
    "Linear scalar": (nn.Linear("scalar", 3, key=KEY), ()),
    "LayerNorm": (nn.LayerNorm((3, 4)), (3, 4)),
    "GroupNorm": (nn.GroupNorm(2, 4), (4, 3)),
    "Attention": (nn.MultiheadAttention(2, 4, key=KEY), (5, 4)),
    "MLP": (nn.MLP(4, "scalar", 8, 2, key=KEY), (4,)),
    "Conv2d": (nn.Conv2d(3, 2, 3, padding=1, key=KEY), (3, 6, 6)),
    "ConvTranspose1d": (nn.ConvTranspose1d(3, 2, 3, key=KEY), (3, 6)),
    "PReLU": (nn.PReLU(0.25), (4,)),
    "Dropout": (nn.Dropout(0.3, inference=True), (4,)),
    "Sequential": (nn.Sequential([LINEAR, nn.Lambda(jax.nn.relu), nn.Identity()]), (4,)),
    "WeightNorm": (nn.WeightNorm(LINEAR), (4,)),
}


class Around(eqx.Module):
    inner: Any

    def __call__(self, *args):
        return self.inner(*args)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_as_those_that_are_cast(name):
    (layer, shape), dtype = LAYERS[name], F16 if name in ("Linear", "Conv2d") else BF16
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

    expected = program(cast, params, jnp.ones(shape))
    assert program(viewed, params, jnp.ones(shape)) == expected
    assert program(island, params, jnp.ones(shape)) == expected


@pytest.mark.thorough
def test_dropout_and_embedding(key):
    x = jnp.arange(50.0)
    view = with_policies(nn.Dropout(0.4), "bf16")
    assert view.p == 0.4 and isinstance(view.p, float)
    assert_same_bits(view(x, key=key), nn.Dropout(0.4)(x.astype(BF16), key=key))
    embedding, tokens = nn.Embedding(7, 3, key=key), jnp.arange(5)
    result = jax.vmap(with_policies(embedding, MIXED))(tokens)
    assert_same_bits(result, embedding.weight[tokens].astype(BF16).astype(F32))


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
    model, tokens = Tied(), jnp.arange(5)
    result = with_policies(model, MIXED + shared)(tokens)
    assert LOG == [(dtype, True)]
    rounded = (lambda y: y.astype(BF16)) if dtype == F32 else (lambda y: y)
    embedding, linear = jmpx.cast_tree(model, dtype).shared()
    inside = rounded(jax.vmap(embedding)(tokens)).astype(dtype)
    assert_same_bits(result, rounded(jax.vmap(linear)(inside)).astype(F32))


def test_a_tied_island_computes_in_its_dtype():
    logits = with_policies(Tied(), "c=bf16; Linear: c=f32,o=f32; Tied: o=f32,c=bf16")(jnp.arange(7))
    weight = Tied().shared.pytree[0].weight.astype(BF16).astype(F32)
    assert_same_bits(logits, jax.vmap(lambda x: weight @ x)(weight))


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


@leniently
def test_batch_norm_in_a_sequential_and_in_a_train_step():
    def make():
        norm = nn.BatchNorm(3, "batch", mode="ema", channelwise_affine=False)
        return nn.Sequential([nn.Linear(4, 3, key=KEY), norm, nn.Lambda(jax.nn.relu)])

    model, state = nn.make_with_state(make)()

    def loss_fn(model, state, x):
        y, state = batched(with_policies(model, "c=f16,o=f32"), x, state)
        return jnp.mean(y**2), state

    grad_fn = jmpx.filter_value_and_grad(
        loss_fn, jmpx.DynamicLossScale(), has_aux=True, policy="full"
    )
    (_, after), _, _, grads = eqx.filter_eval_shape(grad_fn, model, state, jnp.ones((8, 4)))
    assert dtypes(after) == dtypes(state) and set(dtypes(grads)) == {"float32"}
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))


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


@pytest.mark.parametrize(
    ("cls", "rules", "inside", "dtype"),
    [
        (nn.GRUCell, "", BF16, F32),
        (nn.LSTMCell, "; /inner: f16", F16, BF16),
    ],
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

    cell = Noted(3, 5, key=KEY)
    inside = with_policies(Inside(cell), "c=bf16")
    jax.eval_shape(inside, jnp.ones(3))
    for alone in (with_policies(cell, "c=bf16"), inside.inner):
        run = lambda x, alone=alone: (alone(x, hidden), alone(input=x, hidden=hidden))  # noqa: E731
        assert set(dtypes(jax.eval_shape(run, jnp.ones(3)))) == {dtype.name}
    assert set(seen) == {"bfloat16"}


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


# Calls that read parameters cast what is made inside of the model.


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
    "map": lambda model, x, made: jax.lax.map(model.second, made[None])[0],
    "scan": lambda model, x, made: scan(model.second, made),
    "cell": scanned_cell,
    "fori_loop": lambda m, x, made: jax.lax.fori_loop(0, 2, lambda i, carry: m.second(carry), made),
    "while_loop": while_looped,
    "cond": lambda m, x, made: jax.lax.cond(x[0] > 0, lambda y: m.second(y), lambda y: y, made),
    "switch": lambda m, x, made: jax.lax.switch(1, [lambda: made, lambda: m.second(made)]),
    "jit in a scan": lambda model, x, made: scan(eqx.filter_jit(model.second), made),
    "jit": jitted_in_a_loop_and_outside,
    "checkpoint in a scan": lambda m, x, made: scan(eqx.filter_checkpoint(m.second), made),
    "vjp": pulled_back,
}
X = jnp.arange(4.0) / 4


@pytest.mark.parametrize("form", [*FORMS, *LOOPS])
def test_what_is_made_inside_is_multiplied_in_16_bits(form):
    dtype = F16 if form in ("plain", "scan") else BF16
    model = Model({**FORMS, **LOOPS}[form])
    view = functools.partial(lambda model, x: with_policies(model, f"c={dtype.name}")(x), model)
    assert set(dots(view, X)) == {f"{dtype.name}x{dtype.name}"}
    assert LOG == [F32 if form in LOOPS else dtype]  # loops keep the dtype of a carry


@pytest.mark.parametrize("form", ["cell", "vjp"])
def test_gradients_are_near_those_in_float32(form):
    model = Model({**FORMS, **LOOPS}[form])

    def gradient(run):
        return eqx.filter_value_and_grad(lambda model: jnp.sum(run(model)(X) ** 2))(model)

    (value, grads), (expected, expected_grads) = map(
        gradient, (lambda model: with_policies(model, MIXED), lambda model: model)
    )
    np.testing.assert_allclose(value, expected, atol=0.1)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert a.dtype == F32
        np.testing.assert_allclose(a, b, atol=0.2)


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


def test_in_loops_the_widest_argument_of_its_shape_counts():
    class Conditioned(eqx.Module):
        scale: jax.Array

        def __call__(self, x, time):
            assert time.dtype == x.dtype  # the float32 one is cast
            return (x * self.scale * time).astype(x.dtype)

    def conditioned(model, x, made):
        step = lambda x, time: (model.cell(x, time), None)  # noqa: E731
        return jax.lax.scan(step, x, jnp.arange(3, dtype=F32))[0]

    def recurrent(model, x, made):
        step = lambda carry, x: (model.cell(x, carry), None)  # noqa: E731
        return jax.lax.scan(step, made, jnp.stack([x, x]))[0]

    model = Model(conditioned, cell=Conditioned(jnp.ones(4)))
    for each in (model, Model(recurrent)):
        jax.eval_shape(with_policies(each, "c=bf16"), X)


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
    assert jax.eval_shape(part, X).dtype == BF16
    assert jax.eval_shape(functools.partial(scan, part), X).dtype == F32
    assert dots(part, X) == ["bfloat16xbfloat16"]


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
    assert model.rotary.dtype == jnp.float16 and model.dtype == "float16"


def test_rotary_embeddings_follow_a_rule():
    x, heads = jnp.ones((3, 4)), Around(nn.RotaryPositionalEmbedding(4, dtype=jnp.float16))
    result = with_policies(heads, "full; RotaryPositionalEmbedding: full")(x)
    assert_same_bits(result, nn.RotaryPositionalEmbedding(4, dtype=jnp.float32)(x))


def test_islands_in_float64():
    with enable_x64():
        model = jax.tree.map(lambda leaf: leaf.astype(F32), Model(FORMS["plain"]))
        view = with_policies(model, "params=f32,c=f32; */second: f64")
        made = jnp.sin(jnp.arange(1.0, 5))
        expected = jmpx.cast_tree(model.second, jnp.float64)(made)
        assert dots(view, X) == ["float32xfloat32", "float64xfloat64"]
        assert_same_bits(view(X), expected.astype(F32))
