"""Rules of operations and of scopes, what goes before them, and what has no effect."""

import functools

import autocast as benchmark
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, assert_same_bits, dtypes, enable_x64, normal, warns_once, zoo
from helpers.autocast import assert_near, assert_ran, check, eleven, named, values
from helpers.jaxprs import FULL, LOW, dots, equations_of, trace
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku


def test_rules_of_operations(rng):
    f = jmpx.autocast(lambda x: jnp.exp(x @ x), "c=bf16; op.exp: full; op.exp: bf16", output=None)
    assert f(normal(rng, 3, 3)).dtype == BF16  # the last rule wins


def test_a_rule_may_ask_for_more_precision_than_was_traced(rng):
    x = jnp.asarray(1 + rng.uniform(size=64) / 64, jnp.float32)
    f = jmpx.autocast(jnp.prod, "c=bf16; op.reduce_prod: float64")
    with enable_x64():
        got = f(x)
        assert any(v.aval.dtype == "float64" for e in equations_of(f, x) for v in e.outvars)
    assert_same_bits(got, jnp.asarray(np.prod(np.asarray(x, np.float64)), jnp.float32))


def test_grampax_semantics(rng):
    """Its default: the operands of products are cast, their results cast back."""
    w, b, x = normal(rng, 3, 2), normal(rng, 2), normal(rng, 4, 3)
    f = jmpx.autocast(lambda: jnp.tanh(x @ w + b), "full; op.dot_general: bf16")
    cast = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    assert_same_bits(f(), jnp.tanh((cast(x) @ cast(w)).astype(jnp.float32) + b))


@pytest.mark.parametrize(
    "policy, expected, transform",
    [
        ("c=bf16; */head: full", [LOW, FULL], jax.vmap),
        ("c=bf16; head: full", [LOW, FULL], lambda f: f),
        ("c=bf16; *: full; */trunk: bf16", [LOW, FULL], jax.jit),
        ("c=full; */trunk: bf16", [LOW, FULL], jax.vmap),
        ("c=bf16; */head: full; op.dot_general: bf16", [LOW, LOW], jax.checkpoint),
        ("c=bf16; op.dot_general: full; */trunk: bf16", [LOW, FULL], lambda f: f),
    ],
)
def test_rules_of_scopes(rng, policy, expected, transform):
    shape = (3, 2, 2) if transform is jax.vmap else (2, 2)
    got = dots(transform(jmpx.autocast(named, policy)), normal(rng, *shape))
    assert got[: len(expected)] == expected


def test_an_island_yields_outside(rng):
    @jax.named_scope("norm")
    def norm(h):
        return h - h.mean()

    def dtypes_of(policy):
        f = jmpx.autocast(lambda x: (norm(x @ x), x @ x + norm(x @ x)), policy, output=None)
        return dtypes(jax.eval_shape(f, normal(rng, 3, 3)))

    assert dtypes_of("c=bf16; norm: full") == ["float32", "bfloat16"]
    assert dtypes_of("c=bf16; norm: c=f32,o=f32") == ["float32", "float32"]


def test_rules_hold_within_jit_and_scan(pair):
    norm = jax.named_scope("norm")(lambda x, w: jnp.exp(jnp.tanh(x)) @ w)
    layer = jax.jit(lambda x, w: norm(x, w) @ w)

    @jax.named_scope("encoder")
    def model(x, w):
        return lax.scan(lambda c, _: (layer(c, w), None), x, None, length=2)[0]

    for rules, dot_general, exp in (
        ("*/encoder/norm: full; op.exp: bf16", "bfloat16 float32", "bfloat16"),
        ("*/encoder/*: full", "float32", "float32"),
    ):
        cast = jmpx.autocast(model, f"compute=bf16; {rules}")
        assert_ran(cast, *pair, dot_general=dot_general, exp=exp)
    check(layer, *pair, policy="compute=bf16; op.dot_general: f16", dot_general="float16")


# Functions that stay in float32.


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
THROUGH = [
    lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    lambda f: lambda x, w: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: f(c, w), x),
    lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w),
    lambda f: jax.grad(lambda x, w: f(x, w).sum()),
    lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w),
    lambda f: jax.jit(jax.grad(lambda x, w: jax.checkpoint(f)(x, w).sum())),
]


