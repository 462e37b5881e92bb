"""Traps of `jmpx.autocast`: what is easy to get wrong when a function runs again, by operation.

Each test looks at two things: at values, next to those of float32, and at the dtypes of operations
in the jaxpr, so that no test passes because nothing was cast. Products of small integers are exact
in 16 bits: where `whole` makes the inputs, values have to be equal.
"""

import functools
import gc
import weakref

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback, pallas as pl
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx
from jmpx._autocast.rules import is_registered
from jmpx._jaxpr import operation_name

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
# Some roundings to 8 bits of digits. XLA:CPU 0.12.0.1 is off by 2e-2 of the largest value where a
# bfloat16 product is transposed and cast within jit, XLA:CPU 0.10.2 by 2e-3.
TOLERANCE = 5e-2

IS_JAX_0_7 = jax.__version__.startswith("0.7.")
if IS_JAX_0_7:
    from jax.experimental import enable_x64
else:
    enable_x64 = jax.enable_x64


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), F32)


def whole(rng, *shape):
    """Small integers, as float32: sums of a few of their products are exact in 16 bits."""
    return jnp.asarray(rng.integers(-3, 4, size=shape), F32)


@pytest.fixture
def pair(rng):
    """An input and a weight."""
    return normal(rng, 4, 4), normal(rng, 4, 4) / 2


@pytest.fixture
def positive(pair):
    """A pair whose sums do not cancel."""
    return tuple(jnp.abs(v) / 2 for v in pair)


