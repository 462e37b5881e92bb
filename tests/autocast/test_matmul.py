"""The algorithm of float32 products under autocast: each product of a region has it."""

import contextlib
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F32
from helpers.autocast import PRODUCTS, assert_ran, both, eleven, rows
from helpers.jaxprs import equations, trace
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jmpx

HIGH, HIGHEST = ((lax.Precision(word), lax.Precision(word)) for word in ("high", "highest"))

# Other tests are about this warning.
pytestmark = pytest.mark.filterwarnings("ignore:JAX cannot trace")


def products(f, *args):
    """The dtypes in which the products of a function run, and their precision."""
    return [
        (eqn.invars[0].aval.dtype, eqn.params["precision"])
        for eqn in equations(trace(f, *args))
        if eqn.primitive.name in PRODUCTS
    ]


# Every function of JAX that multiplies: all of them end in the primitives of PRODUCTS.


def windows(f, **options):
    return lambda x, w: f(x[None, None], w[None, None], (1, 1), "SAME", **options)


def groups(f, *options):
    return lambda x, w: f(x, jnp.stack([w, w]), jnp.array([1, 3]), *options)


RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


OF_LAX = {
    "batch_matmul": lambda x, w: lax.batch_matmul(x[None], w[None]),
    "conv": windows(lax.conv),
    "conv_general_dilated": windows(lax.conv_general_dilated),
    "conv_general_dilated_local": lambda x, w: lax.conv_general_dilated_local(
        x[None, None], jnp.ones((1, 4, 4, 4)), (1, 1), [(0, 1), (0, 1)], (2, 2)
    ),
    "conv_general_dilated_patches": lambda x, w: lax.conv_general_dilated_patches(
        x[None, None], (2, 2), (1, 1), "SAME"
    ),
    "conv_transpose": windows(lax.conv_transpose, dimension_numbers=("NCHW", "OIHW", "NCHW")),
    "conv_with_general_padding": lambda x, w: lax.conv_with_general_padding(
        x[None, None], w[None, None], (1, 1), "SAME", None, None
    ),
    "dot": lax.dot,
    "dot_general": lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "ragged_dot": groups(lax.ragged_dot),
    "ragged_dot_general": groups(lax.ragged_dot_general, RAGGED),
}


def takes_precision(function):
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        return "precision" in inspect.signature(function).parameters
    return False


def test_the_functions_of_lax_that_multiply():
    assert {name for name, f in vars(lax).items() if takes_precision(f)} <= {*OF_LAX}


@pytest.mark.parametrize("name", OF_LAX)
def test_each_product_of_lax_has_the_algorithm(pair, name):
    f = jmpx.autocast(OF_LAX[name], "m=highest")
    found = products(both(lambda x, w: sum(y.sum() for y in jax.tree.leaves(f(x, w)))), *pair)
    assert found and set(found) == {(F32, HIGHEST)}
    (eqn, *_) = (e for e in equations(trace(OF_LAX[name], *pair)) if "precision" in e.params)
    assert eqn.primitive.name in PRODUCTS


# A region with products, next to a product that is not in it. The arrays of the region have 4 rows,
# the one outside has 3.

IN_REGION = {
    "dot": lambda x, w: jnp.tanh(x @ w),
    "outer product": lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]),
    "convolution": lambda x, w: OF_LAX["conv"](x, w)[0, 0],
    "ragged dot": OF_LAX["ragged_dot"],
    "attention": lambda x, w: jax.nn.softmax(x @ w @ x.T) @ x,
}


def by_jvp(f):
    g = jax.custom_jvp(lambda x, w: f(x, w))
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


def mapped(f):
    def g(x, w):
        mesh = jax.make_mesh((1,), ("d",))
        return jax.shard_map(f, mesh=mesh, in_specs=(P(), P()), out_specs=P())(x, w)

    return g


def solving(f):
    def g(x, w):
        fixed = lax.stop_gradient(w)
        matvec = lambda v: fixed @ v + 5 * v  # noqa: E731
        solve = lambda _, b: fixed.T @ b  # noqa: E731
        return lax.custom_linear_solve(matvec, f(x, w), solve, solve)

    return g


TRANSFORMS = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: f(w, x), x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w)[0],
    "custom_jvp": by_jvp,
    "full_precision": jmpx.full_precision,
    "shard_map": mapped,
    "grad": lambda f: lambda x, w: jax.grad(lambda x: f(x, w).sum())(x),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w, x))[1],
    "linear solve": solving,
    "autocast": lambda f: jmpx.autocast(f, "full"),
}


