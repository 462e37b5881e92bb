"""`matmul=` of a gradient function's policy: the algorithm of products, forward and backward."""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import enable_x64, normal
from helpers.jaxprs import equations
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
import jmpx.mpx as mpx

NOOP = jmpx.NoOpLossScale()
# What a product has to which jmpx gives no algorithm, so that its transposed products get none.
UNSET = (None, (jax.lax.Precision.DEFAULT,) * 2)
WORDS = {  # -> what StableHLO calls it
    "default": "DEFAULT", "high": "HIGH", "highest": "HIGHEST", "bfloat16": "DEFAULT",
    "tensorfloat32": "HIGH", "float32": "HIGHEST",
}  # fmt: skip


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def loss(params, x):
    h = jnp.tanh(x @ params["first"])
    h = jax.jit(lambda h, w: jnp.tanh(h @ w))(h, params["second"])
    h = jax.lax.scan(lambda h, w: (jax.checkpoint(jnp.matmul)(h, w), None), h, params["third"])[0]
    return product(h, params["fourth"]).astype(jnp.float32).sum()


def make_args(rng):
    params = {
        "first": normal(rng, 4, 4),
        "second": normal(rng, 4, 4),
        "third": normal(rng, 2, 4, 4),
        "fourth": normal(rng, 4, 4),
    }
    return params, normal(rng, 3, 4)


def products(fn, *args):
    """The dtypes and the precision of each matrix product, from StableHLO."""
    text = jax.jit(lambda *args: fn(*args)).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    found = []
    for line in lines:
        precision = re.search(r"precision = \[(\w+), (\w+)\]", line)
        dtype = re.search(r"\(tensor<[0-9x]+x(\w+)>", line)
        assert dtype
        found.append((dtype[1], set(precision.groups()) if precision else {"DEFAULT"}))
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("scaling", [NOOP, jmpx.DynamicLossScale()], ids=["NoOp", "Dynamic"])
@pytest.mark.parametrize("compute", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("word", WORDS)
def test_a_word_holds_forward_and_backward(word, compute, scaling, rng):
    grad_fn = jmpx.filter_value_and_grad(loss, scaling, policy=f"c={compute},m={word}")
    found = products(grad_fn, *make_args(rng))
    assert len(found) >= 10 and {dtype for dtype, _ in found} == {compute}
    assert all(precision == {WORDS[word]} for _, precision in found)


@pytest.mark.parametrize("policy", ["c=f32,m=highest", "c=bf16", "m=high; Linear: full"])
def test_outside_of_the_function_nothing_changes(policy, rng):
    params, x = make_args(rng)

    def cast_inside(params, x):
        return loss(*jmpx.autocast(lambda *args: args)(params, x))

    def step(params, x):
        before = x @ params["first"]
        fn = cast_inside if ";" in policy else loss
        grads = jmpx.filter_grad(fn, NOOP, policy=policy)(params, x).grads
        return before, x @ params["first"], grads["first"] @ params["first"]

    with jax.default_matmul_precision("high"):
        around = products(step, params, x)
    alone = products(step, params, x)
    inside = {"c=f32,m=highest": "HIGHEST"}.get(policy)
    of = lambda found: [next(iter(precision)) for _, precision in found]  # noqa: E731
    assert of(around).count("HIGH") == (3 if inside else len(around))  # unset, it is untouched
    assert of(alone).count("DEFAULT") == (3 if inside else len(alone))


def test_a_product_with_its_own_precision_keeps_it(rng):
    own = lambda w, x: jnp.dot(x, w, precision="high").sum()  # noqa: E731
    found = products(
        jmpx.filter_grad(own, NOOP, policy="c=f32,m=highest"), normal(rng, 4, 4), normal(rng, 4, 4)
    )
    assert found and all(precision == {"HIGH"} for _, precision in found)


def test_float32_products_in_a_function_of_16_bits(rng):
    """A word reaches those that the function itself runs in float32."""

    def mixed(params, x):
        h = jmpx.force_full_precision(jnp.matmul)(x, params["first"])
        return (h @ params["second"]).sum().astype(jnp.float32)

    found = products(jmpx.filter_grad(mixed, NOOP, policy="c=bf16,m=highest"), *make_args(rng))
    assert {dtype for dtype, _ in found} == {"f32", "bf16"}
    assert all(precision == {"HIGHEST"} for _, precision in found)


@pytest.mark.parametrize("has_axis", [False, True])
def test_a_dot_algorithm_in_float32(has_axis, rng):
    policy = "c=f32,m=bf16_bf16_f32_x3"
    grad_fn = jmpx.filter_grad(
        loss, NOOP, policy=policy, over=jmpx.Over("data") if has_axis else None
    )
    run = lambda params, x: grad_fn(params, x).grads  # noqa: E731
    params, x = make_args(rng)
    if has_axis:
        mesh = Mesh(jax.devices()[:1], "data")
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    jaxpr = jax.make_jaxpr(run)(params, x)
    dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots) >= 10
    for eqn in dots:
        assert eqn.params["precision"] == jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


@pytest.mark.parametrize("make", [jmpx.filter_grad, jmpx.filter_value_and_grad])
@pytest.mark.parametrize("compute", ["bf16", "f16", "half", "f64"])
def test_a_dot_algorithm_is_put_on_float32_alone(compute, make, rng):
    def mixed(params, x):
        forced = jmpx.force_full_precision(jnp.matmul)(x, params["first"])
        return loss(params, x) + forced.astype(jnp.float32).sum()

    with enable_x64():
        grad_fn = make(mixed, NOOP, policy=f"c={compute},m=bf16_bf16_f32_x3")
        jaxpr = jax.make_jaxpr(lambda *args: tuple(grad_fn(*args)))(*make_args(rng))
    dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    wide = [e for e in dots if e.invars[0].aval.dtype == jnp.float32]
    assert len(wide) >= 2 and len(dots) - len(wide) >= 10
    for eqn in dots:
        expected = [jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3] if eqn in wide else UNSET
        assert eqn.params["precision"] in expected


def test_a_policy_without_matmul_inherits_that_of_its_surroundings(rng):
    def run(params, x):
        return jmpx.filter_grad(loss, NOOP, policy="c=bf16")(params, x).grads

    surrounded = jmpx.full_precision(jmpx.force_full_precision(run), matmul="F32_F32_F32")
    jaxpr = jax.make_jaxpr(surrounded)(*make_args(rng))
    dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert dots and all(eqn.params["precision"] in UNSET for eqn in dots)


@pytest.mark.parametrize(
    "options",
    [
        {"use_mixed_precision": False, "policy": "c=f32,m=highest"},
        {"use_mixed_precision": False, "policy": "c=bf16,m=bf16_bf16_f32_x3"},
        {"policy": "c=f32"},
        {"policy": "full"},
    ],
    ids=str,
)
def test_where_it_is_unset_or_unused(options, rng):
    found = products(mpx.filter_grad(loss, NOOP, **options), *make_args(rng))
    assert found and all(precision == {"DEFAULT"} for _, precision in found)