@pytest.mark.parametrize("mark, through", list(zip(MARKS, THROUGH, strict=True)))
def test_regions_of_float32(pair, mark, through):
    policy = "compute=bf16; */head: full" if mark == "rule of a scope" else "compute=bf16"
    region = MARKS[mark](product)
    for f in (through(region), MARKS[mark](through(product))):
        cast = jmpx.autocast(lambda x, w, f=f: (f(x, w), x @ w), policy)
        *inside, beside = dots(cast, *pair)
        assert beside == LOW and inside and set(inside) == {FULL}
    cast = jmpx.autocast(lambda x, w: (region(x, w), x @ w), policy)
    assert_same_bits(cast(*pair)[0], product(*pair))


def test_an_autocast_that_is_called_in_a_region_runs(pair):
    region = jmpx.full_precision(lambda x, w: jmpx.autocast(product)(x, w))
    for f in (region, jmpx.autocast(region), jax.jit(region)):
        assert_ran(f, *pair, dot_general="bfloat16", exp="float32")
    assert_near(*values(pair, jmpx.autocast(region), product))


@pytest.mark.parametrize("mark", [within, jmpx.full_precision, jmpx.force_full_precision])
def test_no_rule_goes_before_full_precision(pair, mark):
    policy = "c=bf16; *?: bf16; op.exp?: bf16; op.dot_general?: bf16"
    for through in THROUGH[3:5]:
        for cast in (jmpx.autocast(through(mark(product)), p) for p in (policy, "c=bf16")):
            assert "bf16" not in str(jax.make_jaxpr(cast)(*pair))


# Rules without effect: tests/messages has what is said of them.


def test_what_is_near_is_found_inside_of_inner_functions():
    by_rule = jax.custom_jvp(lambda x: jax.named_scope("attention")(jnp.tanh)(x @ x))
    by_rule.defjvp(lambda primals, tangents: jax.jvp(by_rule, primals, tangents))

    @jax.named_scope("encoder")
    def deep(x):
        step = jax.checkpoint(lambda x: lax.cond(x[0, 0] > 0, by_rule, by_rule, x))
        return lax.scan(lambda c, _: (jax.jit(step)(c), None), x, None, 2)[0]

    f = jmpx.autocast(deep, "c=bf16; */atention: full; op.tanhh: full")
    for _ in range(2):  # the second one finds the inner functions retraced
        with pytest.warns(UserWarning) as record:
            trace(f, jnp.ones((2, 2)))
        scope, operation = [str(warning.message) for warning in record]
        assert "matched no scope; did you mean '*/attention'?" in scope
        assert "matched no operation; did you mean 'op.tanh'?" in operation


def test_a_class_in_a_function_that_jax_has_traced_before_is_no_unused_rule():
    x = jnp.ones((2, 3))
    _, apply, model = zoo.drawn("haiku", zoo.nested, *x.shape)
    jitted = jax.jit(apply)
    used, unused = (jmpx.autocast(jitted, f"c=bf16; {of}: full") for of in ("HaikuInner", "*/iner"))
    for _ in range(2):
        with pytest.warns(UserWarning, match="did you mean '\\*/inner'"):
            trace(unused, model, x)
        trace(used, model, x)


# Products that stay float32 though autocast was to give them 16 bits.

W = jax.device_put(np.eye(4, dtype=F32) / 2)


def by_hand(x):
    """Two products, the second of which JAX cannot trace again."""
    h = x @ W
    return eleven(h, h)


@custom_partitioning
def partitioned(x, w):
    return x @ w


partitioned.def_partition(
    infer_sharding_from_operands=lambda *_: None,
    partition=lambda *_: None,
    sharding_rule="i j, j k -> i k",
)