def deeply(transform):
    """A transformation in a region of full_precision, with others around it and in it."""

    def of(f):
        inner = jax.jit(TRANSFORMS[transform](jax.checkpoint(f)))
        body = jmpx.full_precision(lambda x, w: inner(x, w))
        return lambda x, w: lax.scan(lambda c, _: (body(c, w), None), x, None, length=2)[0]

    return of


def model(f):
    def loss(x, w):
        outside = x[:3] @ w[:, :3]
        with jax.named_scope("router"):
            inside = f(x, w)
        return inside.sum() + (outside @ outside).sum()

    return loss


def assert_algorithms(f, *args):
    """Holds float32 products of 3 rows to have no algorithm, and all others to have HIGHEST."""
    found = {True: set(), False: set()}
    for eqn in equations(trace(f, *args)):
        if eqn.primitive.name in PRODUCTS:
            avals = [var.aval for var in (*eqn.invars[:2], *eqn.outvars)]
            assert {aval.dtype for aval in avals} == {F32}
            found[any(3 in aval.shape for aval in avals)].add(eqn.params["precision"])
    assert found == {True: {None}, False: {HIGHEST}}
    lines = jax.jit(lambda *args: f(*args)).lower(*args).as_text().splitlines()
    lines = [line for line in lines if re.search(r"stablehlo\.(dot_general|convolution)", line)]
    assert lines and all("f32" in line and "f64" not in line for line in lines)
    for line in lines:
        is_outside = bool(re.search(r"[<x]3x", line.partition(" : ")[2]))
        assert ("HIGHEST" in line) != is_outside, line


CASES = {name: ("nothing", name) for name in IN_REGION}
CASES |= {name: (name, "dot") for name in TRANSFORMS}


@pytest.mark.parametrize("name", rows(CASES, "convolution", "custom_jvp", "shard_map"))
def test_products_of_a_region(pair, name):
    transform, product = CASES[name]
    f = model(TRANSFORMS[transform](IN_REGION[product]))
    policy = "c=f32; */router: m=highest"
    plain = len(products(both(f), *pair))
    for g in (both(jmpx.autocast(f, policy)), jmpx.autocast(both(f), policy)):
        assert_algorithms(g, *pair)
        assert len(products(g, *pair)) == plain
    assert_algorithms(jmpx.autocast(f, policy), *pair)


# When JAX differentiates a scan, it moves products that are the same in each step out of the loop,
# and forgets the scope around it: of the first factor of a jvp, an autocast outside does not know.
# JAX traces the rule of a custom_jvp later.
DEEP = [name for name in TRANSFORMS if name not in ("autocast", "jvp", "custom_jvp")]


@pytest.mark.parametrize("transform", rows(DEEP, "cond", "linear solve"))
def test_products_that_full_precision_marks(pair, transform):
    f = model(deeply(transform)(IN_REGION["dot"]))
    # The products outside run in 16 bits.
    policy = "c=bf16; *: bf16; */router: m=highest; op.tanh?: f32"
    for g in (both(jmpx.autocast(f, policy)), jmpx.autocast(both(f), policy)):
        assert {*products(g, *pair)} == {(BF16, None), (F32, HIGHEST)}
        assert_ran(g, *pair, tanh="float32")
    unset = both(jmpx.autocast(f, "c=bf16; */router: o=bf16"))
    assert {*products(unset, *pair)} == {(BF16, None), (F32, None)}


def test_a_while_loop(pair):
    def f(x, w):
        return lax.while_loop(lambda c: (c @ w)[0, 0] < 3, lambda c: c @ w, x)

    policy = "c=bf16; op.dot_general: c=f32,m=high"
    for g in (f, jmpx.full_precision(f), jax.jit(f)):
        assert products(jmpx.autocast(g, policy), *pair) == [(F32, HIGH)] * 2


def test_a_kernel(pair):
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    def f(x, w):
        call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((4, 4), F32), interpret=True)
        return call(x, w)

    for g in (f, jmpx.full_precision(f)):
        assert products(jmpx.autocast(g, "c=bf16,m=highest"), *pair) == [(F32, HIGHEST)]
        assert products(jmpx.autocast(g), *pair) == [(F32, None)]


def test_a_backward_pass_by_hand_has_what_holds_where_jax_traces_it(pair):
    def loss(x, w):
        return (eleven(x, w) ** 2).sum()

    cast = jmpx.autocast(loss, "m=highest")
    assert products(cast, *pair) == [(F32, HIGHEST)]
    assert {*products(both(cast), *pair)} == {(F32, None)}
    with jax.default_matmul_precision("highest"):
        assert {*products(both(cast), *pair)} == {(F32, HIGHEST)}
