"""Loops and branches: their values, their gradients, and the dtypes of what they carry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32
from helpers.autocast import assert_near, assert_ran, both, check, check_sides, values
from helpers.jaxprs import equations_of
from jax import lax

import jmpx


def scan_of_products(x, w):
    return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c[0]), x, jnp.stack([x, x]))


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


def associative(x, w):
    return lax.associative_scan(lambda a, b: a @ b, jnp.stack([x, w, x]))


def while_loop(x, w):
    def body(state):
        n, c = state
        return n + 1, jnp.tanh(c @ w)

    return lax.while_loop(lambda state: (state[0] < 3) & (state[1] + w < 9).all(), body, (0, x))[1]


BRANCHES = {
    "cond": lambda x, w: lax.cond(x[0, 0] > 9, lambda x, w: x, jnp.matmul, x, w),
    "cond of closures": lambda x, w: lax.cond(x[0, 0] < 9, lambda: x @ w, lambda: w),
    "cond of a constant": lambda x, w: lax.cond(
        x[0, 0] < 9, lambda x: x @ w, lambda x: jnp.zeros((4, 4), F32), x
    ),
    "cond in vmap": lambda x, w: jax.vmap(
        lambda x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)
    )(jnp.stack([x, w])),
    "cond in scan": lambda x, w: lax.scan(
        lambda c, n: (lax.cond(n > 0, lambda: c @ w, lambda: c), n), x, np.arange(2)
    )[0],
    "scan of scan": lambda x, w: lax.scan(
        lambda c, x: (scan_of_products(c, x)[0], c[0]), x, jnp.stack([w, w])
    ),
    "map in batches": lambda x, w: lax.map(lambda x: x @ w, jnp.stack([x, w, x]), batch_size=2),
    "fori of a static count": lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
}
LOOPS = {
    "scan of many dtypes": scan_of_many,
    "fori of a traced count": lambda x, w: lax.fori_loop(
        0, x[0, 0].astype(int) * 0 + 3, lambda i, c: jnp.tanh(c @ w) + i.astype(F32), x
    ),
    "while": while_loop,
    "while in vmap": lambda x, w: jax.vmap(lambda x: while_loop(x[None], w))(x),
}
CONTROL = {
    "cond of other dtypes": lambda x, w: lax.cond(
        x[0, 0] > 9, lambda x: (x, jnp.exp(x), 1, x), lambda x: (x @ w, x @ w, 2, x), x
    ),
    "switch": lambda x, w: lax.switch(
        1 + (x[0, 0] < 9).astype(int), [jnp.add, lambda x, w: jnp.exp(x), jnp.matmul], x, w
    ),
    "scan": scan_of_products,
    "scan in reverse": lambda x, w: lax.scan(
        lambda c, x: (c @ x, c), x, jnp.stack([w, x, w]), reverse=True, unroll=2
    ),
    "map": lambda x, w: lax.map(lambda x: x @ w, jnp.stack([x, w])),
    "associative_scan": associative,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*BRANCHES, *LOOPS])
def test_control_flow(pair, name):
    check((BRANCHES | LOOPS)[name], *pair)


def total_of(fn):
    """Sums the float32 results of `fn`, so that the sum can be differentiated."""

    def total(*args):
        results = fn(*args)
        leaves = [leaf for leaf in jax.tree.leaves(results) if leaf.dtype == F32]
        return sum(leaf.sum() for leaf in leaves), results

    return total


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONTROL)
def test_control_flow_and_its_gradients(pair, name):
    check_sides(lambda f: jax.grad(f, (0, 1), has_aux=True), total_of(CONTROL[name]), *pair)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BRANCHES)
def test_gradients_of_branches(pair, name):
    gradient = functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    total = total_of(BRANCHES[name])
    for cast in (gradient(jmpx.autocast(total)), jmpx.autocast(gradient(total))):
        assert_ran(cast, *pair, dot_general="bfloat16")


STEPS = 2000  # a bfloat16 sum of ones ends at 256, a float16 sum at 2048
ONE = jnp.eye(2, dtype=F32)


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


@pytest.mark.parametrize("f", [sum_in_scan, sum_of_a_closed_over_product])
def test_gradients_that_a_loop_sums_are_exact(f):
    def total(x, w):
        return jax.tree.leaves(f(x, w))[0].sum()

    check_sides(both, total, ONE, ONE, tolerance=0)


@pytest.mark.parametrize("name", ["scan", "while"])
def test_a_rule_carries_activations_in_16_bits(pair, name):
    def f(x, w):
        steps = 3 if name == "scan" else x[0, 0].astype(int) * 0 + 3
        return lax.fori_loop(0, steps, lambda i, c: jnp.tanh(c @ w), x)

    cast = jmpx.autocast(f, f"c=bf16; op.{name}: bf16")
    assert_near(*values(pair, cast, f))
    for wrapped, dtype in ((cast, BF16), (jmpx.autocast(f), F32)):
        (loop,) = (e for e in equations_of(wrapped, *pair) if e.primitive.name == name)
        carried = [v.aval.dtype for v in loop.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        assert carried == [dtype]


def test_carries_of_loops(rng):
    """A sum over 2,000 steps is right in float32; a rule carries it in 16 bits, where it stalls."""

    def count(x):
        one = (x @ x)[0, 0]
        looped = lax.fori_loop(0, 2000, lambda _, c: c + one, jnp.float32(0))
        return looped, lax.while_loop(
            lambda c: c[0] < 2000, lambda c: (c[0] + 1, c[1] + one), (0, 0.0)
        )[1]

    x = jnp.eye(2)
    assert [float(s) for s in jmpx.autocast(count)(x)] == [2000, 2000]
    assert [float(s) for s in jmpx.autocast(count, "c=bf16; op.scan: bf16")(x)] == [256, 2000]
    assert [float(s) for s in jmpx.autocast(count, "c=bf16; op.while: bf16")(x)] == [2000, 256]