def kernel(x, w):
    def body(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    return pl.pallas_call(body, jax.ShapeDtypeStruct((4, 4), F32), interpret=True)(x, w)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@jax.custom_vjp
def marked_inside(x):
    return jmpx.full_precision(jnp.matmul)(x, x)


marked_inside.defvjp(lambda x: (marked_inside(x), x), lambda x, g: (g @ x,))


@jax.custom_vjp
def routed(x):
    return jax.named_scope("router")(jnp.matmul)(x, x)


routed.defvjp(lambda x: (routed(x), x), lambda x, g: (g @ x,))


PLACES = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, f, x),
}


@pytest.mark.parametrize("place", ["checkpoint", "scan", "cond"])
def test_a_function_with_its_own_backward_pass(place):
    f = jmpx.autocast(PLACES[place](by_hand))
    for _ in range(2):  # the second one finds the inner function retraced
        match = r"custom_vjp_call at \S*test_rules.py:\d+ \(by_hand\) .* there, 50.0 % of all FLOPs"
        with warns_once(__file__, match):
            jax.eval_shape(lambda x: f(x), jnp.eye(4))


def test_under_jit_it_is_said_when_jax_traces():
    step = jax.jit(jax.grad(lambda x: jmpx.autocast(by_hand)(x).sum()))
    with warns_once(__file__, "JAX cannot trace"):
        step(jnp.eye(4))
    step(jnp.eye(4))


