"""`import jmpx.mpx as mpx`: the examples of MPX's paper (arXiv 2507.03312), and its promises."""

import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import LOG

import jmpx.mpx as mpx

HALF = np.dtype(mpx.HALF_PRECISION_DATATYPE).name
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
CASTS = {
    "cast_to_half_precision": HALF,
    "cast_to_float16": "float16",
    "cast_to_bfloat16": "bfloat16",
    "cast_to_float32": "float32",
    "cast_to_full_precision": "float32",
}


class Attention(eqx.Module):
    """The paper's example 1: most of it in half precision, softmax and layer norm in full."""

    linears: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    heads: int

    def __init__(self, size, heads, key):
        self.linears = [eqx.nn.Linear(size, size, key=k) for k in jax.random.split(key, 4)]
        self.norm = eqx.nn.LayerNorm(size)
        self.heads = heads

    def attend(self, q, k, v):
        scores = q @ k.T / jnp.sqrt(q.shape[-1]).astype(q.dtype)
        LOG.append(("scores", scores.dtype.name))
        softmax = mpx.force_full_precision(jax.nn.softmax, scores.dtype)
        return softmax(scores, axis=-1) @ v

    def __call__(self, x):
        normed = jax.vmap(mpx.force_full_precision(self.norm, x.dtype))(x)
        LOG.append(("normed", normed.dtype.name))
        *inputs, out = self.linears
        q, k, v = (self.split(jax.vmap(linear)(normed)) for linear in inputs)
        mixed = jax.vmap(self.attend)(q, k, v)
        return x + jax.vmap(out)(mixed.transpose(1, 0, 2).reshape(x.shape))

    def split(self, x):
        return x.reshape(len(x), self.heads, -1).transpose(1, 0, 2)


def loss_fn(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y).astype(jnp.float32) ** 2)


@pytest.fixture
def problem(rng):
    model = Attention(8, 2, jax.random.key(int(rng.integers(1000))))
    return model, tuple(rng.normal(size=(3, 5, 8)).astype(np.float32) for _ in range(2))


def seen():
    """The dtypes of what the model has computed since it was asked last."""
    found = set(LOG)
    LOG.clear()
    return found


@pytest.mark.thorough
def test_example_2_trains_the_model_of_example_1(problem):
    model, batch = problem
    optimizer = optax.sgd(0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
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

    before, full = full_step(model)
    assert seen() == {("scores", "float32"), ("normed", "float32")}
    for _ in range(20):
        model, state, scaling = step(model, state, scaling, batch)
    assert seen() == {("scores", HALF), ("normed", HALF)}
    for _ in range(19):
        _, full = full_step(full)
    (loss, _), (full_loss, _) = full_step(model), full_step(full)
    assert full_loss < before
    np.testing.assert_allclose(before - loss, before - full_loss, rtol=2e-2)
    assert scaling.loss_scale == 2.0**15  # five growths, none of which halved a gradient
    assert {leaf.dtype.name for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))} == {
        "float32"
    }


def test_casts_of_a_model(problem):
    model, (x, _) = problem
    casts = {name: (getattr(mpx, name), dtype) for name, dtype in CASTS.items()}
    casts["cast_tree"] = (lambda tree: mpx.cast_tree(tree, jnp.bfloat16), "bfloat16")
    for name, (cast, dtype) in casts.items():
        new, *others = cast((model, jnp.arange(3), jax.random.PRNGKey(0)))
        arrays = jax.tree.leaves(eqx.filter(new, eqx.is_array))
        assert name in mpx.__all__ and {leaf.dtype.name for leaf in arrays} == {dtype}
        assert [each.dtype.name for each in others] == ["int32", "uint32"] and new.heads == 2
    seen()
    for returned in ("float32", "bfloat16"):
        options = (returned,) if returned == "float32" else ()
        run = mpx.cast_function(model, jnp.bfloat16, *options)
        assert eqx.filter_eval_shape(run, x[0]).dtype == returned
        assert ("normed", "bfloat16") in seen()


def test_the_arguments_of_mpx_are_the_first_ones():
    for name, arguments in SIGNATURES.items():
        found = list(inspect.signature(getattr(mpx, name)).parameters.values())
        for number, argument in enumerate(arguments.split(", ") if arguments else ()):
            argument, _, default = argument.partition("=")
            assert name in mpx.__all__ and found[number].name == argument
            assert default in str(found[number].default)
    same = mpx.select_tree(jnp.array(True), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
    assert same["w"].all() and mpx.all_finite([1.0])


@pytest.mark.thorough
def test_half_precision_is_float16_unless_it_is_set():
    x, scaling = jnp.ones(2), mpx.DynamicLossScaling(8.0)

    def loss_fn(x):
        LOG.append(x.dtype.name)
        return x.sum()

    makers = (mpx.filter_grad, mpx.filter_value_and_grad, mpx.calculate_scaled_grad)
    gradients = [make(loss_fn, scaling) for make in makers]
    try:
        for name in ("float16", "bfloat16"):
            assert np.dtype(mpx.half_precision_datatype()).name == name
            assert mpx.cast_to_half_precision(x).dtype.name == name
            for gradient in gradients:
                gradient(x)
            assert seen() == {name}
            mpx.set_half_precision_datatype("bfloat16")
    finally:
        mpx.set_half_precision_datatype(mpx.HALF_PRECISION_DATATYPE)


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
    assert float(mpx.scaled(lambda w: w.sum(), scaling)(w)) == 4 * float(w.sum())


def test_the_largest_numbers_are_those_of_the_dtypes():
    for dtype, largest in ((jnp.float16, mpx.FLOAT16_MAX), (jnp.bfloat16, mpx.BFLOAT16_MAX)):
        assert largest == float(jnp.finfo(dtype).max) and largest.dtype == jnp.float32


def test_the_loss_scaling_is_a_class_and_a_pytree(rng):
    scaling = mpx.DynamicLossScaling(jnp.float32(2**15), jnp.float32(4), 4, 3, jnp.int32(2))
    names = {"DynamicLossScaling": mpx.DynamicLossScaling, "array": np.array}
    names |= {"float32": np.float32, "int32": np.int32, "Array": lambda x, **_: x}
    for again in (
        scaling.adjust(jnp.array(False)).adjust(True),
        jax.tree.map(lambda leaf: leaf + 0, scaling),
        pickle.loads(pickle.dumps(scaling)),
        eval(repr(scaling), names),
    ):
        assert type(again) is mpx.DynamicLossScaling
        assert (again.min_loss_scaling, again.factor, again.period) == (4, 4, 3)
    grown = scaling.adjust(True)
    assert float(grown.loss_scaling) == mpx.FLOAT16_MAX and int(grown.counter) == 0
    assert str(scaling) == "dynamic,init=32768,period=3,factor=4,min=4,max=65504,counter=2"
    small, x = mpx.DynamicLossScaling(jnp.float32(4)), rng.normal(size=3).astype(np.float16)
    np.testing.assert_array_equal(small.scale(x), 4 * x.astype(np.float32))
    assert small.unscale(jnp.asarray(x)).dtype == jnp.float32
    assert jax.jit(lambda s: s.adjust(jnp.array(False)))(small).loss_scale == 2
    assert len(jax.tree.leaves(small)) == 2
