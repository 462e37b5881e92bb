"""`import jmpx.mpx as mpx`: the examples of MPX's paper (arXiv 2507.03312), and its promises."""

import inspect
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import leniently

import jmpx.mpx as mpx

HALF = mpx.HALF_PRECISION_DATATYPE
HALF_NAME = np.dtype(HALF).name
# The functions of MPX 0.1.8, with their arguments.
SIGNATURES = {
    "cast_tree": "tree, dtype",
    "force_full_precision": "func, return_dtype=float16",
    "cast_function": "func, dtype, return_dtype=None",
    "half_precision_datatype": "",
    "set_half_precision_datatype": "datatype",
    "DynamicLossScaling": "loss_scaling, min_loss_scaling, factor=2, period=2000, counter=None",
    "scaled": "func, scaling, has_aux=False",
    "filter_grad": "func, scaling, has_aux=False, use_mixed_precision=True",
    "filter_value_and_grad": "func, scaling, has_aux=False, use_mixed_precision=True",
    "calculate_scaled_grad": "func, scaling, has_aux=False, use_mixed_precision=True",
    "optimizer_update": "model, optimizer, optimizer_state, grads, grads_finite",
}
ONE_TREE = "cast_to_float32 cast_to_float16 cast_to_bfloat16 cast_to_full_precision all_finite"


