"""`apply_policy`, and `policy=` of the gradient functions, which differentiate it."""

import functools
import warnings
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import jmpx

NET = hk.transform(lambda x: hk.nets.MLP([8, 2], name="net")(x))


def model(params, x):
    return NET.apply(params, None, x)


def loss_fn(params, x, y):
    return jnp.mean((model(params, x) - y) ** 2)


@pytest.fixture
def problem(rng):
    x, y = normal(rng, 4, 3), normal(rng, 4, 2)
    return NET.init(jax.random.key(int(rng.integers(1000))), x), x, y


def by_arguments(params, x):
    return model(*jmpx.cast_tree((params, x), "bfloat16"))


def by_modules(params, x):
    with jmpx.haiku.policies("c=bf16,o=f32; */linear_1: full"):
        return model(params, x)


# A policy, and the model with the same casts by hand.
WAYS = {
    "c=bf16": by_arguments,
    "by=arguments,c=bf16": by_arguments,
    "c=bf16,o=f32": lambda *args: by_arguments(*args).astype(jnp.float32),
    "c=bf16,o=f32; */linear_1: full": by_modules,
    "by=modules,c=bf16,o=f32; */linear_1: full": by_modules,
    "by=operations,c=bf16": jmpx.autocast(model, "c=bf16"),
    "by=operations,c=bf16; */linear_1: full": jmpx.autocast(model, "c=bf16; */linear_1: full"),
    "by=operations,c=bf16,save=products": jmpx.autocast(model, "c=bf16", save="products"),
    "c=bf16; op.max: bf16": jmpx.autocast(model, "c=bf16; op.max: bf16"),
    "full": model,
}


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("policy", WAYS)
def test_each_way_casts_as_it_does_by_hand(policy, problem):
    params, x, _ = problem
    for run in (lambda f: f, jax.jit):
        assert_equal(run(jmpx.apply_policy(model, policy))(params, x), run(WAYS[policy])(params, x))


@pytest.mark.parametrize("policy", WAYS)
def test_the_gradient_function_differentiates_it(policy, problem):
    applied = jmpx.apply_policy(loss_fn, policy)
    loss, grads = jax.jit(jax.value_and_grad(lambda *args: applied(*args).astype(jnp.float32)))(
        *problem
    )
    grad_fn = jmpx.filter_value_and_grad(loss_fn, jmpx.NoOpLossScale(), policy=policy)
    result = jax.jit(grad_fn)(*problem)
    assert_equal((result.value, result.grads), (loss, grads))
    scaled = jmpx.filter_grad(loss_fn, jmpx.StaticLossScale(2**10), policy=policy)
    assert_equal(jax.jit(scaled)(*problem).grads, grads)


def test_whatever_a_policy_is(problem):
    params, x, _ = problem
    text = "c=bf16,o=f32; */linear_1: full"
    mapping = {"policy": "c=bf16,o=f32", "rules": [{"select": "*/linear_1", "compute": "f32"}]}
    for policy in (
        text,
        mapping,
        jmpx.get_policy_map(text),
        jmpx.MixedPrecision(text),
        jmpx.get_mixed_precision(f"{text} | static=1024"),
    ):
        assert_equal(jmpx.apply_policy(model, policy)(params, x), by_modules(params, x))
        grad_fn = jmpx.filter_grad(loss_fn, jmpx.NoOpLossScale(), policy=policy)
        assert grad_fn(*problem).grads["net/~/linear_0"]["w"].dtype == jnp.float32
    for policy in (jmpx.get_policy("c=bf16"), {"compute": "bf16"}, jmpx.Policy(*["bf16"] * 3)):
        assert jmpx.apply_policy(model, policy)(params, x).dtype == jnp.bfloat16
    assert jmpx.apply_policy(model, jnp.bfloat16)(params, x).dtype == jnp.bfloat16
    assert jmpx.apply_policy(model)(params, x).dtype == jmpx.half_dtype()


def test_as_a_decorator(problem):
    params, x, _ = problem

    @jmpx.apply_policy(policy="c=bf16", uncast="x")
    def dtypes(params, x):
        """Returns the dtypes."""
        return [leaf.dtype.name for leaf in (*jax.tree.leaves(params), x)]

    assert dtypes(params, x) == ["bfloat16"] * 4 + ["float32"]
    assert dtypes(params, x=x) == ["bfloat16"] * 4 + ["float32"]
    assert dtypes.__doc__ == "Returns the dtypes."


