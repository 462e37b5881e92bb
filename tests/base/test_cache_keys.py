"""Policies of classes are part of the keys of JAX's caches of jitted functions."""

import contextlib
import dataclasses
import gc
import threading

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import zoo

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

DTYPES = [np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32)]
X = np.ones((2, 3), np.float32)


class Plain:
    """A class whose own code asks for its policy."""


def product(m, x):
    return x @ m.param("w", 3, 2)


def ask(_, x):
    policy = jmpx.policy_of(Plain)
    return x if policy is None else policy.cast_to_output(x)


def counted(func, jit=jax.jit):
    """A function that is jitted, and the list of its traces."""
    traces = []

    def traced(*args):
        traces.append(1)
        return func(*args)

    return jit(traced), traces


CLASSES = {
    "haiku": zoo.HaikuNet,
    "haiku map": zoo.HaikuNet,
    "linen": zoo.LinenNet,
    "equinox": None,  # one of its own for each body
    "nnx": zoo.NNXNet,
    "plain": Plain,
}
CONTEXTS = {"haiku map": lambda: jmpx.haiku.policies("full"), "linen": jmpx.flax.policies}
VIEWS = {
    "equinox": lambda model, x: jmpx.equinox.with_policies(model)(x),
    "nnx": lambda model, x: jmpx.flax.with_policies(model)(x),
    "plain": ask,
}


def make_case(kind):
    """A class, a call of a jitted function that runs it, and the list of its traces."""
    framework = "haiku" if kind == "plain" else kind.split()[0]
    net = zoo.build(framework, product, X, rng=np.random.default_rng(0))
    jit = {"equinox": eqx.filter_jit, "nnx": nnx.jit}.get(kind, jax.jit)
    jitted, traces = counted(VIEWS.get(kind, net.apply), jit)

    def call():
        with CONTEXTS.get(kind, contextlib.nullcontext)():
            return jitted(net.model, X)

    return type(net.model) if kind == "equinox" else CLASSES[kind], traces, call


@pytest.mark.parametrize("kind", ["haiku", "equinox", "plain"])
def test_a_sweep_by_set_policy_compares_what_it_says(kind):
    cls, traces, call = make_case(kind)
    assert call().dtype == np.float32 and len(traces) == 1
    for dtypes in DTYPES, reversed(DTYPES):  # and back: nothing is traced twice
        for dtype in dtypes:
            jmpx.set_policy(cls, f"p=f32,c={dtype.name}")
            for _ in range(2):
                assert call().dtype == dtype
        jmpx.clear_policy(cls)
        assert call().dtype == np.float32
        assert len(traces) == 1 + len(DTYPES)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_sweep_by_push_policy_compares_what_it_says(kind):
    cls, traces, call = make_case(kind)
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


@pytest.mark.parametrize("kind", ["haiku map", "linen", "nnx"])
def test_another_thread_has_policies_and_traces_of_its_own(kind):
    cls, _, call = make_case(kind)
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


def local_class():
    class Local:
        pass

    return Local


def test_local_classes_of_one_name_are_told_apart():
    first, second = local_class(), local_class()
    jitted, traces = counted(lambda x: x)
    for cls in (first, second, first):
        with jmpx.push_policy(cls, "f16"):
            jitted(X)
    assert len(traces) == 2


@pytest.mark.thorough
def test_ten_thousand_changes_leave_nothing_behind():
    _, traces, call = make_case("plain")
    call()
    policies = [jmpx.Policy("float32", dtype, dtype) for dtype in DTYPES]
    counts = []
    for changes in (300, 10_000):
        for i in range(changes):
            jmpx.set_policy(Plain, policies[i % 3])
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 1000
    jmpx.clear_policy(Plain)
    call()
    assert len(traces) == 1


def test_what_leaves_the_policies_as_they_are_traces_nothing_anew():
    cls, traces, call = make_case("plain")
    jmpx.set_policy(cls, "f16")
    call()
    jmpx.set_policy(cls, "f16")
    jmpx.clear_policy(zoo.EquinoxNet)
    with jmpx.push_policy(cls, jmpx.get_policy("f16")):
        call()
    with pytest.raises(ValueError):
        jmpx.set_policy(cls, "f17")
    call()
    jmpx.clear_policy(cls)
    assert len(traces) == 1


def cast_as_plain(x):
    return jmpx.policy_of(Plain).cast_to_compute(x)  # pyright: ignore[reportOptionalMemberAccess]


def test_a_push_inside_of_a_traced_function_holds_for_its_own_part():
    inner, traces = counted(cast_as_plain)

    @jax.jit
    def outer(x):
        with jmpx.push_policy(Plain, "f16"):
            half = inner(x)
        with jmpx.push_policy(Plain, "bf16"):
            return half, inner(x)

    for _ in range(2):
        assert [y.dtype for y in outer(X)] == [np.float16, jnp.bfloat16]
    assert jmpx.policy_of(Plain) is None and len(traces) == 2


TRANSFORMS = {
    "none": lambda f: f,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "grad": lambda f: jax.grad(lambda x: f(x) ** 2 / 2),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[0],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_the_policy_too(name):
    f = TRANSFORMS[name](jax.jit(lambda x: cast_as_plain(x).astype(jnp.float32).sum()))
    x = jnp.full((), 1 + 2**-12)
    for policy, expected in [("c=bf16", 1), ("full", 1 + 2**-12), ("c=bf16", 1)]:
        with jmpx.push_policy(Plain, policy):
            assert f(x) == expected


def test_two_frameworks_contexts_are_both_in_the_key():
    jitted, traces = counted(lambda x: x)
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

    _, _, call = make_case("plain")
    for factor in (2.0, 3.0, 2.0):
        with jmpx.push_policy(Plain, Scaled("float32", "float32", "float32", factor)):
            assert call()[0, 0] == factor


@pytest.mark.parametrize("own", [hk.mixed_precision.set_policy, hk.mixed_precision.push_policy])
def test_what_haiku_keeps_by_itself_comes_back_and_is_traced_where_jmpx_changes_it(own):
    cls, traces, call = make_case("haiku")
    policy = jmpx.get_policy("p=f32,c=bf16")
    with own(cls, policy) or contextlib.nullcontext():
        assert call().dtype == jnp.bfloat16
        with jmpx.push_policy(cls, "p=f32,c=f16"):
            assert call().dtype == np.float16
        assert hk.mixed_precision.get_policy(cls) is policy
        assert call().dtype == jnp.bfloat16 and len(traces) == 2
        jmpx.clear_policy(cls)
        assert hk.mixed_precision.get_policy(cls) is None
    hk.mixed_precision.clear_policy(cls)


@pytest.mark.parametrize("method", ["scan", "remat"])
def test_haikus_own_transforms_are_traced_anew(method):
    def net(x):
        dense = zoo.HaikuNet(product)
        if method == "scan":
            return hk.scan(lambda carry, _: (carry, dense(carry)), x, None, length=1)[1][0]
        return hk.remat(dense)(x)

    network = hk.transform(net)
    params = network.init(jax.random.key(0), X)
    jitted = jax.jit(lambda params, x: network.apply(params, None, x))
    for dtype in (*DTYPES, *DTYPES):
        with jmpx.push_policy(zoo.HaikuNet, f"p=f32,c={dtype.name}"):
            assert jitted(params, X).dtype == dtype
