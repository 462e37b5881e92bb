"""Which algorithm a product has: the policy map's, and what goes before it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F16, F32, warns_once
from helpers.autocast import PRODUCTS, assert_ran, both, eleven
from helpers.jaxprs import equations, trace
from helpers.products import products_of
from hypothesis import given, settings, strategies as st
from jax import lax

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


def precisions(f, *args):
    """The precision of each product, in their order."""
    products = [eqn for eqn in equations(trace(f, *args)) if eqn.primitive.name in PRODUCTS]
    return [eqn.params["precision"] for eqn in products]


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
    "m=bfloat16": [DEFAULT] * 4,
    "*/a: m=highest": [HIGHEST] * 3 + [None],
    "*/b: m=highest": [None, HIGHEST, HIGHEST, None],
    "m=high; */a: m=highest; */b: m=default": [HIGHEST, DEFAULT, DEFAULT, HIGH],
    "m=high; */b?: m=default; */b: m=highest": [HIGH, HIGHEST, HIGHEST, HIGH],
    # The last rule that matches applies alone: the others are as if they were not there.
    "m=high; */b?: m=default; */b: c=f32": [HIGH] * 4,
    "*/a: m=highest; */b: c=f32,o=f32": [HIGHEST] * 3 + [None],
    # Also where the dtype is that of the user, or of another rule.
    "c=bf16,m=highest": [None, None, HIGHEST, None],
    "c=bf16; */a: c=f32,m=highest": [HIGHEST] * 3 + [None],
    "c=bf16; */a: c=f32; */b: m=highest": [None, HIGHEST, HIGHEST, None],
    "c=f32,m=highest; */a: c=bf16": [None, None, HIGHEST, HIGHEST],
    # Rules for operations: the last of those that are about a product.
    "c=bf16; op.dot_general: c=f32,m=highest": [HIGHEST] * 4,
    "c=bf16,m=high; op.dot_general: f32": [HIGH] * 4,
    "c=bf16; */a: m=high; op.dot_general: f32": [HIGH] * 3 + [None],
    "c=bf16; op.dot_general: m=highest": [None, None, HIGHEST, None],
    "op.dot_general: m=highest; */a: m=high": [HIGH] * 3 + [HIGHEST],
    "*/a?: m=high; op.dot_general: m=highest": [HIGHEST] * 4,
    "op.dot_general: m=highest; */a: c=f32": [HIGHEST] * 4,
    "m=bf16_bf16_f32_x3": [PRESET] * 4,
    "c=bf16,m=bf16_bf16_f32_x3": [None, None, PRESET, None],
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


def test_the_context_of_jax_goes_first(pair):
    with jax.default_matmul_precision("high"):
        assert precisions(jmpx.autocast(in_scopes, "c=bf16,m=highest"), *pair) == [HIGH] * 4


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
    assert precisions(h, *pair) == [None, HIGHEST]  # it is summed in float32


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


@pytest.mark.parametrize(
    "policy",
    [
        f"c=bf16,m={X3}",
        "c=bf16; */router?: m=highest",
        "m=high; op.exp?: m=highest",
        f"m={X3}; op.conv_general_dilated: m=default",
        "c=bf16; */router: c=f32,m=highest; */image: c=f32,m=high",
    ],
)
def test_algorithms_with_effect_or_optional(pair, policy):
    trace(jmpx.autocast(scoped, policy), *pair)


def test_a_convolution_has_no_dot_algorithm(pair):
    found = precisions(both(jmpx.autocast(lambda x, w: scoped(x, w).sum(), f"m={X3}")), *pair)
    assert found.count(PRESET) == 3 and found.count(None) == 6
    policy = f"m={X3}; op.conv_general_dilated: m=highest"
    assert set(precisions(jmpx.autocast(scoped, policy), *pair)) == {PRESET, HIGHEST}
    trace(jmpx.autocast(jmpx.full_precision(scoped), f"c=bf16,m={X3}"), *pair)


# Programs made by chance: an algorithm changes precisions, and nothing else.

STEPS = {
    "product": lambda x, w: x @ w,
    "outer product": rotary,
    "convolution": convolution,
    "own precision": lambda x, w: jnp.dot(x, w, precision="default"),
    "tanh": lambda x, w: jnp.tanh(x),
    "exp": lambda x, w: jnp.exp(x - x.max()),
    "bias": lambda x, w: x + w[0],
    "half": lambda x, w: (x.astype(BF16) @ w.astype(BF16)).astype(F32),
}


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "full_precision": jmpx.full_precision,
    "scope": jax.named_scope("router"),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w),
}


PARTS = st.tuples(
    st.lists(st.sampled_from(sorted(AROUND)), max_size=3),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
)


def program(parts):
    def loss(x, w):
        for around, steps in parts:
            f = lambda x, w, steps=steps: functools.reduce(lambda x, s: STEPS[s](x, w), steps, x)  # noqa: E731
            x = functools.reduce(lambda f, name: AROUND[name](f), around, f)(x, w)
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
    grad_fn = jmpx.filter_value_and_grad(f, jmpx.NoOpLossScale(), policy=f"p=f32,m={matmul}")
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