@pytest.mark.parametrize("uncast", [1, "x", (1,), ["x"], -1])
def test_what_is_not_cast(uncast, problem):
    params, x, _ = problem
    applied = jmpx.apply_policy(lambda params, x: (params, x), "c=bf16", uncast=uncast)
    cast, kept = applied(params, x)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cast)} == {"bfloat16"}
    assert kept is x


def test_results_are_widened_and_never_narrowed():
    def results(x):
        return {"same": x, "wide": x.astype(jnp.float32), "count": jnp.arange(2), "text": "text"}

    x = jnp.ones(3)
    for policy, dtypes in {
        "c=bf16": ("bfloat16", "float32"),
        "c=bf16,o=f32": ("float32", "float32"),
        "c=f32,o=bf16": ("float32", "float32"),
    }.items():
        found = jmpx.apply_policy(results, policy)(x)
        assert (found["same"].dtype.name, found["wide"].dtype.name) == dtypes
        assert found["count"].dtype == jnp.int32 and found["text"] == "text"


class WideCast(jmpx.Policy):
    """A policy with casts of its own."""

    def cast_to_compute(self, tree):
        return jmpx.cast_tree(tree, jnp.float32)


def test_casts_of_a_subclass_are_used():
    policy = WideCast("float32", "bfloat16", "float32")
    assert jmpx.apply_policy(jnp.sin, policy)(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32


SAME = [
    ("c=bf16,o=f32", "c=bf16,o=f32"),
    ("by=arguments,c=bf16", "c=bf16"),
    ("c=bf16,o=f32; */linear_1: full", "c=bf16,o=f32; */linear_1: full"),
    ("by=modules,c=bf16,o=f32", "by=modules,c=bf16,o=f32"),
    ("by=modules,c=bf16,o=f32", "c=bf16,o=f32"),
]


@pytest.mark.parametrize(("outer", "inner"), SAME)
def test_the_same_map_inside_is_no_second_cast_and_no_warning(outer, inner, problem):
    def loss_in_context(params, x, y):
        with jmpx.haiku.policies(inner), jax.numpy_dtype_promotion("standard"):
            return loss_fn(params, x, y)

    noop = jmpx.NoOpLossScale()
    twice = jmpx.filter_value_and_grad(loss_in_context, noop, policy=outer)(*problem)
    if jmpx.get_policy_map(outer).way == "modules":
        assert_equal(twice, jmpx.filter_value_and_grad(loss_fn, noop, policy=outer)(*problem))
        return

    def by_hand(*problem):  # the context returns the model's result in its output dtype
        return loss_in_context(*jmpx.cast_tree(problem, "bfloat16")).astype(jnp.float32)

    assert_equal((twice.value, twice.grads), jax.value_and_grad(by_hand)(*problem))


def test_apply_policy_inside_of_the_same_policy(problem):
    for policy in ("c=bf16,o=f32; */linear_1: full", "by=operations,c=bf16", "c=bf16"):
        inner = jmpx.apply_policy(model, policy)

        def loss(params, x, y, inner=inner):
            return jnp.mean((inner(params, x) - y) ** 2)

        grad_fn = jmpx.filter_value_and_grad(loss, jmpx.NoOpLossScale(), policy=policy)
        plain = jmpx.filter_value_and_grad(loss_fn, jmpx.NoOpLossScale(), policy=policy)
        assert_equal(grad_fn(*problem).grads, plain(*problem).grads)


def test_a_jitted_function_is_traced_for_each_way(problem):
    params, x, _ = problem
    jitted = jax.jit(model)
    found = [jmpx.apply_policy(jitted, policy)(params, x) for policy in WAYS]
    for got, policy in zip(found, WAYS, strict=True):
        assert_equal(got, jax.jit(WAYS[policy])(params, x))
    assert_equal(jitted(params, x), jax.jit(model)(params, x))


def message_of(func, *args):
    with pytest.warns(UserWarning) as caught:
        func(*args)
    assert len(caught) == 1, [str(each.message) for each in caught]
    return str(caught[0].message)


def test_nothing_to_cast_by_modules():
    applied = jmpx.apply_policy(lambda x: x * 2, "by=modules,c=bf16")
    message = message_of(applied, jnp.ones(2))
    assert message.startswith("jmpx.apply_policy casts nothing by policy map 'by=modules,")
    assert "by modules, as none ran" in message and "pass the whole model" in message
    grad_fn = jmpx.filter_grad(lambda x: x.sum(), jmpx.NoOpLossScale(), policy="by=modules,c=bf16")
    assert message_of(grad_fn, jnp.ones(2)).startswith("The gradient function casts nothing")


def test_nothing_to_cast_by_arguments():
    w = jnp.ones(3)
    applied = jmpx.apply_policy(lambda i: w[i] * 2, "c=bf16")
    assert "by arguments, as no floating array stands among them" in message_of(
        applied, jnp.arange(2)
    )
    jmpx.apply_policy(lambda i: w[i] * 2, "full")(jnp.arange(2))  # there is nothing to say
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        jmpx.apply_policy(lambda key, i: jax.random.normal(key, (2,)), "c=bf16")(key, 3)


def test_rules_beside_arguments_are_without_effect():
    policy = "by=arguments,c=bf16; Linear: full; Other?: full"
    message = message_of(lambda: jmpx.apply_policy(model, policy))
    assert "'Linear: compute=float32'" in message and "write by=modules" in message


def test_rules_without_effect_are_one_pool(problem):
    params, x, _ = problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmpx.apply_policy(model, "c=bf16; */linear_1: full; */linear_0: full")(params, x)
    message = message_of(
        jmpx.apply_policy(model, "c=bf16; */linear_1: full; */hed: full"), params, x
    )
    assert "'*/hed: compute=float32'" in message


def test_casts_twice_name_the_way(problem):
    params, x, _ = problem

    def in_context(params, x):
        with jmpx.haiku.policies("c=bf16; */linear_1: full"):
            return model(params, x)

    message = message_of(jmpx.apply_policy(in_context, "c=bf16"), params, x)
    assert "jmpx.haiku.policies inside of it casts them again" in message
    assert "write by=modules into its policy" in message
    message = message_of(jmpx.apply_policy(jmpx.autocast(model), "c=bf16,o=f32"), params, x)
    assert "write by=operations into its policy" in message


apply: Any = jmpx.apply_policy

BAD = [
    (lambda: apply(3, "c=bf16"), TypeError, "Expected a function to run"),
    (lambda: apply(model, 3), TypeError, "Expected a policy map string"),
    (lambda: jmpx.apply_policy(model, "c=bf61"), ValueError, "did you mean 'bf16'"),
    (lambda: jmpx.apply_policy(model, "c=bf16 | dynamic"), ValueError, "loss scale"),
    (lambda: apply(model, "c=bf16", uncast=0.5), TypeError, "Expected uncast"),
    (lambda: jmpx.apply_policy(model, "c=bf16", uncast="z")(1.0, 2.0), ValueError, "'z'"),
    (lambda: jmpx.autocast(model, "by=modules,c=bf16"), ValueError, "by jmpx.autocast"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_arguments_are_one_sentence(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("way", ["arguments", "operations"])
def test_a_context_refuses_a_map_for_another_way(way):
    with pytest.raises(ValueError, match=f"by={way}.* which is for by=modules"):
        with jmpx.haiku.policies(f"by={way},c=bf16"):
            pass


def test_partials_and_methods(problem):
    params, x, _ = problem

    class Holder:
        def apply(self, params, x):
            return model(params, x)

    expected = by_modules(params, x)
    for func in (functools.partial(model, params), Holder().apply, jax.tree_util.Partial(model)):
        args = (x,) if getattr(func, "args", ()) else (params, x)
        applied = jmpx.apply_policy(func, "c=bf16,o=f32; */linear_1: full")
        assert_equal(applied(*args), expected)


@pytest.mark.parametrize("policy", ["c=bf16", "c=bf16,o=f32", "c=f16", "full"])
def test_a_class_policy_casts_again_only_to_another_dtype(policy, rng):
    network, x = hk.transform(lambda x: hk.Linear(2)(x)), normal(rng, 4, 3)
    params = network.init(jax.random.key(0), x)
    with jmpx.push_policy(hk.Linear, policy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jmpx.apply_policy(network.apply, "c=bf16")(params, None, x)
    texts = [str(warning.message) for warning in caught]
    assert ["casts them again" in text for text in texts] == [True] * (
        not policy.startswith("c=bf16")
    )