def equations(jaxpr):
    """All equations of a jaxpr, with those of the functions that its equations carry."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def dtypes_of(fn, *args):
    """Which inexact dtypes the operands of each operation of `fn(*args)` have."""
    dtypes = {}
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        avals = [v.aval for v in eqn.invars if hasattr(v.aval, "dtype")]
        names = [a.dtype.name for a in avals if jnp.issubdtype(a.dtype, jnp.inexact)]
        dtypes.setdefault(operation_name(eqn.primitive.name), set()).update(names)
    return dtypes


def assert_ran(fn, *args, **operations):
    """Holds operations of `fn(*args)` to run, in these dtypes and no others."""
    found = dtypes_of(fn, *args)
    ran = {name: " ".join(sorted(found.get(name, {"nowhere"}))) for name in operations}
    assert ran == operations


def assert_near(actual, desired, tolerance=TOLERANCE):
    """Holds two trees to the same dtypes, and to be near next to the largest of each leaf."""
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
    """Holds a transformation of autocast, and autocast of it, to float32's values.

    The products of the two are in `products`, where they are named.
    """
    sides = transform(jmpx.autocast(fn)), jmpx.autocast(transform(fn))
    *results, reference = values(args, *sides, transform(fn))
    for side, result, dtypes in zip(sides, results, products, strict=True):
        assert_near(result, reference, tolerance)
        assert_ran(side, *args, dot_general=dtypes)


# Transformations, with autocast inside and outside.


def loss_fn(x, w):
    return jnp.tanh(x @ w).sum()


def both(f):
    return jax.grad(f, (0, 1))


TRANSFORMS = {
    "value_and_grad": jax.value_and_grad,
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w, x)),
    "jvp of grad": lambda f: lambda x, w: jax.jvp(both(f), (x, w), (w, x)),
    "grad of jvp": lambda f: both(lambda x, w: jax.jvp(f, (x, w), (w, x))[1]),
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](w, x),
    "vmap of grad": lambda f: jax.vmap(both(f), (0, None)),
    "jit of grad of jit": lambda f: jax.jit(both(jax.jit(f))),
    "grad of checkpoint": lambda f: both(jax.checkpoint(f)),
    "grad of named_call": lambda f: both(jax.named_call(f, name="model")),
    "closure_convert": lambda f: (
        lambda x, w: (lambda g, consts: g(x, *consts))(*jax.closure_convert(lambda x: f(x, w), x))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transformations(positive, transform):
    check_sides(transform, loss_fn, *positive)
    twice = jmpx.autocast(transform(jmpx.autocast(loss_fn)))
    assert_ran(twice, *positive, dot_general="bfloat16")


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


def test_inspection_without_running(positive):
    cast = jmpx.autocast(loss_fn)
    spec = jax.ShapeDtypeStruct((4, 4), F32)
    assert jax.eval_shape(cast, spec, spec) == jax.ShapeDtypeStruct((), F32)
    assert jax.make_jaxpr(cast)(spec, spec).out_avals[0].dtype == F32
    lowered = jax.jit(cast).lower(spec, spec)
    assert "tensor<4x4xbf16>" in lowered.as_text()
    assert_near(lowered.compile()(*positive), loss_fn(*positive))


# Derivatives that are set by hand.

ACTIVATIONS = {
    "relu": (jax.nn.relu, 0.0),
    "maximum": (lambda x: jnp.maximum(x, 0), 0.5),
    "abs": (jnp.abs, 1.0),
    "leaky_relu": (jax.nn.leaky_relu, 1.0),
    "silu": (jax.nn.silu, 0.5),
}


def test_gradients_at_zero_are_those_of_float32():
    eye, zeros = jnp.eye(3, dtype=F32), jnp.zeros((1, 3), F32)

    def slopes(wrap):
        return lambda x: {
            name: wrap(lambda x, f=f: f(x @ eye).sum())(x) for name, (f, _) in ACTIVATIONS.items()
        }

    sides = (
        slopes(lambda f: jax.grad(jmpx.autocast(f))),
        slopes(lambda f: jmpx.autocast(jax.grad(f))),
    )
    for side, result in zip(sides, values((zeros,), *sides), strict=True):
        for name, (_, slope) in ACTIVATIONS.items():
            np.testing.assert_array_equal(result[name], slope, err_msg=name)
        assert_ran(side, zeros, dot_general="bfloat16")


@jax.custom_jvp
def seven(x, w):
    """A product with tangents that are wrong on purpose, by 7 and 3."""
    return x @ w


@seven.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return seven(x, w), 7 * (dx @ w) + 3 * (x @ dw)


@jax.custom_jvp
def nested_seven(x, w):
    return jnp.sin(seven(x, w))


@nested_seven.defjvp
def _(primals, tangents):
    out, tangent = jax.jvp(seven, primals, tangents)
    return jnp.sin(out), 5 * jnp.cos(out) * tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def power_of(function, n, x, w):
    return function(x @ w) ** n


@power_of.defjvp
def _(function, n, primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return power_of(function, n, x, w), n * 11 * (dx @ w + x @ dw)


@jax.custom_jvp
def counted(n, x, w):
    return n + 1, (x @ w) * n.astype(F32)


@counted.defjvp
def _(primals, tangents):
    (n, x, w), (dn, dx, dw) = primals, tangents
    assert dn.dtype == jax.dtypes.float0
    return counted(n, x, w), (np.zeros((), jax.dtypes.float0), 13 * (dx @ w + x @ dw))


CUSTOM_JVP = {
    "two arguments": seven,
    "nested": nested_seven,
    "nondiff_argnums": lambda x, w: power_of(jnp.cos, 3, x, w),
    "integers": lambda x, w: counted(jnp.array(3), x, w)[1],
    "a traced integer": lambda x, w: counted(x[0, 0].astype(int), x, w)[1],
    "in jit": jax.jit(seven),
    "in checkpoint": jax.checkpoint(seven),
    "in scan": lambda x, w: lax.scan(lambda c, _: (seven(c, w) / 7, None), x, None, length=2)[0],
    "in cond": lambda x, w: lax.cond(x[0, 0] < 9, seven, lambda x, w: x, x, w),
    "in vmap": lambda x, w: jax.vmap(seven, (0, None))(x[:, None], w),
}


@pytest.mark.parametrize("name", CUSTOM_JVP)
def test_custom_jvp_rules_are_used(pair, name):
    check_sides(both, lambda x, w: CUSTOM_JVP[name](x, w).sum(), *pair)


def test_second_derivatives_of_custom_jvp_rules(pair):
    check_sides(TRANSFORMS["jvp of grad"], lambda x, w: nested_seven(x, w).sum(), *pair)


@jax.custom_vjp
def eleven(x, w):
    return x @ w


eleven.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (11 * (g @ saved[1].T), 5 * (saved[0].T @ g))
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def eleven_of(function, x, w, n):
    return function(x @ w) * n.astype(F32)


eleven_of.defvjp(
    lambda function, x, w, n: (function(x @ w) * n.astype(F32), w),
    lambda function, w, g: (11 * g @ w.T, 5 * g, None),
)


@jax.custom_gradient
def thirteen(x, w):
    return x @ w, lambda g: (13 * g @ w.T, g)


CUSTOM_VJP = {
    "two arguments": eleven,
    "nondiff_argnums and integers": lambda x, w: eleven_of(jnp.cos, x, w, jnp.array(3)),
    "custom_gradient": thirteen,
    "in jit": jax.jit(eleven),
    "in checkpoint": jax.checkpoint(eleven),
    "in scan": lambda x, w: lax.scan(lambda c, _: (eleven(c, w) / 7, None), x, None, length=2)[0],
    "in vmap": lambda x, w: jax.vmap(eleven, (0, None))(x[:, None], w),
    "on a product": lambda x, w: eleven(jnp.tanh(x @ w), w) @ w,
}


@pytest.mark.parametrize("name", CUSTOM_VJP)
def test_custom_vjp_rules_are_used(pair, name):
    # What a rule holds runs in float32 while it is one, and as all else does once it is taken.
    check_sides(
        both,
        lambda x, w: (CUSTOM_VJP[name](x, w) @ w).sum(),
        *pair,
        products=("bfloat16 float32", "bfloat16"),
    )


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


# Control flow.


def scan_of_products(x, w):
    return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c[0]), x, jnp.stack([x, x]))


def scan_of_many(x, w):
    def body(carry, n):
        a, b, c, n_, flag, key = carry
        key, _ = jax.random.split(key)
        b = b + a[0].astype(BF16)
        return (a @ w, b, c + F16(1), n_ + n, ~flag, key), (a[0], b, n)

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


@pytest.mark.parametrize("name", [*BRANCHES, *LOOPS])
def test_control_flow(pair, name):
    check((BRANCHES | LOOPS)[name], *pair)


def total_of(fn):
    """A function that sums what `fn` returns in float32, to be differentiated."""

    def total(*args):
        results = fn(*args)
        leaves = [leaf for leaf in jax.tree.leaves(results) if leaf.dtype == F32]
        return sum(leaf.sum() for leaf in leaves), results

    return total


@pytest.mark.parametrize("name", CONTROL)
def test_control_flow_and_its_gradients(pair, name):
    check_sides(lambda f: jax.grad(f, (0, 1), has_aux=True), total_of(CONTROL[name]), *pair)


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


@pytest.mark.parametrize(
    "rule, name",
    [("scan", "scan"), (lax.scan_p, "scan"), ("while", "while"), (lax.while_p, "while")],
)
def test_a_rule_carries_activations_in_16_bits(pair, rule, name):
    def f(x, w):
        steps = 3 if name == "scan" else x[0, 0].astype(int) * 0 + 3
        return lax.fori_loop(0, steps, lambda i, c: jnp.tanh(c @ w), x)

    cast = jmpx.autocast(f, rules={rule: BF16})
    assert_near(*values(pair, cast, f))
    for wrapped, dtype in ((cast, BF16), (jmpx.autocast(f), F32)):
        (loop,) = (e for e in equations(jax.make_jaxpr(wrapped)(*pair)) if e.primitive.name == name)
        carried = [v.aval.dtype for v in loop.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        assert carried == [dtype]


# Autocast in autocast, and regions of float32.


def test_a_16_bit_autocast_in_another(positive):
    inner = jmpx.autocast(loss_fn)
    check(lambda x, w: inner(x @ w, w), *positive, dot_general="bfloat16", tanh="bfloat16")
    inner = jmpx.autocast(loss_fn, "compute=f16")
    check(inner, *positive, dot_general="float16", tanh="float16")
    check(lambda x, w: inner(x @ w, w), *positive, dot_general="bfloat16 float16", tanh="float16")


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
            for eqn in equations(jax.make_jaxpr(cast)(*pair))
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


def test_rules_hold_within_jit_and_scan(pair):
    @jax.jit
    def layer(x, w):
        with jax.named_scope("norm"):
            x = jnp.exp(jnp.tanh(x)) @ w
        return x @ w

    def model(x, w):
        with jax.named_scope("encoder"):
            return lax.scan(lambda c, _: (layer(c, w), None), x, None, length=2)[0]

    rules = "compute=bf16; */encoder/norm: full; op.exp: bf16"
    check(model, *pair, policy=rules, dot_general="bfloat16 float32", exp="bfloat16")
    rules = "compute=bf16; */encoder/*: full"
    check(model, *pair, policy=rules, dot_general="float32", exp="float32")
    check(layer, *pair, policy="compute=bf16; op.dot_general: f16", dot_general="float16")


# jit, meshes and collectives.


def test_a_jitted_function_is_called_often_and_in_several_dtypes(pair):
    @jax.jit
    def shared(x, w):
        return x @ w

    def many(x, w):
        low = shared(x.astype(BF16), w.astype(BF16))
        return (
            shared(x, w),
            shared(w, x),
            shared(shared(x, w), w),
            low,
            shared(x.astype(F16), w.astype(F16)),
            shared(x, w),
        )

    check(many, *pair, dot_general="bfloat16 float16")
    cast = jmpx.autocast(lambda x, w: shared(x, w) + shared(w, x))
    calls = [e for e in jax.make_jaxpr(cast)(*pair).eqns if e.params.get("name") == "shared"]
    assert len(calls) == 2 and calls[0].params["jaxpr"] is calls[1].params["jaxpr"]
    outside = jax.jit(jmpx.autocast(shared))
    for dtype in (F32, BF16, F16, jnp.int32, F32):
        assert jax.eval_shape(outside, *(v.astype(dtype) for v in pair)).dtype == dtype


def test_static_arguments(pair):
    @functools.partial(jax.jit, static_argnums=2, static_argnames="name")
    def f(x, w, function, *, name):
        return {name: function(x @ w)}

    check(lambda x, w: f(x, w, jnp.tanh, name="tanh"), *pair)
    cast = jax.jit(jmpx.autocast(f), static_argnums=2, static_argnames="name")
    assert_near(cast(*pair, jnp.tanh, name="y"), f(*pair, jnp.tanh, name="y"))


def test_leaves_that_are_no_arrays_pass(pair):
    def f(x, config, scale=2.0):
        y = (x @ x) * scale * config["rate"]
        return y, config, scale, None, "text", 7, jnp.tanh

    x, _ = pair
    config = {"rate": 0.5, "n": 3, "flag": True, "name": "a", "none": None, "object": object()}
    result, reference = jmpx.autocast(f)(x, config), f(x, config)
    assert result[1:] == reference[1:]
    assert all(type(a) is type(b) for a, b in zip(result[1:], reference[1:], strict=True))
    assert_near(result[0], reference[0])


@pytest.mark.parametrize(
    "x",
    [np.ones((2, 2), np.float32), np.float32(3), np.ones((2, 2)), np.int32(3), np.array(True)],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_numpy_inputs(x):
    def f(x):
        x = jnp.asarray(x)
        return x, x + x, jnp.eye(2, dtype=F32) @ jnp.ones((2, 2), F32)

    assert_same_bits(jmpx.autocast(f)(x), jax.tree.map(jnp.asarray, f(x)))


def test_arrays_of_no_size():
    def f(x):
        y = x @ x.T
        return y, y.sum(), jax.nn.softmax(x), jnp.concatenate([x, x])

    check(f, jnp.ones((0, 4), F32))
    x = jnp.ones((4, 0), F32)
    assert [y.shape for y in jax.eval_shape(jmpx.autocast(f), x)] == [(4, 4), (), (4, 0), (8, 0)]
    assert jax.grad(jmpx.autocast(lambda x: (x @ x.T).sum()))(x).shape == (4, 0)


def test_results_are_as_weakly_typed_as_before(pair):
    def f(x):
        return x @ x, jnp.asarray(2.0), jnp.tanh(jnp.asarray(2.0)), x * 2

    results = (jax.eval_shape(g, pair[0]) for g in (jmpx.autocast(f), f))
    assert [y.weak_type for y in next(results)] == [y.weak_type for y in next(results)]


def test_weakly_typed_numbers_stay_so_inside(pair):
    def f(n, x):
        low = n * x.astype(BF16) * jnp.asarray(2.0)  # strict promotion lets a weak type alone do so
        return low, lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x[0, 0], 0.0), n * (x @ x)

    check(f, jnp.asarray(0.5), pair[0], dot_general="bfloat16")


@pytest.fixture
def mesh():
    return lambda kind: jax.make_mesh((2,), ("d",), axis_types=(kind,))


AXIS_TYPES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # float32 cannot become a 16-bit result
def test_jit_with_shardings_and_donation_inside(pair, mesh):
    mesh = mesh(AXIS_TYPES["auto"])
    rows, all_of_it = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    @functools.partial(
        jax.jit, in_shardings=(rows, all_of_it), out_shardings=rows, donate_argnums=0
    )
    def f(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), rows)

    x, w = pair
    check(lambda x, w: f(x + 0, w), x, w, dot_general="bfloat16", tanh="bfloat16")
    eager = jmpx.autocast(lambda x, w: f(x + 0, w))(x, w)
    assert eager.sharding == rows
    donated = jnp.array(x)
    result = jax.jit(jmpx.autocast(lambda x, w: x @ w), donate_argnums=0)(donated, w)
    assert_near(result, x @ w)
    assert donated.is_deleted()


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_meshes(pair, mesh, kind):
    def f(x, w, b):
        def layer(c, w):
            h = jnp.tanh(c @ w + b)
            return h - h.mean(1, keepdims=True), None

        return lax.scan(layer, x, w)[0].reshape(2, 2, 4).sum()

    mesh = mesh(AXIS_TYPES[kind])
    with jax.set_mesh(mesh):
        x, w = pair
        x = jax.device_put(x, NamedSharding(mesh, P("d")))
        w, b = (jax.device_put(v, NamedSharding(mesh, P())) for v in (jnp.stack([w, w]), w[0]))
        cast, plain = jax.grad(jmpx.autocast(f)), jax.grad(f)
        result, reference = values((x, w, b), cast, plain)
        assert_near(result, reference)
        assert result.sharding == reference.sharding
        assert_ran(cast, x, w, b, dot_general="bfloat16")
        assert_ran(jmpx.autocast(plain), x, w, b, dot_general="bfloat16")


def collect(x, w):
    h = jnp.tanh(x @ w)
    gathered = lax.all_gather(h, "d").sum(0)
    moved = lax.ppermute(h, "d", [(0, 1), (1, 0)])
    scattered = lax.psum_scatter(gathered, "d", tiled=True)
    index = lax.axis_index("d").astype(F32)
    return lax.psum(h * index, "d") + lax.pmean(h, "d") + lax.pmax(h, "d"), (moved, scattered)


@pytest.fixture(params=[True, False], ids=["check_vma", "no check_vma"])
def sharded(request, mesh):
    """A function that maps over the rows of its first argument, on two devices."""
    return lambda out_specs: functools.partial(
        jax.shard_map,
        mesh=mesh(AXIS_TYPES["auto"]),
        in_specs=(P("d"), P()),
        out_specs=out_specs,
        check_vma=request.param,
    )


def test_shard_map(pair, sharded):
    def body(x, w):
        total, (moved, scattered) = collect(x, w)
        carry = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), moved, None, length=2)[0]
        return total[None], carry, scattered

    check_sides(sharded(P("d")), body, *pair)
    cast = jmpx.autocast(sharded(P("d"))(body))
    assert_ran(cast, *pair, all_gather="bfloat16", ppermute="bfloat16", tanh="bfloat16")


def test_gradients_of_shard_map(pair, sharded):
    def body(x, w):
        return lax.psum((jnp.tanh(x @ w) ** 2).sum(), "d")

    check_sides(lambda f: both(sharded(P())(f)), body, *pair)
    assert_ran(both(jmpx.autocast(sharded(P())(body))), *pair, dot_general="bfloat16")


def test_pmap(pair):
    x, w = pair
    x = x.reshape(2, 2, 4)

    def body(x, w):
        return lax.pmean(jnp.tanh(x @ w), "i")

    def mapped(body):
        return jax.pmap(body, "i", in_axes=(0, None), devices=jax.devices()[:2])

    reference = mapped(body)(x, w)
    for cast in (mapped(jmpx.autocast(body)), jmpx.autocast(mapped(body))):
        assert_near(cast(x, w), reference)
    assert_ran(mapped(jmpx.autocast(body)), x, w, dot_general="bfloat16")
    inside = "float32" if IS_JAX_0_7 else "bfloat16"  # JAX 0.7's pmap runs as it was traced
    assert_ran(jmpx.autocast(mapped(body)), x, w, dot_general=inside)


def test_collectives_of_vmap(pair):
    x, w = pair
    check_sides(lambda f: jax.vmap(f, (0, None), axis_name="d"), collect, x.reshape(2, 2, 4), w)


# What keeps its bits.


def of_integers(x):
    n = x.astype(int)
    return n @ n, n // 2, n**2, n.sum(), n << 1, lax.dot(n, n, preferred_element_type=jnp.int32)


def of_complex(x):
    z = lax.complex(x, x)
    return z @ z, jnp.exp(z), jnp.abs(z), z.real


def of_fp8(x):
    low = x.astype(jnp.float8_e4m3fn)
    numbers = (((1,), (0,)), ((), ()))
    mixed = lax.dot_general(low, x, numbers, preferred_element_type=F32)
    return lax.dot_general(low, low, numbers, preferred_element_type=F32), mixed, low.astype(BF16)


def of_16_bits(x, dtype):
    h = x.astype(dtype)
    wide = jnp.matmul(h, h, preferred_element_type=F32)
    return jnp.tanh(h @ h).sum(), wide, jnp.einsum("ij,kj->ik", h, h, preferred_element_type=F32)


def of_keys(key):
    keys = jax.random.split(jax.random.fold_in(key, 7), 7)
    return (
        jax.random.normal(keys[0], (3,)),
        jax.random.uniform(keys[1], (3,)),
        jax.random.truncated_normal(keys[2], -1.0, 1.0, (3,)),
        jax.random.bernoulli(keys[3], 0.3, (8,)),
        jax.random.gamma(keys[4], 2.0, (2,)),
        jax.random.permutation(keys[5], 8),
        jax.random.categorical(keys[6], jnp.arange(3.0, dtype=F32)),
        jax.random.key_data(keys[0]),
        jax.random.bits(key),
    )


UNTOUCHED = {
    "integers": of_integers,
    "complex": of_complex,
    "fp8": of_fp8,
    "bfloat16": lambda x: of_16_bits(x, BF16),
    "float16": lambda x: of_16_bits(x, F16),
    "bits": lambda x: (
        lax.bitcast_convert_type(x, jnp.int32),
        jnp.nextafter(x, 9.0),
        lax.reduce_precision(x, 5, 3),
    ),
    "highest": lambda x: jnp.matmul(x, x, precision="highest"),
    "high": lambda x: jnp.matmul(x, x, precision=lax.Precision.HIGH),
    "high on one side": lambda x: lax.dot(x, x, precision=("default", "highest")),
    "an algorithm": lambda x: jnp.matmul(x, x, precision=lax.DotAlgorithmPreset.F32_F32_F32),
    "a convolution": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME", "highest"),
    "positions": lambda x: jnp.sin(jnp.einsum("i,j->ij", jnp.arange(4.0, dtype=F32), x[0])),
    "keys": lambda x: of_keys(jax.random.key(3)),
    "old keys": lambda x: of_keys(jax.random.PRNGKey(3)),
    "fft": lambda x: jnp.abs(jnp.fft.rfft(x)),
}


def steps(fn, *args):
    """The operations of `fn(*args)` in order, with what they take and return.

    Without casts to the same dtype, and calls, whose operations follow.
    """
    found = []
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        avals = [str(v.aval).strip("~") for v in (*eqn.invars, *eqn.outvars)]
        is_cast = eqn.primitive.name == "convert_element_type"
        if eqn.primitive.name not in ("jit", "pjit") and not (is_cast and avals[0] == avals[1]):
            found.append((eqn.primitive.name, *avals))
    return found


@pytest.mark.parametrize("name", UNTOUCHED)
def test_operations_that_stay_as_they_are(pair, name):
    x, w = pair
    fn = UNTOUCHED[name]
    cast = steps(jmpx.autocast(lambda x: (fn(x), w @ w)), x)
    *plain, _ = steps(lambda x: (fn(x), w @ w), x)
    assert cast[: len(plain)] == plain  # the same operations on the same values: the same bits
    assert cast[len(plain) :] == [
        ("convert_element_type", "float32[4,4]", "bfloat16[4,4]"),
        ("dot_general", "bfloat16[4,4]", "bfloat16[4,4]", "bfloat16[4,4]"),
        ("convert_element_type", "bfloat16[4,4]", "float32[4,4]"),
    ]


def test_float64_stays(rng):
    def f(x):
        h = jnp.tanh(x @ x)
        scanned, _ = lax.scan(lambda c, _: (c @ x, None), x, None, length=2)
        return h.sum(), (jnp.exp(h), scanned)

    with enable_x64(True):
        x = jnp.asarray(rng.normal(size=(3, 3)))
        cast = jmpx.autocast(lambda x: (*f(x), x.astype(F32) @ x.astype(F32)))
        assert_ran(cast, x, dot_general="bfloat16 float64", tanh="float64", exp="float64")
        gradient = jax.grad(lambda x: cast(x)[:2], has_aux=True)
        assert_same_bits(*(jax.jit(g)(x) for g in (gradient, jax.grad(f, has_aux=True))))


def test_dropout_draws_the_same_mask(pair):
    def f(key, x, w):
        h = x @ w
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        noise = jax.random.normal(key, h.shape)
        return jnp.where(keep, h / 0.5, 0) + 0.1 * noise, keep, noise, jax.random.key_data(key)

    cast = jmpx.autocast(f)
    result, reference = values((jax.random.key(1), *pair), cast, f)
    assert_same_bits(result[1:], reference[1:])
    assert_near(result, reference)
    assert_ran(cast, jax.random.key(1), *pair, dot_general="bfloat16")


# Operations next to products. Inputs are whole numbers, so that results have to be equal.

INDEX = np.array([2, 0])


def reduce_by_hand(h, x):
    return lax.reduce(h, np.float32(-99), lambda a, b: jnp.where(a > b, a, b), (1,))


def pool(h, init, computation):
    return lax.reduce_window(h, np.float32(init), computation, (2, 2), (1, 1), "VALID")


def convolve(h, x):
    return lax.conv_general_dilated(h[None, None], x[None, None, :2, :2], (1, 1), "SAME")


# name: (a function of a product and an input, the operation to look at, its dtypes)
EXACT = {
    "sort": (
        lambda h, x: lax.sort((h, x, jnp.arange(16).reshape(4, 4)), num_keys=1),
        "sort",
        "bfloat16 float32",
    ),
    "argsort": (lambda h, x: h + jnp.argsort(h).astype(F32), "sort", "bfloat16"),
    "top_k": (lambda h, x: lax.top_k(h, 2), "top_k", "bfloat16"),
    "argmax": (lambda h, x: (jnp.argmax(h, 1), h.max(0), h.min()), "argmax", "bfloat16"),
    "set": (lambda h, x: h.at[1].set(x[0]), "scatter", "float32"),
    "add": (lambda h, x: h.at[INDEX].add(x[:2]), "scatter_add", "float32"),
    "multiply": (lambda h, x: x.at[INDEX].multiply(h[:2]), "scatter_mul", "float32"),
    "max": (lambda h, x: h.at[INDEX].max(x[:2]), "scatter_max", "float32"),
    "min": (lambda h, x: x.at[INDEX].min(h[:2]), "scatter_min", "float32"),
    "gather": (lambda h, x: h[INDEX], "gather", "bfloat16"),
    "dynamic_slice": (
        lambda h, x: lax.dynamic_slice(h, (INDEX[1], 1), (2, 2)),
        "dynamic_slice",
        "bfloat16",
    ),
    "dynamic_update_slice": (
        lambda h, x: lax.dynamic_update_slice(x, h[:2], (1, INDEX[1])),
        "dynamic_update_slice",
        "bfloat16",
    ),
    "concatenate": (lambda h, x: jnp.concatenate([h, x]), "concatenate", "bfloat16"),
    "pad": (lambda h, x: jnp.pad(h, 1), "pad", "bfloat16"),
    "clip": (lambda h, x: jnp.clip(h, -2, x), "max", "bfloat16"),
    "where": (lambda h, x: jnp.where(x > 0, h, x), "select_n", "bfloat16"),
    "roll and flip": (lambda h, x: jnp.roll(h, 1)[::-1].T.reshape(2, 8), "rev", "bfloat16"),
    "cumsum": (lambda h, x: jnp.cumsum(h, 0), "cumsum", "float32"),
    "cumprod": (lambda h, x: jnp.cumprod(jnp.clip(h, -1, 1), 0), "cumprod", "float32"),
    "cummax": (lambda h, x: lax.cummax(h), "cummax", "bfloat16"),
    "max_pool": (lambda h, x: pool(h, -np.inf, lax.max), "reduce_window_max", "bfloat16"),
    "avg_pool": (lambda h, x: pool(h, 0, lax.add), "reduce_window_sum", "float32"),
    "convolution": (convolve, "conv_general_dilated", "bfloat16"),
    "einsum": (lambda h, x: jnp.einsum("ij,kj->ik", h, x), "dot_general", "bfloat16"),
    "ragged_dot": (
        lambda h, x: lax.ragged_dot(h, jnp.stack([x, x.T]), jnp.array([1, 3])),
        "ragged_dot_general",
        "bfloat16",
    ),
    "reduce by a function": (reduce_by_hand, "reduce", "float32"),
    "associative_scan": (lambda h, x: lax.associative_scan(jnp.add, h), "add", "bfloat16"),
    "barrier": (
        lambda h, x: lax.optimization_barrier((h, x)),
        "optimization_barrier",
        "bfloat16 float32",
    ),
    "bitcast": (
        lambda h, x: lax.bitcast_convert_type(h, jnp.int32),
        "bitcast_convert_type",
        "float32",
    ),
    "nextafter": (lambda h, x: jnp.nextafter(h, x), "nextafter", "float32"),
    "device_put": (lambda h, x: jax.device_put(h, jax.devices()[0]), "device_put", "bfloat16"),
}
# Those whose derivatives are operations of other kinds.
DIFFERENTIATED = set(
    """
    sort top_k scatter scatter_add scatter_max gather dynamic_slice dynamic_update_slice concatenate
    select_n cumsum reduce_window_max reduce_window_sum conv_general_dilated ragged_dot_general
    """.split()
)


@pytest.mark.parametrize("name", EXACT)
def test_operations_on_products(rng, name):
    fn, operation, dtypes = EXACT[name]
    args = whole(rng, 4, 4), whole(rng, 4, 4)
    weights = whole(rng, 64)

    def f(x, w):
        results = fn(x @ w, x)
        leaves = [leaf for leaf in jax.tree.leaves(results) if leaf.dtype == F32]
        products = [leaf * weights[: leaf.size].reshape(leaf.shape) for leaf in leaves]
        return sum(p.sum() for p in products) if operation in DIFFERENTIATED else 0.0, results

    def transform(f):
        grad = jax.grad(f, (0, 1), has_aux=True)
        return grad if operation in DIFFERENTIATED else lambda *args: f(*args)[1]

    check_sides(transform, f, *args, tolerance=0)
    assert_ran(jmpx.autocast(lambda x, w: fn(x @ w, x)), *args, **{operation: dtypes})


def assert_float32(x):
    assert x.dtype == np.float32, f"the user's function was called with {x.dtype}"
    return x


def with_pallas(h):
    def kernel(x_ref, o_ref):
        assert x_ref.dtype == F32
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(h.shape, F32), interpret=True)(h)


def with_pure_callback(h):
    return jax.pure_callback(assert_float32, jax.ShapeDtypeStruct(h.shape, F32), h)


def with_io_callback(h):
    return io_callback(assert_float32, jax.ShapeDtypeStruct(h.shape, F32), h, ordered=True)


def with_a_ref(h):
    ref = jax.new_ref(h)
    ref[0] += 2 * h[1]
    ref[1, :2] = h[0, :2]
    return ref[...] + h


def with_refs_in_a_scan(h):
    ref, count = jax.new_ref(jnp.zeros_like(h)), jax.new_ref(jnp.array(0))

    def body(c, row):
        ref[...] += row * c
        count[...] += 1
        return c @ jnp.eye(4, dtype=F32), row

    c, rows = lax.scan(body, h, h)
    return ref[...], count[...], c, rows


def with_linear_call(h):
    return jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, x: r.T @ x, h, h)


AS_TRACED = {
    "pallas": with_pallas,
    "pure_callback": with_pure_callback,
    "io_callback": with_io_callback,
    "ref": with_a_ref,
    "refs in a scan": with_refs_in_a_scan,
    "linear_call": with_linear_call,
}


@pytest.mark.parametrize("name", AS_TRACED)
def test_what_keeps_its_dtypes_gets_float32(rng, name):
    w, x = (jnp.clip(whole(rng, 4, 4), -1, 1) for _ in range(2))
    cast = jmpx.autocast(lambda x, w: AS_TRACED[name](x @ w))
    assert_same_bits(*values((x, w), cast, lambda x, w: AS_TRACED[name](x @ w)))
    assert "bfloat16" in dtypes_of(cast, x, w)["dot_general"]


def test_effects_keep_their_order(pair, capsys):
    seen, written = [], []

    def f(x, w):
        h = x @ w
        jax.debug.callback(lambda v: seen.append(v.dtype.name), h, ordered=True)
        io_callback(lambda v: written.append(v.dtype.name), None, h, ordered=True)

        def body(c, n):
            jax.debug.callback(lambda n: seen.append(int(n)), n, ordered=True)
            return c @ w, None

        h, _ = lax.scan(body, h, np.arange(3))
        jax.debug.print("after {}", h.astype(int)[0, 0] * 0, ordered=True)
        io_callback(lambda: written.append("end"), None, ordered=True)
        return h

    for g in (jax.jit(f), jmpx.autocast(f), jax.jit(jmpx.autocast(f))):
        seen.clear()
        written.clear()
        jax.block_until_ready(g(*pair))
        jax.effects_barrier()
        assert seen == ["float32", 0, 1, 2]
        assert written == ["float32", "end"]
    assert capsys.readouterr().out == "after 0\n" * 3
    assert_ran(jmpx.autocast(f), *pair, dot_general="bfloat16")


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
    "inv": lambda h: jnp.linalg.inv(spd(h)),
    "slogdet": lambda h: jnp.linalg.slogdet(spd(h))[1],
    "cholesky": lambda h: jnp.linalg.cholesky(spd(h)),
    "eigvalsh": lambda h: jnp.linalg.eigvalsh(spd(h)),
    "svdvals": lambda h: jnp.linalg.svdvals(spd(h)),
    "qr": lambda h: jnp.abs(jnp.linalg.qr(spd(h)).R),
    "norm": lambda h: jnp.linalg.norm(h, axis=1),
    "fft": lambda h: jnp.abs(jnp.fft.rfft(h)) + jnp.fft.irfft(jnp.fft.rfft(h))[:, :3],
    "custom_root": cube_root,
    "custom_linear_solve": linear_solve,
    "conjugate gradients": lambda h: jax.scipy.sparse.linalg.cg(spd(h), h[0], maxiter=9)[0],
}
FACTORIZATIONS = "cholesky eigh fft geqrf householder_product lu qr svd triangular_solve".split()


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_runs_in_float32(pair, name):
    def fn(x, w):
        return LINALG[name](x @ w)

    cast = jmpx.autocast(fn)
    assert_near(*values(pair, cast, fn))
    found = dtypes_of(cast, *pair)
    assert "bfloat16" in found["dot_general"]
    in_float32 = [found[name] for name in FACTORIZATIONS if name in found]
    assert in_float32 or name in ("norm", "custom_root", "conjugate gradients")
    assert all(dtypes <= {"float32", "complex64"} for dtypes in in_float32)


@pytest.mark.parametrize("name", ["custom_root", "custom_linear_solve"])
def test_gradients_of_linear_algebra(pair, name):
    def f(x, w):
        return (LINALG[name](x @ w) ** 2).sum()

    cast = both(jmpx.autocast(f))
    assert_near(*values(pair, cast, both(f)))
    assert "bfloat16" in dtypes_of(cast, *pair)["dot_general"]


@pytest.mark.parametrize("side", ["inside", "outside"])
def test_checkify(pair, side):
    def f(x, w):
        h = x @ w
        checkify.check(jnp.all(h < 0), "too large: {m}", m=h.max() * 0)
        return jnp.log(h - 9)

    def checked(f, errors=checkify.user_checks | checkify.float_checks):
        return checkify.checkify(f, errors=errors)

    cast = checked(jmpx.autocast(f)) if side == "outside" else jmpx.autocast(checked(f))
    error, _ = jax.jit(cast)(*pair)
    assert "too large: 0.0" in error.get()
    fine, _ = jax.jit(cast)(-jnp.abs(pair[0]) - 1, jnp.abs(pair[1]) + 1)
    assert "nan generated by primitive: log" in fine.get()
    assert_ran(cast, *pair, dot_general="bfloat16", log="float32")


# float16: what is finite in float32 stays finite.

LEAST = jnp.finfo(F32).min
MASKS = {
    "where": lambda keep: lambda s: jnp.where(keep, s, -1e9),
    "where of the least": lambda keep: lambda s: jnp.where(keep, s, LEAST),
    "added": lambda keep: lambda s: s + (1 - keep.astype(F32)) * -1e9,
    "added least": lambda keep: lambda s: s + jnp.where(keep, 0.0, LEAST),
    "added twice": lambda keep: (
        lambda s: s + jnp.where(keep, 0.0, -1e9) + jnp.where(jnp.arange(4) < 3, 0, -1e9)
    ),
    "multiplied": lambda keep: lambda s: s * keep.astype(F32) - 1e9 * (1 - keep.astype(F32)),
    "in jit": lambda keep: lambda s: jax.jit(lambda s, keep: jnp.where(keep, s, -1e9))(s, keep),
}


@pytest.mark.parametrize("name", [*MASKS, "input", "least input", "in scan"])
def test_rows_that_are_masked_as_a_whole(rng, name):
    keep = jnp.tril(jnp.ones((4, 4), bool), -1)  # no key for the first row
    bias = jnp.where(keep, 0, LEAST if name == "least input" else F32(-1e9))

    def f(q, k, bias):
        mask = MASKS[name](keep) if name in MASKS else lambda s: s + bias
        if name == "in scan":
            logits = lax.scan(lambda c, b: (c, c + b), q @ k, bias[None])[1][0]
        else:
            logits = mask(q @ k)
        weights = jax.nn.softmax(logits)
        return (weights**2).sum(), weights

    policies = ("compute=f16", "compute=bf16") if "least" in name else ("compute=f16",)
    casts = [jmpx.autocast(f, policy) for policy in policies]
    args = normal(rng, 4, 4) / 2, normal(rng, 4, 4) / 2, bias
    gradients = [jax.grad(g, (0, 1), has_aux=True) for g in (*casts, f)]
    *results, reference = values(args, *gradients)
    for cast, result, low in zip(casts, results, ("float16", "bfloat16"), strict=False):
        assert_near(result, reference)
        assert_ran(cast, *args, dot_general=low, exp="float32")


def rms_norm(h, mean_of_squares):
    return h * lax.rsqrt(mean_of_squares(h) + 1e-6)


NORMS = {
    "power": lambda h: rms_norm(h, lambda h: jnp.mean(h**2, -1, keepdims=True)),
    "square": lambda h: rms_norm(h, lambda h: jnp.mean(jnp.square(h), -1, keepdims=True)),
    "product": lambda h: rms_norm(h, lambda h: jnp.mean(h * h, -1, keepdims=True)),
    "var": lambda h: (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6),
    "norm": lambda h: h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-12),
    "cast": lambda h: rms_norm(h, lambda h: jnp.mean(h.astype(F32) ** 2, -1, keepdims=True)),
    "squares of differences": lambda h: rms_norm(
        h - h.mean(-1, keepdims=True), lambda d: (d * d).mean(-1, keepdims=True)
    ),
    "softmax": lambda h: jax.nn.softmax(h / 300),
}


@pytest.mark.parametrize("name", NORMS)
def test_squares_beyond_float16(rng, name):
    x, w = normal(rng, 4, 4) * 300, normal(rng, 4, 4)

    def f(x, w):
        out = NORMS[name](x @ w)
        return (out**2 * jnp.arange(out.size, dtype=F32).reshape(out.shape)).sum(), out

    assert np.abs(np.asarray(x) @ np.asarray(w)).max() ** 2 > 65504
    cast = jmpx.autocast(f, "compute=f16")
    gradients = [jax.grad(g, (0, 1), has_aux=True) for g in (cast, f)]
    assert_near(*values((x, w), *gradients))
    assert_ran(cast, x, w, dot_general="float16")


FREQUENCIES = np.float32(1e4) ** -np.linspace(0, 0.9, 4, dtype=np.float32)
POSITIONS = {
    "arange": lambda n: jnp.arange(70_000 - n, 70_000)[:, None].astype(F32) * FREQUENCIES,
    "float arange": lambda n: jnp.arange(4096.0, 4096 + n, dtype=F32)[:, None] * FREQUENCIES,
    "iota": lambda n: (lax.iota(F32, n) + 70_000)[:, None] * FREQUENCIES,
    "einsum": lambda n: jnp.einsum("i,j->ij", jnp.arange(n).astype(F32) + 4096, FREQUENCIES),
    "outer": lambda n: jnp.outer(jnp.arange(n).astype(F32) + 4096, FREQUENCIES),
    "product of one": lambda n: (jnp.arange(n).astype(F32) + 4096)[:, None] @ FREQUENCIES[None],
    "batch": lambda n: jnp.einsum(
        "bi,j->bij", (jnp.arange(n).astype(F32) + 4096)[None], FREQUENCIES
    )[0],
    "frequencies made inside": lambda n: (
        (jnp.arange(n).astype(F32) + 4096)[:, None] / 1e4 ** (jnp.arange(4).astype(F32) / 4)
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_keep_their_digits(pair, name):
    def rotated(x, w):
        q = x @ w
        angles = POSITIONS[name](4)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return q * cos + jnp.roll(q, 2, -1) * sin, q + sin

    cast = jmpx.autocast(rotated, "compute=f16")
    assert_near(*values(pair, cast, rotated))
    assert_ran(cast, *pair, cos="float32", sin="float32")
    assert "float16" in dtypes_of(cast, *pair)["dot_general"]


# State around the function.


def test_what_changed_since_the_last_call_is_seen(pair):
    state = {"scale": 1.0}
    cast = jmpx.autocast(lambda x, w: (x @ w) * state["scale"])
    before = cast(*pair)
    state["scale"] = 3.0
    assert_near(cast(*pair), 3 * before)
    assert_ran(cast, *pair, dot_general="bfloat16")
    inner = jax.jit(jnp.matmul)
    cast = jmpx.autocast(lambda x, w: inner(x, w))
    assert_ran(cast, *pair, dot_general="bfloat16")
    with jax.default_matmul_precision("highest"):
        assert_ran(cast, *pair, dot_general="float32")
        assert_same_bits(jax.jit(cast)(*pair), jax.jit(lambda x, w: inner(x, w))(*pair))
    assert_ran(cast, *pair, dot_general="bfloat16")


def many_things(x, w):
    """jit, scan, cond, custom rules, a checkpoint and a mask in one function."""

    @jax.jit
    def layer(x):
        return jax.nn.relu(x @ w)

    x, _ = lax.scan(lambda c, _: (jax.checkpoint(layer)(c), None), x, None, length=2)
    x = lax.cond(x[0, 0] > 0, lambda: seven(x, w), lambda: eleven(x, w))
    return jnp.where(w > 0, x, -1e9).sum()


SIDES = {
    "inside": jax.grad(jmpx.autocast(many_things)),
    "outside": jmpx.autocast(jax.grad(many_things)),
}


@pytest.mark.parametrize("side", SIDES)
def test_no_tracer_leaks(pair, side):
    gc.freeze()  # the search for leaks collects garbage at each trace: only that of this test
    try:
        with jax.checking_leaks():
            assert "bfloat16" in dtypes_of(SIDES[side], *pair)["dot_general"]
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("side", SIDES)
def test_jax_checks_its_own_invariants(pair, side):
    with jax.enable_checks(True):
        assert "bfloat16" in dtypes_of(SIDES[side], *pair)["dot_general"]


def relu_of_a_product(x, captured):
    return jax.nn.relu(x @ captured)


def callback_with(x, captured):
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda h: h * np.asarray(captured), spec, x @ x)


@pytest.mark.parametrize("f", [relu_of_a_product, callback_with])
def test_what_a_function_captured_is_freed(pair, f):
    def call():
        captured = jnp.array(pair[1])
        inner = jax.jit(lambda x: f(x, captured))
        jax.jit(jmpx.autocast(inner))(pair[0])
        return weakref.ref(captured)

    captured = call()
    gc.collect()
    assert captured() is None


def test_a_captured_constant_stays_a_constant(pair):
    big = np.ones((4, 1000), np.float32)
    x, _ = pair
    result = check(lambda x: jax.jit(lambda x: x @ big + x @ jnp.asarray(big))(x), x)
    assert result.shape == (4, 1000)
    assert "1.0, 1.0" not in str(jax.make_jaxpr(jmpx.autocast(lambda x: x @ big))(x))


# Checkpoints.

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("h"),
    "all but names": jax.checkpoint_policies.save_anything_except_these_names("h"),
    "low precision": jmpx.save_low_precision,
}


@pytest.mark.parametrize("name", POLICIES)
def test_checkpoint_policies_are_followed(pair, name):
    def f(x, w):
        h = checkpoint_name(jnp.sin(x @ w), "h")
        return jnp.sin(h @ w).sum()

    def products(f):
        return sum(e.primitive.name == "dot_general" for e in equations(jax.make_jaxpr(f)(*pair)))

    remat = functools.partial(jax.checkpoint, policy=POLICIES[name])
    inside, outside = both(jmpx.autocast(remat(f))), both(remat(jmpx.autocast(f)))
    around, plain = jmpx.autocast(both(remat(f))), both(remat(f))
    for cast in (inside, outside, around):
        assert_ran(cast, *pair, dot_general="bfloat16")
    if name in ("names", "low precision"):
        assert_near(*values(pair, inside, plain))
    assert products(around) == products(plain) >= products(both(f))
    if name == "low precision":  # what it saves is 16 bits wide: no product runs again
        assert products(inside) == products(outside) == products(both(f)) < products(plain)
    else:
        assert products(inside) == products(outside) == products(plain)


def test_a_checkpoint_that_captured_a_constant(pair):
    x, w = (np.asarray(v) for v in pair)
    check_sides(jax.grad, jax.checkpoint(lambda x: jnp.tanh(x @ w + w[0]).sum()), x)


# Libraries.


def test_equinox(pair):
    x, _ = pair
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))

    def gradient(wrap):
        def loss_fn(model, x):
            remat = eqx.filter_checkpoint(lambda x: jnp.tanh(eqx.filter_vmap(model)(x)))
            return wrap(remat)(x).sum()

        return eqx.filter_grad(loss_fn)

    both = eqx.filter_jit(lambda *args: [gradient(w)(*args) for w in (jmpx.autocast, lambda f: f)])
    assert_near(*both(model, x))
    vmapped = jax.vmap(jmpx.autocast(model))
    assert_ran(vmapped, x, dot_general="bfloat16")
    assert_near(vmapped(x), jax.vmap(model)(x))


def test_haiku(pair):
    x, w = pair
    network = hk.transform_with_state(lambda x: jnp.tanh(hk.Linear(4)(x)))
    args = {"linear": {"w": w, "b": w[0]}}, {}, None, x
    check(lambda params, x: network.apply(params, {}, None, x), args[0], x)
    assert_ran(lambda x: jmpx.autocast(network.apply)(*args), x, dot_general="bfloat16")
    wrong = hk.transform(jmpx.autocast(lambda x: hk.Linear(2)(x)))
    with pytest.raises(ValueError, match="autocast the apply"):
        wrong.init(jax.random.key(0), x)


def test_linen(pair):
    x, w = pair
    module = nn.Dense(4)
    params = {"params": {"kernel": w, "bias": w[0]}}
    check(module.apply, params, x)
    check_sides(jax.grad, lambda params: jnp.tanh(module.apply(params, x)).sum(), params)


def test_nnx(pair):
    x, _ = pair
    ones = nnx.initializers.ones
    graphdef, state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0), kernel_init=ones))
    check(lambda state, x: nnx.merge(graphdef, state)(x), state, x)


# The table of operations is complete.

# These have no rule, because they compute nothing in floating numbers or run as they were traced.
WITHOUT_RULE = set(
    """
    after_all and axis_index clz create_token custom_lin dce_sink eval_jaxpr
    not or population_count ragged_all_to_all reduce_and reduce_or reduce_xor shift_left
    shift_right_arithmetic shift_right_logical stage xla_pmap xor
    """.split()
)


def test_each_operation_of_jax_has_a_rule():
    found = {
        operation_name(value.name)
        for module in (lax, primitives)
        for key, value in vars(module).items()
        if key.endswith("_p") and hasattr(value, "bind")
    }
    assert len(found) > 150
    assert {name for name in found if not is_registered(name)} <= WITHOUT_RULE
    assert not any(map(is_registered, WITHOUT_RULE))
