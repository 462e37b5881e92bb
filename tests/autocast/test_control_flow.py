"""Autocast inside and outside of loops, branches, and JAX's other transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32
from helpers.autocast import (
    assert_near,
    assert_ran,
    both,
    check,
    check_sides,
    dtypes_of,
    loss_fn,
    rows,
    values,
)
from helpers.jaxprs import equations_of
from jax import lax
from jax.experimental import checkify

import jmpx


def scan_of_many(x, w):
    def body(carry, n):
        a, b, c, n_, flag, key = carry
        key, _ = jax.random.split(key)
        b = b + a[0].astype(BF16)
        return (a @ w, b, c + jnp.float16(1), n_ + n, ~flag, key), (a[0], b, n)

    key = jax.random.key(0)
    carry = x, x[0].astype(BF16), x[0].astype(F16), jnp.array(0), jnp.array(True), key
    (a, b, c, n, flag, key), ys = lax.scan(body, carry, jnp.arange(3))
    return a, b, c, n, flag, jax.random.key_data(key), ys


def while_loop(x, w):
    def body(state):
        n, c = state
        return n + 1, jnp.tanh(c @ w)

    return lax.while_loop(lambda state: (state[0] < 3) & (state[1] + w < 9).all(), body, (0, x))[1]


CONTROL = {
    "cond of closures": lambda x, w: lax.cond(x[0, 0] < 9, lambda: x @ w, lambda: w),
    "cond of other dtypes": lambda x, w: lax.cond(
        x[0, 0] > 9, lambda x: (x, jnp.exp(x), 1, x), lambda x: (x @ w, x @ w, 2, x), x
    ),
    "switch": lambda x, w: lax.switch(
        1 + (x[0, 0] < 9).astype(int), [jnp.add, lambda x, w: jnp.exp(x), jnp.matmul], x, w
    ),
    "scan in reverse": lambda x, w: lax.scan(
        lambda c, x: (c @ x, c), x, jnp.stack([w, x, w]), reverse=True, unroll=2
    ),
}
LOOPS = {
    "scan of many dtypes": scan_of_many,
    "fori of a traced count": lambda x, w: lax.fori_loop(
        0, x[0, 0].astype(int) * 0 + 3, lambda i, c: jnp.tanh(c @ w) + i.astype(F32), x
    ),
    "while in vmap": lambda x, w: jax.vmap(lambda x: while_loop(x[None], w))(x),
}


def total_of(fn):
    """Sums the float32 results of `fn`, so that the sum can be differentiated."""

    def total(*args):
        results = fn(*args)
        leaves = [leaf for leaf in jax.tree.leaves(results) if leaf.dtype == F32]
        return sum(leaf.sum() for leaf in leaves), results

    return total


@pytest.mark.parametrize("name", CONTROL | LOOPS)
def test_products_in_control_flow_run_in_16_bits(pair, name):
    gradient = functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    f = total_of((CONTROL | LOOPS)[name])
    for cast in (gradient(jmpx.autocast(f)), jmpx.autocast(gradient(f))) if name in CONTROL else ():
        assert_ran(cast, *pair, dot_general="bfloat16")
    assert_ran(jmpx.autocast(f), *pair, dot_general="bfloat16")


@pytest.mark.parametrize("name", rows(CONTROL | LOOPS, "switch", "scan of many dtypes"))
def test_control_flow_and_its_gradients(pair, name):
    if name in LOOPS:
        check(LOOPS[name], *pair)
    else:
        check_sides(lambda f: jax.grad(f, (0, 1), has_aux=True), total_of(CONTROL[name]), *pair)


STEPS = 2000  # a bfloat16 sum of ones ends at 256, a float16 sum at 2048


ONE = jax.device_put(np.eye(2, dtype=F32))


def sum_in_scan(x, w):
    return lax.scan(
        lambda c, x: (c + x @ w, c), jnp.zeros((2, 2), F32), jnp.ones((STEPS, 1, 1), F32) * x
    )


def sum_of_a_closed_over_product(x, w):
    h = x @ w
    return lax.scan(lambda c, _: (c + h, None), jnp.zeros((2, 2), F32), None, length=STEPS)[0]


def sum_in_while(x, w):
    zero = jnp.zeros((2, 2), F32)
    return lax.fori_loop(0, STEPS * x[0, 0].astype(int), lambda i, c: c + x @ w, zero)


def sum_in_a_ref(x, w):
    ref = jax.new_ref(jnp.zeros((2, 2), F32))

    def add(i, _):
        ref[...] += x @ w
        return i

    lax.fori_loop(0, STEPS, add, 0)
    return ref[...]


@pytest.mark.parametrize(
    "f", [sum_in_scan, sum_of_a_closed_over_product, sum_in_while, sum_in_a_ref]
)
def test_sums_in_a_loop_are_exact(f):
    total = check(f, ONE, ONE, tolerance=0)
    np.testing.assert_array_equal(jax.tree.leaves(total)[0], STEPS * ONE)


@pytest.mark.thorough
def test_gradients_that_a_loop_sums_are_exact():
    def total(x, w):
        return sum_in_scan(x, w)[0].sum() + sum_of_a_closed_over_product(x, w).sum()

    check_sides(both, total, ONE, ONE, tolerance=0)


@pytest.mark.parametrize("name, expected", [("scan", (256, 2000)), ("while", (2000, 256))])
def test_a_rule_carries_activations_in_16_bits(pair, name, expected):
    def f(x, w):
        steps = 3 if name == "scan" else x[0, 0].astype(int) * 0 + 3
        return lax.fori_loop(0, steps, lambda i, c: jnp.tanh(c @ w), x)

    rule = f"c=bf16; op.{name}: bf16"
    assert_near(*values(pair, jmpx.autocast(f, rule), f))
    for wrapped, dtype in ((jmpx.autocast(f, rule), BF16), (jmpx.autocast(f), F32)):
        (loop,) = (e for e in equations_of(wrapped, *pair) if e.primitive.name == name)
        carried = [v.aval.dtype for v in loop.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        assert carried == [dtype]

    def count(x):  # a sum over 2,000 steps stalls in 16 bits
        one = (x @ x)[0, 0]
        looped = lax.fori_loop(0, STEPS, lambda _, c: c + one, jnp.float32(0))
        step = lambda c: (c[0] + 1, c[1] + one)  # noqa: E731
        return looped, lax.while_loop(lambda c: c[0] < STEPS, step, (0, 0.0))[1]

    assert tuple(map(float, jmpx.autocast(count, rule)(jnp.eye(2)))) == expected


# Other transformations.

TRANSFORMS = {
    "grad of jvp": lambda f: both(lambda x, w: jax.jvp(f, (x, w), (w, x))[1]),
    "hessian": jax.hessian,
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](w, x),
    "jit of grad of jit": lambda f: jax.jit(both(jax.jit(f))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_products_in_transformations_run_in_16_bits(positive, name):
    cast = jmpx.autocast(loss_fn)
    transform = TRANSFORMS[name]
    for f in (transform(cast), jmpx.autocast(transform(loss_fn)), jmpx.autocast(transform(cast))):
        assert_ran(f, *positive, dot_general="bfloat16")


@pytest.mark.parametrize("name", rows(TRANSFORMS, "grad of jvp", "linearize"))
def test_transformations(positive, name):
    check_sides(TRANSFORMS[name], loss_fn, *positive)


def test_linear_transpose(pair):
    x, w = pair

    def transpose(f):
        return lambda y, w: jax.linear_transpose(lambda x: f(x, w), x)(y)

    check_sides(transpose, jnp.matmul, x, w)


def test_a_gradient_with_respect_to_a_closed_over_tracer(pair):
    x, w = pair

    def slope(wrap):
        return jax.grad(lambda w: jax.grad(wrap(lambda x: loss_fn(x, w) * w.sum()))(x).sum())

    plain = slope(lambda f: f)
    sides = slope(jmpx.autocast), jmpx.autocast(plain)
    *results, reference = values((w,), *sides, plain)
    for side, result in zip(sides, results, strict=True):
        assert_near(result, reference)
        assert_ran(side, w, dot_general="bfloat16")


@pytest.mark.parametrize("is_inside", [True, False])
def test_checkify(pair, is_inside):
    def f(x, w):
        h = x @ w
        checkify.check(jnp.all(h < 0), "too large: {m}", m=h.max() * 0)
        return jnp.log(h - 9)

    checked = functools.partial(
        checkify.checkify, errors=checkify.user_checks | checkify.float_checks
    )
    cast = checked(jmpx.autocast(f)) if is_inside else jmpx.autocast(checked(f))
    error, _ = jax.jit(cast)(*pair)
    assert "too large: 0.0" in error.get()
    fine, _ = jax.jit(cast)(-jnp.abs(pair[0]) - 1, jnp.abs(pair[1]) + 1)
    assert "nan generated by primitive: log" in fine.get()
    assert_ran(cast, *pair, dot_general="bfloat16", log="float32")


# Factorizations, solvers and Fourier transforms run in float32.


def spd(h):
    """A positive matrix of a product."""
    return jnp.tanh(h) @ jnp.tanh(h).T + 4 * jnp.eye(4, dtype=F32)


def cube_root(h):
    y = 1 + h**2

    def newton(f, z):
        return lax.fori_loop(0, 20, lambda i, z: z - f(z) / (3 * z**2), z)

    return lax.custom_root(lambda z: z**3 - y, y, newton, lambda g, y: y / g(jnp.ones_like(y)))


def linear_solve(h):
    a = spd(h)
    return lax.custom_linear_solve(
        lambda v: a @ v, h[0], lambda _, b: jnp.linalg.solve(a, b), symmetric=True
    )


LINALG = {
    "slogdet": lambda h: jnp.linalg.slogdet(spd(h))[1],
    "eigvalsh": lambda h: jnp.linalg.eigvalsh(spd(h)),
    "svdvals": lambda h: jnp.linalg.svdvals(spd(h)),
    "fft": lambda h: jnp.abs(jnp.fft.rfft(h)) + jnp.fft.irfft(jnp.fft.rfft(h))[:, :3],
    "custom_root": cube_root,
    "custom_linear_solve": linear_solve,
    "conjugate gradients": lambda h: jax.scipy.sparse.linalg.cg(spd(h), h[0], maxiter=9)[0],
}
FACTORIZATIONS = "cholesky eigh fft geqrf householder_product lu qr svd triangular_solve".split()


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_runs_in_float32(pair, name):
    found = dtypes_of(jmpx.autocast(lambda x, w: LINALG[name](x @ w)), *pair)
    assert "bfloat16" in found["dot_general"]
    in_float32 = [found[name] for name in FACTORIZATIONS if name in found]
    assert in_float32 or name in ("custom_root", "conjugate gradients")
    assert all(dtypes <= {"float32", "complex64"} for dtypes in in_float32)


def test_linear_algebra_and_its_gradients(pair):
    def f(x, w):
        y = cube_root(x @ w)
        return (y**2).sum(), y

    gradient = functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    assert_near(*values(pair, gradient(jmpx.autocast(f)), gradient(f)))
