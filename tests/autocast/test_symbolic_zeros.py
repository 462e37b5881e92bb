"""Symbolic zeros reach the user's rules, as without autocast."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32
from helpers.autocast import assert_near, both
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal

import jmpx

SEEN: list = []  # per call of a rule, which tangents are symbolic zeros


def is_zero(tangent):
    return type(tangent) is SymbolicZero


@jax.custom_jvp
def scaled(x, y, n):
    return x * y * n.astype(F32), x + 1, n + 1


def scaled_rule(primals, tangents):
    SEEN.append(["scaled", *map(is_zero, tangents)])
    (x, y, n), (dx, dy, _) = primals, tangents
    terms = [t * other for t, other in ((dx, y), (dy, x)) if not is_zero(t)]
    second = zero_from_primal(x, symbolic_zeros=True) if is_zero(dx) else dx
    integer = np.zeros(n.shape, jax.dtypes.float0)
    return scaled(*primals), (sum(terms) * n.astype(F32), second, integer)


scaled.defjvp(scaled_rule, symbolic_zeros=True)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


def sine_rule(primals, tangents):
    SEEN.append(["sine", is_zero(tangents[0])])
    return sine(*primals), 3 * jnp.cos(primals[0]) * tangents[0]  # 3: it is this rule that is used


sine.defjvp(sine_rule, symbolic_zeros=True)


@eqx.filter_custom_jvp
def filtered(x, y, factor, *, nothing=None):
    return x * y * factor


@filtered.def_jvp
def _(primals, tangents, *, nothing=None):
    SEEN.append(["filtered", *(t is None for t in tangents)])
    (x, y, factor), (dx, dy, _) = primals, tangents
    terms = [t * other for t, other in ((dx, y), (dy, x)) if t is not None]
    return x * y * factor, sum(terms) * factor


def of_rules(x, y):
    h = x @ jnp.eye(2, dtype=F32)
    first, second, n = scaled(h, y, jnp.array(2))
    return (first + sine(second) + filtered(h, y, 3.0, nothing=None) + n.astype(F32)).sum()


SYMBOLIC = {
    "x": jax.grad,
    "y": lambda f: jax.grad(f, 1),
    "both": both,
    "neither": lambda f: jax.grad(lambda x, y: f(lax.stop_gradient(x), y), 0),
    "jvp": lambda f: lambda x, y: jax.jvp(lambda y: f(x, y), (y,), (x,)),
    "jit": lambda f: jax.grad(lambda x, y: jax.jit(lambda x, y: f(x, y))(x, y), 1),
    "vmap": lambda f: lambda x, y: jax.vmap(jax.grad(f, 1))(x[None], y[None]),
    "checkpoint": lambda f: jax.grad(lambda x, y: jax.checkpoint(f)(x, y), 1),
    "scan": lambda f: jax.grad(
        lambda x, y: lax.scan(lambda c, _: (c + f(x, y), None), F32.type(0), None, length=2)[0], 1
    ),
    "jvp of grad": lambda f: lambda x, y: jax.jvp(lambda y: jax.grad(f, 1)(x, y), (y,), (x,)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_zeros_reach_the_rules(name):
    x, y = jnp.full((2, 2), 0.5, F32), jnp.full((2, 2), 0.25, F32)

    def results(wrap_f=lambda f: f, wrap_g=lambda f: f):
        SEEN.clear()
        f = SYMBOLIC[name](wrap_f(lambda x, y: of_rules(x, y)))
        out = jax.jit(wrap_g(lambda x, y: f(x, y)))(x, y)
        return out, list(SEEN)

    expected, seen = results()
    assert len(seen) > 0 or name == "neither"
    for sides in ({"wrap_f": jmpx.autocast}, {"wrap_g": jmpx.autocast}):
        got, found = results(**sides)
        assert found == seen
        assert_near(got, expected, 2e-2)
