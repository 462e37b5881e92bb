"""Which algorithm a product under autocast has: the policy map's, and what goes before it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F16, F32, warns_once
from helpers.autocast import PRODUCTS, assert_ran, both, eleven, rows
from helpers.jaxprs import equations, trace
from helpers.products import products_of
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jmpx

HIGH, HIGHEST, DEFAULT = (
    (lax.Precision(word), lax.Precision(word)) for word in ("high", "highest", "default")
)
X3 = "BF16_BF16_F32_X3"
PRESET, EXACT = lax.DotAlgorithmPreset[X3], lax.DotAlgorithmPreset.F32_F32_F32

# Other tests are about these warnings.
pytestmark = pytest.mark.filterwarnings(
    "ignore:JAX cannot trace", "ignore:No product runs in 16 bits"
)


def products(f, *args):
    """The dtypes in which the products of a function run, and their precision."""
    return [
        (eqn.invars[0].aval.dtype, eqn.params["precision"])
        for eqn in equations(trace(f, *args))
        if eqn.primitive.name in PRODUCTS
    ]


def precisions(f, *args):
    """The precision of each product, in their order."""
    return [precision for _, precision in products(f, *args)]


def in_scopes(x, w):
    """One product in `a`, one in `a/b`, one in `a/b` in full precision, and one in no scope."""
    with jax.named_scope("a"):
        x = x @ w
        with jax.named_scope("b"):
            x = x @ w
            with jmpx.full_precision():
                x = x @ w
    return x @ w


SAID = {
    "c=f32": [None] * 4,
    "m=highest": [HIGHEST] * 4,
    "*/a: m=highest": [HIGHEST] * 3 + [None],
    "m=high; */a: m=highest; */b: m=default": [HIGHEST, DEFAULT, DEFAULT, HIGH],
    "m=high; */b?: m=default; */b: m=highest": [HIGH, HIGHEST, HIGHEST, HIGH],
    # The last rule that matches applies alone: the others are as if they were not there.
    "m=high; */b?: m=default; */b: c=f32": [HIGH] * 4,
    # Also where the dtype is that of the user, or of another rule.
    "c=bf16,m=highest": [None, None, HIGHEST, None],
    "c=bf16; */a: c=f32; */b: m=highest": [None, HIGHEST, HIGHEST, None],
    "c=f32,m=highest; */a: c=bf16": [None, None, HIGHEST, HIGHEST],
    # Rules for operations: the last of those that are about a product.
    "c=bf16; op.dot_general: c=f32,m=highest": [HIGHEST] * 4,
    "c=bf16,m=high; op.dot_general: f32": [HIGH] * 4,
    "c=bf16; */a: m=high; op.dot_general: f32": [HIGH] * 3 + [None],
    "op.dot_general: m=highest; */a: m=high": [HIGH] * 3 + [HIGHEST],
    "m=bf16_bf16_f32_x3": [PRESET] * 4,
    "c=f16; */b: c=f32,m=f32_f32_f32": [None, EXACT, EXACT, None],
}


@pytest.mark.parametrize("policy", SAID)
def test_what_a_policy_map_says(pair, policy):
    expected = SAID[policy]
    assert precisions(jmpx.autocast(in_scopes, policy), *pair) == expected
    forward = jmpx.autocast(jax.jit(lambda x, w: in_scopes(x, w)), policy)
    for _ in range(2):  # the second one finds the inner function traced
        assert precisions(forward, *pair) == expected
    slope = precisions(both(jmpx.autocast(lambda x, w: in_scopes(x, w).sum(), policy)), *pair)
    assert sorted(map(str, slope)) == sorted(map(str, [*expected] * 3))


def test_two_maps_share_a_jitted_function(pair):
    inner = jax.jit(jmpx.full_precision(lambda x, w: eleven(x @ w, w)))
    for policy, expected in (
        ("c=bf16,m=high", HIGH),
        ("c=bf16,m=highest", HIGHEST),
        ("full", None),
    ):
        assert precisions(jmpx.autocast(inner, policy), *pair) == [expected] * 2
    assert precisions(inner, *pair) == [None] * 2


def test_a_rule_for_the_algorithm_leaves_dtypes_alone(pair):
    def f(x, w):
        with jax.named_scope("a"):
            h = jnp.tanh(x @ w)
            with jmpx.full_precision():
                h = h @ w
            with jax.named_scope("b"):
                return h + (x @ w) * jnp.exp(x)

    def dtypes(policy):
        eqns = equations(trace(jmpx.autocast(f, policy, output=None), *pair))
        return [(e.primitive.name, [v.aval.dtype.name for v in e.outvars]) for e in eqns]

    for plain in ("c=bf16", "c=bf16; op.tanh: f32; */a: o=f32; */b: f32"):
        assert dtypes(f"{plain}; */a/b?: m=highest; op.dot_general?: m=high") == dtypes(plain)
        assert dtypes(f"{plain.replace('c=bf16', 'c=bf16,m=highest')}") == dtypes(plain)


@pytest.mark.parametrize(
    "policy, precision, expected",
    [
        ("m=highest", "default", DEFAULT),
        (f"m={X3}", "high", HIGH),
        ("op.dot_general: m=highest", ("default", "highest"), (DEFAULT[0], HIGHEST[0])),
        ("c=f32,m=highest", "F32_F32_F32", EXACT),
    ],
)
def test_the_precision_of_a_product_goes_first(pair, policy, precision, expected):
    def loss(x, w):
        return jnp.dot(x, w, precision=precision).sum()

    transposed = expected[::-1] if isinstance(expected, tuple) else expected
    for wrap in (lambda f: f, jmpx.full_precision, lambda f: jax.jit(lambda x, w: f(x, w))):
        f = jmpx.autocast(wrap(loss), policy)
        assert {*precisions(f, *pair)} == {expected}
        assert {*precisions(both(f), *pair)} <= {expected, transposed}


@pytest.mark.parametrize("policy, mixed", [("m=highest", HIGHEST), (f"m={X3}", None)])
def test_other_dtypes(pair, policy, mixed):
    def dot_of(left, right, result):
        dims = {"dimension_numbers": (((1,), (0,)), ((), ())), "preferred_element_type": result}
        return lambda x, w: lax.dot_general(x.astype(left), w.astype(right), **dims)

    for dtypes, expected in {
        (BF16, BF16, BF16): None,
        (F16, F16, None): None,
        (jnp.int8, jnp.int8, jnp.int32): None,
        # A factor in float32 has digits to multiply, and so has one in the backward pass.
        (F32, BF16, F32): mixed,
        (BF16, BF16, F32): mixed,
    }.items():
        assert precisions(jmpx.autocast(dot_of(*dtypes), policy), *pair) == [expected]
    slope = both(lambda x, w: dot_of(BF16, BF16, F32)(x, w).sum())
    assert {*precisions(jmpx.autocast(slope, policy), *pair)} == {mixed}
    x = pair[0].astype(jnp.complex64)  # which JAX multiplies as float32
    assert precisions(jmpx.autocast(lambda x: x @ x, policy), x) == [mixed]


@pytest.mark.parametrize(
    "inner, outer, expected",
    [
        ("full", "c=bf16,m=highest", HIGHEST),
        ("m=high", "c=bf16,m=highest", HIGH),
        ("c=bf16,m=high", "m=highest", None),  # 16 bits inside
    ],
)
def test_an_autocast_in_another(pair, inner, outer, expected):
    def f(x, w):
        x = jmpx.autocast(lambda x, w: x @ w, inner)(x, w)
        return jax.jit(jmpx.autocast(lambda x, w: x @ w, inner))(x, w).sum()

    for g, times in ((f, 1), (both(f), 3)):
        assert precisions(jmpx.autocast(g, outer), *pair) == [expected] * 2 * times


def rotary(x, w):
    return jnp.einsum("i,j->ij", x[0], w[0])


def test_products_in_float32_in_a_region_of_16_bits(pair):
    assert precisions(jmpx.autocast(rotary, "c=bf16,m=highest"), *pair) == [HIGHEST]
    assert precisions(jmpx.autocast(rotary, f"c=bf16,m={X3}"), *pair) == [PRESET]
    assert precisions(jmpx.autocast(rotary), *pair) == [None]
    h = jmpx.autocast(lambda x, w: rotary(x @ w, w), "c=bf16,m=highest")
    assert_ran(h, *pair, dot_general="bfloat16")
    assert precisions(h, *pair) == [None, None]  # its result has 16 bits, too


# Rules without effect.


def convolution(x, w):
    return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]


def scoped(x, w):
    with jax.named_scope("router"):
        x = x @ w
    with jax.named_scope("norm"):
        x = jnp.exp(x)
    with jax.named_scope("image"):
        return convolution(x, w) + convolution(x, w.T)


def test_algorithms_without_effect(pair):
    f = jax.jit(lambda x, w: scoped(x, w))
    for policy in ("c=bf16; */router: m=highest", "c=bf16; */norm: c=f32,m=highest"):
        for _ in range(2):  # the second one finds the inner function traced
            with warns_once(__file__, "has no effect, because no float32 product gets it"):
                jax.eval_shape(jmpx.autocast(f, policy), *pair)
    jax.eval_shape(jmpx.autocast(f, "c=bf16; */router?: m=highest; op.exp?: m=highest"), *pair)
    jax.eval_shape(jmpx.autocast(f, f"m={X3}; op.conv_general_dilated: m=default"), *pair)


def test_a_convolution_has_no_dot_algorithm(pair):
    found = precisions(both(jmpx.autocast(lambda x, w: scoped(x, w).sum(), f"m={X3}")), *pair)
    assert found.count(PRESET) == 3 and found.count(None) == 6
    policy = f"m={X3}; op.conv_general_dilated: m=highest"
    assert set(precisions(jmpx.autocast(scoped, policy), *pair)) == {PRESET, HIGHEST}
    trace(jmpx.autocast(jmpx.full_precision(scoped), f"c=bf16,m={X3}"), *pair)


# A region with products, next to a product that is not in it. The arrays of the region have 4 rows,
# the one outside has 3.

IN_REGION = {
    "dot": lambda x, w: jnp.tanh(x @ w),
    "convolution": convolution,
    "ragged dot": lambda x, w: lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 3])),
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
    "full_precision": jmpx.full_precision,
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: f(w, x), x, w),
    "custom_jvp": by_jvp,
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


CASES = {name: ("nothing", name) for name in IN_REGION}
CASES |= {name: (name, "dot") for name in TRANSFORMS}


@pytest.mark.parametrize("name", rows(CASES, *IN_REGION, "custom_jvp", "shard_map"))
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


# Programs made by chance: an algorithm changes precisions, and nothing else.

STEPS = IN_REGION | {
    "outer product": rotary,
    "own precision": lambda x, w: jnp.dot(x, w, precision="default"),
    "exp": lambda x, w: jnp.exp(x - x.max()),
    "half": lambda x, w: (x.astype(BF16) @ w.astype(BF16)).astype(F32),
}
AROUND = "nothing", "jit", "checkpoint", "full_precision", "scan", "cond"
PARTS = st.tuples(
    st.lists(st.sampled_from(AROUND), max_size=3),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
)


def program(parts):
    def loss(x, w):
        for around, steps in parts:
            f = lambda x, w, steps=steps: functools.reduce(lambda x, s: STEPS[s](x, w), steps, x)  # noqa: E731
            x = functools.reduce(lambda f, name: TRANSFORMS[name](f), around, f)(x, w)
        return x.sum()

    return loss


@pytest.mark.thorough
@pytest.mark.versions
@settings(max_examples=25, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=3), st.sampled_from(["bf16", "f16", "f32"]))
def test_an_algorithm_changes_precisions_alone(parts, dtype):
    pair = jnp.ones((4, 4)), jnp.ones((4, 4))
    for transform in (lambda f: f, both):
        side = [
            list(equations(trace(transform(jmpx.autocast(program(parts), policy)), *pair)))
            for policy in (f"c={dtype}", f"c={dtype},m=highest")
        ]
        assert [str(e.primitive) for e in side[0]] == [str(e.primitive) for e in side[1]]
        for plain, cast in zip(*side, strict=True):
            assert [v.aval for v in plain.outvars] == [v.aval for v in cast.outvars]
            if plain.primitive.name in PRODUCTS:
                result = plain.params["preferred_element_type"]
                is_full = F32 in (result, *(var.aval.dtype for var in plain.invars))
                is_open = plain.params["precision"] is None
                expected = HIGHEST if is_full and is_open else plain.params["precision"]
                assert cast.params["precision"] == expected


# Autocast inside of what sets an algorithm: jmpx's own regions, and JAX's context.


def loss(w, x):
    h = x @ w
    with jmpx.full_precision():
        h = h @ w
    return (h @ w).sum()


def in_gradient_function(f, matmul):
    grad_fn = jmpx.value_and_grad(f, jmpx.NoOpLossScale(), policy=f"p=f32,m={matmul}")
    return lambda w, x: grad_fn(w, x).grads


def in_full_precision(f, matmul):
    def run(w, x):
        with jmpx.full_precision(matmul=matmul):
            return jax.grad(f)(w, x)

    return run


def in_forced_full_precision(f, matmul):
    return jmpx.full_precision(jmpx.force_full_precision(jax.grad(f)), matmul=matmul)


ROADS = [in_gradient_function, in_full_precision, in_forced_full_precision]
LOWERED = {"high": "HIGH", "highest": "HIGHEST", X3: "bf16 f32 x3"}


def how_by_dtype(f, *args):
    """How the products of a program multiply, by their dtype."""
    found = products_of(f, *args)
    ways = {dtype: [p.how for p in found if p.dtypes == {dtype}] for dtype in ("f32", "bf16")}
    assert sum(map(len, ways.values())) == len(found)
    return ways


@pytest.mark.parametrize(
    "road, policy, matmul, expected",
    [
        (in_gradient_function, "c=bf16", "highest", "HIGHEST"),
        (in_full_precision, "c=bf16", X3, "bf16 f32 x3"),
        (in_forced_full_precision, "c=bf16", X3, "bf16 f32 x3"),
        # The policy of autocast goes first.
        (in_gradient_function, "c=bf16,m=high", X3, "HIGH"),
        (in_full_precision, "c=bf16; op.dot_general: m=high", X3, "HIGH"),
    ],
)
def test_a_setting_of_jmpx_around_the_call_is_for_float32_alone(
    pair, road, policy, matmul, expected
):
    ways = how_by_dtype(road(jmpx.autocast(loss, policy), matmul), *pair)
    assert ways["f32"] == [expected] * 3
    assert len(ways["bf16"]) == 4 and LOWERED[X3] not in ways["bf16"]  # nor where it is transposed


@pytest.mark.parametrize("road", ROADS[:2])
def test_inner_functions_are_traced_anew_under_another_setting(road, pair):
    inner = jax.jit(jax.checkpoint(loss))
    cast = jmpx.autocast(lambda w, x: inner(w, x), "c=bf16")
    for matmul in ("high", "highest", "high"):
        assert set(how_by_dtype(road(cast, matmul), *pair)["f32"]) == {LOWERED[matmul]}
    assert set(how_by_dtype(jax.grad(cast), *pair)["f32"]) == {"DEFAULT"}


def test_the_users_own_setting_of_jax_keeps_products_in_float32(pair):
    with jax.default_matmul_precision("high"):  # it goes before the policy
        assert precisions(jmpx.autocast(in_scopes, "c=bf16,m=highest"), *pair) == [HIGH] * 4
    slope = jax.grad(jmpx.autocast(loss, "c=bf16"))
    for around in (contextlib.nullcontext(), jmpx.full_precision(matmul="high")):
        with around, jax.default_matmul_precision("highest"):
            assert how_by_dtype(slope, *pair) == {"f32": ["HIGHEST"] * 7, "bf16": []}


@pytest.mark.parametrize("road", ROADS[1:])
def test_a_precision_of_ones_own_and_a_backward_pass_by_hand(road, pair):
    def precise(w, x):
        return (jnp.dot(x, w, precision="high") @ w).sum()

    ways = how_by_dtype(road(jmpx.autocast(precise, "c=bf16"), "highest"), *pair)
    assert ways["f32"] == ["HIGH"] * 2 and len(ways["bf16"]) == 2
    cast = jmpx.autocast(lambda w, x: (eleven(x, w) @ w).sum(), "c=bf16")
    ways = how_by_dtype(road(cast, "highest"), *pair)
    assert set(ways["f32"]) == {"HIGHEST"} and len(ways["bf16"]) == 2
