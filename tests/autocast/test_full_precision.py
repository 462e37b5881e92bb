"""Functions that stay in float32 within autocast, and autocast within autocast."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F32, assert_same_bits, normal
from helpers.autocast import assert_near, assert_ran, check, loss_fn, values
from helpers.jaxprs import equations_of
from jax import lax

import jmpx


def test_a_16_bit_autocast_in_another(positive):
    inner = jmpx.autocast(loss_fn)
    check(lambda x, w: inner(x @ w, w), *positive, dot_general="bfloat16", sin="bfloat16")
    inner = jmpx.autocast(loss_fn, "compute=f16")
    check(inner, *positive, dot_general="float16", sin="float16")
    check(lambda x, w: inner(x @ w, w), *positive, dot_general="bfloat16 float16", sin="float16")


def product(x, w):
    return jnp.exp(x @ w)


def within(f):
    def wrapper(x, w):
        with jmpx.full_precision():
            return f(x, w)

    return wrapper


MARKS = {
    "with": within,
    "decorator": jmpx.full_precision,
    "force_full_precision": jmpx.force_full_precision,
    "autocast to float32": lambda f: jmpx.autocast(f, "full"),
    "autocast by an operation": lambda f: jmpx.autocast(f, "compute=bf16; op.dot_general: f32"),
    "rule of a scope": jax.named_scope("head"),
}
THROUGH = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "while": lambda f: lambda x, w: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: f(c, w), x),
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w),
    "grad": lambda f: jax.grad(lambda x, w: f(x, w).sum()),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w),
    "checkpoint": lambda f: jax.grad(lambda x, w: jax.checkpoint(f)(x, w).sum()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("mark", MARKS)
def test_regions_of_float32(pair, mark, through):
    policy = "compute=bf16; */head: full" if mark == "rule of a scope" else "compute=bf16"
    inside = THROUGH[through](MARKS[mark](product))
    outside = MARKS[mark](THROUGH[through](product))
    for f in (inside, outside) if through != "nothing" else (inside,):
        cast = jmpx.autocast(lambda x, w, f=f: (f(x, w), x @ w), policy)
        products = [
            [v.aval.dtype for v in eqn.invars]
            for eqn in equations_of(cast, *pair)
            if eqn.primitive.name == "dot_general"
        ]
        assert products[-1] == [BF16, BF16]  # the one next to the region
        assert products[:-1] and all(dtypes == [F32, F32] for dtypes in products[:-1])
    if through == "nothing":
        assert_same_bits(jax.jit(cast)(*pair)[0], jax.jit(product)(*pair))


def test_an_autocast_that_is_called_in_a_region_runs(pair):
    region = jmpx.full_precision(lambda x, w: jmpx.autocast(product)(x, w))
    for f in (region, jmpx.autocast(region), jax.jit(region)):
        assert_ran(f, *pair, dot_general="bfloat16", exp="float32")
    assert_near(*values(pair, jmpx.autocast(region), product))


def mark_with(x):
    with jmpx.full_precision():
        return jnp.tanh(x @ x)


@jmpx.full_precision
def mark_decorated(x):
    return jnp.tanh(x @ x)


@jmpx.force_full_precision
def forced(x):
    return jnp.tanh(x @ x)


@pytest.mark.parametrize("f", [mark_with, mark_decorated, forced])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        jax.vmap,
        lambda f: lambda x: lax.map(f, x),
        lambda f: lambda x: jax.grad(lambda x: f(x).sum())(x),
    ],
)
def test_full_precision(rng, f, wrap):
    x = normal(rng, 3, 4, 4)

    def outer(x):
        return wrap(f)(x) if wrap is not jax.checkpoint else jax.vmap(wrap(f))(x)

    policy = "c=bf16; *: bf16; op.tanh: bf16; op.dot_general: bf16"  # no rule overrides it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        marked = jax.make_jaxpr(jmpx.autocast(outer, policy))(x)
    names = [v.aval.dtype for e in equations_of(jmpx.autocast(outer), x) for v in e.outvars]
    assert BF16 not in names
    assert "bf16" not in str(marked)
