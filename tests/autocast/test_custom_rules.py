"""Derivatives and batching rules that the user wrote are the ones that run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32, normal
from helpers.autocast import (
    activation,
    assert_near,
    assert_ran,
    both,
    check,
    check_sides,
    eleven,
    rows,
    seven,
    together,
    values,
)
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.scipy.special import xlogy

import jmpx

# Other tests are about this warning.
pytestmark = pytest.mark.filterwarnings("ignore:JAX cannot trace")

ACTIVATIONS = [(jax.nn.relu, 0.0), (lambda x: jnp.maximum(x, 0), 0.5), (jnp.abs, 1.0)]
ACTIVATIONS += [(jax.nn.leaky_relu, 1.0), (jax.nn.silu, 0.5)]


@pytest.mark.thorough
def test_gradients_at_zero_are_those_of_float32():
    eye, zeros = jnp.eye(3, dtype=F32), jnp.zeros((1, 3), F32)

    def slopes(wrap):
        return lambda x: [wrap(lambda x, f=f: f(x @ eye).sum())(x) for f, _ in ACTIVATIONS]

    sides = (
        slopes(lambda f: jax.grad(jmpx.autocast(f))),
        slopes(lambda f: jmpx.autocast(jax.grad(f))),
    )
    for side, result in zip(sides, values((zeros,), *sides), strict=True):
        for found, (_, slope) in zip(result, ACTIVATIONS, strict=True):
            np.testing.assert_array_equal(found, slope)
        assert_ran(side, zeros, dot_general="bfloat16")


@jax.custom_jvp
def nested_seven(x, w):
    return jnp.sin(seven(x, w))


@nested_seven.defjvp
def _(primals, tangents):
    out, tangent = jax.jvp(seven, primals, tangents)
    return jnp.sin(out), 5 * jnp.cos(out) * tangent


@jax.custom_jvp
def counted(n, x, w):
    return n + 1, (x @ w) * n.astype(F32)


@counted.defjvp
def _(primals, tangents):
    (n, x, w), (dn, dx, dw) = primals, tangents
    assert dn.dtype == jax.dtypes.float0
    return counted(n, x, w), (np.zeros((), jax.dtypes.float0), 13 * (dx @ w + x @ dw))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def eleven_of(function, x, w, n):
    return function(x @ w) * n.astype(F32)


eleven_of.defvjp(
    lambda function, x, w, n: (function(x @ w) * n.astype(F32), w),
    lambda function, w, g: (11 * g @ w.T, 5 * g, None),
)


def in_scan(f):
    return lambda x, w: lax.scan(lambda c, _: (f(c, w) / 7, None), x, None, length=2)[0]


CUSTOM_JVP = {
    "nested": jax.jit(nested_seven),
    "a traced integer": lambda x, w: counted(x[0, 0].astype(int), x, w)[1],
    "in cond": lambda x, w: lax.cond(x[0, 0] < 9, seven, lambda x, w: x, x, w),
}
CUSTOM_VJP = {
    "nondiff_argnums and integers": lambda x, w: eleven_of(jnp.cos, x, w, jnp.array(3)),
    "in scan ": in_scan(eleven),
}


@pytest.mark.parametrize("name", CUSTOM_JVP | CUSTOM_VJP)
def test_custom_rules_are_used(pair, name):
    if name in CUSTOM_JVP:
        check_sides(both, lambda x, w: CUSTOM_JVP[name](x, w).sum(), *pair)
        return
    # The operations of a custom_vjp run in float32. Once JAX has differentiated it, it is gone, and
    # autocast outside of the gradient casts its operations as all others.
    f = lambda x, w: (CUSTOM_VJP[name](x, w) @ w).sum()  # noqa: E731
    check_sides(both, f, *pair, products=("bfloat16 float32", "bfloat16"))


def test_custom_vjp_runs_in_float32(pair):
    forward = jmpx.autocast(lambda x, w: eleven(jnp.tanh(x @ w), w))
    assert_ran(forward, *pair, dot_general="bfloat16 float32", tanh="bfloat16")
    assert_ran(jmpx.autocast(eleven), *pair, dot_general="float32")


def test_a_custom_vmap_rule_is_used(pair):
    @jax.custom_batching.custom_vmap
    def f(x):
        return x + 1

    @f.def_vmap
    def _(axis_size, in_batched, x):
        return 5 * x, in_batched[0]

    x, w = pair
    check(lambda x, w: jax.vmap(f)(x @ w), x, w)
    cast = jax.vmap(jmpx.autocast(lambda x: f(x @ w)))
    assert_near(cast(x), 5 * (x @ w))


# Casts of tangents and cotangents are linear: a large one overflows, and does not saturate.


@jax.custom_jvp
def chosen(h, p):
    return h * p


@chosen.defjvp
def _(primals, tangents):
    (h, p), (dh, dp) = primals, tangents
    return chosen(h, p), jnp.where(h > 0, dh * p, dp) + jnp.where(h > 0, h * dp, dp)


@jax.custom_jvp
def joined(h, p):
    return jnp.concatenate([h, p])


@joined.defjvp
def _(primals, tangents):
    dh, dp = tangents
    zeros = jnp.zeros((2 * dh.shape[0], *dh.shape[1:]), dh.dtype)
    start = (dh.shape[0], 0)
    out = lax.dynamic_update_slice(jnp.pad(dh, ((0, dh.shape[0]), (0, 0))), dp, start)
    return joined(*primals), out + zeros.at[0].set(dp[0]) - zeros.at[0].set(dp[0])


BY_HAND = {
    "tangents in place": joined,
    "in scan": lambda h, p: lax.scan(lambda c, _: (xlogy(c, p) + h, c), h, None, length=2),
    "chosen": jax.jit(jax.checkpoint(lambda h, p: chosen(xlogy(h, p), p))),
}


def test_custom_jvp_of_an_activation_and_a_parameter():
    x, w, p = jnp.eye(3, dtype=F32) + 1, *normal(np.random.default_rng(4), 2, 3, 3)
    p = jnp.abs(p) + 0.5

    def forward(f):
        return lambda x, p: jax.jvp(f, (x, p), (p, x))[1]

    def sides_of(name):
        def loss(x, p):
            leaves = jax.tree.leaves(BY_HAND[name](jnp.abs(x @ w) + 0.5, p))
            return sum((leaf**2).sum() for leaf in leaves)

        cast = jmpx.autocast(loss, "c=f16")
        sides = jmpx.autocast(both(loss), "c=f16"), forward(cast), both(cast)
        return [f(x, p) for f in (*sides, both(loss), forward(loss))]

    found = together({name: functools.partial(sides_of, name) for name in BY_HAND})
    for *got, slope, tangent in found.values():
        assert_near(got, [slope, tangent, slope], 1e-2)


def test_a_large_tangent_overflows():
    x, h = activation([1.0, -1.0])
    f = jmpx.autocast(jax.jit(jax.checkpoint(lambda x, p: chosen(h(x), p))), "c=f16")

    def slope(size):
        return jax.jvp(f, (x, jnp.ones_like(x)), (jnp.zeros_like(x), jnp.full_like(x, size)))[1]

    np.testing.assert_array_equal(slope(1e6), [[np.inf, np.inf]])
    np.testing.assert_array_equal(slope(1e3), [[1e3, 2e3]])


# Symbolic zeros reach the user's rules, as without autocast.

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


def of_rules(x, y):
    h = x @ jnp.eye(2, dtype=F32)
    first, second, n = scaled(h, y, jnp.array(2))
    return (first + sine(second) + n.astype(F32)).sum()


SYMBOLIC = {
    "x": jax.grad,
    "jvp": lambda f: lambda x, y: jax.jvp(lambda y: f(x, y), (y,), (x,)),
    "vmap": lambda f: lambda x, y: jax.vmap(jax.grad(f, 1))(x[None], y[None]),
    "jit of checkpoint": lambda f: jax.grad(
        lambda x, y: jax.jit(jax.checkpoint(lambda x, y: f(x, y)))(x, y), 1
    ),
    "scan": lambda f: jax.grad(
        lambda x, y: lax.scan(lambda c, _: (c + f(x, y), None), F32.type(0), None, length=2)[0], 1
    ),
}


@pytest.mark.parametrize("name", rows(SYMBOLIC, "x", "jit of checkpoint", "scan"))
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
