"""`matmul=` of a gradient function's policy: the algorithm of products, forward and backward."""

import jax
import jax.numpy as jnp
import pytest
from helpers import enable_x64, normal
from helpers.jaxprs import equations_of
from helpers.maps import AXIS, mesh_of
from helpers.products import products_of
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.mpx as mpx

NOOP = jmpx.NoOpLossScale()
X3 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
# What a product has to which jmpx gives no algorithm, so that its transposed products get none.
UNSET = (None, (jax.lax.Precision.DEFAULT,) * 2)


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def loss(params, x):
    h = jnp.tanh(x @ params["first"])
    h = jax.jit(lambda h, w: jnp.tanh(h @ w))(h, params["second"])
    h = jax.lax.scan(lambda h, w: (jax.checkpoint(jnp.matmul)(h, w), None), h, params["third"])[0]
    return product(h, params["fourth"]).astype(jnp.float32).sum()


def mixed(params, x):
    """The loss, and a product in float32 whatever the arguments are."""
    forced = jmpx.force_full_precision(jnp.matmul)(x, params["first"])
    return loss(params, x) + forced.astype(jnp.float32).sum()


def make_args(rng):
    params = {
        "first": normal(rng, 4, 4),
        "second": normal(rng, 4, 4),
        "third": normal(rng, 2, 4, 4),
        "fourth": normal(rng, 4, 4),
    }
    return params, normal(rng, 3, 4)


WORDS = {"high": "HIGH", "highest": "HIGHEST", "bfloat16": "DEFAULT", "float32": "HIGHEST"}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_holds_forward_and_backward(word, rng):
    compute = ("f32", "bf16", "f16")[list(WORDS).index(word) % 3]
    scaling = jmpx.DynamicLossScale() if word == "highest" else NOOP
    grad_fn = jmpx.value_and_grad(mixed, scaling, policy=f"by=arguments,c={compute},m={word}")
    found = products_of(grad_fn, *make_args(rng))
    assert sum(product.dtypes == {compute} for product in found) >= 10
    ways = {(*product.dtypes, product.how) for product in found}
    assert ways == {(compute, WORDS[word]), ("f32", WORDS[word])}


@pytest.mark.parametrize("policy", ["m=highest", "by=arguments,c=bf16", "by=modules,m=high"])
def test_outside_of_the_function_nothing_changes(policy, rng):
    params, x = make_args(rng)

    def cast_inside(params, x):
        return loss(*jmpx.autocast(lambda *args: args)(params, x))  # for by=modules to see a cast

    def step(params, x):
        before = x @ params["first"]
        fn = cast_inside if "modules" in policy else loss
        grads = jmpx.grad(fn, NOOP, policy=policy)(params, x).grads
        return before, x @ params["first"], grads["first"] @ params["first"]

    with jax.default_matmul_precision("high"):
        around = [product.how for product in products_of(step, params, x)]
    alone = [product.how for product in products_of(step, params, x)]
    inside = policy == "m=highest"
    assert around.count("HIGH") == (3 if inside else len(around))  # unset, it is untouched
    assert alone.count("DEFAULT") == (3 if inside else len(alone))


def dots(fn, *args):
    return [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("over", [None, jmpx.Over(AXIS)])
def test_a_dot_algorithm_in_float32(over, rng):
    grad_fn = jmpx.grad(loss, NOOP, policy="c=f32,m=bf16_bf16_f32_x3", over=over)
    run = lambda params, x: grad_fn(params, x).grads  # noqa: E731
    if over is not None:
        run = jax.shard_map(run, mesh=mesh_of(1), in_specs=(P(), P(AXIS)), out_specs=P())
    found = dots(run, *make_args(rng))
    assert len(found) >= 10
    assert {eqn.params["precision"] for eqn in found} == {X3}


@pytest.mark.parametrize("compute", ["bf16", "f16", "half", "f64"])
def test_a_dot_algorithm_is_put_on_float32_alone(compute, rng):
    with enable_x64():
        policy = f"by=arguments,c={compute},m=bf16_bf16_f32_x3"
        grad_fn = jmpx.value_and_grad(mixed, jmpx.StaticLossScale(1), policy=policy)
        found = dots(lambda *args: tuple(grad_fn(*args)), *make_args(rng))
    wide = [eqn for eqn in found if eqn.invars[0].aval.dtype == jnp.float32]
    assert len(wide) >= 2 and len(found) - len(wide) >= 10
    for eqn in found:
        assert eqn.params["precision"] in ([X3] if eqn in wide else UNSET)


def test_a_policy_without_matmul_inherits_that_of_its_surroundings(rng):
    def run(params, x):
        return jmpx.grad(loss, NOOP, policy="by=arguments,c=bf16")(params, x).grads

    surrounded = jmpx.full_precision(jmpx.force_full_precision(run), matmul="F32_F32_F32")
    found = dots(surrounded, *make_args(rng))
    assert found and all(eqn.params["precision"] in UNSET for eqn in found)


def test_where_it_is_unset_or_unused(rng):
    args = make_args(rng)
    plain = mpx.filter_grad(loss, NOOP, use_mixed_precision=False)
    for grad_fn in (plain, jmpx.grad(loss, NOOP, policy="by=arguments,c=f32")):
        found = products_of(grad_fn, *args)
        assert {product.how for product in found} == {"DEFAULT"}
