"""Products that stay float32 though autocast was to give them 16 bits are told of."""

import autocast as benchmark
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, enable_x64, normal, warns_once
from helpers.autocast import assert_ran, eleven
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import jmpx

W = jnp.eye(4) / 2


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


@custom_partitioning
def negated(x):
    return -x


negated.def_partition(
    infer_sharding_from_operands=lambda *_: None,
    partition=lambda *_: None,
    sharding_rule="i j -> i j",
)


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
    with jax.named_scope("router"):
        return x @ x


routed.defvjp(lambda x: (routed(x), x), lambda x, g: (g @ x,))

PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, f, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_function_with_its_own_backward_pass(place):
    f = jmpx.autocast(PLACES[place](by_hand))
    for _ in range(2):  # the second one finds the inner function retraced
        match = r"custom_vjp_call at \S*test_wide.py:\d+ \(by_hand\) again in 16 bits, so autocast"
        with warns_once(__file__, match):
            f(jnp.eye(4))


def test_under_jit_it_is_said_when_jax_traces():
    step = jax.jit(jmpx.autocast(by_hand))
    with warns_once(__file__, "JAX cannot trace"):
        step(jnp.eye(4))
    step(jnp.eye(4))
    gradient = jax.jit(jax.grad(lambda x: jmpx.autocast(by_hand)(x).sum()))
    with warns_once(__file__, "JAX cannot trace"):
        gradient(jnp.eye(4))


@pytest.mark.parametrize("function", [partitioned, kernel])
def test_functions_of_other_kinds(function):
    with warns_once(__file__, r"JAX cannot trace .* at \S*test_wide.py.* float32 there:"):
        jmpx.autocast(lambda x: function(x @ W, W))(jnp.eye(4))


QUIET = {
    "clipped gradients": lambda x: clipped(x @ W),
    "a partitioned function": lambda x: negated(x @ W),
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
    "entropies": lambda x: jax.scipy.special.xlogy(x @ W, x) + jax.scipy.special.entr(x),
    "log_sinkhorn": lambda x: jax.nn.log_softmax(jax.nn.relu6(jax.nn.gelu(x @ W))),
    "linear algebra": lambda x: jnp.linalg.solve(jnp.eye(4) + x @ W, x),
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_said_of(name):
    f = jmpx.autocast(QUIET[name])
    f(jnp.eye(4))
    if "partitioned" not in name:  # JAX has no derivatives of those
        jax.grad(lambda x: f(x).sum().astype(F32))(jnp.eye(4))


@pytest.mark.parametrize(
    "policy", ["full", "c=bf16; op.custom_vjp_call: f32; op.dot_general: f32", "c=bf16; *: full"]
)
def test_nothing_is_said_where_a_rule_says_float32(policy):
    def f(x):
        with jax.named_scope("all"):
            return by_hand(x)

    jmpx.autocast(f, policy)(jnp.eye(4))


def test_rules_of_scopes_inside_are_respected():
    with warns_once(__file__, "JAX cannot trace"):
        jmpx.autocast(lambda x: routed(x @ W))(jnp.eye(4))
    jmpx.autocast(lambda x: routed(x @ W), "c=bf16; *router?: full")(jnp.eye(4))


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
    np.testing.assert_allclose(jax.grad(cast)(x), jax.grad(written)(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "rule, f, match",
    [
        ("custom_vjp_call: bf16", clipped, "cast the operands before the call"),
        ("custom_vjp_call: f16", clipped, "has no effect"),
        ("jit: bf16", jax.jit(jnp.tanh), "holds others .* write rules for those inside"),
        ("cond: bf16", PLACES["cond"](jnp.tanh), "holds others"),
        ("custom_jvp_call: bf16", jax.nn.relu, "holds others"),
        ("remat2: bf16", jax.checkpoint(jnp.tanh), "holds others"),
        ("convert_element_type: bf16", lambda x: x.astype(F16), "keeps its dtypes"),
    ],
)
def test_rules_for_operations_without_a_dtype(rule, f, match):
    if rule.startswith("remat2"):
        rule = rule.replace("remat2", jax.make_jaxpr(f)(1.0).eqns[0].primitive.name)
    with warns_once(__file__, match):
        jmpx.autocast(lambda x: f(x @ W), f"c=bf16; op.{rule}")(jnp.eye(4))
    jmpx.autocast(lambda x: f(x @ W), f"c=bf16; op.{rule.replace(':', '?:')}")(jnp.eye(4))


def precise(x):
    return jnp.matmul(jnp.matmul(x, x, precision="highest"), x, precision="high")


def within_precision(x):
    with jax.default_matmul_precision("float32"):
        return jnp.tanh(x @ x) @ x


@pytest.mark.parametrize("place", ["plain", "jit", "scan"])
@pytest.mark.parametrize("f", [precise, within_precision])
def test_no_product_runs_in_16_bits(f, place):
    f = jmpx.autocast(PLACES[place](f), "c=f16")
    with warns_once(__file__, "No product runs in 16 bits .* leave out `precision=`"):
        f(jnp.eye(4))


def test_no_product_of_float64_runs_in_16_bits():
    with enable_x64():
        x = jnp.eye(4, dtype=jnp.float64)
        with warns_once(__file__, "No product runs in 16 bits .* such as float64"):
            jmpx.autocast(lambda x: x @ x)(x)
        jmpx.autocast(lambda x, y: (x @ x, y @ y))(x, x.astype(F32))