def in_a_grid(x, w):
    def body(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    row, all_rows = pl.BlockSpec((1, 4), lambda i: (i, 0)), pl.BlockSpec((4, 4), lambda i: (0, 0))
    shape, options = jax.ShapeDtypeStruct((4, 4), F32), {"interpret": True, "grid": (4,)}
    return pl.pallas_call(body, shape, in_specs=[row, all_rows], out_specs=row, **options)(x, w)


def in_a_branch(x, w):
    return lax.cond(x[0, 0] > 0, lambda x: kernel(x, w), lambda x: x @ w @ w, x)


def foreign(x, w):
    return jax.ffi.ffi_call("of_nobody", jax.ShapeDtypeStruct((4, 4), F32))(x, w)


@jax.custom_vjp
def foreign_inside(x, w):
    return foreign(x, w)


foreign_inside.defvjp(lambda x, w: (foreign(x, w), None), lambda kept, g: (g, g))


@pytest.mark.parametrize(
    "function, share",
    [
        (partitioned, ", 50.0 % of all FLOPs of products"),
        (kernel, ", 50.0 % of all FLOPs of products"),
        (in_a_grid, ", 50.0 % of all FLOPs of products"),
        (in_a_branch, ", 50.0 % of all FLOPs of products"),
        (foreign, ""),  # as nothing shows what it computes
        (foreign_inside, ""),
    ],
)
def test_functions_of_other_kinds(function, share):
    match = rf"JAX cannot trace .* at \S*test_rules.py.* float32 there{share}: cast .* by=modules"
    with warns_once(__file__, match):
        jax.eval_shape(jmpx.autocast(lambda x: function(x @ W, W)), jnp.eye(4))


QUIET = {
    "clipped gradients": lambda x: clipped(x @ W),
    "differentiated inside": jax.grad(lambda x: by_hand(x).sum()),
    "marked": lambda x: jmpx.full_precision(by_hand)(x),
    "marked inside": lambda x: marked_inside(x @ W),
    "no product": lambda x: jnp.tanh(x) + 1,
    "outer product": lambda x: jnp.outer(x[0], x[1]),
    "integers": lambda x: x.astype(int) @ x.astype(int),
    "in 16 bits by hand": lambda x: x.astype(BF16) @ x.astype(BF16),
    "cast operands": lambda x: eleven((x @ W).astype(BF16), W.astype(BF16)).astype(F32),
    "a precise one among others": lambda x: jnp.matmul(x @ W, W, precision="highest"),
    "losses": lambda x: optax.safe_softmax_cross_entropy(x @ W, x),
    "linear algebra": lambda x: jnp.linalg.solve(jnp.eye(4) + x @ W, x),
    "a foreign call on inputs": lambda x: foreign_inside(x, x) @ W,
    "a foreign call in 16 bits": lambda x: foreign_inside((x @ W).astype(BF16), W.astype(BF16)),
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_said_of(name):
    f = jmpx.autocast(QUIET[name])
    jax.eval_shape(jax.grad(lambda x: f(x).sum().astype(F32)), jnp.eye(4))


@pytest.mark.parametrize(
    "policy", ["full", "c=bf16; op.custom_vjp_call: f32; op.dot_general: f32", "c=bf16; *: full"]
)
def test_nothing_is_said_where_a_rule_says_float32(policy):
    jax.eval_shape(jmpx.autocast(jax.named_scope("all")(by_hand), policy), jnp.eye(4))


def test_rules_of_scopes_inside_are_respected():
    with warns_once(__file__, "JAX cannot trace"):
        jax.eval_shape(jmpx.autocast(lambda x: routed(x @ W)), jnp.eye(4))
    cast = jmpx.autocast(lambda x: routed(x @ W), "c=bf16; *router?: full")
    jax.eval_shape(cast, jnp.eye(4))


def test_the_remedy_is_the_program_written_by_hand(rng):
    x = normal(rng, 4, 4)

    def remedied(w):
        h = x @ w
        return (eleven(h.astype(BF16), h.astype(BF16)).astype(F32) @ w).sum()

    def written(w):
        w = w.astype(BF16)
        h = x.astype(BF16) @ w
        return (eleven(h, h) @ w).astype(F32).sum()

    cast = jmpx.autocast(remedied)
    assert_ran(jax.grad(cast), x, dot_general="bfloat16")
    assert benchmark.residual_bytes(cast, x) == benchmark.residual_bytes(written, x)


@pytest.mark.parametrize(
    "rule, f",
    [
        ("cond: bf16", PLACES["cond"](jnp.tanh)),
        ("custom_jvp_call: f16", jax.nn.relu),
        ("convert_element_type: bf16", lambda x: x.astype(F16)),
    ],
)
def test_rules_for_operations_without_a_dtype(rule, f):
    with warns_once(__file__, "holds others or keeps its dtypes"):
        jax.eval_shape(jmpx.autocast(lambda x: f(x @ W), f"c=bf16; op.{rule}"), jnp.eye(4))
    optional = f"c=bf16; op.{rule.replace(':', '?:')}"
    jax.eval_shape(jmpx.autocast(lambda x: f(x @ W), optional), jnp.eye(4))


def precise(x):
    return jnp.matmul(jnp.matmul(x, x, precision="highest"), x, precision="high")


def within_precision(x):
    with jax.default_matmul_precision("float32"):
        return jnp.tanh(x @ x) @ x


DIGITS = "because `precision=` or jax.default_matmul_precision asks for more digits: leave that out"


@pytest.mark.parametrize("policy", ["c=f16", "c=f16,m=default"])
@pytest.mark.parametrize("f, place", [(precise, "jit"), (within_precision, "scan")])
def test_no_product_runs_in_16_bits(f, place, policy):
    f = jmpx.autocast(PLACES[place](f), policy)
    with warns_once(__file__, f"No product runs in 16 bits .* {DIGITS}"):
        jax.eval_shape(f, jnp.eye(4))


@pytest.mark.parametrize("policy", ["c=f16,m=highest", "c=f16; op.dot_general: m=high"])
@pytest.mark.parametrize("f", [precise, within_precision])
def test_nothing_is_said_where_the_policy_asks_for_precision(f, policy):
    jax.eval_shape(jmpx.autocast(f, policy), jnp.eye(4))
    jax.eval_shape(jmpx.apply_policy(f, policy), jnp.eye(4))


def test_each_cause_of_float32_is_told():
    with pytest.warns(UserWarning) as caught:
        jax.eval_shape(jmpx.autocast(lambda x: precise(eleven(x, x))), jnp.eye(4))
    said = [str(each.message)[:20] for each in caught]
    assert said == ["JAX cannot trace cus", "No product runs in 1"]


def test_no_product_of_float64_runs_in_16_bits():
    with enable_x64():
        x = jnp.eye(4, dtype=jnp.float64)
        with warns_once(__file__, "No product runs in 16 bits .* operands of float64 keep"):
            jax.eval_shape(jmpx.autocast(lambda x: x @ x), x)
        jax.eval_shape(jmpx.autocast(lambda x, y: (x @ x, y @ y)), x, x.astype(F32))
