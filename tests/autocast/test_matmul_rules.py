"""Which algorithm a product has under autocast: the policy map's, and what goes before it."""

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F16, F32, warns_once
from helpers.autocast import assert_ran, both, eleven
from helpers.jaxprs import equations, trace
from hypothesis import given, settings, strategies as st
from jax import lax

import jmpx
from jmpx._autocast.products import PRODUCTS

HIGH, HIGHEST, DEFAULT = (
    (lax.Precision(word), lax.Precision(word)) for word in ("high", "highest", "default")
)

# Other tests are about these warnings.
pytestmark = pytest.mark.filterwarnings(
    "ignore:JAX cannot trace", "ignore:No product runs in 16 bits"
)
X3 = "BF16_BF16_F32_X3"
PRESET = lax.DotAlgorithmPreset[X3]


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


@pytest.mark.parametrize(
    "policy, expected",
    [
        ("c=f32", [None] * 4),
        ("m=highest", [HIGHEST] * 4),
        ("m=float32", [HIGHEST] * 4),
        ("m=bfloat16", [DEFAULT] * 4),
        ("*/a: m=highest", [HIGHEST] * 3 + [None]),
        ("*/b: m=highest", [None, HIGHEST, HIGHEST, None]),
        ("m=high; */a: m=highest; */b: m=default", [HIGHEST, DEFAULT, DEFAULT, HIGH]),
        ("m=high; */b: m=default; */a: m=highest", [HIGHEST, DEFAULT, DEFAULT, HIGH]),
        ("m=high; */b?: m=default; */b: m=highest", [HIGH, HIGHEST, HIGHEST, HIGH]),
        # The last rule that matches applies alone: the others are as if they were not there.
        ("m=high; */b?: m=default; */b: c=f32", [HIGH] * 4),
        ("*/a: m=highest; */b: c=f32,o=f32", [HIGHEST] * 3 + [None]),
        # Also where the dtype is that of the user, or of another rule.
        ("c=bf16,m=highest", [None, None, HIGHEST, None]),
        ("c=bf16; */a/b: m=highest", [None, None, HIGHEST, None]),
        ("c=bf16; */a: c=f32,m=highest", [HIGHEST] * 3 + [None]),
        ("c=bf16; */a: c=f32; */b: m=highest", [None, HIGHEST, HIGHEST, None]),
        ("c=f32,m=highest; */a: c=bf16", [None, None, HIGHEST, HIGHEST]),
        # Rules for operations: the last of those that are about a product.
        ("op.dot_general: m=highest", [HIGHEST] * 4),
        ("c=bf16; op.dot_general: c=f32,m=highest", [HIGHEST] * 4),
        ("c=bf16,m=high; op.dot_general: f32", [HIGH] * 4),
        ("c=bf16; */a: m=high; op.dot_general: f32", [HIGH] * 3 + [None]),
        ("c=bf16; op.dot_general: m=highest", [None, None, HIGHEST, None]),
        ("op.dot_general: m=highest; */a: m=high", [HIGH] * 3 + [HIGHEST]),
        ("*/a?: m=high; op.dot_general: m=highest", [HIGHEST] * 4),
        ("op.dot_general: m=highest; */a: c=f32", [HIGHEST] * 4),
        ("m=bf16_bf16_f32_x3", [PRESET] * 4),
        ("c=bf16,m=bf16_bf16_f32_x3", [None, None, PRESET, None]),
        ("c=f16; */b: c=f32,m=f32_f32_f32", [None, F32, F32, None]),
    ],
)
def test_what_a_policy_map_says(pair, policy, expected):
    expected = [lax.DotAlgorithmPreset.F32_F32_F32 if e is F32 else e for e in expected]
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

    base = "c=bf16; op.tanh: f32; */a: o=f32"
    for plain in ("c=bf16", "c=bf16; op.tanh: f32", base, f"{base}; */b: f32"):
        assert dtypes(f"{plain}; */a/b?: m=highest; op.dot_general?: m=high") == dtypes(plain)
        assert dtypes(f"{plain.replace('c=bf16', 'c=bf16,m=highest')}") == dtypes(plain)


OWN = {
    "default": (DEFAULT, {"precision": "default"}),
    "high": (HIGH, {"precision": "high"}),
    "two": ((DEFAULT[0], HIGHEST[0]), {"precision": ("default", "highest")}),
    "algorithm": (lax.DotAlgorithmPreset.F32_F32_F32, {"precision": "F32_F32_F32"}),
}


@pytest.mark.parametrize("name", OWN)
def test_the_precision_of_a_product_goes_first(pair, name):
    precision, options = OWN[name]

    def loss(x, w):
        return jnp.dot(x, w, **options).sum()

    for policy in ("m=highest", f"m={X3}", "op.dot_general: m=highest", "c=f32,m=highest"):
        for wrap in (lambda f: f, jmpx.full_precision, lambda f: jax.jit(lambda x, w: f(x, w))):
            for f in (both(jmpx.autocast(wrap(loss), policy)), jmpx.autocast(wrap(loss), policy)):
                assert set(map(str, precisions(f, *pair))) <= {
                    str(precision),
                    str(precision[::-1]) if isinstance(precision, tuple) else "",
                }


