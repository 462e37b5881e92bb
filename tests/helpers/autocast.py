"""Checks of functions under `jmpx.autocast`: their values, and the dtypes of their operations.

A check looks at both: values next to those of float32, and dtypes in the jaxpr, so that no test
passes because nothing was cast. Products of small integers (`whole`) and of a 16-bit matrix with
the identity (`activation`) are exact in 16 bits, so their values have to be equal.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmpx
from helpers import BF16, F16, F32
from helpers.jaxprs import equations_of

# A bfloat16 has 8 bits of digits, and a result is rounded several times. If a bfloat16 product is
# transposed and cast within jit, XLA:CPU of JAX 0.12 is off by 2e-2 of the largest value.
TOLERANCE = 5e-2
LEAST = np.finfo(np.float32).min
LOW_DTYPES = {"c=f16": F16, "c=bf16": BF16}
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def rows(table, *by_default):
    """Returns the names of a table: the default run has some of them, all runs all."""
    others = pytest.mark.thorough, pytest.mark.versions
    return [pytest.param(name, marks=() if name in by_default else others) for name in table]


def whole(rng, *shape):
    """Small integers, as float32: sums of a few of their products are exact in 16 bits."""
    return jax.device_put(np.asarray(rng.integers(-3, 4, size=shape), F32))


def dtypes_of(fn, *args):
    """Returns, for each operation of `fn(*args)`, the inexact dtypes of its operands."""
    dtypes = {}
    for eqn in equations_of(fn, *args):
        avals = [v.aval for v in eqn.invars if hasattr(v.aval, "dtype")]
        names = [a.dtype.name for a in avals if jnp.issubdtype(a.dtype, jnp.inexact)]
        dtypes.setdefault(eqn.primitive.name.replace("-", "_"), set()).update(names)
    return dtypes


def assert_ran(fn, *args, **operations):
    """Holds operations of `fn(*args)` to run, in these dtypes and no others."""
    found = dtypes_of(fn, *args)
    ran = {name: " ".join(sorted(found.get(name, {"nowhere"}))) for name in operations}
    assert ran == operations


def assert_near(actual, desired, tolerance=TOLERANCE):
    """Holds two trees to the same dtypes and near values: next to the largest of each leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for a, d in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert a.dtype == d.dtype
        a, d = np.asarray(a, np.float64), np.asarray(d, np.float64)
        assert np.isfinite(d).all()
        np.testing.assert_allclose(a, d, rtol=0, atol=tolerance * np.abs(d).max(initial=1e-30))


QUICK = {"xla_backend_optimization_level": 0}  # what is compiled here runs once


def values(args, *functions):
    """Results of functions of the same arguments, compiled together."""
    compiled = jax.jit(lambda *args: [f(*args) for f in functions], compiler_options=QUICK)
    return compiled(*args)


def check(fn, *args, policy="compute=bf16", tolerance=TOLERANCE, **operations):
    """Holds `fn` under autocast to float32's values, and to the dtypes of its operations."""
    cast = jmpx.autocast(fn, policy)
    result, reference = values(args, cast, fn)
    assert_near(result, reference, tolerance)
    assert_ran(cast, *args, **operations or {"dot_general": "bfloat16"})
    return result


def check_sides(transform, fn, *args, products=("bfloat16", "bfloat16"), tolerance=TOLERANCE):
    """Holds `transform(autocast(fn))` and `autocast(transform(fn))` to float32's values.

    Their matrix products have to run in the dtypes of `products`, the first of which is for the
    first of the two.
    """
    sides = transform(jmpx.autocast(fn)), jmpx.autocast(transform(fn))
    *results, reference = values(args, *sides, transform(fn))
    for side, result, dtypes in zip(sides, results, products, strict=True):
        assert_near(result, reference, tolerance)
        assert_ran(side, *args, dot_general=dtypes)


def loss_fn(x, w):
    return jnp.sin(x @ w).sum()


def both(f):
    return jax.grad(f, (0, 1))


@jax.custom_jvp
def seven(x, w):
    """A product with tangents that are wrong on purpose, by 7 and 3."""
    return x @ w


@seven.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return seven(x, w), 7 * (dx @ w) + 3 * (x @ dw)


@jax.custom_vjp
def eleven(x, w):
    return x @ w


eleven.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (11 * (g @ saved[1].T), 5 * (saved[0].T @ g))
)


def activation(numbers):
    """Returns a matrix, and a function that turns it into an activation in 16 bits."""
    return jnp.asarray(np.atleast_2d(numbers), F32), lambda x: x @ jnp.eye(x.shape[1], dtype=F32)


def together(functions):
    """Results of functions without arguments, by their names, compiled together."""
    return jax.device_get(jax.jit(lambda: {name: f() for name, f in functions.items()})())


def named(x):
    with jax.named_scope("trunk"):
        x = jnp.tanh(x @ x)
    with jax.named_scope("head"):
        return jax.jit(lambda x: lax.scan(lambda c, _: (c @ x, None), x, None, 2)[0])(x)


def under_autocast(loss_fn, more=""):
    """Returns a loss under autocast as a whole: its first argument holds the parameters."""
    return jmpx.apply_policy(loss_fn, f"by=operations,c=bf16{more}")
