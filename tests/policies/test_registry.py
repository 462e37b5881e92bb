import importlib
import sys
import threading

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpx
from jmpx._policies.registry import in_loop

MIXED = jmpx.get_policy("c=bf16,o=f32")


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
def test_set_policy_of_clear(cls):
    assert jmpx.policy_of(cls) is None
    jmpx.set_policy(cls, "c=bf16,o=f32")
    assert jmpx.policy_of(cls) == MIXED
    jmpx.set_policy(cls, jmpx.get_policy("full"))
    assert jmpx.policy_of(cls) == jmpx.get_policy("full")
    jmpx.clear_policy(cls)
    assert jmpx.policy_of(cls) is None
    jmpx.clear_policy(cls)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__qualname__)
def test_push_policy_nests_and_restores_also_after_an_error(cls):
    with jmpx.push_policy(cls, "f16"):
        with pytest.raises(RuntimeError), jmpx.push_policy(cls, MIXED):
            assert jmpx.policy_of(cls) == MIXED
            raise RuntimeError
        assert jmpx.policy_of(cls) == jmpx.get_policy("f16")
    assert jmpx.policy_of(cls) is None


@pytest.mark.parametrize("first", [0, 1, 2])
def test_pushes_may_end_in_any_order(first):
    texts = ["c=bf16", "c=f16", "full"]
    pushes = {text: jmpx.push_policy(Plain, text) for text in texts}
    for push in pushes.values():
        push.__enter__()
    for text in [texts.pop(first), *texts]:
        pushes.pop(text).__exit__(None, None, None)
        last = next(reversed(pushes), None)
        assert jmpx.policy_of(Plain) == (last and jmpx.get_policy(last))


BODIES = {
    "nothing": lambda f: f,
    "a jit in a derivative": lambda f: jax.grad(jax.jit(f)),
    "a checkpoint": jax.checkpoint,
    "a loop": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "a branch": lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x),
}


@pytest.mark.parametrize("name", BODIES)
def test_where_no_method_runs_any_loop_or_branch_counts(name):
    found = []

    def f(x):
        found.append(in_loop())
        return x

    BODIES[name](f)(1.0)
    assert {*found} == {name in ("a loop", "a branch")}


def test_push_policy_as_a_decorator():
    @jmpx.push_policy(Plain, "f16")
    def inside():
        return jmpx.policy_of(Plain)

    assert inside() == inside() == jmpx.get_policy("f16")
    assert jmpx.policy_of(Plain) is None


@pytest.mark.parametrize("make", [local_class, local_module])
def test_local_classes_of_one_name_have_policies_of_their_own(make):
    first, second = make(), make()
    jmpx.set_policy(first, "f16")
    assert jmpx.policy_of(second) is None
    jmpx.clear_policy(first)


@pytest.mark.parametrize("cls", [Plain, Dense])
def test_a_subclass_does_not_inherit(cls):
    with jmpx.push_policy(cls, "f16"):
        assert jmpx.policy_of(type("Child", (cls,), {})) is None


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


@pytest.mark.parametrize("cls", [Plain, hk.Linear])
def test_policies_are_per_thread(cls):
    seen = []
    with jmpx.push_policy(cls, "f16"):
        thread = threading.Thread(target=lambda: seen.append(jmpx.policy_of(cls)))
        thread.start()
        thread.join()
    assert seen == [None]


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
        SEEN.append((jmpx.current_policy(), x.dtype, w.dtype))
        return x * w


SEEN = []


def test_a_policy_runs_a_haiku_module_in_its_dtypes(rng):
    x = rng.normal(size=(2, 3)).astype(np.float32)
    network = hk.transform(lambda x: Recorder()(x))
    SEEN.clear()
    with jmpx.push_policy(Recorder, "p=f32,c=bf16,o=f16"):
        params = network.init(jax.random.key(0), x)
        y = jax.jit(network.apply)(params, None, x)
    policy = jmpx.get_policy("p=f32,c=bf16,o=f16")
    assert SEEN == [(policy, jnp.bfloat16, jnp.bfloat16)] * 2
    w = params["recorder"]["w"]
    assert w.dtype == jnp.float32 and y.dtype == jnp.float16
    expected = jnp.asarray(x, jnp.bfloat16) * w.astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, expected.astype(jnp.float16))
    assert jmpx.current_policy() is None


@pytest.mark.thorough
def test_batch_norm_under_16_bits_keeps_its_averages_in_16_bits_unless_it_is_full(rng):
    x = rng.normal(size=(16, 3)).astype(np.float32)

    def run(x):
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    class Net(hk.Module):
        def __call__(self, x):
            return run(x)

    network = hk.transform_with_state(lambda x: Net()(x))

    def averages():
        params, state = network.init(jax.random.key(0), x)
        _, state = network.apply(params, state, None, x)
        return {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.int32}

    with jmpx.push_policy(Net, "c=bf16"):
        assert averages() == {np.dtype(jnp.bfloat16)}
        with jmpx.push_policy(hk.BatchNorm, "full"):
            assert averages() == {np.dtype("float32")}


def test_pushing_inside_a_method_of_the_class_is_refused_as_haiku_does(rng):
    class Inside(hk.Module):
        def __call__(self, x):
            with jmpx.push_policy(Inside, "f16"):
                return x

    with pytest.raises(ValueError, match="same class is not supported"):
        hk.transform(lambda x: Inside()(x)).apply({}, None, jnp.ones(2))


BAD = [
    (lambda: jmpx.set_policy("Linear", "f16"), TypeError, "Expected a class"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.set_policy(Plain(), "f16"), TypeError, "Expected a class"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.policy_of(None), TypeError, "Expected a class"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.clear_policy(3), TypeError, "Expected a class"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.set_policy(Plain, None), TypeError, "clear_policy"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.set_policy(hk.Linear, None), TypeError, "clear_policy"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.set_policy(hk.Linear, "f17"), ValueError, "Unknown dtype"),
    (lambda: jmpx.push_policy(Plain, "f17").__enter__(), ValueError, "Unknown dtype"),
]


@pytest.mark.parametrize(("act", "error", "message"), BAD)
def test_bad_input_changes_nothing(act, error, message):
    with pytest.raises(error, match=message):
        act()
    assert jmpx.policy_of(Plain) is None and jmpx.policy_of(hk.Linear) is None
