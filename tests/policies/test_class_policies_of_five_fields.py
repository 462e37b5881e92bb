"""Class policies: what `reduce` and a bare dtype mean for them, and policies of JMP among them."""

import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import pytest
from flax import nnx
from helpers import dtypes, warns_once
from helpers.products import products_of

import jmpx
import jmpx.flax
import jmpx.haiku

KEY, X = jax.random.key(0), jnp.ones((2, 3))


@pytest.mark.parametrize("cls", [hk.Linear, nn.Dense, nnx.Linear, eqx.nn.Linear])
def test_reduce_of_a_class_policy_is_warned_of_once(cls):
    says = "reduce=bfloat16 of a class policy reduces nothing.*policy="
    with warns_once(__file__, says):
        jmpx.set_policy(cls, "c=bf16,r=bf16")
    assert jmpx.policy_of(cls) == jmpx.get_policy("c=bf16,r=bf16")
    jmpx.clear_policy(cls)
    with warns_once(__file__, says), jmpx.push_policy(cls, jmpx.get_policy("c=bf16,r=bf16")):
        pass

    @jmpx.push_policy(cls, "c=bf16,r=bf16")
    def pushed():
        pass

    with warns_once(__file__, says):
        pushed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jmpx.push_policy(cls, "c=bf16,m=highest"):
            pass


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        ("bf16", jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16),
        ("c=bf16", jnp.float32),
        ({"compute": "bf16"}, jnp.float32),
        ("full", jnp.float32),
    ],
)
def test_a_bare_dtype_is_a_complete_policy(policy, stored):
    network = hk.transform(lambda x: hk.Linear(4)(x))
    with jmpx.push_policy(hk.Linear, policy):
        assert network.init(KEY, X)["linear"]["w"].dtype == stored
    with jmpx.push_policy(nn.Dense, policy), jmpx.flax.policies():
        (kernel,) = dtypes(nn.Dense(4, use_bias=False).init(KEY, X))
    assert kernel == jnp.dtype(stored).name


def test_a_policy_of_jmp_in_haikus_registry_has_no_algorithm_of_its_own():
    network = hk.transform(lambda x: hk.nets.MLP([4, 4])(x))
    params = network.init(KEY, X)

    def ways(policy_map):
        def run(x):
            with jmpx.haiku.policies(policy_map):
                return network.apply(params, None, x)

        return [(*product.dtypes, product.how) for product in products_of(run, X)]

    hk.mixed_precision.set_policy(hk.nets.MLP, jmp.get_policy("p=f32,c=bf16,o=f32"))
    try:
        assert ways("full") == [("bf16", "DEFAULT")] * 2
        assert ways("full; *linear_1: full") == [("bf16", "DEFAULT"), ("f32", "DEFAULT")]
        assert ways("full; *linear_1: c=f32,m=high") == [("bf16", "DEFAULT"), ("f32", "HIGH")]
        assert ways("p=f32,m=highest; *linear_1: full") == [("bf16", "HIGHEST"), ("f32", "HIGHEST")]
        with jmpx.push_policy(hk.Linear, "p=f32,m=highest"):  # casts by Haiku itself
            found = products_of(lambda x: network.apply(params, None, x), X)
        assert [(*product.dtypes, product.how) for product in found] == [("f32", "HIGHEST")] * 2
    finally:
        hk.mixed_precision.clear_policy(hk.nets.MLP)
