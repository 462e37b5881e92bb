"""The registry of class policies: set, pushed and cleared, in Haiku's own store, too."""

import importlib
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import nnx
from helpers import LOG, warns_once
from helpers.products import products_of

import jmpx
import jmpx.flax
import jmpx.haiku

MIXED = jmpx.get_policy("c=bf16,o=f32")
X = np.ones((2, 3), np.float32)


class Plain:
    """A class of no framework."""

    class Nested:
        pass


class Dense(hk.Linear):
    """A Haiku module of the user's own."""


def local_class():
    class Local:
        pass

    return Local


def local_module():
    class Local(hk.Module):
        pass

    return Local


CLASSES = [Plain, Plain.Nested, local_class(), hk.Linear, Dense, local_module(), int]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__qualname__)
def test_set_clear_and_push_of_a_class(cls):
    assert jmpx.policy_of(cls) is None
    jmpx.set_policy(cls, "c=bf16,o=f32")
    assert jmpx.policy_of(cls) == MIXED
    assert jmpx.policy_of(type(cls)("Child", (cls,), {})) is None  # a subclass has none
    jmpx.set_policy(cls, jmpx.get_policy("full"))
    with jmpx.push_policy(cls, "f16"):
        with pytest.raises(RuntimeError), jmpx.push_policy(cls, MIXED):
            assert jmpx.policy_of(cls) == MIXED
            raise RuntimeError
        assert jmpx.policy_of(cls) == jmpx.get_policy("f16")
    assert jmpx.policy_of(cls) == jmpx.get_policy("full")
    for _ in range(2):
        jmpx.clear_policy(cls)
        assert jmpx.policy_of(cls) is None


@pytest.mark.parametrize("make", [local_class, local_module])
def test_another_local_class_of_its_name_has_no_policy(make):
    first, second = make(), make()
    with jmpx.push_policy(first, "f16"):
        assert jmpx.policy_of(second) is None


def test_a_policy_survives_the_reload_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "reloaded.py").write_text("class Block:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded")
    before = module.Block
    jmpx.set_policy(before, "f16")
    module = importlib.reload(module)
    assert module.Block is not before
    assert jmpx.policy_of(module.Block) == jmpx.get_policy("f16")
    jmpx.clear_policy(module.Block)
    del sys.modules["reloaded"]


def test_haikus_registry_and_ours_are_one():
    hk.mixed_precision.set_policy(hk.Linear, MIXED)  # pyright: ignore[reportArgumentType]
    assert jmpx.policy_of(hk.Linear) is MIXED
    jmpx.set_policy(hk.Linear, "f16")
    assert hk.mixed_precision.get_policy(hk.Linear) == jmpx.get_policy("f16")
    with hk.mixed_precision.push_policy(hk.Linear, MIXED):  # pyright: ignore[reportArgumentType]
        assert jmpx.policy_of(hk.Linear) is MIXED
        with jmpx.push_policy(hk.Linear, "bf16"):
            assert hk.mixed_precision.get_policy(hk.Linear) == jmpx.get_policy("bf16")
        assert hk.mixed_precision.get_policy(hk.Linear) is MIXED
    hk.mixed_precision.clear_policy(hk.Linear)
    assert jmpx.policy_of(hk.Linear) is None


class Recorder(hk.Module):
    def __call__(self, x):
        w = hk.get_parameter("w", x.shape[-1:], x.dtype, hk.initializers.RandomNormal())
        LOG.append((jmpx.current_policy(), x.dtype, w.dtype))
        return x * w


def test_a_policy_runs_a_haiku_module_in_its_dtypes(rng):
    x = rng.normal(size=(2, 3)).astype(np.float32)
    network = hk.transform(lambda x: Recorder()(x))
    with jmpx.push_policy(Recorder, "p=f32,c=bf16,o=f16"):
        params = network.init(jax.random.key(0), x)
        y = jax.jit(network.apply)(params, None, x)
    policy = jmpx.get_policy("p=f32,c=bf16,o=f16")
    assert LOG == [(policy, jnp.bfloat16, jnp.bfloat16)] * 2
    w = params["recorder"]["w"]
    assert w.dtype == jnp.float32 and y.dtype == jnp.float16
    expected = jnp.asarray(x, jnp.bfloat16) * w.astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, expected.astype(jnp.float16))
    assert jmpx.current_policy() is None


def test_pushing_inside_a_method_of_the_class_is_refused_as_haiku_does():
    class Inside(hk.Module):
        def __call__(self, x):
            with jmpx.push_policy(Inside, "f16"):
                return x

    with pytest.raises(ValueError, match="same class is not supported"):
        hk.transform(lambda x: Inside()(x)).apply({}, None, jnp.ones(2))


@pytest.mark.parametrize("cls", [Plain, hk.Linear])
def test_a_policy_that_is_refused_changes_nothing(cls):
    for wrong in ("f17", "c=bf16; BatchNorm: full"):
        with pytest.raises(ValueError):
            jmpx.set_policy(cls, wrong)
        assert jmpx.policy_of(cls) is None


@pytest.mark.parametrize("cls", [hk.Linear, nnx.Linear])
def test_reduce_of_a_class_policy_is_warned_of_once(cls):
    says = "reduce=bfloat16 of a class policy reduces nothing.*policy="
    with warns_once(__file__, says):
        jmpx.set_policy(cls, "c=bf16,r=bf16")
    assert jmpx.policy_of(cls) == jmpx.get_policy("c=bf16,r=bf16")
    jmpx.clear_policy(cls)

    @jmpx.push_policy(cls, "c=bf16,r=bf16")
    def pushed():
        return jmpx.policy_of(cls)

    for _ in range(2):
        with warns_once(__file__, says):
            assert pushed() == jmpx.get_policy("c=bf16,r=bf16")
    assert jmpx.policy_of(cls) is None


def test_a_policy_of_jmp_in_haikus_registry_has_no_algorithm_of_its_own():
    network = hk.transform(lambda x: hk.nets.MLP([4, 4])(x))
    params = jax.eval_shape(network.init, jax.random.key(0), X)

    def products(run):
        return [(*product.dtypes, product.how) for product in products_of(run, params, X)]

    def ways(policy_map):
        def run(params, x):
            with jmpx.haiku.policies(policy_map):
                return network.apply(params, None, x)

        return products(run)

    hk.mixed_precision.set_policy(hk.nets.MLP, jmp.get_policy("p=f32,c=bf16,o=f32"))
    try:
        assert ways("full") == [("bf16", "DEFAULT")] * 2
        assert ways("full; *linear_1: full") == [("bf16", "DEFAULT"), ("f32", "DEFAULT")]
        assert ways("full; *linear_1: c=f32,m=high") == [("bf16", "DEFAULT"), ("f32", "HIGH")]
        assert ways("p=f32,m=highest; *linear_1: full") == [("bf16", "HIGHEST"), ("f32", "HIGHEST")]
        with jmpx.push_policy(hk.Linear, "p=f32,m=highest"):  # casts by Haiku itself
            found = products(lambda params, x: network.apply(params, None, x))
        assert found == [("f32", "HIGHEST")] * 2
    finally:
        hk.mixed_precision.clear_policy(hk.nets.MLP)
