"""8 bits are for storage: a policy that would compute in them is refused."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from helpers.adapters import ADAPTERS, LAYERS, X, run_haiku

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

# 8 bits are for storage.

FLOAT8 = sorted(name for name in vars(jnp) if name.startswith("float8_"))


def autocast_product(x, policy, **options):
    @jmpx.autocast(policy=policy, **options)
    def f(x):
        with jax.named_scope("head"):
            return jnp.exp(x @ x.T)

    return f(x)


def with_class_policy(cls, policy, run):
    with jmpx.push_policy(cls, policy):
        return run()


def with_haikus_own(policy):
    hk.mixed_precision.set_policy(hk.Linear, jmpx.get_policy(policy))  # pyright: ignore[reportArgumentType]
    try:
        return hk.transform(lambda x: hk.Linear(2)(x)).init(jax.random.key(0), X)
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)


def linear_without_a_map():
    return jmpx.equinox.with_policies(eqx.nn.Linear(3, 2, key=jax.random.key(0)))(X[0])


COMPUTES = {
    "cast_to_compute": lambda n: jmpx.get_policy(f"c={n}").cast_to_compute({"w": X}),
    "cast_to_compute of nothing": lambda n: jmpx.get_policy(n).cast_to_compute(None),
    "compute follows params": lambda n: jmpx.get_policy(f"p={n}").cast_to_compute(X),
    "filter_grad": lambda n: jmpx.filter_grad(jnp.sum, jmpx.NoOpLossScale(), policy=n)(X),
    "filter_value_and_grad": lambda n: jmpx.filter_value_and_grad(
        jnp.sum, jmpx.NoOpLossScale(), policy=f"c={n},o=f32"
    )(X),
    "autocast": lambda n: autocast_product(X, n),
    "autocast, scope": lambda n: autocast_product(X, f"c=bf16; */head: {n}"),
    "autocast, operation": lambda n: autocast_product(X, f"c=bf16; op.exp: {n}"),
    "haiku, class": lambda n: with_class_policy(hk.nets.MLP, f"c={n}", lambda: run_haiku("bf16")),
    "haiku, its own registry": lambda n: with_haikus_own(f"c={n},o=f32"),
    "equinox, class": lambda n: with_class_policy(eqx.nn.Linear, f"c={n}", linear_without_a_map),
    **{
        f"{adapter}, {kind}": lambda n, run=run, text=text: run(text.format(n))
        for adapter, run in ADAPTERS.items()
        for kind, text in {
            "default": "c={},o=f32",
            "class rule": f"c=bf16; {LAYERS[adapter]}: {{}}",
            "path rule": "c=bf16; *: c={}",
        }.items()
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", COMPUTES)
def test_8_bits_are_refused_as_a_compute_dtype(way):
    assert len(FLOAT8) >= 5
    for name in FLOAT8 if "," not in way else FLOAT8[:2]:
        with pytest.raises(ValueError, match=f"^Cannot compute in {name}, where .*, as") as error:
            COMPUTES[way](name)
        assert "\n" not in str(error.value) and f"params={name}" in str(error.value)
    assert jmpx.current_policy() is None


@pytest.mark.parametrize("name", FLOAT8)
def test_8_bits_remain_a_dtype_to_parse_and_to_store_in(name):
    policy = jmpx.get_policy(f"p={name},c=bf16,o={name}")
    assert jmpx.get_policy(str(policy)) == policy
    assert policy.param_dtype is policy.output_dtype is getattr(jnp, name)
    stored = policy.cast_to_param({"w": X})
    assert stored["w"].dtype.name == name
    assert policy.cast_to_compute(stored)["w"].dtype == jnp.bfloat16
    assert policy.cast_to_output(X).dtype.name == jmpx.cast_tree(X, name).dtype.name == name
    assert autocast_product(X, "bf16", output=name).dtype.name == name
    assert jmpx.get_policy(name).compute_dtype is getattr(jnp, name)  # refused where it is used
    assert str(jmpx.get_policy_map(f"Linear: {name}")).endswith(f"Linear: compute={name}")


@pytest.mark.thorough
def test_statistics_of_a_model_that_is_stored_in_8_bits_are_float32():
    network = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, True))
    with jmpx.haiku.policies("p=float8_e4m3fn,c=bf16"):
        params, state = network.init(jax.random.key(0), X)
        y, state = network.apply(params, state, None, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float8_e4m3fn"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    assert y.dtype == jnp.bfloat16

    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    model = jmpx.cast_tree(model, "float8_e4m3fn")
    view = jmpx.equinox.with_policies(model, "p=float8_e4m3fn,c=bf16")
    y, state = jax.vmap(view, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)  # pyright: ignore[reportArgumentType]
    assert y.dtype == jnp.bfloat16
    statistics = [
        leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert statistics and {leaf.dtype.name for leaf in statistics} == {"float32"}


def test_a_policy_that_casts_in_its_own_way_may_compute_in_8_bits():
    class Scaled(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jmpx.cast_tree(jax.tree.map(lambda x: x / 4, tree), self.compute_dtype)

    cast = Scaled("f32", "float8_e4m3fn", "f32").cast_to_compute(jnp.asarray(X))
    assert cast.dtype == jnp.float8_e4m3fn and float(cast[0, 0]) == 0.25
