"""Errors that come of tracing, with a note that names the ways that trace nothing."""

import flax.errors
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmpx
import jmpx.flax
import jmpx.haiku

W = jax.device_put(np.eye(2, dtype=np.float32))
X = jax.device_put(np.ones((4, 2), np.float32))
WAYS = "by=arguments or by=modules"

# By what Python does with the sum of a product, 8.0: the error.
READS = {
    "if": (lambda h: h if h > 0 else -h, jax.errors.TracerBoolConversionError),
    "float": (lambda h: h * float(h), jax.errors.ConcretizationTypeError),
    "item": (lambda h: h * h.item(), jax.errors.ConcretizationTypeError),
    "index": (lambda h: h * [1, 2][h.astype(int) * 0], jax.errors.TracerIntegerConversionError),
    "numpy": (lambda h: h * np.asarray(h), jax.errors.TracerArrayConversionError),
    "mask": (lambda h: h[h > 0].sum(), jax.errors.NonConcreteBooleanIndexError),
    "format": (lambda h: h * float(f"{h:.1f}"), TypeError),
    "shape": (lambda h: jnp.ones(h.astype(int)).sum(), TypeError),
}


def notes(error):
    return [note for note in getattr(error, "__notes__", ()) if note[0] != "-"]  # those of JAX


def reading(read):
    return lambda w, x: read((x @ w).sum())


def error_of(kind, f, *args):
    with pytest.raises(kind) as caught:
        f(*args)
    assert caught.type is kind
    return caught.value


@pytest.mark.parametrize("name", READS)
def test_reading_a_number_names_the_ways_that_have_it(name):
    read, kind = READS[name]
    f = reading(read)
    assert float(jmpx.apply_policy(f, "by=arguments,c=bf16")(W, X)) in (8.0, 64.0)  # as is said
    for by, cast in (
        ("jmpx.apply_policy", jmpx.apply_policy(f, "c=bf16")),
        ("jmpx.autocast", jmpx.autocast(f)),
        ("The gradient function", jmpx.grad(f, jmpx.NoOpLossScale(), policy="c=bf16")),
    ):
        (note,) = notes(error_of(kind, cast, W, X))
        assert note.startswith(f"{by} traces the function") and WAYS in note
        is_grad_alone = name in ("float", "item", "numpy")  # JAX differentiates no NumPy array
        assert ("but for `float`" in note) == (is_grad_alone and "gradient" in by)
    for elsewhere in (
        jax.jit(jmpx.apply_policy(f, "c=bf16")),
        jax.checkpoint(jmpx.grad(f, jmpx.NoOpLossScale(), policy="c=bf16")),
        lambda w, x: jax.vmap(jmpx.autocast(f), (None, 0))(w, x[None]),
        lambda w, x: jax.lax.map(lambda x: jmpx.autocast(f)(w, x), x[None]),
    ):
        assert not notes(error_of(kind, elsewhere, W, X))  # it is so by any way
    if name in ("if", "float", "item", "index", "numpy"):  # of others, JAX names no function
        assert not notes(error_of(kind, jmpx.autocast(jax.jit(f)), W, X))


def refuse(h):
    raise TypeError("the user's own")


def immutable(h):
    h[0] = 1


@pytest.mark.parametrize("fault", [refuse, immutable, lambda h: {h: 1}, lambda h: h + "x"])
def test_other_errors_have_no_note_of_ways(fault):
    with pytest.raises(TypeError) as caught:
        jmpx.apply_policy(reading(fault), "c=bf16")(W, X)
    assert not notes(caught.value)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_an_array_in_a_list(wrap):
    kept = []

    def f(w, x):
        kept.append(x @ w)
        return sum(each.sum() for each in kept)

    wrap(jmpx.apply_policy(f, "c=bf16"))(W, X)
    error = error_of(jax.errors.UnexpectedTracerError, lambda: kept[0] + 1)
    assert f"return what it keeps, as in a list, or write {WAYS}" in str(error)
    later = error_of(jax.errors.UnexpectedTracerError, jmpx.autocast(f), W, X[:3])
    assert "arrays are lost" in notes(later)[-1] and WAYS in notes(later)[-1]
    kept.clear()
    jmpx.apply_policy(f, "by=arguments,c=bf16")(W, X)
    assert (kept[0] + 1).shape == (4, 2)


def linear(x):
    return hk.Linear(2)(x)


def norm(x):
    return hk.BatchNorm(True, True, 0.9)(x, is_training=True)


@pytest.mark.usefixtures("standard_promotion")  # of Haiku's moving averages
@pytest.mark.parametrize("part", [linear, norm])
def test_parameters_and_state_that_haiku_creates(part):
    def net(wrap):
        return hk.transform_with_state(lambda x: wrap(part)(x))

    init = net(jmpx.autocast).init
    error = error_of(jax.errors.UnexpectedTracerError, init, jax.random.key(0), X)
    (note,) = notes(error.__cause__)  # Haiku raises its own from it
    assert "such as parameters that Haiku creates in it" in note and WAYS in note
    error = error_of(jax.errors.UnexpectedTracerError, jax.jit(init), jax.random.key(0), X)
    assert WAYS in str(error)
    cast = net(lambda f: jmpx.apply_policy(f, "by=arguments,c=bf16"))
    made = cast.init(jax.random.key(0), X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made))
    params, state = net(lambda f: f).init(jax.random.key(0), X)
    if part is linear:  # creates nothing
        assert net(jmpx.autocast).apply(params, state, None, X)[0].shape == (4, 2)


def test_an_object_of_nnx_from_outside():
    counted = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    error = error_of(flax.errors.TraceContextError, jmpx.autocast(lambda x: counted(x)), X)
    assert "pass the object as an argument" in notes(error)[0]
    assert jmpx.autocast(lambda counted, x: counted(x))(counted, X).shape == (4, 2)
