"""A policy inside of another one, by each pair of ways: an island or an error."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from helpers import zoo
from helpers.jaxprs import dots

import jmpx

WAYS = ("arguments", "modules", "operations")
SHORT = {"full": "float32", "c=f16": "float16", "c=bf16": "bfloat16"}


def head(m, x):
    return m.linear("head", 4)(x)


def run(net, outer, inner):
    """Returns the operand dtypes of a product under the inner policy, and of one beside it."""

    def f(model, x):
        inside = inner(model, jax.lax.stop_gradient(x))
        return inside, net.apply(model, x)

    apply, model = net.split(jmpx.apply_policy(f, outer))
    return dots(apply, model, np.ones((2, 4), np.float32))


@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
@pytest.mark.parametrize("outer", ["c=bf16", "full"])
@pytest.mark.parametrize("inner", ["full", "c=f16"])
@pytest.mark.filterwarnings("ignore:jmpx.apply_policy has cast its arguments to 16 bits")
@pytest.mark.filterwarnings("ignore:jmpx.apply_policy casts operations .* widens nothing")
@pytest.mark.sampled(3)
def test_an_inner_policy_is_an_island_or_an_error(framework, outer, inner):
    net = zoo.drawn(framework, head, 2, 4)
    for way in WAYS:
        for inner_way in WAYS:
            policies = f"by={way},{outer}", f"by={inner_way},{inner}"
            cast = jmpx.apply_policy(net.apply, policies[1])
            is_view = framework in ("nnx", "equinox") and inner_way == "modules"
            if way == "modules" and outer != inner and (inner_way != "modules" or is_view):
                with pytest.raises(ValueError, match="Cannot apply policy map"):
                    run(net, policies[0], cast)
            elif not (way == "modules" and is_view):
                dtypes = "x".join([SHORT[inner]] * 2), "x".join([SHORT[outer]] * 2)
                # What was rounded in the call of the outer function stays so for autocast.
                is_rounded = (way, inner_way, outer) == ("arguments", "operations", "c=bf16")
                found = run(net, policies[0], cast)
                assert tuple(found) == (dtypes[1:] * 2 if is_rounded else dtypes), policies


@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
def test_a_context_or_a_view_in_float32_is_an_island_in_autocast(framework):
    net = zoo.drawn(framework, head, 2, 4)
    found = run(net, "by=operations,c=bf16", net.under("full"))
    assert found == ["float32xfloat32", "bfloat16xbfloat16"]


def test_a_gradient_function_without_casts_leaves_modules_to_the_context():
    net = zoo.drawn("haiku", head, 2, 4)
    grad_fn = jmpx.grad(
        lambda model, x: net.apply(model, x).astype(jnp.float32).sum(),
        jmpx.NoOpLossScale(),
        policy="full",
    )
    found = dots(jmpx.apply_policy(grad_fn, "by=modules,c=bf16"), net.model, np.ones((2, 4)))
    assert set(found) == {"bfloat16xbfloat16"}


CLASSES = {"haiku": hk.Linear, "linen": nn.Dense, "nnx": nnx.Linear, "equinox": eqx.nn.Linear}


@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
@pytest.mark.parametrize("policy", SHORT)
def test_autocast_follows_the_policies_of_classes_and_rules_before_them(framework, policy):
    net = zoo.drawn(framework, head, 2, 4)
    apply, model = net.split(jmpx.apply_policy(net.apply, "by=operations,c=bf16"))
    ruled, _ = net.split(jmpx.apply_policy(net.apply, "by=operations,c=bf16; */head: c=f32,o=f32"))
    with jmpx.push_policy(CLASSES[framework], policy):
        found = dots(apply, model, np.ones((2, 4), np.float32))
        if framework != "haiku":  # Haiku itself casts by the policy of the class
            assert dots(ruled, model, np.ones((2, 4), np.float32)) == ["float32xfloat32"]
    assert found == ["x".join([SHORT[policy]] * 2)]
