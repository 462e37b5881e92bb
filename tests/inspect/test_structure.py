"""The key of a jaxpr's structure: what shares it, and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmpx._jaxprs.structure import structure, structure_of


def key(fn, *args):
    # A new function each time, as JAX would return the jaxpr that it has for the old one.
    return structure(jax.make_jaxpr(lambda *args: fn(*args))(*args))


def scanned(x, scale=2.0, length=3):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c) * scale, c.sum()), x, None, length=length)


@jax.custom_vjp
def halved_gradient(x):
    return jnp.sin(x)


halved_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) / 2,))
X = jnp.linspace(0, 1, 4)
PROGRAMS = {
    "scan": scanned,
    "gradient": lambda x: jax.grad(lambda x: scanned(x)[0].sum())(x),
    "jit": lambda x: jnp.clip(jnp.clip(x, 0.2, 0.8), 0.4),
    "branches": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x),
    "rows": lambda x: x.at[jnp.array([0, 2])].add(1.0)[1:],
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "nan": lambda x: jnp.where(x > 0, x, np.float32("nan")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_traced_again_has_the_same_key(name):
    first, second = key(PROGRAMS[name], X), key(PROGRAMS[name], X)
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: scanned(x, 2.5),
        lambda x: scanned(x, -2.0),
        lambda x: scanned(x, length=4),
        lambda x: scanned(x)[::-1],
        lambda x: scanned(x.astype(jnp.bfloat16)),
        lambda x: scanned(x[:3]),
        lambda x: scanned(scanned(x)[0]),
        jax.jit(scanned),
    ],
)
def test_another_program_has_another_key(other):
    assert key(scanned, X) != key(other, X)


def test_operands_tell_programs_apart():
    y = X + 1
    keys = [
        key(lambda x, y: x - y, X, y),
        key(lambda x, y: y - x, X, y),
        key(lambda x, y: x - x, X, y),
        key(lambda x, y: (x - y, x), X, y),
        key(lambda x: x * np.float32(0.0), X),
        key(lambda x: x * np.float32(-0.0), X),
    ]
    assert len(set(keys)) == len(keys)


def test_constants_count_by_shape_and_dtype():
    keys = [key(lambda x, c=c: jax.jit(lambda x: x + c)(x), X) for c in (X + 1, X + 2, X[:1] + 1)]
    assert keys[0] == keys[1] != keys[2]


def test_a_function_with_a_rule_differs_by_what_it_runs():
    run = lambda: key(lambda x: halved_gradient(x) * 2, X)  # noqa: E731
    assert run() == run() != key(lambda x: jnp.sin(x) * 2, X)


def test_equal_layers_of_one_program_share_a_key():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(x) * 2.0) * 2.0)(X)
    ((x,), eqns) = jaxpr.jaxpr.invars, jaxpr.eqns
    layers = (eqns[:2], [x], eqns[1].outvars), (eqns[2:], eqns[1].outvars, eqns[3].outvars)
    assert structure_of(*layers[0]) == structure_of(*layers[1]) != structure(jaxpr)