def test_the_context_of_jax_goes_first(pair):
    with jax.default_matmul_precision("high"):
        assert precisions(jmpx.autocast(in_scopes, "c=bf16,m=highest"), *pair) == [HIGH] * 4


def test_other_dtypes(pair):
    def dot_of(left, right, result):
        def f(x, w):
            dims = (((1,), (0,)), ((), ()))
            x, w = x.astype(left), w.astype(right)
            return lax.dot_general(x, w, dims, preferred_element_type=result)

        return f

    for policy, mixed in (("m=highest", HIGHEST), (f"m={X3}", None)):
        for dtypes, expected in {
            (BF16, BF16, BF16): None,
            (F16, F16, None): None,
            (jnp.int8, jnp.int8, jnp.int32): None,
            # A factor in float32 has digits to multiply, and so has one in the backward pass.
            (F32, BF16, F32): mixed,
            (BF16, BF16, F32): mixed,
        }.items():
            f = dot_of(*dtypes)
            assert precisions(jmpx.autocast(f, policy), *pair) == [expected]
            if dtypes == (BF16, BF16, F32):
                slope = both(lambda x, w, f=f: f(x, w).sum())
                found = precisions(jmpx.autocast(slope, policy), *pair)
                assert {*found} == {expected}
    x = pair[0].astype(jnp.complex64)  # which JAX multiplies as float32
    assert precisions(jmpx.autocast(lambda x: x @ x, "m=highest"), x) == [HIGHEST]
    assert precisions(jmpx.autocast(lambda x: x @ x, f"m={X3}"), x) == [None]


@pytest.mark.parametrize(
    "inner, outer, expected",
    [
        ("full", "c=bf16,m=highest", HIGHEST),
        ("m=high", "c=bf16,m=highest", HIGH),
        ("m=high", "full", HIGH),
        ("c=bf16,m=high", "m=highest", None),  # 16 bits inside
        ("c=bf16", "m=highest", None),
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


NO_PRODUCT = "has no effect, because no float32 product gets it: leave it out"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "policy, words",
    [
        ("c=bf16; */router: m=highest", NO_PRODUCT),
        ("c=bf16; */norm: c=f32,m=highest", NO_PRODUCT),
        ("c=bf16; op.dot_general: m=highest", NO_PRODUCT),
        ("m=high; op.exp: m=highest", NO_PRODUCT),
        ("c=bf16; op.exp: c=f32,m=highest", NO_PRODUCT),
        ("c=bf16; */rooter: c=f32,m=highest", "matched no scope; did you mean 'router'"),
        ("m=high; op.dot_generall: m=highest", "matched no operation; did you mean"),
    ],
)
def test_algorithms_without_effect(pair, policy, words):
    for f in (scoped, jax.jit(lambda x, w: scoped(x, w))):
        for _ in range(2):  # the second one finds the inner function traced
            with warns_once(__file__, words):
                jmpx.autocast(f, policy)(*pair)


@pytest.mark.parametrize(
    "policy",
    [
        "c=bf16,m=highest",
        f"c=bf16,m={X3}",
        "c=bf16; */router?: m=highest",
        "m=high; op.exp?: m=highest",
        "c=bf16; */norm?: c=f32,m=highest",
        f"m={X3}",
        f"m={X3}; op.conv_general_dilated: m=highest",
        f"m={X3}; op.conv_general_dilated: m=default",
        "c=bf16; */router: c=f32,m=highest; */image: c=f32,m=high",
    ],
)
def test_algorithms_with_effect_or_optional(pair, policy):
    jmpx.autocast(scoped, policy)(*pair)


def test_a_convolution_has_no_dot_algorithm(pair):
    found = precisions(both(jmpx.autocast(lambda x, w: scoped(x, w).sum(), f"m={X3}")), *pair)
    assert found.count(PRESET) == 3 and found.count(None) == 6
    policy = f"m={X3}; op.conv_general_dilated: m=highest"
    assert set(precisions(jmpx.autocast(scoped, policy), *pair)) == {PRESET, HIGHEST}
    jmpx.autocast(jmpx.full_precision(scoped), f"c=bf16,m={X3}")(*pair)


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
    def of(around, steps):
        def f(x, w):
            for step in steps:
                x = STEPS[step](x, w)
            return x

        for name in around:
            f = AROUND[name](f)
        return f

    functions = [of(*part) for part in parts]

    def loss(x, w):
        for f in functions:
            x = f(x, w)
        return x.sum()

    return loss


@pytest.mark.thorough
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