class Attention(eqx.Module):
    """The paper's example 1: most of it in half precision, softmax and layer norm in full."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    heads: int

    def __init__(self, size, heads, key):
        keys = jax.random.split(key, 4)
        linears = [eqx.nn.Linear(size, size, key=k) for k in keys]
        self.query, self.key, self.value, self.out = linears
        self.norm = eqx.nn.LayerNorm(size)
        self.heads = heads

    def attend(self, q, k, v):
        scores = q @ k.T / jnp.sqrt(q.shape[-1]).astype(q.dtype)
        DTYPES.add(("scores", scores.dtype.name))
        softmax = mpx.force_full_precision(jax.nn.softmax, scores.dtype)
        return softmax(scores, axis=-1) @ v

    def __call__(self, x):
        normed = jax.vmap(mpx.force_full_precision(self.norm, x.dtype))(x)
        DTYPES.add(("normed", normed.dtype.name))
        q, k, v = (self.split(jax.vmap(f)(normed)) for f in (self.query, self.key, self.value))
        mixed = jax.vmap(self.attend)(q, k, v)
        return x + jax.vmap(self.out)(mixed.transpose(1, 0, 2).reshape(x.shape))

    def split(self, x):
        return x.reshape(len(x), self.heads, -1).transpose(1, 0, 2)


DTYPES = set()


def loss_fn(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y).astype(jnp.float32) ** 2)


def make_problem(rng):
    model = Attention(8, 2, jax.random.key(int(rng.integers(1000))))
    batch = tuple(rng.normal(size=(3, 5, 8)).astype(np.float32) for _ in range(2))
    return model, batch


@pytest.mark.sampled(2)
@pytest.mark.parametrize("filtered", [eqx.is_array, eqx.is_inexact_array])
def test_example_2_trains_the_model_of_example_1(filtered, rng):
    model, batch = make_problem(rng)
    optimizer = optax.sgd(0.1)
    state = optimizer.init(eqx.filter(model, filtered))
    scaling = mpx.DynamicLossScaling(jnp.float32(2**10), jnp.float32(1.0), period=4)

    @eqx.filter_jit
    def step(model, state, scaling, batch):
        scaling, grads_finite, grads = mpx.filter_grad(loss_fn, scaling)(model, batch)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, grads_finite)
        return model, state, scaling

    @eqx.filter_jit
    def full_step(model):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g if eqx.is_array(p) else p, model, grads)

    DTYPES.clear()
    before, full = full_step(model)
    assert DTYPES == {("scores", "float32"), ("normed", "float32")}
    DTYPES.clear()
    for _ in range(20):
        model, state, scaling = step(model, state, scaling, batch)
    assert DTYPES == {("scores", HALF_NAME), ("normed", HALF_NAME)}
    for _ in range(19):
        _, full = full_step(full)
    (loss, _), (full_loss, _) = full_step(model), full_step(full)
    assert full_loss < before
    np.testing.assert_allclose(before - loss, before - full_loss, rtol=2e-2)
    assert scaling.loss_scale == 2.0**15  # five growths, none of which halved a gradient
    assert model.query.weight.dtype == jnp.float32


def test_gradients_have_the_format_of_the_model_and_agree(rng):
    model, batch = make_problem(rng)
    loss, expected = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(model, batch)
    scaling = mpx.DynamicLossScaling(jnp.float32(2**10), jnp.float32(1.0), period=1)
    gradient = eqx.filter_jit(mpx.filter_value_and_grad(loss_fn, scaling))
    value, new, finite, grads = gradient(model, batch)
    assert new.loss_scale == 2**11 and bool(finite)  # a growth step
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    np.testing.assert_allclose(value, loss, rtol=1e-2)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for grad, reference in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, reference, atol=1e-2 * largest)


def test_filter_grad_returns_in_the_papers_order(rng):
    model, batch = make_problem(rng)
    scaling = mpx.DynamicLossScaling(jnp.float32(8), jnp.float32(1))

    def with_aux(model, batch):
        return loss_fn(model, batch), {"n": 3}

    gradient = eqx.filter_jit(mpx.filter_grad(with_aux, scaling, True, True))
    new, finite, grads, aux = gradient(model, batch)
    assert isinstance(new, mpx.DynamicLossScaling) and finite.dtype == jnp.bool_
    assert isinstance(grads, Attention) and aux == {"n": 3}
    gradient = eqx.filter_jit(mpx.filter_value_and_grad(with_aux, scaling, has_aux=True))
    (_, aux), *_ = gradient(model, batch)
    assert aux == {"n": 3}


def test_optimizer_update_takes_any_optax_optimizer_and_skips(rng):
    model, batch = make_problem(rng)
    optimizer = optax.adamw(1e-2)
    state = leniently(optimizer.init)(eqx.filter(model, eqx.is_array))
    grads = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch)
    update = leniently(mpx.optimizer_update)
    same, same_state = update(model, optimizer, state, grads, jnp.array(False))
    assert eqx.tree_equal(same, model) and eqx.tree_equal(same_state, state)
    new, _ = update(model, optimizer, state, grads, jnp.array(True))
    assert not eqx.tree_equal(new, model) and new.heads == model.heads


CASTS = [
    (mpx.cast_to_half_precision, HALF),
    (mpx.cast_to_float16, jnp.float16),
    (mpx.cast_to_bfloat16, jnp.bfloat16),
    (mpx.cast_to_float32, jnp.float32),
    (lambda model: mpx.cast_tree(model, jnp.bfloat16), jnp.bfloat16),
]


@pytest.mark.parametrize(("cast", "dtype"), CASTS)
def test_casts_of_a_model(cast, dtype, rng):
    model, _ = make_problem(rng)
    tree = cast((model, jnp.arange(3), jax.random.PRNGKey(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(tree[0], eqx.is_array))} == {
        np.dtype(dtype)
    }
    assert tree[1].dtype == jnp.int32 and tree[2].dtype == jnp.uint32 and tree[0].heads == 2


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_of_mpx_are_the_first_ones(name):
    found = list(inspect.signature(getattr(mpx, name)).parameters.values())
    for number, argument in enumerate(SIGNATURES[name].split(", ") if SIGNATURES[name] else ()):
        argument, _, default = argument.partition("=")
        assert found[number].name == argument
        if default:
            assert default in str(found[number].default)


@pytest.mark.parametrize("name", [*ONE_TREE.split(), "cast_to_half_precision", "select_tree"])
def test_functions_of_trees_take_them_by_position(name):
    trees = (jnp.array(True), *[{"w": jnp.ones(2)}] * 2) if name == "select_tree" else ([1.0],)
    assert name in mpx.__all__ and getattr(mpx, name)(*trees) is not None


@pytest.fixture
def bfloat16():
    """Half precision is bfloat16 in a test."""
    mpx.set_half_precision_datatype("bfloat16")
    yield
    mpx.set_half_precision_datatype(mpx.HALF_PRECISION_DATATYPE)


def test_half_precision_is_float16_unless_it_is_set(request):
    x, scaling = jnp.ones(2), mpx.DynamicLossScaling(8.0)
    dtypes = []

    def loss_fn(x):
        dtypes.append(x.dtype.name)
        return x.sum()

    gradients: list[Any] = [
        make(loss_fn, scaling) for make in (mpx.filter_grad, mpx.filter_value_and_grad)
    ]
    gradients.append(mpx.calculate_scaled_grad(loss_fn, scaling))
    for name in ("float16", "bfloat16"):
        assert np.dtype(mpx.half_precision_datatype()).name == name
        assert mpx.cast_to_half_precision(x).dtype.name == name
        for gradient in gradients:
            gradient(x)
        assert set(dtypes) == {name}
        dtypes.clear()
        if name == "float16":
            request.getfixturevalue("bfloat16")
    mpx.filter_grad(loss_fn, scaling, policy="f16")(x)
    assert dtypes[0] == "float16"
    with pytest.raises(ValueError, match="Expected float16 or bfloat16 as half precision, got f"):
        mpx.set_half_precision_datatype("float32")


@pytest.mark.parametrize("mixed", [True, False])
def test_the_scaled_gradient(mixed, rng):
    w, x = jnp.asarray(rng.normal(size=3), jnp.float32), rng.normal(size=3).astype(np.float32)
    scaling = mpx.DynamicLossScaling(jnp.float32(4), jnp.float32(1))

    def with_aux(w, x):
        return (w * x).sum().astype(jnp.float32), x.dtype

    gradient = mpx.calculate_scaled_grad(with_aux, scaling, True, mixed)
    (value, dtype), grads = gradient(w, x)
    factor, name = (4, "float16") if mixed else (1, "float32")
    assert grads.dtype == dtype == name
    np.testing.assert_allclose(value, factor * (w * x).sum(), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(grads, factor * x, rtol=1e-2)
    assert float(mpx.scaled(with_aux, scaling, True)(w, x)[0]) == 4 * float(with_aux(w, x)[0])


def test_the_largest_numbers_are_those_of_the_dtypes():
    for dtype, largest in ((jnp.float16, mpx.FLOAT16_MAX), (jnp.bfloat16, mpx.BFLOAT16_MAX)):
        assert largest == float(jnp.finfo(dtype).max) and largest.dtype == jnp.float32


def test_the_loss_scaling_is_a_class():
    scaling = mpx.DynamicLossScaling(jnp.float32(2**15), jnp.float32(4), 4, 3, jnp.int32(2))
    for again in (
        scaling.adjust(jnp.array(False)).adjust(True),
        jax.tree.map(lambda leaf: leaf + 0, scaling),
        pickle.loads(pickle.dumps(scaling)),
        eval(
            repr(scaling),
            {"DynamicLossScaling": mpx.DynamicLossScaling, "array": np.array}
            | {"float32": np.float32, "int32": np.int32, "Array": lambda x, **_: x},
        ),
    ):
        assert type(again) is mpx.DynamicLossScaling
        assert (again.min_loss_scaling, again.factor, again.period) == (4, 4, 3)
    grown = scaling.adjust(True)
    assert float(grown.loss_scaling) == mpx.FLOAT16_MAX and int(grown.counter) == 0
    assert str(scaling) == "dynamic,init=32768,period=3,factor=4,min=4,max=65504,counter=2"


def test_cast_function_casts_inputs_and_outputs(rng):
    model, (x, _) = make_problem(rng)
    run = mpx.cast_function(model, jnp.bfloat16, jnp.float32)
    DTYPES.clear()
    assert run(x[0]).dtype == jnp.float32 and ("normed", "bfloat16") in DTYPES
    assert mpx.cast_function(model, jnp.bfloat16)(x[0]).dtype == jnp.bfloat16


def test_the_loss_scaling_is_a_pytree_with_the_papers_methods(rng):
    scaling = mpx.DynamicLossScaling(jnp.float32(4), jnp.float32(1))
    x = rng.normal(size=3).astype(np.float16)
    np.testing.assert_array_equal(scaling.scale(x), 4 * x.astype(np.float32))
    assert scaling.unscale(jnp.asarray(x)).dtype == jnp.float32
    assert jax.jit(lambda s: s.adjust(jnp.array(False)))(scaling).loss_scale == 2
    assert len(jax.tree.leaves(scaling)) == 2
