"""`jmpx.autocast(save="products")` changes what is kept, and neither numbers nor dtypes."""

import collections
import functools
from typing import Any

import autocast as benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, normal
from helpers.autocast import LOW_DTYPES
from helpers.jaxprs import equations_of
from helpers.saved_models import MODELS
from jax import export

import jmpx

# Equations that hold a jaxpr, names, which compute nothing, and casts, which each piece makes.
_AROUND = {"jit", "remat2", "custom_vjp_call", "convert_element_type", "copy", "name"}


def losses(apply, x, labels, policy, save: Any = "products"):
    """Returns a loss without `save=` and one with it."""

    def loss_of(apply):
        return lambda params: benchmark.cross_entropy(apply(params, x), labels)

    casts = jmpx.autocast(apply, policy), jmpx.autocast(apply, policy, save=save)
    return [loss_of(cast) for cast in casts]


def dtypes_of_operations(fn, *args):
    """Returns how often each operation runs on operands of which dtypes."""
    found = [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name not in _AROUND]
    return collections.Counter(
        (
            eqn.primitive.name,
            *(str(getattr(atom.aval, "dtype", "")) for atom in (*eqn.invars, *eqn.outvars)),
        )
        for eqn in found
    )


# Else XLA:CPU keeps a result of 16 bits in float32 where it fuses what reads it, and where that is
# depends on what is computed again.
EXACT = {"xla_allow_excess_precision": False}


# In these, XLA sums the cotangents of a parameter in another order; since JAX 0.12, in one more.
REORDERED = ("unrolled", "haiku", *["equinox"] * (jax.__version_info__ >= (0, 12)))


@pytest.mark.filterwarnings("ignore:JAX cannot trace")  # other tests are about that
@pytest.mark.sampled(12)
@pytest.mark.parametrize("save", ["products", "products+attention"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes(rng, name, save):
    """Only under XLA's optimizations do gradients differ, by the order of float32 sums."""
    apply, params, x, labels = MODELS[name](rng)
    plain, saving = losses(apply, x, labels, rng.choice(list(LOW_DTYPES)), save)
    assert any(eqn.primitive.name == "remat2" for eqn in equations_of(saving, params))
    assert dtypes_of_operations(saving, params) == dtypes_of_operations(plain, params)
    grads = [jax.jit(jax.grad(f), compiler_options=EXACT)(params) for f in (plain, saving)]
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(grads[0]))
    if name in REORDERED:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3), *grads)
    else:
        assert_same_bits(*grads)
    assert benchmark.residual_bytes(saving, params) < benchmark.residual_bytes(plain, params)


@pytest.mark.thorough
@pytest.mark.parametrize("save", ["products", "products+attention"])
@pytest.mark.filterwarnings("ignore:JAX cannot trace")
@pytest.mark.parametrize("name", MODELS)
def test_operation_by_operation_the_bits_are_the_same(rng, name, save):
    """So what differs in the compiled programs of these models is XLA's alone."""
    apply, params, x, labels = MODELS[name](rng)
    plain, saving = losses(apply, x, labels, rng.choice(list(LOW_DTYPES)), save)
    with jax.disable_jit():  # JAX 0.12 compiles a checkpoint as a whole, also in an eager call
        grads = [jax.grad(loss)(params) for loss in (saving, plain)]
    assert_same_bits(*grads)


def attention(x, w, up, down):
    scores = jax.nn.softmax((x @ w) @ jnp.swapaxes(x, -1, -2) / 4)
    x = x + scores @ x
    return x + jax.nn.gelu(x @ up) @ down


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", ["b, 6, 8", "b, s, 8", "2*b, s + 1, 8"])
def test_an_exported_function_with_symbolic_sizes(shape, rng):
    params = [(normal(rng, 8, 8), normal(rng, 8, 16), normal(rng, 16, 8)) for _ in range(3)]

    def loss(params, x, save: Any = "products"):
        def apply(params, x):
            return functools.reduce(lambda x, weights: attention(x, *weights) / 2, params, x)

        return jnp.mean(jmpx.autocast(apply, save=save)(params, x).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
    assert any(eqn.primitive.name == "remat2" for eqn in equations_of(loss, params, x))
    exported = export.export(jax.jit(jax.grad(loss)))(params, x)
    batch = normal(rng, 4, 6, 8)
    plain = jax.jit(jax.grad(functools.partial(loss, save=None)))(params, batch)
    grads = exported.call(params, batch)
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.02), grads, plain)
