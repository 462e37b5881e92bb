"""Policies of classes are part of what JAX caches jitted functions by."""

import contextlib
import dataclasses
import gc
import threading

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

DTYPES = [np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32)]
X = np.ones((2, 3), np.float32)


class HaikuDense(hk.Module):
    def __call__(self, x):
        return x @ hk.get_parameter("w", (3, 2), jnp.float32, init=jnp.ones)


class LinenDense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (3, 2))


class EquinoxDense(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x @ self.w


class NnxDense(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((3, 2)))

    def __call__(self, x):
        return x @ self.w[...]


class Plain:
    """A class whose own code asks for its policy."""


def counted(func):
    """A function that is jitted, and the list of its traces."""
    traces = []

    def traced(*args):
        traces.append(1)
        return func(*args)

    return traced, traces


def haiku_case():
    network = hk.transform(lambda x: HaikuDense()(x))
    func, traces = counted(lambda params, x: network.apply(params, None, x))
    params = network.init(None, X)
    jitted = jax.jit(func)
    return HaikuDense, traces, lambda: jitted(params, X)


def haiku_map_case():
    cls, traces, call = haiku_case()

    def within():
        with jmpx.haiku.policies("full"):
            return call()

    return cls, traces, within


def linen_case():
    module = LinenDense()
    params = module.init(jax.random.key(0), X)
    func, traces = counted(module.apply)
    jitted = jax.jit(func)

    def call():
        with jmpx.flax.policies():
            return jitted(params, X)

    return LinenDense, traces, call


def equinox_case():
    func, traces = counted(lambda model, x: jmpx.equinox.with_policies(model)(x))
    jitted, model = eqx.filter_jit(func), EquinoxDense(jnp.ones((3, 2)))
    return EquinoxDense, traces, lambda: jitted(model, X)


def nnx_case():
    func, traces = counted(lambda model, x: jmpx.flax.with_policies(model)(x))
    jitted, model = nnx.jit(func), NnxDense()
    return NnxDense, traces, lambda: jitted(model, X)


def plain_case():
    def ask(x):
        policy = jmpx.policy_of(Plain)
        return x if policy is None else policy.cast_to_output(x)

    func, traces = counted(ask)
    jitted = jax.jit(func)
    return Plain, traces, lambda: jitted(X)


CASES = [haiku_case, haiku_map_case, linen_case, equinox_case, nnx_case, plain_case]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_sweep_by_set_policy_compares_what_it_says(case):
    cls, traces, call = case()
    assert call().dtype == np.float32 and len(traces) == 1
    for dtype in DTYPES:
        jmpx.set_policy(cls, f"p=f32,c={dtype.name}")
        for _ in range(2):
            assert call().dtype == dtype
    jmpx.clear_policy(cls)
    assert call().dtype == np.float32
    assert len(traces) == 1 + len(DTYPES)
    for dtype in reversed(DTYPES):  # and back: nothing is traced twice
        jmpx.set_policy(cls, f"p=f32,c={dtype.name}")
        assert call().dtype == dtype
    jmpx.clear_policy(cls)
    assert call().dtype == np.float32 and len(traces) == 1 + len(DTYPES)


@pytest.mark.parametrize("case", CASES)
def test_a_sweep_by_push_policy_compares_what_it_says(case):
    cls, traces, call = case()
    for _ in range(2):
        assert call().dtype == np.float32
        with jmpx.push_policy(cls, "p=f32,c=bf16"):
            assert call().dtype == jnp.bfloat16
            with pytest.raises(KeyError), jmpx.push_policy(cls, "p=f32,c=f16"):
                assert call().dtype == np.float16
                raise KeyError
            assert call().dtype == jnp.bfloat16
        decorated = jmpx.push_policy(cls, "p=f32,c=f16")(call)
        assert decorated().dtype == decorated().dtype == np.float16
    assert len(traces) == 3


@pytest.mark.parametrize("case", CASES)
def test_another_thread_has_policies_and_traces_of_its_own(case):
    cls, _, call = case()
    seen = {}

    def run():
        seen["before"] = call().dtype
        with jmpx.push_policy(cls, "p=f32,c=f16"):
            seen["inside"] = call().dtype
        seen["after"] = call().dtype

    with jmpx.push_policy(cls, "p=f32,c=bf16"):
        assert call().dtype == jnp.bfloat16
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert call().dtype == jnp.bfloat16
    assert seen == {"before": np.float32, "inside": np.float16, "after": np.float32}


def local_classes():
    class Local:  # pyright: ignore[reportRedeclaration]
        pass

    first = Local

    class Local:
        pass

    return first, Local


def test_local_classes_of_one_name_are_told_apart():
    first, second = local_classes()
    traced, traces = counted(lambda x: x)
    jitted = jax.jit(traced)
    for cls in (first, second, first):
        with jmpx.push_policy(cls, "f16"):
            jitted(X)
    assert len(traces) == 2


@pytest.mark.thorough
def test_ten_thousand_changes_leave_nothing_behind():
    _, traces, call = plain_case()
    call()
    policies = [jmpx.Policy("float32", dtype, dtype) for dtype in DTYPES]
    for i in range(300):
        jmpx.set_policy(Plain, policies[i % 3])
    gc.collect()
    before = len(gc.get_objects())
    for i in range(10_000):
        jmpx.set_policy(Plain, policies[i % 3])
    gc.collect()
    assert len(gc.get_objects()) - before < 1000
    jmpx.clear_policy(Plain)
    call()
    assert len(traces) == 1


def test_what_leaves_the_policies_as_they_are_traces_nothing_anew():
    cls, traces, call = plain_case()
    jmpx.set_policy(cls, "f16")
    call()
    jmpx.set_policy(cls, "f16")
    jmpx.clear_policy(EquinoxDense)
    with jmpx.push_policy(cls, jmpx.get_policy("f16")):
        call()
    with pytest.raises(ValueError):
        jmpx.set_policy(cls, "f17")
    call()
    jmpx.clear_policy(cls)
    assert len(traces) == 1


def test_a_push_inside_of_a_traced_function_holds_for_its_own_part():
    inner, traces = counted(lambda x: jmpx.policy_of(Plain).cast_to_output(x))  # pyright: ignore[reportOptionalMemberAccess]
    inner = jax.jit(inner)

    @jax.jit
    def outer(x):
        with jmpx.push_policy(Plain, "f16"):
            half = inner(x)
        with jmpx.push_policy(Plain, "bf16"):
            return half, inner(x)

    for _ in range(2):
        assert [y.dtype for y in outer(X)] == [np.float16, jnp.bfloat16]
    assert jmpx.policy_of(Plain) is None and len(traces) == 2
    jax.jit(lambda x: x)(X)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transform", [jax.checkpoint, jax.vmap, jax.grad, jax.linearize, None])
def test_transforms_see_the_policy_too(transform):
    @jax.jit
    def f(x):
        return jmpx.policy_of(Plain).cast_to_compute(x).astype(jnp.float32).sum()  # pyright: ignore[reportOptionalMemberAccess]

    x = jnp.full((), 1 + 2**-12)
    for policy, expected in [("c=bf16", 1), ("full", 1 + 2**-12), ("c=bf16", 1)]:
        with jmpx.push_policy(Plain, policy):
            if transform is jax.vmap:
                result = jax.vmap(f)(x[None])[0]
            elif transform is jax.grad:
                result = jax.grad(lambda x: f(x) ** 2 / 2)(x)
            elif transform is jax.linearize:
                result = jax.linearize(f, x)[0]
            else:
                result = (transform or (lambda f: f))(f)(x)
        assert result == expected


def test_two_frameworks_contexts_are_both_in_the_key():
    traced, traces = counted(lambda x: x)
    jitted = jax.jit(traced)
    for haiku_map in ("c=bf16", "c=f16", "c=bf16"):
        with jmpx.haiku.policies(haiku_map), jmpx.flax.policies("c=bf16"):
            jitted(X)
        with jmpx.flax.policies("c=bf16"), jmpx.haiku.policies(haiku_map):
            jitted(X)  # their order does not matter
    jitted(X)
    with jmpx.flax.policies():
        jitted(X)
    assert len(traces) == 4


def test_a_policy_of_a_subclass_of_policy_is_in_the_key():
    @dataclasses.dataclass(frozen=True, repr=False)
    class Scaled(jmpx.Policy):
        factor: float = 1.0

        def cast_to_output(self, tree):
            return jax.tree.map(lambda leaf: leaf * self.factor, tree)

    _, _, call = plain_case()
    for factor in (2.0, 3.0, 2.0):
        with jmpx.push_policy(Plain, Scaled("float32", "float32", "float32", factor)):
            assert call()[0, 0] == factor


@pytest.mark.parametrize("own", [hk.mixed_precision.set_policy, hk.mixed_precision.push_policy])
def test_what_haiku_keeps_by_itself_comes_back_and_is_traced_where_jmpx_changes_it(own):
    _, traces, call = haiku_case()
    policy = jmpx.get_policy("p=f32,c=bf16")
    with own(HaikuDense, policy) or contextlib.nullcontext():
        assert call().dtype == jnp.bfloat16
        with jmpx.push_policy(HaikuDense, "p=f32,c=f16"):
            assert call().dtype == np.float16
        assert hk.mixed_precision.get_policy(HaikuDense) is policy
        assert call().dtype == jnp.bfloat16 and len(traces) == 2
        jmpx.clear_policy(HaikuDense)
        assert hk.mixed_precision.get_policy(HaikuDense) is None
    hk.mixed_precision.clear_policy(HaikuDense)


@pytest.mark.parametrize("method", ["scan", "remat"])
def test_haikus_own_transforms_are_traced_anew(method):
    def net(x):
        dense = HaikuDense()
        if method == "scan":
            return hk.scan(lambda carry, _: (carry, dense(carry)), x, None, length=1)[1][0]
        return hk.remat(dense)(x)

    network = hk.transform(net)
    params = network.init(None, X)
    jitted = jax.jit(lambda params, x: network.apply(params, None, x))
    for dtype in (*DTYPES, *DTYPES):
        with jmpx.push_policy(HaikuDense, f"p=f32,c={dtype.name}"):
            assert jitted(params, X).dtype == dtype
